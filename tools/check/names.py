"""One word, one meaning: no second class of one name in product and tools, and no page names what no class has.

PINNED are rooms whose files carry a hash on results pages: a new name there would make a page stale though no figure
changed.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping

from valve_tools.check.sizes import classes
from valve_tools.check.tree import ROOT, tracked

PINNED = ("tools/lab/cotrain/", "tools/lab/granted/")
MEMBER = re.compile(r"`(?:\w+\.)*([A-Z][A-Za-z]*[a-z]\w*)\.([a-z_]\w*(?:/[a-z_]\w*)*)(?:\(\))?`")
HISTORY = ("CHANGELOG.md", "DECISIONS.md")  # they name what was


def findings() -> list[str]:
    found = list(classes())
    members = defaultdict[str, set[str]](set)
    for _, node in found:
        members[node.name] |= _members(node)
    pages = (path for path in tracked(".md") if path.name not in HISTORY)
    missing = [f"{path.relative_to(ROOT)}: {each}" for path in pages for each in absent(path.read_text(), members)]
    return [*judge((file, node.name) for file, node in found), *missing]


def _members(node: ast.ClassDef) -> set[str]:
    """Every name in it, so that a field that is set in a method is one."""
    parts = list(ast.walk(node))
    names = {each.name for each in parts if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)}
    fields = {each.attr for each in parts if isinstance(each, ast.Attribute)}
    return names | fields | {each.id for each in parts if isinstance(each, ast.Name)}


def absent(text: str, members: Mapping[str, set[str]]) -> list[str]:
    """What a page names as a class's own, `Class.name` or `Class.one/another`, and no such class has."""
    named = [(kind, name) for kind, names in MEMBER.findall(text) for name in names.split("/")]
    return [f"{kind}.{name} is in no class" for kind, name in named if name not in members.get(kind, ())]


def judge(found: Iterable[tuple[str, str]]) -> list[str]:
    """(file, name of a class) of everything outside the tests."""
    places = defaultdict[str, set[str]](set)
    for file, name in found:
        if not file.startswith(PINNED):
            places[name].add(file)
    return [
        f"class {name} is in {', '.join(sorted(files))}: give each a name of its own"
        for name, files in sorted(places.items())
        if len(files) > 1
    ]
