"""An operator's own load for `whatif`: a CSV of requests, or a Prometheus range export when there is no request log.

The export is the answer of `/api/v1/query_range` with rates per second. Which series is which is read from the metric
name: one holding `prompt` is prompt tokens/s, one holding `generation` or `output` is answer tokens/s, any other is
requests/s (vLLM: rate of vllm:prompt_tokens_total, vllm:generation_tokens_total, vllm:request_success_total; set the
name with label_replace, since `rate()` drops it). Several series of one kind are summed. What a rate does not tell, the
burstiness inside a step and the spread of lengths, is drawn and swept by seed: that is the width of the interval.
"""

from __future__ import annotations

import itertools
import json
import math
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
from valve_tools.sim.traces import NS, Trace, TraceError, read_file

BURSTINESS = (0.25, 0.5, 1.0)
"""Gamma shapes of the gaps, swept by seed: 1 is Poisson, 0.25 has four times its variance."""
MOST_REQUESTS = 2e7
LENGTH_SIGMA = 0.8
"""Spread of lognormal lengths around the mean that the rates imply; public traces have 0.5 to 1.2."""


def requests_of(path: Path) -> Trace:
    """A CSV of requests in the trace format."""
    if not path.is_file():
        raise TraceError(f"{path} is not a file")
    found = read_file(path)
    if not isinstance(found, Trace):
        raise TraceError(f"{path} is no request trace; it needs a header with t_s,in_tok,out_tok")
    return found


def prometheus_of(path: Path, seed: int) -> Trace:
    """Requests drawn from the rates of an export."""
    steps = _steps(path)
    expected = sum(seconds * rate for _, seconds, rate, _, _ in steps)
    if expected > MOST_REQUESTS:
        raise TraceError(
            f"{path}: {expected:.3g} requests, at most {MOST_REQUESTS:.0e} are drawn; export a shorter range, or the "
            "rates of one replica"
        )
    rng = np.random.default_rng(seed)
    shape = BURSTINESS[seed % len(BURSTINESS)]
    times: list[np.ndarray] = []
    prompts: list[np.ndarray] = []
    answers: list[np.ndarray] = []
    for start, seconds, rate, prompt_rate, answer_rate in steps:
        count = rng.poisson(rate * seconds)
        if count == 0:
            continue
        gaps = rng.gamma(shape, 1.0, count + 1)
        times.append(start + seconds * np.cumsum(gaps)[:-1] / gaps.sum())
        prompts.append(_lengths(rng, prompt_rate / rate, count))
        answers.append(_lengths(rng, answer_rate / rate, count))
    if not times:
        raise TraceError(f"{path}: no step has a request rate above zero")
    return Trace(
        name=path.stem,
        arrive_ns=np.rint(np.concatenate(times) * NS).astype(np.int64),
        in_tok=np.concatenate(prompts),
        out_tok=np.concatenate(answers),
    )


def _lengths(rng: np.random.Generator, mean: float, count: int) -> np.ndarray:
    drawn = max(mean, 1.0) * np.exp(LENGTH_SIGMA * rng.standard_normal(count) - LENGTH_SIGMA**2 / 2)
    return np.maximum(1, np.rint(drawn)).astype(np.int64)


def _steps(path: Path) -> list[tuple[float, float, float, float, float]]:
    """(start, seconds, requests/s, prompt tokens/s, answer tokens/s) of every step.

    A hole in the export is cut out: time of which nothing is known is no idle time."""
    rates: dict[str, dict[float, float]] = defaultdict(dict)
    for series in _series(path):
        metric, values = series.get("metric"), series.get("values")
        if not isinstance(metric, dict) or not isinstance(values, list):
            raise TraceError(f"{path}: a series without metric or values; export with query_range, not query")
        kind = _kind(str(metric.get("__name__", "")))
        for sample in values:
            at, value = _sample(path, sample)
            if value is not None:
                rates[kind][at] = rates[kind].get(at, 0.0) + value
    for kind in ("requests", "prompt", "generation"):
        if not rates[kind]:
            raise TraceError(f"{path}: no series of {kind} per second; name the metrics so that they can be told apart")
    moments = sorted(rates["requests"])
    if len(moments) < 2:
        raise TraceError(f"{path}: one sample is no range; export with query_range over an hour or more")
    step = min(b - a for a, b in itertools.pairwise(moments))
    return [
        (i * step, step, rates["requests"][at], rates["prompt"].get(at, 0.0), rates["generation"].get(at, 0.0))
        for i, at in enumerate(moments)
    ]


def _series(path: Path) -> list[dict[str, Any]]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise TraceError(f"{path}: not readable as JSON: {error}") from error
    if isinstance(document, dict) and document.get("status") == "error":
        raise TraceError(f"{path}: Prometheus answered with an error: {document.get('error')}")
    data = document.get("data") if isinstance(document, dict) else None
    if not isinstance(data, dict) or data.get("resultType") != "matrix" or not isinstance(data.get("result"), list):
        raise TraceError(f"{path}: not the answer of /api/v1/query_range (resultType matrix)")
    return [series for series in data["result"] if isinstance(series, dict)]


def _kind(name: str) -> str:
    if "prompt" in name:
        return "prompt"
    return "generation" if "generation" in name or "output" in name else "requests"


def _sample(path: Path, sample: Any) -> tuple[float, float | None]:
    """A sample; NaN is a missing one, as Prometheus writes a division by zero."""
    try:
        at, value = float(sample[0]), float(sample[1])
    except (TypeError, ValueError, IndexError, KeyError):
        raise TraceError(f"{path}: {sample!r} is not a [time, value] sample") from None
    if not math.isfinite(at):
        raise TraceError(f"{path}: a sample at {at}, a time in seconds is finite")
    if math.isnan(value):
        return at, None
    if value < 0 or math.isinf(value):
        raise TraceError(f"{path}: rate {value} at {at:.0f}, it must be finite and not negative")
    return at, value
