"""What a run is judged by, as facts the pass marks refer to: increases over solo, useful offline work, preemptions."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from valve_tools.sim.world import NS, Result

HOUR_NS = 3600 * NS
QUANTILES = {"mean": None, "p50": 50.0, "p95": 95.0, "p99": 99.0}
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """One run of one combination, small enough to send between processes and to commit."""

    ttft_ms: dict[str, float]
    tpot_ms: dict[str, float]
    ttft_increase: dict[str, float]
    """Percent over solo, by mean, p50, p95, p99."""
    tpot_increase: dict[str, float]
    own_ttft_increase: dict[str, float]
    """The same over the service on a GPU of its own; empty where it was not asked for."""
    own_tpot_increase: dict[str, float]
    offline_tokens_per_s: float
    share_of_alone: float
    """Offline throughput over that of the job alone: GPUs saved per GPU."""
    utilisation_gain: float
    lost_tokens_per_s: float
    max_preemptions: int
    preemptions: tuple[int, int, int, int]
    """Requests with 0, 1, 2, more preemptions."""
    stop_ms: dict[str, float]
    """Preemption latency p50, p99, max."""
    reclaims_by_hour: tuple[int, ...]
    kills: int
    refused: int
    unserved: int
    """Requests that solo served and this run never began."""
    stalls: int
    iterations: int

    @property
    def reclaims_after_first_hour(self) -> int:
        """Worst hour after the first; of a slice shorter than two hours there is none."""
        return max(self.reclaims_by_hour[1:], default=0)


def summarise(run: Result, solo: Result, alone_tokens_per_s: float, own: Result | None = None) -> Summary:
    """`solo` is the service in the pool that it has beside the job, `own` the service with the whole card."""
    ttft, solo_ttft, unserved = _paired_ttft(run, solo)
    tpot, solo_tpot = _paired_tpot(run, solo)
    gates = run.gates_per_request
    return Summary(
        ttft_ms=distribution(ttft),
        tpot_ms=distribution(tpot),
        ttft_increase=increase(ttft, solo_ttft),
        tpot_increase=increase(tpot, solo_tpot),
        own_ttft_increase=increase(*_paired_ttft(run, own)[:2]) if own else {},
        own_tpot_increase=increase(*_paired_tpot(run, own)) if own else {},
        offline_tokens_per_s=run.offline_tokens_per_s,
        share_of_alone=run.offline_tokens_per_s / alone_tokens_per_s if alone_tokens_per_s else 0.0,
        utilisation_gain=run.utilisation_gain,
        lost_tokens_per_s=run.totals["offline_lost_tokens"] / run.seconds,
        max_preemptions=int(gates.max(initial=0)),
        preemptions=tuple(np.bincount(np.minimum(gates, 3), minlength=4).tolist()),
        stop_ms=_latency(run.gate_took_ns / 1e6),
        reclaims_by_hour=_by_hour(run),
        kills=run.kills,
        refused=run.totals["refused"],
        unserved=unserved,
        stalls=run.totals["stalls"],
        iterations=run.totals["iterations"] + run.totals["offline_iterations"],
    )


def distribution(values: Floats) -> dict[str, float]:
    if values.size == 0:
        return dict.fromkeys(QUANTILES, 0.0)
    return {
        name: float(values.mean() if quantile is None else np.percentile(values, quantile))
        for name, quantile in QUANTILES.items()
    }


def increase(values: Floats, reference: Floats) -> dict[str, float]:
    """Percent by which each figure of `values` exceeds that of `reference`, over the same requests."""
    one, other = distribution(values), distribution(reference)
    return {name: 100.0 * (one[name] / other[name] - 1.0) if other[name] > 0 else 0.0 for name in QUANTILES}


def _paired_ttft(run: Result, solo: Result) -> tuple[Floats, Floats, int]:
    """Times of the requests that solo served. One that this run never began counts what it had waited at the end:
    leaving it out would reward starvation."""
    served = np.isfinite(solo.ttft_ms)
    waited = run.waited_ms[served]
    ttft = np.where(np.isfinite(run.ttft_ms[served]), run.ttft_ms[served], waited)
    return ttft, solo.ttft_ms[served], int((~np.isfinite(run.ttft_ms[served])).sum())


def _paired_tpot(run: Result, solo: Result) -> tuple[Floats, Floats]:
    both = np.isfinite(run.tpot_ms) & np.isfinite(solo.tpot_ms)
    return run.tpot_ms[both], solo.tpot_ms[both]


def _latency(values: Floats) -> dict[str, float]:
    if values.size == 0:
        return {"p50": 0.0, "p99": 0.0, "max": 0.0}
    return {
        "p50": float(np.percentile(values, 50)),
        "p99": float(np.percentile(values, 99)),
        "max": float(values.max()),
    }


def _by_hour(run: Result) -> tuple[int, ...]:
    hours = max(1, int(np.ceil(run.seconds / 3600)))
    return tuple(np.bincount(run.reclaim_at_ns // HOUR_NS, minlength=hours)[:hours].tolist())


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """Mean over seeds with its 95 % interval."""

    mean: float
    low: float
    high: float
    n: int

    @property
    def half(self) -> float:
        return self.high - self.mean


# Two-sided 95 % points of Student's t by degrees of freedom; beyond ten the normal's is near enough.
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)


def interval(values: Sequence[float]) -> Interval:
    """Of one value the interval is a point: run more seeds to know its width."""
    n = len(values)
    mean = float(np.mean(values))
    if n < 2:
        return Interval(mean=mean, low=mean, high=mean, n=n)
    factor = STUDENT[n - 2] if n - 2 < len(STUDENT) else 1.96
    half = factor * float(np.std(values, ddof=1)) / n**0.5
    return Interval(mean=mean, low=mean - half, high=mean + half, n=n)


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """One pass mark, judged by the worse end of its interval."""

    claim: str
    pair: str
    """Or the experiment, where there are no pairs."""
    value: float | None
    """None: there was nothing to judge."""
    bound: float
    ok: bool
    note: str = ""

    @property
    def verdict(self) -> str:
        if self.value is None:
            return "not judged" if self.ok else "VOID"
        return "holds" if self.ok else "MISSED"

    def cells(self) -> tuple[str, str, str]:
        """What was found, the bound and the verdict, for a page."""
        value = "-" if self.value is None else f"{self.value:.3g}"
        return value, f"{self.bound:g}", self.verdict if self.ok else f"**{self.verdict}**"

    def line(self) -> str:
        """The line that `--json` prints."""
        value = None if self.value is None else round(self.value, 4)
        return json.dumps({"claim": self.claim, "pair": self.pair, "value": value, "bound": self.bound, "ok": self.ok})


def at_most(claim: str, pair: str, found: float | Iterable[float], bound: float, note: str = "") -> Claim:
    """Of several figures the largest. Of none, or of one that is no number, nothing can be said."""
    figures = _figures(found)
    if not figures:
        return void(claim, pair, bound, note or NOTHING)
    return Claim(claim=claim, pair=pair, value=max(figures), bound=bound, ok=max(figures) <= bound, note=note)


def at_least(claim: str, pair: str, found: float | Iterable[float], bound: float, note: str = "") -> Claim:
    """As `at_most`, with the smallest."""
    figures = _figures(found)
    if not figures:
        return void(claim, pair, bound, note or NOTHING)
    return Claim(claim=claim, pair=pair, value=min(figures), bound=bound, ok=min(figures) >= bound, note=note)


NOTHING = "nothing was there to judge"


def _figures(found: float | Iterable[float]) -> list[float]:
    figures = list(found) if isinstance(found, Iterable) else [found]
    return figures if all(map(math.isfinite, figures)) else []


def most(found: Iterable[float]) -> list[float]:
    """The largest alone, for a mark that one case has to reach."""
    return sorted(found)[-1:]


def void(claim: str, pair: str, bound: float, note: str) -> Claim:
    """Not measured, or too noisy to say: never a pass."""
    return Claim(claim=claim, pair=pair, value=None, bound=bound, ok=False, note=note)


def not_judged(claim: str, pair: str, bound: float, note: str) -> Claim:
    return Claim(claim=claim, pair=pair, value=None, bound=bound, ok=True, note=note)
