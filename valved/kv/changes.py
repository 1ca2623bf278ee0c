"""What has changed in the books of KV memory, as values. kv/service.py applies them, in one place.

The books (ranges, layouts, tables, unheeded) call no object above them. They put a value here: at once, or when a time
has come that they waited for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from valved.kv.engines import Engine
from valved.kv.slots import KvRangeBook
from valved.model.ids import ClientId
from valved.state.registry import ClientEntry


@dataclass(frozen=True, slots=True)
class Look:
    """An engine may need memory, or may be given some."""


@dataclass(frozen=True, slots=True)
class RangeCame:
    """A range is known; what it holds may still have to be told."""


@dataclass(frozen=True, slots=True)
class RangeTold:
    """A client of a predecessor has told all that a range of it holds."""

    shim: ClientEntry


@dataclass(frozen=True, slots=True)
class RangeGone:
    shim: ClientEntry
    book: KvRangeBook


@dataclass(frozen=True, slots=True)
class PinCame:
    client: ClientId


@dataclass(frozen=True, slots=True)
class BackWhole:
    """Back this range before its allocation returns, then answer its client: message `seq`, 0 for none."""

    book: KvRangeBook
    seq: int


@dataclass(frozen=True, slots=True)
class BackHeld:
    """Back this range in whole or not at all: its process launches nothing until then."""

    book: KvRangeBook


@dataclass(frozen=True, slots=True)
class EngineLeft:
    engine: Engine


@dataclass(frozen=True, slots=True)
class HookLost:
    """The shim beside this hook left. Only a hook that comes anew tells where the tensors of its ranges lie."""

    hook: ClientId


@dataclass(frozen=True, slots=True)
class EndProcess:
    client: ClientId
    reason: str


Changed = Look | RangeCame | RangeTold | RangeGone | PinCame | BackWhole | BackHeld | EngineLeft | HookLost | EndProcess


class Changes:
    """The way of these values to the part that applies them: the one listener of this room."""

    def __init__(self) -> None:
        self.listener: Callable[[Changed], None] = lambda changed: None

    def put(self, changed: Changed) -> None:
        self.listener(changed)
