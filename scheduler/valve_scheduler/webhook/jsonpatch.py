"""Makes the JSON Patch (RFC 6902) that turns one value into another, for admission answers. Pure."""

from typing import Any

Operation = dict[str, Any]


def diff(before: Any, after: Any, path: str = "") -> list[Operation]:
    """Compares objects key by key, and keeps the elements that two lists share. Equal values give no operation."""
    if before is after or before == after:
        return []
    if isinstance(before, dict) and isinstance(after, dict):
        removed = [{"op": "remove", "path": f"{path}/{_escape(key)}"} for key in before if key not in after]
        changed = [op for key in after for op in _member(before, after, key, path)]
        return removed + changed
    if isinstance(before, list) and isinstance(after, list):
        return _lists(before, after, path)

    return [{"op": "replace", "path": path, "value": after}]


def _lists(before: list[Any], after: list[Any], path: str) -> list[Operation]:
    """Elements that are the same object in both lists, in the same order, stay. They divide both lists into stretches.
    Within a stretch the elements are compared place by place. Surplus elements are removed or added."""
    at = {id(element): index for index, element in enumerate(before)}
    found: list[Operation] = []
    old = new = 0  # where the stretch begins
    for index, element in [*enumerate(after), (len(after), None)]:
        shared = at.get(id(element), -1) if index < len(after) else len(before)
        if shared < old:
            continue
        both = min(shared - old, index - new)
        for place in range(both):
            found += diff(before[old + place], after[new + place], f"{path}/{new + place}")
        found += [{"op": "remove", "path": f"{path}/{new + both}"}] * (shared - old - both)
        for place in range(new + both, index):
            where = "-" if shared == len(before) else str(place)
            found.append({"op": "add", "path": f"{path}/{where}", "value": after[place]})
        old, new = shared + 1, index + 1

    return found


def _member(before: dict[str, Any], after: dict[str, Any], key: str, path: str) -> list[Operation]:
    member = f"{path}/{_escape(key)}"
    if key not in before:
        return [{"op": "add", "path": member, "value": after[key]}]

    return diff(before[key], after[key], member)


def _escape(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")
