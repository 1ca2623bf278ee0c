"""Counts what the GPUs of this node would offer, in every mode: what `valve cluster report` is made from.

All of it goes out as metrics, so a week of them is the week that Prometheus keeps: nothing here outlives the daemon.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, field

from prometheus_client.core import Metric

from valved.machine.ports import GpuInfo
from valved.metrics import Figures, counter, gauge, of_each
from valved.model.ids import ServiceId
from valved.state.journal import Watcher
from valved.state.registry import Books

MOST_WAKES = 1 << 16  # between two looks, a second apart


@dataclass(slots=True)
class Offer:
    """Of one GPU."""

    seen_s: float = 0.0  # in which anybody could tell whether online work was busy
    idle_s: float = 0.0
    free_bytes: int = 0  # what offline work could have had, when online work last left the GPU


OFFER_COUNTERS: Figures[Offer] = {
    "valve_gpu_observed_seconds": ("Time in which valved knew whether online work was busy", lambda o: o.seen_s),
    "valve_gpu_idle_seconds": (
        "Part of the observed time in which no online service held the GPU",
        lambda o: o.idle_s,
    ),
}
OFFER_GAUGES: Figures[Offer] = {
    "valve_gpu_offered_memory_bytes": (
        "Memory that offline work could have had when online work last left the GPU",
        lambda o: o.free_bytes,
    ),
}


@dataclass(slots=True)
class Observed:
    gpus: Sequence[GpuInfo]
    offers: list[Offer] = field(default_factory=list)
    _idles: dict[tuple[str, str], int] = field(default_factory=dict)  # namespace and pod
    _pods: dict[ServiceId, tuple[str, str]] = field(default_factory=dict)  # at the last look

    def __post_init__(self) -> None:
        self.offers = [Offer() for _ in self.gpus]

    def book(
        self, seen_s: Sequence[float], left_s: Sequence[float], wakes: Watcher, books: Books, live: Set[str]
    ) -> None:
        """Once a second: as the node's series, and the services that dropped their hold since. A pod keeps its count
        while it is one of the `live` ones, whichever of its services leave: a sum that falls reads as a reset."""
        for offer, seen, left in zip(self.offers, seen_s, left_s, strict=True):
            offer.seen_s += seen
            offer.idle_s += min(left, seen)
        pods = {key: _pod(service.name) for key, service in books.services.items()}
        known = self._pods | pods  # one that let go may have left since
        self._pods = pods
        for event, _ in wakes.take():
            pod = known.get(ServiceId(event.service))
            if pod is not None:
                self._idles[pod] = self._idles.get(pod, 0) + 1
        kept = {_pod(name) for name in live} | set(known.values())
        self._idles = {pod: count for pod, count in self._idles.items() if pod in kept}

    def note_free(self, place: int, free_bytes: int, is_held: bool) -> None:
        """What is free while online computes is no offer."""
        if not is_held:
            self.offers[place].free_bytes = free_bytes

    def families(self) -> Iterator[Metric]:
        labels = ["gpu", "uuid"]
        offers = {(str(gpu.index), gpu.uuid_text): one for gpu, one in zip(self.gpus, self.offers, strict=True)}
        yield from of_each(counter, OFFER_COUNTERS, offers, labels)
        yield from of_each(gauge, OFFER_GAUGES, offers, labels)
        total = {(str(gpu.index), gpu.uuid_text): gpu.total_bytes for gpu in self.gpus}
        yield gauge("valve_gpu_memory_bytes", "Memory of the card", total, labels)
        text = "Times the online pod let go of its GPUs; after each at most one preemption can follow"
        yield counter("valve_online_idles", text, self._idles, ["namespace", "pod"])


def _pod(name: str) -> tuple[str, str]:
    namespace, _, pod = name.partition("/")
    return namespace, pod
