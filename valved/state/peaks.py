"""Remembers how much memory of each GPU the online services of a name had at most, also for a while after their end.

A service that is restarted, or grows again, finds the memory that it had: offline work is kept out of it. A peak counts
until it was not reached for `remember_ns`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass

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

    def of(self, since_ns: int) -> int:
        return self.bytes if self.at_ns >= since_ns else 0


class Peaks:
    def __init__(self, remember_ns: int) -> None:
        self._remember_ns = remember_ns
        self._had: dict[GpuIndex, dict[str, tuple[_Peak, _Peak]]] = {}  # by name: plain, KV
        self._last: dict[GpuIndex, dict[str, MemoryUse]] = {}
        self._again: dict[GpuIndex, tuple[list[_Peak], int]] = {}  # what the last look reached; when it forgets others

    @property
    def remembers(self) -> bool:
        return self._remember_ns > 0

    def see(
        self, gpu: GpuIndex, uses: Mapping[str, MemoryUse], now_ns: int, sure: Mapping[str, int] | None = None
    ) -> None:
        """What each name has now. Who is not among them has nothing. `sure`: bytes that are no KV memory whenever the
        card was read, where that is not all of the plain ones.
        """
        if not self._remember_ns:
            return
        peaks, self._last[gpu] = self._had.setdefault(gpu, {}), dict(uses)
        reached, others_ns = list[_Peak](), list[int]()
        for name in {*peaks, *uses}:
            use, (plain, kv) = uses.get(name, MemoryUse()), peaks.setdefault(name, (_Peak(), _Peak()))
            for peak, has in (plain, (sure or {}).get(name, use.plain_bytes)), (kv, use.kv_bytes):
                peak.see(has, now_ns, self._remember_ns)
                if peak.bytes == has:
                    reached.append(peak)
                else:
                    others_ns.append(peak.at_ns)
            if not plain.bytes and not kv.bytes:
                del peaks[name]
        self._again[gpu] = reached, min(others_ns, default=now_ns) + self._remember_ns
        for name in sorted(peaks, key=lambda name: max(one.at_ns for one in peaks[name]))[:-MOST_NAMES]:
            del peaks[name]
            self._again.pop(gpu, None)

    def see_again(self, gpu: GpuIndex, now_ns: int) -> bool:
        """What the last look saw. False: more than the times of its peaks may change, so it is to be said in full."""
        if not self._remember_ns:
            return True
        reached, until_ns = self._again.get(gpu, ([], 0))
        if now_ns > until_ns:
            return False
        for peak in reached:
            peak.at_ns = now_ns
        return True

    def of(self, gpu: GpuIndex, now_ns: int) -> dict[str, MemoryUse]:
        """Also where nothing is seen any more."""
        since_ns, peaks = now_ns - self._remember_ns, self._had.get(gpu, {}).items()
        return {
            name: MemoryUse(plain_bytes=plain.of(since_ns), kv_bytes=kv.of(since_ns)) for name, (plain, kv) in peaks
        }

    def last(self, gpu: GpuIndex) -> Mapping[str, MemoryUse]:
        """As it was seen last, by a predecessor too."""
        return self._last.get(gpu, {})

    # A successor

    def saved(self) -> list[SavedPeak]:
        return [
            SavedPeak(
                gpu=gpu,
                name=name,
                plain=(plain.bytes, plain.at_ns),
                kv=(kv.bytes, kv.at_ns),
                last=astuple(self.last(gpu).get(name, MemoryUse())),
            )
            for gpu, peaks in self._had.items()
            for name, (plain, kv) in peaks.items()
        ]

    def restore(self, saved: Iterable[SavedPeak], now_ns: int) -> None:
        """Without what makes no sense. Those of another boot, whose clock was another, are not among them."""
        self._again.clear()
        for one in saved:
            told = [_Peak(bytes=size, at_ns=at_ns) for size, at_ns in (one.plain, one.kv)]
            gpu, (plain, kv) = GpuIndex(one.gpu), one.last
            is_sane = all(0 <= size <= 1 << 50 for size in (plain, kv, *(peak.bytes for peak in told)))
            if self._remember_ns and is_sane and all(0 <= peak.at_ns <= now_ns for peak in told):
                self._had.setdefault(gpu, {})[one.name] = (told[0], told[1])
                self._last.setdefault(gpu, {})[one.name] = MemoryUse(plain_bytes=plain, kv_bytes=kv)
