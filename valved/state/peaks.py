"""Remembers how much memory of each GPU the online services of a name had at most, also for a while after their end.

A service that is restarted, or grows again, finds the memory that it had: offline work is kept out of it. A peak counts
until it was not reached for `remember_ns`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from valved.model.ids import GpuIndex
from valved.policy.keeping import MemoryUse
from valved.state.saved import SavedPeak

MOST_NAMES = 256  # on one GPU; those that were seen longest ago are forgotten first


@dataclass(slots=True, kw_only=True)
class _Peak:
    bytes: int = 0
    at_ns: int = 0  # when it was last reached

    def see(self, now_bytes: int, now_ns: int, remember_ns: int) -> None:
        if now_bytes >= self.bytes or now_ns - self.at_ns > remember_ns:
            self.bytes, self.at_ns = now_bytes, now_ns


class Peaks:
    def __init__(self, remember_ns: int) -> None:
        self._remember_ns = remember_ns
        self._had: dict[GpuIndex, dict[str, tuple[_Peak, _Peak]]] = {}  # by name: plain, KV

    @property
    def remembers(self) -> bool:
        return self._remember_ns > 0

    def see(self, gpu: GpuIndex, uses: Mapping[str, MemoryUse], now_ns: int) -> None:
        """What each name has now. Who is not among them has nothing."""
        if not self._remember_ns:
            return
        peaks = self._had.setdefault(gpu, {})
        for name in {*peaks, *uses}:
            use, (plain, kv) = uses.get(name, MemoryUse()), peaks.setdefault(name, (_Peak(), _Peak()))
            plain.see(use.plain_bytes, now_ns, self._remember_ns)
            kv.see(use.kv_bytes, now_ns, self._remember_ns)
            if not plain.bytes and not kv.bytes:
                del peaks[name]
        for name in sorted(peaks, key=lambda name: max(one.at_ns for one in peaks[name]))[:-MOST_NAMES]:
            del peaks[name]

    def of(self, gpu: GpuIndex) -> dict[str, MemoryUse]:
        peaks = self._had.get(gpu, {}).items()
        return {name: MemoryUse(plain_bytes=plain.bytes, kv_bytes=kv.bytes) for name, (plain, kv) in peaks}

    # A successor

    def saved(self) -> list[SavedPeak]:
        return [
            SavedPeak(gpu=gpu, name=name, plain=(plain.bytes, plain.at_ns), kv=(kv.bytes, kv.at_ns))
            for gpu, peaks in self._had.items()
            for name, (plain, kv) in peaks.items()
        ]

    def restore(self, saved: Iterable[SavedPeak], now_ns: int) -> None:
        """Without those of another boot, whose clock was another, and what makes no sense."""
        for one in saved:
            told = [_Peak(bytes=size, at_ns=at_ns) for size, at_ns in (one.plain, one.kv)]
            if self._remember_ns and all(0 <= peak.bytes <= 1 << 50 and 0 <= peak.at_ns <= now_ns for peak in told):
                self._had.setdefault(GpuIndex(one.gpu), {})[one.name] = (told[0], told[1])
