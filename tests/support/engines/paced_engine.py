"""An engine in virtual time around the asking half of granted time as it ships: `valve_hook.grants.Asking`, its policy,
its words in shared memory. Only the clock, the card and valved are played; nothing of the hook is made a second time.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
from grant_valved import Valved
from valve_abi import GrantAnswer
from valve_hook import grants
from valve_hook.grants import MS, Asking
from valve_hook.policy.granting import EngineFacts
from valve_tools.lab.granted.engine import Bench, Load

WAKE_NS, STOP_NS, HOST_NS = 3 * MS // 10, 3 * MS // 10, 3 * MS // 10
RENEW_NS = 10 * MS  # valved/native/slice.c
KV_TOKENS = 10**6
MOST = 256


@dataclass(slots=True, kw_only=True)
class Asked:
    name: str
    prompt: int
    tokens: int
    arrived_ns: int
    first_ns: int = 0
    last_ns: int = 0
    made: int = 0

    @property
    def ttft_ms(self) -> float:
        return (self.first_ns - self.arrived_ns) / MS

    @property
    def tpot_ms(self) -> float:
        return (self.last_ns - self.first_ns) / MS / max(1, self.made - 1)


@dataclass(slots=True)
class PlayedValved:
    """It opens and closes as the native gate does, and moves an end on as late as any gate did: after it has passed.
    Every ring is answered at the next look.
    """

    page: Valved
    gap_ns: int
    by_slices: bool
    heard: int = 0
    open_until_ns: int = 0
    since_ns: int = 0
    openings: int = 0
    asked_open: int = 0  # times that it was asked while it was open
    granted_ns: int = 0

    def look(self, now_ns: int) -> None:
        until_ns = self.page.until_ns
        if self.by_slices and 0 < self.open_until_ns <= now_ns + RENEW_NS:  # the hook has moved it on, or not
            self.open_until_ns = max(self.open_until_ns, min(until_ns, self.page.step[1] + self.gap_ns))
            self.page.share(self.open_until_ns)
        if self.open_until_ns and now_ns >= self.open_until_ns:
            self._close(self.open_until_ns)
        if self.page.seq == self.heard:
            return
        self.heard = self.page.seq
        if until_ns <= now_ns:
            self._close(now_ns)
        elif not self.open_until_ns:
            self.open_until_ns, self.since_ns = min(until_ns, now_ns + self.gap_ns), now_ns + WAKE_NS
            self.openings += 1
            if self.by_slices:
                self.page.share(self.open_until_ns)
        else:
            self.asked_open += 1
        self.page.answer(GrantAnswer.GIVEN if until_ns > now_ns else GrantAnswer.NONE)

    def _close(self, at_ns: int) -> None:
        if self.open_until_ns:
            self.granted_ns += max(0, at_ns - self.since_ns)
        self.open_until_ns = 0
        if self.by_slices:
            self.page.share(0)


@dataclass(slots=True)
class PacedEngine:
    """Requests are decoded together; prompts come first, by themselves."""

    load: Load
    page: Valved
    valved: PlayedValved
    asking: Asking
    slowed: float
    chance: random.Random
    now_ns: int = 0
    queue: deque[Asked] = field(default_factory=deque)
    batch: list[Asked] = field(default_factory=list)
    done: list[Asked] = field(default_factory=list)
    idle_ns: int = 0
    longest_pause_ns: int = 0
    shared_prompts: int = 0
    rings_by_pause: list[int] = field(default_factory=list)
    next: int = 0

    @property
    def comes_ns(self) -> int:
        """When the next request comes."""
        arrive = self.load.arrive_ms
        return int(arrive[self.next] * MS) + MS if self.next < len(arrive) else 1 << 62

    def run(self) -> None:
        while self.queue or self.batch or self.next < len(self.load.arrive_ms):
            self._take_in()
            if not self.queue and not self.batch:
                self.asking.rested(self.now_ns)
                self.valved.look(self.now_ns)
                self.idle_ns += self.comes_ns - self.now_ns
                self.now_ns = self.comes_ns
                self.asking.rested(self.now_ns)
                continue
            self.now_ns += HOST_NS
            self._step()
            self._take_in()
            self._pause()

    def _take_in(self) -> None:
        while self.comes_ns <= self.now_ns:
            prompt, tokens = self.load.prompt[self.next], max(2, self.load.answer[self.next])
            asked = Asked(name=f"r{self.next}", prompt=prompt, tokens=tokens, arrived_ns=self.comes_ns)
            self.next += 1
            self.queue.append(asked)

    def _step(self) -> None:
        asking, clock = self.asking, Bench.h100().timing
        self.valved.look(self.now_ns)
        new = [self.queue.popleft() for _ in range(min(len(self.queue), MOST - len(self.batch)))]
        follows = asking.follows
        for asked in new if follows else ():
            asking.arrived(asked.name, asked.prompt, asked.arrived_ns)
        served = new or self.batch
        rows = sum(each.prompt for each in new) if new else len(served)
        context = 0 if new else sum(each.prompt + each.made for each in served)
        ns = max(rows * clock.prefill_token_ns, clock.base_ns) + clock.fixed_ns + len(served) * clock.seq_ns
        ns = (ns + context * clock.context_token_ns) * self.chance.uniform(0.97, 1.03)
        self.shared_prompts += bool(new) and self.valved.open_until_ns > 0
        if self.valved.open_until_ns and self.valved.by_slices:
            self.valved.granted_ns -= int(ns)  # of a step offline work gets what it is slowed by
            ns *= self.slowed
        elif self.valved.open_until_ns:  # a launch into what is open
            ns += STOP_NS
        begin_ns, self.now_ns = self.now_ns, self.now_ns + int(ns)
        for asked in served:
            asked.first_ns, asked.last_ns = asked.first_ns or self.now_ns, self.now_ns
            asked.made += 1
        asking.stepped(begin_ns, self.now_ns, len(served), prefill=bool(new))
        if follows:
            asking.delivered([(each.name, 1, each.made >= each.tokens) for each in served], self.now_ns)
        self.done += [each for each in served if each.made >= each.tokens]
        self.batch = [each for each in (*self.batch, *new) if each.made < each.tokens]

    def _pause(self) -> None:
        held = sum(each.prompt + each.made for each in self.batch)
        facts = EngineFacts(
            running=len(self.batch), prefilling=len(self.batch) - self.asking.readers, waiting=len(self.queue),
            kv_used=held, kv_pool=KV_TOKENS, kv_mapped=KV_TOKENS, max_num_seqs=MOST,
        )  # fmt: skip
        resume_ns = self.asking.wants(self.now_ns, facts)
        if resume_ns:
            begun_ns, before = self.now_ns, self.page.seq
            if self.asking.pause(resume_ns, self.wait, is_done=True):
                self.rings_by_pause.append(self.page.seq - before)
            self.longest_pause_ns = max(self.longest_pause_ns, self.now_ns - begun_ns)

    def wait(self, seconds: float) -> bool:
        self.valved.look(self.now_ns)
        self.now_ns = min(self.now_ns + int(seconds * 1e9), max(self.now_ns, self.comes_ns))
        return self.comes_ns <= self.now_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What the owner of the service states, or None: no consent."""

    tpot_ms: float
    gap_ms: float = 100.0
    by_slices: bool = False
    slowed: float = 1.3
    """Steps beside offline work take so many times longer, on the timeslice rung."""


def paced(load: Load, terms: Terms | None, patch: pytest.MonkeyPatch) -> PacedEngine:
    """The load served to its end."""
    page, told = Valved(), terms or Terms(tpot_ms=1.0)
    page.consent(told.tpot_ms, told.gap_ms, consented=int(terms is not None))
    page.by_slices(told.by_slices)
    valved = PlayedValved(page, int(told.gap_ms * MS), told.by_slices)
    engine = PacedEngine(load, page, valved, Asking(page), told.slowed, random.Random(3))
    patch.setattr(grants, "time", SimpleNamespace(monotonic_ns=lambda: engine.now_ns))
    engine.run()
    page.close()
    return engine
