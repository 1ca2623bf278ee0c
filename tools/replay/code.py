"""A module's code without its words, which make no page stale: provenance.py and the pages of the labs hash it."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import io
import tokenize
from collections.abc import Sequence
from functools import cache
from pathlib import Path

OURS = ("valve_hook.", "valve_tools.", "valved.")
NO_FIGURES = ("valve_tools.replay.", "valve_tools.sim.generator", "valve_tools.sim.metrics")
"""Of what a lab imports: work spread over processes, charts, hashes, the traces of a quick run, and verdicts."""


def sources_of(*roots: str) -> str:
    """A hash of these modules and of all of this repository that they import, however far away: nobody can leave out
    what makes a figure."""
    digest = hashlib.sha256()
    for module in sorted(reached(*roots)):
        digest.update(module.encode() + code_of(_text(module) or "").encode())
    return digest.hexdigest()[:16]


def reached(*roots: str) -> set[str]:
    """Modules, these among them."""
    found, left = set[str](), [*roots]
    while left:
        module = left.pop()
        text = None if module in found or module.startswith(NO_FIGURES) else _text(module)
        if text is not None:
            found.add(module)
            left += (name for name in _imported(module, text) if name.startswith(OURS))
    return found


@cache
def _imported(module: str, text: str) -> tuple[str, ...]:
    """What may be modules."""
    found: list[str] = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found += (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above: Sequence[str] = module.split(".")[: -node.level] if node.level else ()
            base = ".".join([*above, *([node.module] if node.module else [])])
            found += (base, *(f"{base}.{alias.name}" for alias in node.names))
    return tuple(found)


def _text(module: str) -> str | None:
    """None: that is no module of its own."""
    try:
        spec = importlib.util.find_spec(module)
    except ModuleNotFoundError:  # a name in a module
        return None
    return None if spec is None or spec.origin is None else Path(spec.origin).read_text("utf-8")


@cache
def code_of(text: str) -> str:
    """The same on every version of Python: lines of the file, not its syntax tree."""
    lines = [*text.splitlines(), ""]
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and _is_words(node):
            lines[node.lineno - 1 : node.end_lineno] = [""] * ((node.end_lineno or node.lineno) - node.lineno + 1)
    return "\n".join(line.rstrip() for line in lines if line.strip())


def _is_words(node: ast.Expr) -> bool:
    return isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
