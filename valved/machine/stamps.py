"""What the native gate reports of each stop and wake."""

from __future__ import annotations

import enum
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple, cast

from valved.model.figures import plausible
from valved.model.ids import ClientId, GpuIndex, ServiceId


class StampKind(enum.IntEnum):
    """What one native stamp reports."""

    GATE = 1  # a ring or `hold` closed at least one GPU
    HOLD = 2  # a ring took the hold, every GPU was closed already
    WAKE = 3
    WAKE_REFUSED = 4
    GATE_FAILED = 5  # a disable failed or timed out; status says how
    LEARN = 6  # a gap inside a hold must be learned from before this service is woken


class StopCause(enum.IntEnum):
    """Why a hold was taken, as enum valve_cause of native/gate.h counts."""

    ASKED = 0
    RING = 1
    GRANT_END = 2
    GRANT_BROKEN = 3  # a launch fell into a grant


GRANT_CAUSES = frozenset({StopCause.GRANT_END, StopCause.GRANT_BROKEN})


class Stamp(NamedTuple):
    """One native event, field for field as `struct valve_stamp` has it: there may be a thousand a second, and what few
    ask for is worked out when it is asked for. Times are CLOCK_MONOTONIC; 0 where a step did not happen."""

    service: ServiceId
    client: ClientId  # whose doorbell rang; 0 when Python asked
    launch_ns: int  # the ringing launch, from the client's region (checked against seen_ns)
    seen_ns: int  # the listener woke
    ioctl_ns: int  # first disable ioctl of this GPU entered
    done_ns: int  # last one returned, or when this was written
    code: int  # of StampKind
    gpu: GpuIndex  # GATE and GATE_FAILED: one stamp per GPU that was closed; else the first GPU
    epoch: int
    channels: int  # that were switched; WAKE: open requests that were not believed
    status: int  # RM status, or -errno; WAKE: the reason, as WakeLook has it
    cause: int = 0  # GATE and HOLD: StopCause
    teller: int = 0  # the only client of the service that tells of requests; 0: none, or several
    claims_started: int = 0  # its totals then, as it wrote them
    claims_ended: int = 0

    @property
    def kind(self) -> StampKind:
        return StampKind(self.code)

    @property
    def requests_started(self) -> int:
        return plausible(self.claims_started)

    @property
    def requests_ended(self) -> int:
        return plausible(self.claims_ended)


_LAYOUT = struct.Struct("<6Q4IiI3Q")  # struct valve_stamp of native/gate.h; a test compares the three
STAMP_BYTES = _LAYOUT.size
# Stamp(*fields), less a call of Python
_stamp = cast("Callable[[tuple[int, ...]], Stamp]", partial(tuple.__new__, Stamp))


class Stamps(Sequence[Stamp]):
    """Stamps as the native side wrote them. Few of them are ever looked at one by one."""

    __slots__ = ("raw",)

    def __init__(self, raw: bytes) -> None:
        self.raw = raw

    @classmethod
    def packed(cls, stamps: Iterable[Stamp]) -> Stamps:
        return cls(b"".join(_LAYOUT.pack(*stamp) for stamp in stamps))

    def __len__(self) -> int:
        return len(self.raw) // STAMP_BYTES

    def __getitem__(self, at: int) -> Stamp:  # type: ignore[override]  # nobody asks for a slice
        return _stamp(_LAYOUT.unpack_from(self.raw, at * STAMP_BYTES))

    def __iter__(self) -> Iterator[Stamp]:
        return map(_stamp, _LAYOUT.iter_unpack(self.raw))

    def services(self) -> list[int]:
        """Of each stamp."""
        words: list[int] = memoryview(self.raw).cast("Q")[:: STAMP_BYTES // 8].tolist()
        return words
