"""What arrives: requests and training micro-batches by a seed, at random or at the times of a request trace."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from valve_router.plan.profile import Law, Profile
from valve_router.plan.task import Task, TaskKind
from valve_tools.sim.traces import NS, Trace, TraceError, read_file

USUAL_TOKENS = 150
SPREAD = 0.8  # of the logarithm of a length
SHORTEST, LONGEST = 8, 4096
FIXED_SHARE = 0.55  # of a usual forward: reading the weights; the rest grows with the tokens
STOP_S = 0.001  # what the gate needs, and what the first kernel after it loses

# Seconds of one stage, forward and backward: table II of the LeMix paper.
MODELS = {
    "GPT-400M": (0.03, 0.04),
    "GPT-1.4B": (0.08, 0.09),
    "GPT-2.5B": (0.12, 0.14),
    "Llama-8B": (0.11, 0.15),
    "Llama-13B": (0.24, 0.36),
    "Llama-70B": (0.73, 1.05),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetShape:
    """Equal replicas of one model."""

    model: str = "Llama-8B"
    nodes: int = 4
    stages: int = 2
    has_gate: bool = True

    @property
    def profile(self) -> Profile:
        forward_s, backward_s = MODELS[self.model]
        stop_s = STOP_S if self.has_gate else None
        return Profile(stages=self.stages, forward=law(forward_s), backward=law(backward_s), stop_s=stop_s)

    @property
    def requests_per_s(self) -> float:
        """What the fleet can do of usual requests alone: a stage takes them one after another."""
        return self.nodes / MODELS[self.model][0]


def law(usual_s: float, fixed_share: float = FIXED_SHARE) -> Law:
    return Law(fixed_s=fixed_share * usual_s, per_token_s=(1 - fixed_share) * usual_s / USUAL_TOKENS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrivals:
    """`per_s` tasks a second, `training` of them micro-batches. `trace`: a file whose bursts and lengths are taken."""

    per_s: float
    training: float
    count: int = 600
    trace: str = ""
    folder: str = ""

    def tasks(self, seed: int) -> list[Task]:
        draw = random.Random(seed)
        times, lengths = self._of_trace(draw) if self.trace else self._at_random(draw)
        kinds = (TaskKind.INFERENCE, TaskKind.TRAINING)
        return [
            Task(arrival_s=at, tokens=tokens, kind=kinds[draw.random() < self.training])
            for at, tokens in zip(times, lengths, strict=True)
        ]

    def _at_random(self, draw: random.Random) -> tuple[list[float], list[int]]:
        now, times, lengths = 0.0, [], []
        for _ in range(self.count):
            now += draw.expovariate(self.per_s)
            times.append(now)
            lengths.append(_tokens(draw.lognormvariate(0, SPREAD) * USUAL_TOKENS))
        return times, lengths

    def _of_trace(self, draw: random.Random) -> tuple[list[float], list[int]]:
        """A stretch of it, drawn by the seed; time stretched to the rate, lengths to the usual mean."""
        trace = _read(Path(self.folder), self.trace)
        if trace.requests < self.count:
            raise TraceError(f"{self.trace} holds {trace.requests} requests, {self.count} are needed")
        first = draw.randrange(trace.requests - self.count + 1)
        part = slice(first, first + self.count)
        at = trace.arrive_ns[part] / NS
        at = (at - at[0]) * (self.count / self.per_s / max(float(at[-1] - at[0]), 1e-9))
        tokens = trace.in_tok[part] * (USUAL_TOKENS / float(trace.in_tok[part].mean()))
        return [float(one) for one in at], [_tokens(float(one)) for one in tokens]


_TRACES: dict[Path, Trace] = {}


def _read(folder: Path, name: str) -> Trace:
    path = folder / f"{name}.csv.gz"
    if path not in _TRACES:
        found = read_file(path) if path.is_file() else None
        if not isinstance(found, Trace):
            raise TraceError(f"{folder} holds no request trace {name}")
        _TRACES[path] = found
    return _TRACES[path]


def _tokens(value: float) -> int:
    return min(LONGEST, max(SHORTEST, round(value)))


def mean_tokens(tasks: Sequence[Task]) -> float:
    return sum(one.tokens for one in tasks) / max(1, len(tasks))
