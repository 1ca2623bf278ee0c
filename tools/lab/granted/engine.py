"""One engine on one GPU in virtual time, step by step: continuous batching, decodes first, prompts in chunks.

The iteration time is that of the replay lab (tools/sim/machine.py, tools/sim/native/engine.c). Between two steps a
granter may pause it; the product's GrantPolicy is called as the hook calls it. Times are in ms.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import Protocol

import numpy as np
from valve_hook.policy.granting import Decision, EngineFacts, GrantCost
from valve_tools.lab.granted.books import Books, Outcome
from valve_tools.sim.machine import MODELS, Settings, Timing, pool_handles, timing
from valve_tools.sim.traces import Trace

GAP_MEDIAN_MS, GAP_SIGMA, GAP_MOST_MS = 0.5, 0.9898, 20.0
"""Log-normal host gap: P99 is ten times the median (async scheduling)."""
NOISE, NOISE_MOST = 0.02, 0.08
"""Of a step's time, normal."""
DRAWS = 1 << 16
OBSERVED = 0.1
"""Of a load's time the first part is counted nowhere: a service is watched in idle mode before its owner consents."""
ROUND_MS = 30_000.0
"""In a closed loop a silence this long parts two rounds."""
NOBODY: list[int] = []


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Requests of one service."""

    name: str
    arrive_ms: tuple[float, ...]
    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    duration_ms: float
    think_ms: float | None = None
    """A closed loop: each round of requests comes so long after the last answer of the round before."""

    @classmethod
    def of(cls, trace: Trace, seconds: float | None = None, think_ms: float | None = None) -> Load:
        part = trace if seconds is None else trace.first(seconds)
        return cls(
            name=trace.label,
            arrive_ms=tuple((part.arrive_ns / 1e6).tolist()),
            prompt=tuple(part.in_tok.tolist()),
            answer=tuple(part.out_tok.tolist()),
            duration_ms=min(trace.duration_s, seconds or trace.duration_s) * 1e3,
            think_ms=think_ms,
        )

    def rounds(self) -> dict[int, int]:
        """First and last request of each round of a closed loop; empty for clients who come when they will."""
        if self.think_ms is None or not self.arrive_ms:
            return {}
        firsts = [0, *(np.flatnonzero(np.diff(self.arrive_ms) > ROUND_MS) + 1).tolist()]
        return dict(zip(firsts, [*firsts[1:], len(self.arrive_ms)], strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """The machine under the service."""

    timing: Timing
    pool_tokens: int
    prompt_budget: int = 2048
    max_seqs: int = 256

    @classmethod
    def h100(cls) -> Bench:
        """8B online beside an 8B batch job on an H100: the pool of pair P1 of the replay lab."""
        settings, model = Settings(), MODELS["8B"]
        handles = pool_handles(2 * model.weights_gib, 2, settings)
        return cls(
            timing=timing(model, 1, settings, budget_tokens=2048, max_seqs=256),
            pool_tokens=int(handles * settings.handle_mib * 1024 / model.kv_kib_per_token),
        )

    @property
    def fixed_ms(self) -> float:
        """The part of a step that no request pays: weights and the fixed time."""
        return (self.timing.base_ns + self.timing.fixed_ns) / 1e6


class Granter(Protocol):
    """Who may pause the engine: GrantPolicy, or a rival."""

    def arrived(self, request: int, now_ms: float) -> None: ...
    def first_token(self, request: int, now_ms: float) -> None: ...
    def delivered(self, now_ms: float, skipped: list[int]) -> None: ...
    def finished(self, request: int, now_ms: float) -> object: ...
    def stepped(self, batch: int, context: int, ms: float, gap_ms: float, *, prefill: bool) -> None: ...
    def decide(self, now_ms: float, facts: EngineFacts) -> Decision: ...


class Engine:
    """A run. `cost` is what a stop costs in idle mode too; without it (alone) nothing is ever stopped."""

    def __init__(
        self, load: Load, bench: Bench, cost: GrantCost | None, granter: Granter | None, seed: int = 1
    ) -> None:
        self._from_ms = OBSERVED * load.duration_ms
        self._load = load
        self._bench = bench
        self._cost = cost
        self._granter = granter
        rng = np.random.default_rng(seed)
        drawn = GAP_MEDIAN_MS * np.exp(GAP_SIGMA * rng.standard_normal(DRAWS))
        self._gaps = np.minimum(drawn, GAP_MOST_MS).tolist()
        noise = np.clip(NOISE * rng.standard_normal(DRAWS), -NOISE_MOST, NOISE_MOST)
        self._noise = (1.0 + noise).tolist()
        count = len(load.arrive_ms)
        self.outcome = Outcome(
            arrive_ms=np.array(load.arrive_ms), first_ms=np.full(count, np.nan), end_ms=np.full(count, np.nan)
        )
        self._facts = EngineFacts(kv_pool=bench.pool_tokens, kv_mapped=bench.pool_tokens, max_num_seqs=bench.max_seqs)
        self._now = 0.0
        self._step = 0
        self._next = 0
        self._arrives = [*load.arrive_ms, float("inf")]
        self._rounds = load.rounds()
        for first in self._rounds:
            self._arrives[first] = float("inf")
        self._queue: deque[int] = deque()
        self._prompts: dict[int, int] = {}
        """Unfinished prompts: tokens that lack."""
        self._left = list(load.answer)
        """Tokens that a request still wants when it begins to decode."""
        self._ends: list[tuple[int, int]] = []
        self._aside: set[int] = set()
        """Preempted after their first token."""
        self._context = 0
        self._prefilled = 0
        self._delivered_ms = 0.0
        self._idles = 0
        self._books = Books(self.outcome, load.duration_ms, self._from_ms)

    def run(self) -> Outcome:
        out, arrives, gap_ms = self.outcome, self._arrives, 0.0
        while True:
            while arrives[self._next] <= self._now:
                self._arrive(self._next)
                self._next += 1
            if not (self._ends or self._queue or self._prompts):
                if self._next in self._rounds:
                    self._begin_round(self._next)
                if arrives[self._next] == float("inf"):
                    break
                gap_ms = self._idle(arrives[self._next])
                continue
            late_ms = self._launch(gap_ms)
            gap_ms = self._gaps[self._step & (DRAWS - 1)]
            self._now += gap_ms + late_ms
        ended_ms = self._now if self._rounds else max(self._load.duration_ms, self._now)
        out.offline_idle_ms += self._counted_ms(self._now, ended_ms)
        out.duration_ms = ended_ms - self._from_ms
        return out

    def _counted_ms(self, from_ms: float, to_ms: float) -> float:
        """What lies in the time of observation: a service that gets little may begin it within a pause."""
        return max(0.0, to_ms - max(from_ms, self._from_ms))

    def _begin_round(self, first: int) -> None:
        load, begins_ms = self._load, self._now + (self._load.think_ms or 0.0)
        for request in range(first, self._rounds[first]):
            at_ms = begins_ms + load.arrive_ms[request] - load.arrive_ms[first]
            self._arrives[request] = self.outcome.arrive_ms[request] = at_ms

    def _arrive(self, request: int) -> None:
        if self._load.prompt[request] + self._load.answer[request] > self._bench.pool_tokens:
            self.outcome.refused += 1
            return
        self._queue.append(request)
        if self._granter is not None:
            self._granter.arrived(request, self._arrives[request])

    def _idle(self, until_ms: float) -> float:
        """Nobody is there. Who comes then waits for the host, as one who comes in a pause; returned is how long."""
        cost = self._cost
        runs_ms = self._now + (cost.wake_ms if cost else 0.0)
        self.outcome.offline_idle_ms += self._counted_ms(runs_ms, until_ms)
        self._books.pause(self._now, until_ms)
        self._idles += 1
        gap_ms: float = self._gaps[-self._idles & (DRAWS - 1)]
        # Where offline did not come to run, nothing is stopped.
        self._now = until_ms + gap_ms + (cost.stop_ms + cost.after_ms if cost and until_ms > runs_ms else 0.0)
        return gap_ms

    def _launch(self, gap_ms: float) -> float:
        """One step and the pause after it; returns what the next launch is late by."""
        bench, clock = self._bench, self._bench.timing
        decoding = len(self._ends)
        tokens, pairs = (0, 0.0)
        done: list[int] = []
        if self._queue or self._prompts:
            tokens, pairs, done = self._plan(bench.prompt_budget - decoding)
        rows_ns = (tokens + decoding) * clock.prefill_token_ns
        step_ms = (
            (
                (rows_ns if rows_ns > clock.base_ns else clock.base_ns)
                + clock.fixed_ns
                + decoding * clock.seq_ns
                + self._context * clock.context_token_ns
                + pairs * clock.attention_pair_ns
            )
            * self._noise[self._step & (DRAWS - 1)]
            / 1e6
        )
        context = self._context
        self._now += step_ms
        self._step += 1
        granter = self._granter
        if granter is not None:
            granter.stepped(decoding, context, step_ms, gap_ms, prefill=tokens > 0)
        self._deliver(decoding, done)
        if granter is None or not self._ends:
            return 0.0
        return self._pause()

    def _pause(self) -> float:
        facts, granter = self._facts, self._granter
        assert granter is not None
        facts.running = len(self._ends)
        facts.context_tokens = facts.kv_used = self._context
        facts.kv_used += self._prefilled
        facts.prefilling = len(self._prompts)
        facts.waiting = len(self._queue)
        if self._arrives[self._next] <= self._now:
            facts.waiting += 1
        decision = granter.decide(self._now, facts)
        self._books.decided(self._now, decision.reason)
        return self._grant(decision.grant_ms) if decision.grant_ms > 0 else 0.0

    def _grant(self, length_ms: float) -> float:
        """Offline runs; a request that comes ends it. What the service pays on top is returned."""
        out, cost, comes_ms = self.outcome, self._cost, self._arrives[self._next]
        assert cost is not None
        ends_ms = self._now + length_ms
        closes_ms = ends_ms - cost.stop_ms
        if comes_ms < closes_ms:
            closes_ms = max(comes_ms, self._now)
            ends_ms = closes_ms + cost.stop_ms
        paused_ms = ends_ms - self._now
        out.grants += ends_ms > self._from_ms
        out.granted_ms += self._counted_ms(self._now, ends_ms)
        out.offline_granted_ms += self._counted_ms(self._now + cost.wake_ms, closes_ms)
        out.longest_ms = max(out.longest_ms, paused_ms + cost.bubble_ms)
        self._now = ends_ms
        return cost.after_ms

    def _plan(self, budget: int) -> tuple[int, float, list[int]]:
        """Chunks of prompts: (tokens, attention pairs, prompts that end)."""
        tokens, pairs = 0, 0.0
        done: list[int] = []
        for request in list(self._prompts):
            if budget <= 0:
                break
            chunk = min(budget, self._prompts[request])
            pairs += self._chunk(request, chunk, done)
            budget -= chunk
            tokens += chunk
        while budget > 0 and self._queue and len(self._ends) + len(self._prompts) + len(done) < self._bench.max_seqs:
            request = self._queue[0]
            whole = self._whole(request)
            if self._context + self._prefilled + sum(self._prompts.values()) + whole > self._bench.pool_tokens:
                break
            self._queue.popleft()
            self._prompts[request] = whole
            chunk = min(budget, whole)
            pairs += self._chunk(request, chunk, done)
            budget -= chunk
            tokens += chunk
        return tokens, pairs, done

    def _whole(self, request: int) -> int:
        """What must be computed: the prompt, and after a preemption what was generated."""
        return self._load.prompt[request] + self._load.answer[request] - self._left[request]

    def _chunk(self, request: int, chunk: int, done: list[int]) -> float:
        before = self._whole(request) - self._prompts[request]
        self._prompts[request] -= chunk
        self._prefilled += chunk
        if self._prompts[request] == 0:
            del self._prompts[request]
            done.append(request)
        return chunk * (before + 0.5 * chunk)

    def _deliver(self, decoding: int, done: list[int]) -> None:
        now, granter, out = self._now, self._granter, self.outcome
        resumed = self._aside.intersection(done) if self._aside else self._aside
        if decoding:
            self._context += decoding
            out.intervals_ms.append(now - self._delivered_ms)
            out.readers.append(decoding)
        self._delivered_ms = now
        if granter is not None:
            # A recomputed prompt ends with a token, too.
            granter.delivered(now, list(self._aside - resumed) if self._aside else NOBODY)
        while self._ends and self._ends[0][0] == self._step:
            self._finish(heappop(self._ends)[1])
        for request in done:
            whole = self._whole(request)
            self._prefilled -= whole
            self._context += whole
            self._left[request] -= 1
            if request in resumed:
                self._aside.discard(request)
            else:
                out.first_ms[request] = now
                if granter is not None:
                    granter.first_token(request, now)
            if self._left[request] == 0:
                self._finish(request)
            else:
                heappush(self._ends, (self._step + self._left[request], request))
        while self._context + self._prefilled > self._bench.pool_tokens and len(self._ends) > 1:
            self._preempt()

    def _finish(self, request: int) -> None:
        self._context -= self._load.prompt[request] + self._load.answer[request] - 1
        self.outcome.end_ms[request] = self._now
        if self._granter is not None:
            self._granter.finished(request, self._now)

    def _preempt(self) -> None:
        """The newest goes back to waiting; its tokens are computed again."""
        newest = max(self._ends, key=lambda one: one[1])
        self._ends.remove(newest)
        heapify(self._ends)
        request = newest[1]
        self._left[request] = newest[0] - self._step
        self._context -= self._whole(request) - 1
        self._aside.add(request)
        self._queue.appendleft(request)
        self.outcome.preempted += 1
