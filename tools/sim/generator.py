"""A seeded folder of traces for a clone without data: ten services whose shapes span those of public traces.

Arrivals are sessions: bursts start as a Poisson process (or on a clock), a burst holds a geometric number of requests
with gamma gaps. Lengths are lognormal and capped. Nothing here is copied from a data set; the parameters are round
numbers chosen so that every pair of the `pairs` experiment finds a trace near its shape.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from valve_tools.sim.traces import NS, Folder, IntArray, JobLengths, Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """Lognormal token counts."""

    median: float
    sigma: float
    most: int

    def draw(self, rng: np.random.Generator, n: int) -> IntArray:
        drawn = self.median * np.exp(self.sigma * rng.standard_normal(n))
        return np.clip(np.rint(drawn), 1, self.most).astype(np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceRecipe:
    name: str
    seconds: float
    bursts_per_hour: float
    burst_requests: float
    gap_s: float
    """Mean gap inside a burst."""
    gap_shape: float
    """Gamma shape: 1 is Poisson, below is burstier."""
    prompt: Tokens
    answer: Tokens
    period_s: float = 0.0
    """Above 0: bursts start on this clock instead of at random."""


HOURS_6 = 6 * 3600.0
RECIPES = (
    ServiceRecipe(
        name="chat", seconds=2100, bursts_per_hour=1320, burst_requests=1, gap_s=1, gap_shape=1,
        prompt=Tokens(median=1000, sigma=0.7, most=4100), answer=Tokens(median=120, sigma=0.9, most=900),
    ),
    ServiceRecipe(
        name="code", seconds=2100, bursts_per_hour=1600, burst_requests=1.8, gap_s=0.02, gap_shape=0.4,
        prompt=Tokens(median=1450, sigma=0.8, most=7400), answer=Tokens(median=13, sigma=1.1, most=400),
    ),
    ServiceRecipe(
        name="long-context", seconds=HOURS_6, bursts_per_hour=70, burst_requests=10, gap_s=1.2, gap_shape=0.5,
        prompt=Tokens(median=1200, sigma=1.7, most=24_000), answer=Tokens(median=300, sigma=1.4, most=5000),
    ),
    ServiceRecipe(
        name="reasoning", seconds=HOURS_6, bursts_per_hour=48, burst_requests=18, gap_s=1.0, gap_shape=0.5,
        prompt=Tokens(median=3000, sigma=1.1, most=34_000), answer=Tokens(median=1100, sigma=0.6, most=4096),
    ),
    ServiceRecipe(
        name="short-gaps", seconds=HOURS_6, bursts_per_hour=10_800, burst_requests=1, gap_s=1, gap_shape=1,
        prompt=Tokens(median=230, sigma=0.8, most=1500), answer=Tokens(median=58, sigma=0.4, most=90),
    ),
    ServiceRecipe(
        name="tiny", seconds=HOURS_6, bursts_per_hour=1200, burst_requests=5, gap_s=0.08, gap_shape=0.6,
        prompt=Tokens(median=46, sigma=0.05, most=60), answer=Tokens(median=52, sigma=0.3, most=140),
    ),
    ServiceRecipe(
        name="kv-bursts", seconds=HOURS_6, bursts_per_hour=330, burst_requests=4, gap_s=0.5, gap_shape=0.5,
        prompt=Tokens(median=4000, sigma=0.7, most=17_000), answer=Tokens(median=220, sigma=0.5, most=700),
    ),
    ServiceRecipe(
        name="rollout", seconds=HOURS_6, bursts_per_hour=20, burst_requests=140, gap_s=0.01, gap_shape=1, period_s=180,
        prompt=Tokens(median=400, sigma=0.5, most=1300), answer=Tokens(median=700, sigma=0.9, most=5600),
    ),
    ServiceRecipe(
        name="busy", seconds=2100, bursts_per_hour=1450, burst_requests=1, gap_s=1, gap_shape=1,
        prompt=Tokens(median=7400, sigma=1.0, most=90_000), answer=Tokens(median=340, sigma=0.5, most=1200),
    ),
    ServiceRecipe(
        name="adapter", seconds=HOURS_6, bursts_per_hour=300, burst_requests=14, gap_s=0.35, gap_shape=0.5,
        prompt=Tokens(median=190, sigma=1.1, most=2000), answer=Tokens(median=60, sigma=1.5, most=1400),
    ),
)  # fmt: skip
SUMMARY = (Tokens(median=2650, sigma=0.3, most=4096), Tokens(median=150, sigma=0.8, most=3300))


def generate(seed: int = 1) -> Folder:
    """The same folder for the same seed."""
    streams = np.random.SeedSequence(seed).spawn(len(RECIPES) + 1)
    traces = tuple(
        make(recipe, np.random.default_rng(stream)) for recipe, stream in zip(RECIPES, streams, strict=False)
    )
    return Folder(traces=traces, lengths=(summaries(np.random.default_rng(streams[-1])),), ignored=())


def summaries(rng: np.random.Generator) -> JobLengths:
    """Prompt and answer lengths of a summarising batch job."""
    prompt, answer = SUMMARY
    return JobLengths(name="summaries", in_tok=prompt.draw(rng, 8192), out_tok=answer.draw(rng, 8192))


def make(recipe: ServiceRecipe, rng: np.random.Generator) -> Trace:
    starts = _starts(recipe, rng)
    sizes = rng.geometric(1 / recipe.burst_requests, len(starts)) if recipe.burst_requests > 1 else np.ones(len(starts))
    gaps = rng.gamma(recipe.gap_shape, recipe.gap_s / recipe.gap_shape, int(sizes.sum()))
    first = np.concatenate([[0], np.cumsum(sizes[:-1])]).astype(np.int64)
    gaps[first] = 0.0
    elapsed = np.cumsum(gaps)
    since_start = elapsed - np.repeat(elapsed[first], sizes.astype(np.int64))
    times = np.sort(np.repeat(starts, sizes.astype(np.int64)) + since_start)
    times = times[times < recipe.seconds]
    return Trace(
        name=recipe.name,
        arrive_ns=np.rint(times * NS).astype(np.int64),
        in_tok=recipe.prompt.draw(rng, len(times)),
        out_tok=recipe.answer.draw(rng, len(times)),
    )


def _starts(recipe: ServiceRecipe, rng: np.random.Generator) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    if recipe.period_s > 0:
        return np.arange(0.0, recipe.seconds, recipe.period_s)
    count = rng.poisson(recipe.bursts_per_hour * recipe.seconds / 3600)
    return np.sort(rng.uniform(0.0, recipe.seconds, max(count, 1)))
