"""One name for the newest version of an adapter: who asks for `chat` gets the newest `chat-vN` of the chosen replica.

Trainers publish under numbered names. The request that goes on names the version, and so does the answer.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

import msgspec

VERSION = re.compile(r"(.+)-v([1-9][0-9]{0,8})")


class ListedModel(msgspec.Struct):
    id: str
    parent: Any = None  # an adapter has one
    owned_by: Any = None


class ListedModels(msgspec.Struct):
    """What an engine answers to /v1/models."""

    data: list[ListedModel]


def newest_of(told: bytes, names: Collection[str]) -> dict[str, str]:
    """By name: what to ask this engine for. SGLang wants the base before the adapter's name."""
    models = msgspec.json.decode(told, type=ListedModels).data
    base = next((one for one in models if not one.parent), None)
    before = f"{base.id}:" if base is not None and base.owned_by == "sglang" else ""
    found: dict[str, int] = {}
    for one in models:
        version = VERSION.fullmatch(one.id) if one.parent else None  # a base may be named so, too
        if version is not None and version[1] in names:
            found[version[1]] = max(found.get(version[1], 0), int(version[2]))
    return {name: f"{before}{name}-v{number}" for name, number in found.items()}


def named(body: bytes, newest: Mapping[str, str]) -> bytes:
    """The request with the version in place of the name; all else of it as it came."""
    if not newest:
        return body
    try:
        asked = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        version = newest.get(msgspec.json.decode(asked["model"], type=str))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, KeyError):
        return body
    if version is None:
        return body
    asked["model"] = msgspec.Raw(msgspec.json.encode(version))
    return msgspec.json.encode(asked)
