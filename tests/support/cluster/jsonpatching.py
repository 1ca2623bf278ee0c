"""Applies a JSON Patch as an API server does: what RFC 6902 says of add, replace and remove."""

import copy
from typing import Any


def apply(value: Any, operations: list[dict[str, Any]]) -> Any:
    value = copy.deepcopy(value)
    for operation in operations:
        value = _apply(value, operation)

    return value


def _apply(root: Any, operation: dict[str, Any]) -> Any:
    if operation["path"] == "":
        assert operation["op"] == "replace"
        return operation["value"]
    *parents, last = [part.replace("~1", "/").replace("~0", "~") for part in operation["path"].split("/")[1:]]
    target = root
    for part in parents:
        target = target[int(part)] if isinstance(target, list) else target[part]
    if isinstance(target, list):
        _in_list(target, last, operation)
    elif operation["op"] == "remove":
        del target[last]
    else:
        assert operation["op"] == "add" or last in target  # replace needs a target
        target[last] = operation["value"]

    return root


def _in_list(target: list[Any], last: str, operation: dict[str, Any]) -> None:
    if operation["op"] == "add":
        target.insert(len(target) if last == "-" else int(last), operation["value"])
    elif operation["op"] == "replace":
        target[int(last)] = operation["value"]
    else:
        del target[int(last)]
