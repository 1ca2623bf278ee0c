"""What the demo's runs mean: latencies against running alone, and how much of the idle time offline work got. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from valve_tools.bench.row import percentile

MS = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class AnsweredRequest:
    """One answered request, as the online workload reports it."""

    arrival_s: float
    ttft_ms: float
    tpot_ms: float
    out_tokens: int

    @property
    def done_s(self) -> float:
        return self.arrival_s + (self.ttft_ms + self.tpot_ms * max(0, self.out_tokens - 1)) / 1e3


@dataclass(frozen=True, slots=True, kw_only=True)
class Preemption:
    """One preemption, from valved's recorded trace."""

    launch_ns: int
    seen_ns: int
    ioctl_ns: int
    done_ns: int

    @property
    def own_us(self) -> float:
        """Launch to ioctl issued: our share. The rest is the driver and the firmware."""
        return (self.ioctl_ns - self.launch_ns) / 1e3

    @property
    def total_ms(self) -> float:
        return (self.done_ns - self.launch_ns) / MS


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoRun:
    """One pass over the same arrivals under one condition."""

    condition: str
    requests: tuple[AnsweredRequest, ...]
    wall_s: float
    units: float = 0.0  # of offline work, finished while the online service ran
    cooldown_s: float = 0.0
    gates: tuple[Preemption, ...] = ()
    most_per_request: int | None = None
    offline_ok: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Latency:
    """The four figures that promise P5 bounds, in milliseconds."""

    values: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, requests: Iterable[AnsweredRequest]) -> Latency:
        everyone = list(requests)
        ttft = sorted(each.ttft_ms for each in everyone)
        tpot = sorted(each.tpot_ms for each in everyone if each.out_tokens > 1)
        return cls(
            values={
                "ttft-mean": sum(ttft) / len(ttft),
                "ttft-p99": percentile(ttft, 0.99),
                "tpot-mean": sum(tpot) / len(tpot),
                "tpot-p99": percentile(tpot, 0.99),
            }
        )

    def over(self, base: Latency) -> dict[str, float]:
        """Increase over another in percent, figure by figure."""
        return {name: 100.0 * (value / base.values[name] - 1.0) for name, value in self.values.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class OnlineRun:
    """What the online workload says of itself: its requests, and when it began and ended (CLOCK_MONOTONIC)."""

    requests: tuple[AnsweredRequest, ...]
    start_s: float
    wall_s: float


def parse_online(lines: Iterable[str]) -> OnlineRun:
    """The online workload's JSON lines; other lines are not its own."""
    requests, start_s, wall_s = [], 0.0, 0.0
    for line in lines:
        if not line.startswith("{"):
            continue
        record = json.loads(line)
        if "request" in record:
            requests.append(
                AnsweredRequest(
                    arrival_s=record["arrival_s"],
                    ttft_ms=record["ttft_ms"],
                    tpot_ms=record["tpot_ms"],
                    out_tokens=record["out"],
                )
            )
        elif record.get("summary") == "online":
            start_s, wall_s = record["start_s"], record["wall_s"]
    return OnlineRun(requests=tuple(requests), start_s=start_s, wall_s=wall_s)


def units_between(lines: Iterable[str], start_s: float, end_s: float) -> float:
    """Offline units finished in a stretch of time, from the offline job's progress lines, interpolated at its ends."""
    points = [(0.0, 0.0)]
    for line in lines:
        if line.startswith("{") and "now_s" in line:
            record = json.loads(line)
            points.append((record["now_s"], record["units"]))
    return max(0.0, _at(points, end_s) - _at(points, start_s))


def _at(points: Sequence[tuple[float, float]], when_s: float) -> float:
    for (t0, u0), (t1, u1) in pairwise(points):
        if t0 <= when_s <= t1 and t0:
            return u0 + (u1 - u0) * (when_s - t0) / (t1 - t0)
    return points[-1][1] if when_s > points[-1][0] else 0.0


def parse_gates(records: Iterable[Mapping[str, object]]) -> tuple[Preemption, ...]:
    """Preemptions that a launch caused, from recorded events."""
    gates = []
    for record in records:
        detail = record.get("detail")
        if record.get("kind") != "gate" or not isinstance(detail, Mapping) or not detail.get("launch_ns"):
            continue
        if not detail.get("channels"):
            continue
        times = {name: int(str(detail[name])) for name in ("launch_ns", "seen_ns", "ioctl_ns", "done_ns")}
        gates.append(Preemption(**times))
    return tuple(gates)


def idle_beyond(requests: Sequence[AnsweredRequest], wall_s: float, cooldown_s: float) -> float:
    """Seconds in which no request was open, less one cooldown per idle period: what offline work can get."""
    idle, end_s = 0.0, 0.0
    for each in sorted(requests, key=lambda request: request.arrival_s):
        idle += max(0.0, each.arrival_s - end_s - cooldown_s)
        end_s = max(end_s, each.done_s)
    return idle + max(0.0, wall_s - end_s - cooldown_s)


def pooled(runs: Iterable[DemoRun], condition: str) -> Latency:
    """Latencies over all runs of one condition."""
    return Latency.of(request for run in runs if run.condition == condition for request in run.requests)


def spread(runs: Iterable[DemoRun], condition: str) -> dict[str, float]:
    """The largest difference in percent between two runs of one condition: what this machine cannot tell apart."""
    each = [Latency.of(run.requests) for run in runs if run.condition == condition]
    names = each[0].values if each else {}
    return {
        name: 100.0 * (max(one.values[name] for one in each) / min(one.values[name] for one in each) - 1.0)
        for name in names
    }


def harvested_share(runs: Iterable[DemoRun], units_per_s: float) -> float:
    """Offline work done, as a share of what the idle time beyond cooldown had room for."""
    done_s = room_s = 0.0
    for run in runs:
        if run.condition == "valve":
            done_s += run.units / units_per_s
            room_s += idle_beyond(run.requests, run.wall_s, run.cooldown_s)
    return done_s / room_s if room_s else 0.0
