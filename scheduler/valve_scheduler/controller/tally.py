"""Counts what harvesting saved, promised and kept, for the metrics of the leading controller.

An account is a sum that outlives controllers; a counter begins at 0 with each, so only what an account grows by while
it is watched is counted. What was promised is counted when a window of the SLA monitor closes: sla x its time x the
pod's GPUs; kept is the same with what was reached, at most the SLA. Kept over promised is how far promises hold.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from valve_scheduler import metrics
from valve_scheduler.controller.monitor import Track, Verdict


class SavedCounter:
    def __init__(self) -> None:
        self._saved_s: dict[str, float] = {}  # by namespace, at the last look

    def show(self, namespace: str, offline: Mapping[str, Any]) -> None:
        """One look at the account of a namespace."""
        saved_s = float(offline.get("savedSeconds", 0.0))
        metrics.harvested.labels(namespace).set(offline.get("harvestSeconds", 0.0))
        metrics.saved.labels(namespace).set(saved_s)
        grown_s = saved_s - self._saved_s.get(namespace, saved_s)
        metrics.saved_total.labels(namespace).inc(max(0.0, grown_s))
        self._saved_s[namespace] = saved_s

    def forget(self) -> None:
        """Another replica leads: it shows the accounts."""
        self._saved_s.clear()
        metrics.violations.set(0)
        metrics.harvested.clear()
        metrics.saved.clear()


def closed(before: Mapping[str, Track], after: Mapping[str, Track]) -> Iterator[tuple[Track, float]]:
    """Tracks whose window closed with the last samples, and how long it was."""
    for uid, track in after.items():
        last = before.get(uid)
        if last is not None and track.achieved is not None and track.begin_demand_s > last.begin_demand_s:
            yield track, track.begin_demand_s - last.begin_demand_s


def count(before: Mapping[str, Track], after: Mapping[str, Track]) -> None:
    promised = [track for track in after.values() if not track.sample.is_best_effort]
    metrics.violations.set(sum(track.verdict is Verdict.PERSISTENTLY_MISSED for track in promised))
    for track, span_s in closed(before, after):
        sample = track.sample
        if sample.is_best_effort:
            continue
        metrics.promised_total.labels(sample.namespace).inc(sample.sla * span_s * sample.gpus)
        is_kept = track.verdict is Verdict.NODE_GAVE_ENOUGH  # what a tenant says of its job breaks no promise
        reached = sample.sla if is_kept else min(track.achieved or 0.0, sample.sla)
        metrics.kept_total.labels(sample.namespace).inc(reached * span_s * sample.gpus)
