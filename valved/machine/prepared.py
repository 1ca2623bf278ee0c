"""What the native gate may begin by itself while the loop sleeps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from valved.model.ids import GpuIndex


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedTake:
    """What the native gate does by itself when a need begins, while the loop sleeps."""

    gpus: frozenset[GpuIndex]  # are held first
    wanted: memoryview  # a word of a hook's book: it begins when that says ...
    had: int  # ... more than this
    mode: memoryview  # a word of the book of the engine that loses: nothing begins while it is 0
    table: memoryview  # of the engine that loses ...
    blocks: bytes  # ... these: 32 bits each
    backed: int  # blocks of it that are left
    packets: tuple[tuple[int, bytes], ...]  # by which link


class PreparedPort(Protocol):
    def listen(self, link: int) -> bool:
        """What comes by this link may be a need, until it is closed. False: it cannot be listened to."""
        ...

    def put(self, takes: Sequence[PreparedTake]) -> None:
        """In place of those before, none of which may have begun. OSError: it is as before."""
        ...

    def rest(self) -> None:
        """The loop sleeps from here on, and one of them may begin."""
        ...

    def wake(self) -> int:
        """It is awake: which of them has begun; -1: none has, and none will."""
        ...

    def end(self, *, go: bool) -> tuple[int, int]:
        """How many packets of the one that has begun are sent, and when its loss was told; -1: nothing of it was done,
        and nothing will be. `go`: do it now if the GPUs stand."""
        ...
