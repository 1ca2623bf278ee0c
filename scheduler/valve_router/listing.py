"""What an engine says of itself at /v1/models: its base, its adapters, and by which names clients mean them.

`chat-v3` is a version. A client that asks for `chat` gets the newest `chat-vN` of the chosen replica, where the
operator gave that name. The request that goes on names the version, and so does the answer."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from valve_router.prompt import NO_REQUEST

VERSION = re.compile(r"(.+)-v([1-9][0-9]{0,8})")


class ListedModel(msgspec.Struct):
    id: str
    parent: Any = None  # an adapter has one
    owned_by: Any = None
    root: Any = None  # of an adapter: its folder


class ListedModels(msgspec.Struct):
    """What an engine answers to /v1/models."""

    data: list[ListedModel]


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """An adapter is loaded into no other one."""

    name: str
    root: str  # empty: the engine does not say


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedAdapter:
    name: str
    asked: str  # what the engine is asked for: SGLang answers as the base to an adapter's bare name
    path: str  # empty: the engine does not say
    base: Base

    @property
    def version(self) -> tuple[str, int]:
        """Of which name, and its number; 0: none."""
        found = VERSION.fullmatch(self.name)
        return (found[1], int(found[2])) if found else ("", 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    base: Base
    adapters: Mapping[str, ListedAdapter]
    newest: Mapping[str, ListedAdapter]  # by the name that stands for it
    asked: Mapping[str, str]  # by each name that clients may use: what the engine is asked for
    is_sglang: bool


def listing_of(told: bytes, names: Collection[str]) -> Listing:
    """`names`: those that stand for the newest of their versions."""
    models = msgspec.json.decode(told, type=ListedModels).data
    bases = [one for one in models if not one.parent]
    base = Base(name=bases[0].id, root=_text(bases[0].root)) if bases else Base(name="", root="")
    is_sglang = bool(bases) and bases[0].owned_by == "sglang"
    before = f"{base.name}:" if is_sglang else ""
    adapters = {
        one.id: ListedAdapter(name=one.id, asked=before + one.id, path=_text(one.root), base=base)
        for one in models
        if one.parent
    }
    newest: dict[str, ListedAdapter] = {}
    for one in sorted(adapters.values(), key=lambda each: each.version[1]):
        if one.version[0] in names:
            newest[one.version[0]] = one
    asked = {one.id: one.id for one in bases}
    for one in adapters.values():
        asked |= {one.name: one.asked, one.asked: one.asked}
    asked |= {name: one.asked for name, one in newest.items()}
    return Listing(base=base, adapters=adapters, newest=newest, asked=asked, is_sglang=is_sglang)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def renamed(body: bytes, model: str) -> bytes:
    """The request for `model`; all else of it as it came."""
    try:
        asked = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except NO_REQUEST:
        return body
    asked["model"] = msgspec.Raw(msgspec.json.encode(model))
    return msgspec.json.encode(asked)
