"""The JSON Patch (RFC 6902) from one value to another, as admission answers need it. Pure."""

from typing import Any

Operation = dict[str, Any]


def diff(before: Any, after: Any, path: str = "") -> list[Operation]:
    """Objects are compared key by key, lists place by place: nothing to do gives no operation."""
    if before == after:
        return []
    if isinstance(before, dict) and isinstance(after, dict):
        removed = [{"op": "remove", "path": f"{path}/{_escape(key)}"} for key in before if key not in after]
        changed = [op for key in after for op in _member(before, after, key, path)]
        return removed + changed
    if isinstance(before, list) and isinstance(after, list) and len(before) <= len(after):
        common = [op for index, old in enumerate(before) for op in diff(old, after[index], f"{path}/{index}")]
        return common + [{"op": "add", "path": f"{path}/-", "value": value} for value in after[len(before) :]]

    return [{"op": "replace", "path": path, "value": after}]


def _member(before: dict[str, Any], after: dict[str, Any], key: str, path: str) -> list[Operation]:
    member = f"{path}/{_escape(key)}"
    if key not in before:
        return [{"op": "add", "path": member, "value": after[key]}]

    return diff(before[key], after[key], member)


def _escape(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")
