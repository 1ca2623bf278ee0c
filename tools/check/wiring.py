"""Checks how the daemon's rooms report to the rooms above: by one listener a room, and by nothing else.

A callable that other code sets from outside after construction is a way that no reader of the class can follow: each is
given to the constructor instead. So is every part: no constructor, and no file that puts parts together, sets an
attribute of another object. What must stay late is a listener (node/news.py). The scheduler keeps the same two rules.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator, Mapping

from valve_tools.check.tree import ROOT, tracked

LISTENER = "listener"
MOST_LISTENERS = 4
PRODUCT = ("valved/", "scheduler/")
COMPOSERS = frozenset({"valved/compose.py", "valved/daemon.py", "valved/node/kv.py"})


def findings() -> list[str]:
    sources = {path.relative_to(ROOT).as_posix(): path.read_text() for path in tracked(".py")}
    return judge({name: text for name, text in sources.items() if name.startswith(PRODUCT)})


def judge(sources: Mapping[str, str]) -> list[str]:
    trees = {name: ast.parse(text, filename=name) for name, text in sources.items()}
    callables = {name for tree in trees.values() for name in _callables(tree)} - {LISTENER}
    own = {name for tree in trees.values() for name in _own(tree)} - callables
    problems = [
        f"{name}:{line}: {attribute} is set from outside; give it to the constructor, or tell the room's listener"
        for name, tree in trees.items()
        for line, attribute in _set_from_outside(tree)
        if attribute in callables
    ]
    problems += [
        f"{name}:{line}: {attribute} is set where parts are put together; give it to the constructor"
        for name, tree in trees.items()
        for line, attribute in _set_while_composing(tree, is_composer=name in COMPOSERS)
        if attribute in own - {LISTENER}
    ]
    rooms = defaultdict[str, list[str]](list)
    for name, tree in trees.items():
        if not name.startswith("valved/"):
            continue
        room = name.split("/")[1]
        rooms[room].extend(f"{name}:{line}" for line in _listeners(tree))
    problems += [f"{room} has {len(at)} listeners: {', '.join(at)}" for room, at in rooms.items() if len(at) > 1]
    number = sum(len(at) for at in rooms.values())
    if number > MOST_LISTENERS:
        problems.append(f"the daemon has {number} listeners, {MOST_LISTENERS} are allowed")
    return problems


def _callables(tree: ast.Module) -> Iterator[str]:
    """Attributes that hold something to be called, or a list of such."""
    for owner in ast.walk(tree):
        if not isinstance(owner, ast.ClassDef):
            continue
        for node in ast.walk(owner):
            if isinstance(node, ast.AnnAssign) and _is_callable(node.annotation):
                if isinstance(node.target, ast.Attribute) and _is_self(node.target.value):
                    yield node.target.attr
                elif isinstance(node.target, ast.Name) and node in owner.body:
                    yield node.target.id
            elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Lambda):
                yield from (one.attr for one in node.targets if isinstance(one, ast.Attribute) and _is_self(one.value))
            elif isinstance(node, ast.FunctionDef):
                yield from _kept_arguments(node)


def _kept_arguments(function: ast.FunctionDef) -> Iterator[str]:
    arguments = [*function.args.args, *function.args.kwonlyargs]
    given = {one.arg for one in arguments if one.annotation is not None and _is_callable(one.annotation)}
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Name) and node.value.id in given:
            yield from (one.attr for one in node.targets if isinstance(one, ast.Attribute) and _is_self(one.value))


def _is_callable(annotation: ast.expr) -> bool:
    text = ast.unparse(annotation).strip("'\"")
    return text.startswith(("Callable", "list[Callable", "Signaller"))


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def _may_be_called(value: ast.expr) -> bool:
    """A function, a method, or what a method returns; not a number, a set or the length of one."""
    is_made = isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute)
    return is_made or isinstance(value, ast.Lambda | ast.Attribute | ast.Name)


def _set_from_outside(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and _may_be_called(node.value):
            for target in node.targets:
                if isinstance(target, ast.Attribute) and not _is_self(target.value):
                    yield node.lineno, target.attr
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            held = node.func.value
            if node.func.attr in ("append", "insert") and isinstance(held, ast.Attribute) and not _is_self(held.value):
                yield node.lineno, held.attr


def _own(tree: ast.Module) -> Iterator[str]:
    """Attributes that classes of the product give to themselves; what a library's object has is its own affair."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            yield from (
                each.target.id
                for each in node.body
                if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
            )
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_self(node.value):
            yield node.attr


def _set_while_composing(tree: ast.Module, *, is_composer: bool) -> Iterator[tuple[int, str]]:
    places = tree.body if is_composer else []
    constructors = ("__init__", "__post_init__")
    places += [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name in constructors]
    for place in places:
        for node in ast.walk(place) if isinstance(place, ast.FunctionDef | ast.AsyncFunctionDef) else ():
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and not _is_self(node.value):
                yield node.lineno, node.attr


def _listeners(tree: ast.Module) -> Iterator[int]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AnnAssign):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if isinstance(target, ast.Attribute) and target.attr == LISTENER and _is_self(target.value):
                    yield node.lineno
