"""Pages name files and decisions that exist, all rooms are named by a page, README has the figures of results pages."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable, Iterator, Mapping

from valve_tools.check.names import HISTORY
from valve_tools.check.tree import ROOT, tracked

CODE = (".py", ".c", ".h", ".S")
LINK = re.compile(r"\]\(([^)#\s:]+)(?:#[^)\s]*)?\)")
SPAN = re.compile(r"`([^`\n]+)`")
SOURCE = re.compile(r"[\w./-]*\w\.(?:py|c|h|S|sh|proto|map)")
FILES = re.compile(r"^\|(?: room \|)? file \|", re.MULTILINE)
BRACES = re.compile(r"(.*?)\{([^{}]*)\}(.*)")
DECISION = re.compile(r"DECISIONS(?:\.md)?,\s+(?:[\d-]+,\s+)?\"([^\"]+)\"")
HEADING = re.compile(r"^## [\d-]+ (.*)", re.MULTILINE)
FIGURES = re.compile(r"^## Figures\n(.*?)^## ", re.MULTILINE | re.DOTALL)
PRINTED = re.compile(r"^ {4,}.* ms\b.*", re.MULTILINE)
# Of other projects: an engine's, NVIDIA's.
FOREIGN = ("managers/scheduler.py", "py_executor.py", "g_subdevice_nvoc.c", "cudaTypedefs.h")


def findings() -> list[str]:
    files = [path.relative_to(ROOT).as_posix() for path in tracked("")]
    pages = {name: (ROOT / name).read_text() for name in files if name.endswith(".md") and name not in HISTORY}
    decisions = HEADING.findall((ROOT / "DECISIONS.md").read_text())
    results = [text for name, text in pages.items() if name.startswith("docs/results/")]
    return [
        *missing(files, pages),
        *unnamed(files, pages),
        *unlisted(files, pages),
        *undecided(decisions, pages),
        *unmeasured(pages["README.md"], results),
    ]


def missing(files: Iterable[str], pages: Mapping[str, str]) -> Iterator[str]:
    """What a page links to or names, and is not there. A name may leave out the folders before it."""
    known, tails = set(files), set[str]()
    known |= {folder for name in known for folder in _above(name)}
    for name in known:
        parts = name.split("/")
        tails |= {"/".join(parts[first:]) for first in range(len(parts))}
    for page, text in pages.items():
        here = posixpath.dirname(page)
        for target in LINK.findall(text):
            if posixpath.normpath(posixpath.join(here, target)) not in known:
                yield f"{page}: links to {target}, which is not there"
        words = [word.strip(",;:()") for span in SPAN.findall(text) for word in span.split()]
        for name in (name for word in words for name in _spelt_out(word) if SOURCE.fullmatch(name)):
            beside = posixpath.normpath(posixpath.join(here, name))
            if beside not in known and name.removeprefix("./") not in tails and not name.endswith(FOREIGN):
                yield f"{page}: names {name}, which is nowhere"


def unnamed(files: Iterable[str], pages: Mapping[str, str]) -> Iterator[str]:
    """Rooms with code that have no README, and that neither one above nor ARCHITECTURE.md names."""
    code = [name for name in files if name.endswith(CODE) and not name.startswith("tests/")]
    rooms = {posixpath.dirname(name) for name in code if not name.endswith("__init__.py")}
    for room in sorted(rooms):
        if f"{room}/README.md" in pages or re.search(rf"(?<![\w/]){room}(?![\w/])", pages["ARCHITECTURE.md"]):
            continue
        above = [pages[page] for folder in _above(room) if (page := f"{folder}/README.md") in pages]
        if not any(re.search(rf"[`/]{posixpath.basename(room)}[`/]", text) for text in above):
            yield f"{room}: no README of it or above it, nor ARCHITECTURE.md, says what it is"


def unlisted(files: Iterable[str], pages: Mapping[str, str]) -> Iterator[str]:
    """Files that their room's README leaves out, though it has a table of files."""
    for page, text in pages.items():
        room = posixpath.dirname(page)
        if not page.endswith("README.md") or page.startswith("tests/") or not FILES.search(text):
            continue
        named = {name for span in SPAN.findall(text) for word in span.split() for name in _spelt_out(word.strip(",;"))}
        inside = [posixpath.basename(file) for file in files if posixpath.dirname(file) == room]
        for base in (base for base in inside if base.endswith(CODE) and base != "__init__.py"):
            if base not in named and re.sub(r"\.h$", ".c", base) not in named:  # a header goes with its .c
                yield f"{page}: its table of files leaves out {base}"


def undecided(decisions: Iterable[str], pages: Mapping[str, str]) -> Iterator[str]:
    """Entries of DECISIONS.md that a page names by the first words of their title, and that are gone."""
    known = list(decisions)
    for page, text in pages.items():
        for named in (" ".join(name.split()) for name in DECISION.findall(text)):
            if not any(title.startswith(named) for title in known):
                yield f'{page}: names the entry "{named}", which is not in DECISIONS.md'


def unmeasured(readme: str, results: Iterable[str]) -> Iterator[str]:
    """Of README's table of figures and its lines of a program's output, what no results page says in the same words."""
    pages = list(results)
    measured = {cell for page in pages for row in _rows(page) for cell in row}
    printed = {" ".join(line.split()) for page in pages for line in page.splitlines()}
    table = _rows("".join(FIGURES.findall(readme)))
    column = table[0].index("measured") if table else 0
    for cell in (row[column] for row in table[2:]):
        if cell not in measured:
            yield f"README.md: no table of docs/results has the figure {cell!r}"
    for line in (" ".join(line.split()) for line in PRINTED.findall(readme)):
        if line not in printed:
            yield f"README.md: no page of docs/results has the line {line!r}"


def _rows(page: str) -> list[list[str]]:
    lines = (line.replace("**", "").strip() for line in page.splitlines())
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]


def _above(name: str) -> list[str]:
    parts = name.split("/")
    return ["/".join(parts[:count]) for count in range(1, len(parts))]


def _spelt_out(name: str) -> list[str]:
    """`a.{c,h}` is two."""
    found = BRACES.fullmatch(name)
    if not found:
        return [name]
    return [each for part in found[2].split(",") for each in _spelt_out(f"{found[1]}{part}{found[3]}")]
