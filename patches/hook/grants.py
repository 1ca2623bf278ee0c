"""Asking for pauses: a service that is ahead of its stated target lets offline work run between two of its steps.

An engine tells what happens to its requests and asks `wants` between two steps; where that says yes, and its GPU work
is done, `pause` asks valved and waits on the engine's own input. A service that has not consented costs a step one
word.

What one grant costs is measured here: how long valved takes to open (`wake`), how much later than predicted the next
step ends (`damage`), how long before that step the grant has to end so that its stop is not felt (`lead`), and how
late the engine's own waits end (`wait`): so much earlier a pause ends.

On the rung `timeslice` valved opens once and the engine steps beside offline work (sharing.py): a pause is a wait
alone, neither wake nor lead is paid, and `damage` is what every such step is late by.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from typing import Protocol

from valve_hook.followed import Followed, Row
from valve_hook.grant_cost import LearntCost
from valve_hook.grant_page import GrantPage
from valve_hook.policy.granting import EngineFacts, GrantPolicy, GrantReason, GrantSettings, Target
from valve_hook.sharing import Sharing
from valve_hook.wire import GrantAnswer

MS = 1_000_000
LEAST_NS = 2 * MS  # valved gives no shorter one than 1 ms, counted from where it has heard of it
ANSWER_NS = 15 * MS  # it answers within 5 ms of hearing; then it hangs, or is gone
LOOK_S = 0.0003  # between two looks for the answer
AGAIN_MS, AGAIN_MOST_MS = 100.0, 5_000.0  # until a refusal is put to the test
GRANTS_PER_S = 18.0  # a little below valved's own bound, which counts from when it opened
OPENED_NS = int(1e9 / GRANTS_PER_S)  # the same bound for the openings of the timeslice rung; its pauses have none
KEPT_NS = 30_000 * MS  # what was learnt, without a consent: a valved that is started again tells it anew

Wait = Callable[[float], bool]
"""Wait so many seconds at most; True as soon as the engine has anything to do."""


class Paged(Protocol):
    @property
    def grant(self) -> GrantPage | None: ...


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
        self._told: tuple[float, float, bool] | None = None  # target, and whether pauses go by slices
        self._followed = Followed()
        self._sharing = Sharing()
        self._last_ns = 0  # end of the last step, or of the pause after it
        self._is_after_pause = False
        self._gone_ns = 0  # since when it has no consent
        self._again_ns, self._again_ms = 0, AGAIN_MS
        self._learnt = LearntCost()
        self.policy: GrantPolicy | None = None

    @property
    def follows(self) -> bool:
        """Whether requests are followed: the owner consents, or did a moment ago. To be asked once a step."""
        page = self._page()
        if page is not None:
            self._gone_ns = 0
            told = (*page.target_ms, page.by_slices)
            if self._told != told:
                self._begin(*told)
        elif self.policy is not None:
            now_ns = time.monotonic_ns()
            self._gone_ns = self._gone_ns or now_ns
            if now_ns - self._gone_ns > KEPT_NS:
                self._told = self.policy = None
        return self.policy is not None

    def _page(self) -> GrantPage | None:
        """None: the owner does not consent, or valved is not there to say so."""
        page = self._link.grant
        return page if page is not None and page.consented and not self.refused else None

    def _begin(self, tpot_ms: float, gap_ms: float, by_slices: bool) -> None:
        """What was learnt under another target, or on the other rung, says nothing about this one."""
        self._sharing.end()
        self._told = tpot_ms, gap_ms, by_slices
        self._followed = Followed()
        self._again_ns, self._again_ms = 0, AGAIN_MS
        settings = replace(self._settings, grants_per_s=float("inf")) if by_slices else self._settings
        cost = self._learnt.begin(by_slices=by_slices)
        self.policy = GrantPolicy(Target(tpot_ms=tpot_ms, gap_ms=gap_ms), cost, settings=settings)

    def refuse(self, why: str) -> None:
        """From now on it asks for nothing."""
        self.refused = why
        self._sharing.end()

    # ---- what the engine tells ----

    def arrived(self, name: str, prompt_tokens: int, now_ns: int, *, streamed: bool = True) -> None:
        if self.policy is not None:
            number = self._followed.arrived(name, prompt_tokens, streamed=streamed)
            if number:
                self.policy.arrived(number, now_ns / MS)

    def delivered(self, odd: Iterable[Row], now_ns: int, *, plain: int = 0, names: Collection[str] = ()) -> None:
        """One step's output, of each request. `plain` of the requests that decode, all among `names`, may be left out:
        they got one token and go on. Requests that are not known are passed by.
        """
        policy = self.policy
        if policy is None:
            return
        now_ms, step = now_ns / MS, self._followed.delivered(odd, plain, names)
        policy.delivered(now_ms, step.skipped, step.extra)
        for request in step.firsts:
            policy.first_token(request.number, now_ms, streamed=request.streamed)
        for name in step.ended:
            self._forget(name, policy.finished, now_ms)
        if not self.readers:
            self._sharing.end()
        elif self._sharing.is_begun:
            self._sharing.move_on(self._gap_ends_ns(now_ns))

    def _gap_ends_ns(self, now_ns: int) -> int:
        """When the gap is over that the owner stated, for the request that has waited longest for a token."""
        assert self.policy is not None
        oldest_ms = min(now_ns / MS, self.policy.credits.oldest_token_ms())
        return int((oldest_ms + self.policy.target.gap_ms) * MS)

    def left(self, names: Iterable[str], now_ns: int) -> None:
        """Their clients left. Those that ended by themselves are gone already."""
        if self.policy is not None:
            for name in names:
                self._forget(name, self.policy.aborted, now_ns / MS)

    def _forget(self, name: str, tell: Callable[[int, float], object], now_ms: float) -> None:
        number = self._followed.forget(name)
        if number:
            tell(number, now_ms)

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
        granted, self._is_after_pause = self._is_after_pause or self._sharing.is_begun, False
        if granted and not prefill:
            self._learn_cost(policy, batch, ms + gap_ms)
        batch = self.readers if prefill else batch
        policy.stepped(batch, self._followed.context, ms, gap_ms, prefill=prefill, granted=granted)

    def rested(self, now_ns: int) -> None:
        """The engine had nothing to do: that is no gap between two steps, and no cost kept grants away."""
        self._learnt.rested(now_ns - self._last_ns)
        self._last_ns = now_ns
        self._sharing.end()

    def _learn_cost(self, policy: GrantPolicy, batch: int, taken_ms: float) -> None:
        late_ms = taken_ms - policy.model.predict(batch, self._followed.context).ms - policy.load.gap_ms
        learn = self._learnt.shared if self._sharing.is_begun else self._learnt.stopped
        learn(policy, self._last_ns, late_ms)

    # ---- a pause ----

    @property
    def readers(self) -> int:
        """Requests that have their first token and not their last."""
        return len(self._followed.readers)

    @property
    def reading(self) -> Collection[str]:
        """And their names."""
        return self._followed.readers

    def wants(self, now_ns: int, facts: EngineFacts) -> int:
        """When the next step may begin at the latest, where a pause before it is worth asking for; else 0."""
        policy, page = self.policy, self._page()
        stands = self._sharing.stands(page, now_ns)
        if policy is None or not self.readers or page is None or (now_ns < self._again_ns and not stands):
            return 0
        facts.context_tokens = self._followed.context
        decision = policy.decide(now_ns / MS, facts)
        self.reasons[decision.reason] += 1
        if decision.grant_ms > 0:
            resume_ns = now_ns + int((decision.grant_ms - self._learnt.wait_ms) * MS)
            if self._until(resume_ns) >= now_ns + LEAST_NS:
                return resume_ns
        elif stands and not (decision.reason is GrantReason.SHORT and self._can_share(policy, now_ns, facts)):
            self._sharing.end()
        self._learnt.refused(policy, now_ns, decision.reason)
        return 0

    def _can_share(self, policy: GrantPolicy, now_ns: int, facts: EngineFacts) -> bool:
        """Steps beside offline work spend credit as pauses do: the reserve is not theirs. A policy that is short of
        credit has not looked at the facts.
        """
        if not is_decoding(facts):
            return False
        step_ms = policy.model.predict(facts.running, facts.context_tokens).ms + policy.model.late_ms
        return policy.credits.least_due_ms() - now_ns / MS >= step_ms + policy.cost.after_ms + policy.reserve.ms

    def still(self, resume_ns: int, facts: EngineFacts) -> int:
        """A pause that was wanted a call ago, once what was in flight has come in; 0: something else came between."""
        if is_decoding(facts):
            return resume_ns
        self._sharing.end()
        return 0

    def _until(self, resume_ns: int) -> int:
        return resume_ns - int(self._learnt.lead_ms * MS)

    def pause(self, resume_ns: int, wait: Wait, *, is_done: bool) -> bool:
        """Let offline work run; back when it is time for the next step, or `wait` says that there is something to do.

        `is_done`: the engine's work on the GPU is proven done and all its output delivered. Else nothing is asked.
        valved is never waited for: an answer is looked for while the pause goes on, and a refusal ends it.
        """
        page, begun_ns, until_ns = self._page(), time.monotonic_ns(), self._until(resume_ns)
        if page is None or not is_done or until_ns < begun_ns + LEAST_NS:
            return False
        if self._sharing.stands(page, begun_ns):
            is_given, is_early = True, wait((resume_ns - begun_ns) / 1e9)
            if is_early:
                self._sharing.end()
        else:
            is_given, is_early = self._opened(page, begun_ns, resume_ns, wait)
        self._note(begun_ns, is_given=is_given, is_early=is_early)
        if is_given and not is_early:
            self._learnt.waited((self._last_ns - resume_ns) / MS)
        return is_given

    def _opened(self, page: GrantPage, begun_ns: int, resume_ns: int, wait: Wait) -> tuple[bool, bool]:
        """By a call: whether it was given, and whether there was something to do before its end."""
        until_ns = self._gap_ends_ns(begun_ns) if page.by_slices else self._until(resume_ns)
        answer, is_early = self._await(page, page.ask(until_ns), begun_ns, wait), False
        is_given = answer is GrantAnswer.GIVEN
        if is_given:
            now_ns = time.monotonic_ns()
            self._sharing.begin(page, now_ns)
            if page.by_slices:
                self._again_ns = now_ns + OPENED_NS
            if not self._sharing.is_begun and self.policy is not None:
                self._learnt.opened(self.policy, self._last_ns, (now_ns - begun_ns) / MS)
            is_early = now_ns < resume_ns and wait((resume_ns - now_ns) / 1e9)
        is_whole = is_given and page.by_slices and not self._sharing.is_begun  # open beyond this pause
        if (is_early or answer is None or is_whole) and not self._sharing.end():
            page.ask(0)  # else valved ends it at its time, or has refused it
        return is_given, is_early

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


def is_decoding(facts: EngineFacts) -> bool:
    """Nothing but steps of requests that decode is due."""
    return bool(facts.running) and not (facts.waiting or facts.prefilling or facts.reclaim_pending)
