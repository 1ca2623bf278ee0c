"""Caps on size (CONTRIBUTING.md): a file that outgrows them holds more than one concept.

Files: 400 lines outside the tests, 600 in them. Functions: 80 lines the cap, in Python and C; of twenty functions of a
tree, nineteen have at most 45. Classes: 250 lines. A room (a folder outside the tests): 32 files, 6,000 lines. The
lists name what had more when its cap came, and may only shrink.
"""

from __future__ import annotations

import ast
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from valve_tools.check.tree import ROOT, tracked

FILE_LINES = 400
TEST_FILE_LINES = 600
NINETEEN_OF_TWENTY = 45
ROOM_FILES = 32
ROOM_LINES = 6_000
FUNCTION_LINES = 80
CLASS_LINES = 250
OVERGROWN: dict[str, int] = {}
OVERLONG = {
    "shim/src/link/session.c": 480,
    "tools/emulator/cuda/kernels/step.c": 420,
    "tools/gpu/native/helper.c": 430,
    "tools/sim/world.py": 460,
    "valved/machine/ports.py": 480,
    "valved/native/internal.h": 440,
}
CROWDED: dict[str, int] = {}


def over(found: Mapping[str, int], cap: int, overgrown: Mapping[str, int], what: str) -> Iterator[str]:
    """Those over the cap, or over what they had when it came; and those that are named for nothing."""
    known = dict(overgrown)
    for name, size in found.items():
        allowed = known.pop(name, cap)
        if size > allowed:
            yield f"{name}: {size} {what}, {allowed} are allowed"
        elif size <= cap < allowed:
            yield f"{name}: {size} {what} are few enough now: take it out of the list"
    yield from (f"{name} is in the list and nowhere else" for name in known)


def long_files() -> Iterator[str]:
    sizes = {path.relative_to(ROOT).as_posix(): lines_of(path) for path in tracked(".py", ".c", ".h", ".S")}
    tests = {name: lines for name, lines in sizes.items() if name.startswith("tests/")}
    yield from over(tests, TEST_FILE_LINES, {}, "lines")
    yield from over({name: sizes[name] for name in sizes.keys() - tests.keys()}, FILE_LINES, OVERLONG, "lines")


def crowded_rooms() -> Iterator[str]:
    files, lines = Counter[str](), Counter[str]()
    for path in tracked(".py", ".c", ".h", ".S"):
        room = path.parent.relative_to(ROOT).as_posix()
        if not room.startswith("tests"):
            files[room] += 1
            lines[room] += lines_of(path)
    yield from over(files, ROOM_FILES, CROWDED, "files")
    yield from over(lines, ROOM_LINES, {}, "lines")


def lines_of(path: Path) -> int:
    return path.read_text().count("\n")


def functions() -> Iterator[tuple[str, int]]:
    """(file:line, lines) of every function, in Python and C."""
    for path in tracked(".py"):
        for node in ast.walk(ast.parse(path.read_text(), filename=str(path))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield f"{path.relative_to(ROOT)}:{node.lineno}", (node.end_lineno or node.lineno) - node.lineno + 1
    for path in tracked(".c"):
        for start, lines in c_functions(path):
            yield f"{path.relative_to(ROOT)}:{start}", lines


def long_functions(found: Iterable[tuple[str, int]]) -> Iterator[str]:
    trees = defaultdict[str, list[int]](list)
    for name, lines in found:
        trees[name.split("/")[0]].append(lines)
        if lines > FUNCTION_LINES:
            yield f"{name}: a function of {lines} lines, {FUNCTION_LINES} are allowed"
    for tree, sizes in trees.items():
        long = sum(lines > NINETEEN_OF_TWENTY for lines in sizes)
        if 20 * long > len(sizes):
            yield f"{tree}: {long} of {len(sizes)} functions have more than {NINETEEN_OF_TWENTY} lines"


def classes() -> Iterator[tuple[str, ast.ClassDef]]:
    """(file, class) outside the tests."""
    for path in tracked(".py"):
        name = path.relative_to(ROOT).as_posix()
        if not name.startswith("tests/"):
            for node in ast.walk(ast.parse(path.read_text(), filename=name)):
                if isinstance(node, ast.ClassDef):
                    yield name, node


def long_classes() -> Iterator[str]:
    found = {f"{name}:{node.name}": (node.end_lineno or node.lineno) - node.lineno + 1 for name, node in classes()}
    yield from over(found, CLASS_LINES, OVERGROWN, "lines")


def c_functions(path: Path) -> Iterator[tuple[int, int]]:
    """(first line, lines) of every function body: in kernel style it runs from a `{` in column 0 to a `}`."""
    start = 0
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if line == "{":
            start = number
        elif line == "}" and start:
            yield start, number - start + 1
            start = 0


def findings() -> list[str]:
    return [*long_files(), *crowded_rooms(), *long_functions(functions()), *long_classes()]
