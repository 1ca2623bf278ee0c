"""When memory was reclaimed on each GPU: the operator's target counts per GPU, however many engines share one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from valved.model.ids import GpuIndex
from valved.policy.reservation import REMEMBERED_RECLAIMS


class ReclaimBudget:
    """Every engine decides by the reclaims of its busiest GPU, its own and those of others; they outlive engines."""

    def __init__(self, uuids: Mapping[GpuIndex, bytes]) -> None:
        self._uuids = dict(uuids)
        self._at_ns: dict[GpuIndex, tuple[int, ...]] = {}

    def seen_by(self, gpus: Iterable[GpuIndex], since_ns: int) -> tuple[int, ...]:
        """Of the GPU that had most since then."""
        recent = (tuple(at for at in self._at_ns.get(gpu, ()) if at > since_ns) for gpu in sorted(gpus))
        return max(recent, key=len, default=())

    def note(self, gpus: Iterable[GpuIndex], now_ns: int) -> None:
        for gpu in gpus:
            self._at_ns[gpu] = (*self._at_ns.get(gpu, ()), now_ns)[-REMEMBERED_RECLAIMS:]

    def saved(self) -> dict[str, tuple[int, ...]]:
        return {self._uuids[gpu].hex(): at for gpu, at in self._at_ns.items()}

    def restore(self, saved: Mapping[str, tuple[int, ...]]) -> None:
        self._at_ns = {gpu: tuple(saved[uuid.hex()]) for gpu, uuid in self._uuids.items() if uuid.hex() in saved}
