"""Asking for pauses: a service that is ahead of its stated target lets offline work run between two of its steps.

An engine tells what happens to its requests and asks `wants` between two steps; where that says yes, and its GPU work
is done, `pause` asks valved and waits on the engine's own input. Whoever has not consented costs a step one word.

What one grant costs is measured here: how long valved takes to open (`wake`), how much later than predicted the next
step ends (`damage`), and how long before that step the grant has to end so that its stop is not felt (`lead`).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Protocol

from valve_hook.grant_page import GrantPage
from valve_hook.policy.granting import EngineFacts, GrantCost, GrantPolicy, GrantReason, GrantSettings, Target
from valve_hook.wire import GrantAnswer

MS = 1_000_000
LEAST_NS = 2 * MS  # valved gives no shorter one than 1 ms, counted from where it has heard of it
ANSWER_NS = 15 * MS  # it answers within 5 ms of hearing; then it hangs, or is gone
LOOK_S = 0.0003  # between two looks for the answer
AGAIN_MS, AGAIN_MOST_MS = 100.0, 5_000.0  # until a refusal is put to the test
GRANTS_PER_S = 18.0  # a little below valved's own bound, which counts from when it opened
FIRST_COST = GrantCost(stop_ms=1.0, wake_ms=1.0, bubble_ms=0.0, damage_ms=0.5)
LEAD_LEAST_MS, LEAD_MOST_MS = 0.3, 10.0
LEAD_UP, LEAD_DOWN_MS = 1.25, 0.02  # a step that was late by more than the usual, and one that was not
LEARN = 0.125
KEPT_NS = 30_000 * MS  # what was learnt, without a consent: a valved that is started again tells it anew

Wait = Callable[[float], bool]
"""Wait so many seconds at most; True as soon as the engine has anything to do."""


class Paged(Protocol):
    @property
    def grant(self) -> GrantPage | None: ...


@dataclass(slots=True, kw_only=True)
class Request:
    number: int
    tokens: int
    """Of prompt and answer, computed so far."""
    streamed: bool
    has_first: bool = False


@dataclass(slots=True, kw_only=True)
class PauseSums:
    """What came of it; all only rise."""

    given: int = 0
    ended_early: int = 0
    paused_ns: int = 0
    longest_ns: int = 0


class Asking:
    """One per engine loop. Times are CLOCK_MONOTONIC in ns."""

    def __init__(self, link: Paged, *, refused: str = "", settings: GrantSettings | None = None) -> None:
        self.refused = refused
        """Why this engine never asks; for people."""
        self.sums = PauseSums()
        self.answers: Counter[GrantAnswer | None] = Counter()
        self.reasons: Counter[GrantReason] = Counter()
        self._link = link
        self._settings = settings or GrantSettings(grants_per_s=GRANTS_PER_S)
        self._target: tuple[float, float] | None = None
        self._requests: dict[str, Request] = {}
        self._numbers = 0
        self._readers = 0
        self._context = 0
        self._last_ns = 0  # end of the last step, or of the pause after it
        self._is_after_pause = False
        self._gone_ns = 0
        self._again_ns, self._again_ms = 0, AGAIN_MS
        self._lead_ms = FIRST_COST.stop_ms
        self.policy: GrantPolicy | None = None

    @property
    def follows(self) -> bool:
        """Whether requests are followed: the owner consents, or did a moment ago. To be asked once a step."""
        page = self._page()
        if page is not None:
            self._gone_ns = 0
            if self._target != page.target_ms:
                self._begin(page.target_ms)
        elif self.policy is not None:
            now_ns = time.monotonic_ns()
            self._gone_ns = self._gone_ns or now_ns
            if now_ns - self._gone_ns > KEPT_NS:
                self._target = self.policy = None
        return self.policy is not None

    def _page(self) -> GrantPage | None:
        """None: the owner does not consent, or valved is not there to say so."""
        page = self._link.grant
        return page if page is not None and page.consented and not self.refused else None

    def _begin(self, target: tuple[float, float]) -> None:
        """What was learnt under another target says nothing about this one."""
        self._target = target
        self._requests.clear()
        self._readers = self._context = 0
        self._lead_ms, self._again_ns, self._again_ms = FIRST_COST.stop_ms, 0, AGAIN_MS
        self.policy = GrantPolicy(Target(tpot_ms=target[0], gap_ms=target[1]), FIRST_COST, settings=self._settings)

    # ---- what the engine tells ----

    def arrived(self, name: str, prompt_tokens: int, now_ns: int, *, streamed: bool = True) -> None:
        if self.policy is None or name in self._requests:
            return
        self._numbers += 1
        self._requests[name] = Request(number=self._numbers, tokens=prompt_tokens, streamed=streamed)
        self.policy.arrived(self._numbers, now_ns / MS)

    def delivered(self, outputs: Iterable[tuple[str, int, bool]], now_ns: int) -> None:
        """One step's output: (request, new tokens, whether it has ended). Requests that are not known are passed by."""
        if self.policy is None:
            return
        policy, now_ms, seen = self.policy, now_ns / MS, 0
        firsts: list[Request] = []
        ended: list[str] = []
        extra: dict[int, int] = {}
        served: set[int] = set()
        for name, tokens, has_ended in outputs:
            request = self._requests.get(name)
            if request is None:
                continue
            if tokens > 0:
                seen += request.has_first
                served.add(request.number)
                if not request.has_first:
                    firsts.append(request)
                    self._context += request.tokens
                elif tokens > 1:
                    extra[request.number] = tokens - 1
                request.tokens += tokens
                self._context += tokens
            if has_ended:
                ended.append(name)
        skipped: Collection[int] = ()
        if seen < self._readers:
            skipped = [each.number for each in self._requests.values() if each.has_first and each.number not in served]
        policy.delivered(now_ms, skipped, extra)
        for request in firsts:
            request.has_first = True
            self._readers += 1
            policy.first_token(request.number, now_ms, streamed=request.streamed)
        for name in ended:
            self._forget(name, policy.finished, now_ms)

    def left(self, names: Iterable[str], now_ns: int) -> None:
        """Their clients left. Those that ended by themselves are gone already."""
        if self.policy is not None:
            for name in names:
                self._forget(name, self.policy.aborted, now_ns / MS)

    def _forget(self, name: str, tell: Callable[[int, float], object], now_ms: float) -> None:
        request = self._requests.pop(name, None)
        if request is not None:
            if request.has_first:
                self._readers -= 1
                self._context -= request.tokens
            tell(request.number, now_ms)

    def stepped(self, begin_ns: int, end_ns: int, batch: int, *, prefill: bool) -> None:
        """A step of `batch` requests; `prefill`: some of them were at their prompts. Call before `delivered`,
        and without consent, too: valved says from it what a consent would be worth.
        """
        policy, page, last_ns = self.policy, self._link.grant, self._last_ns
        begin_ns, self._last_ns = max(begin_ns, last_ns), end_ns
        if page is not None:
            page.stepped(begin_ns, end_ns)
        if policy is None:
            return
        gap_ms = (begin_ns - last_ns) / MS if last_ns else 0.0
        ms = (end_ns - begin_ns) / MS
        if self._is_after_pause:
            self._is_after_pause = False
            if not prefill:
                self._learn_cost(policy, batch, ms + gap_ms)
            return
        policy.stepped(self._readers if prefill else batch, self._context, ms, gap_ms, prefill=prefill)

    def rested(self, now_ns: int) -> None:
        """The engine had nothing to do: that is no gap between two steps."""
        self._last_ns = now_ns

    def _learn_cost(self, policy: GrantPolicy, batch: int, taken_ms: float) -> None:
        usual_ms = policy.model.predict(batch, self._context).ms + policy.load.gap_ms
        late_ms = taken_ms - usual_ms
        if late_ms > policy.model.late_ms:
            self._lead_ms = min(LEAD_MOST_MS, self._lead_ms * LEAD_UP)
        else:
            self._lead_ms = max(LEAD_LEAST_MS, self._lead_ms - LEAD_DOWN_MS)
        self._cost(stop_ms=self._lead_ms, damage_ms=max(0.0, late_ms))

    def _cost(self, **seen: float) -> None:
        assert self.policy is not None
        old = self.policy.cost
        parts = {name: getattr(old, name) for name in ("stop_ms", "wake_ms", "bubble_ms", "damage_ms")}
        for name, ms in seen.items():
            parts[name] += LEARN * (ms - parts[name])
        self.policy.cost = GrantCost(**parts)

    # ---- a pause ----

    @property
    def readers(self) -> int:
        """Requests that have their first token and not their last."""
        return self._readers

    def wants(self, now_ns: int, facts: EngineFacts) -> int:
        """When the next step may begin at the latest, where a pause before it is worth asking for; else 0."""
        policy = self.policy
        if policy is None or not self._readers or now_ns < self._again_ns or self._page() is None:
            return 0
        facts.context_tokens = self._context
        decision = policy.decide(now_ns / MS, facts)
        self.reasons[decision.reason] += 1
        if decision.grant_ms <= 0:
            return 0
        resume_ns = now_ns + int(decision.grant_ms * MS)
        return resume_ns if self._until(resume_ns) >= now_ns + LEAST_NS else 0

    def _until(self, resume_ns: int) -> int:
        return resume_ns - int(self._lead_ms * MS)

    def pause(self, resume_ns: int, wait: Wait, *, is_done: bool) -> bool:
        """Let offline work run; back when it is time for the next step, or `wait` says that there is something to do.

        `is_done`: the engine's work on the GPU is proven done and all its output delivered. Else nothing is asked.
        valved is never waited for: an answer is looked for while the pause goes on, and a refusal ends it.
        """
        page, begun_ns, until_ns = self._page(), time.monotonic_ns(), self._until(resume_ns)
        if page is None or not is_done or until_ns < begun_ns + LEAST_NS:
            return False
        answer = self._await(page, page.ask(until_ns), begun_ns, wait)
        is_given, is_early = answer is GrantAnswer.GIVEN, False
        if is_given:
            now_ns = time.monotonic_ns()
            self._cost(wake_ms=(now_ns - begun_ns) / MS)
            is_early = now_ns < resume_ns and wait((resume_ns - now_ns) / 1e9)
        if is_early or answer is None:
            page.ask(0)  # else valved ends it at its time, or has refused it
        self._note(begun_ns, is_given=is_given, is_early=is_early)
        return is_given

    def _await(self, page: GrantPage, seq: int, begun_ns: int, wait: Wait) -> GrantAnswer | None:
        """None: none came in time, or there is something else to do."""
        while (answer := page.answer(seq)) is None:
            if wait(LOOK_S):
                return None
            if time.monotonic_ns() > begun_ns + ANSWER_NS:
                break
        self.answers[answer] += 1
        if answer is GrantAnswer.GIVEN:
            self._again_ms = AGAIN_MS
        else:
            self._again_ns = time.monotonic_ns() + int(self._again_ms * MS)
            self._again_ms = min(AGAIN_MOST_MS, 2 * self._again_ms)
        return answer

    def _note(self, begun_ns: int, *, is_given: bool, is_early: bool) -> None:
        now_ns = time.monotonic_ns()
        self._last_ns, self._is_after_pause = now_ns, True
        self.sums.paused_ns += now_ns - begun_ns
        self.sums.longest_ns = max(self.sums.longest_ns, now_ns - begun_ns)
        self.sums.given += is_given
        self.sums.ended_early += is_early
