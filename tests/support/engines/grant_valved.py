"""Valved as the asking half of granted time sees it: pages and doorbell; an engine's own wait, and its steps."""

from __future__ import annotations

import mmap
import os
import time
from dataclasses import dataclass, field

import pytest
from valve_abi import CONTROL_BYTES, GRANT, GRANT_OFFSET, PAGE, REGION, GrantAnswer
from valve_hook.grant_page import GrantPage
from valve_hook.grants import MS, Asking
from valve_hook.policy.granting import EngineFacts, GrantSettings
from valve_hook.policy.misses import MissSettings
from valve_hook.shared import Bell

TPOT_MS, GAP_MS = 40.0, 100.0
STEP_NS, HOST_NS = 6 * MS, MS // 2


def stop_time(patch: pytest.MonkeyPatch) -> None:
    """Time passes in sleeps alone: a machine that is busy makes no answer late."""
    now_ns = [time.monotonic_ns()]

    def sleep(seconds: float) -> None:
        now_ns[0] += round(seconds * 1e9)

    patch.setattr(time, "monotonic_ns", lambda: now_ns[0])
    patch.setattr(time, "sleep", sleep)


class Valved:
    """Both pages and the doorbell, as valved has them. It answers a request at the first look after it was made."""

    def __init__(self) -> None:
        self.fds = [os.memfd_create("control"), os.memfd_create("region"), os.eventfd(0, os.EFD_NONBLOCK)]
        os.ftruncate(self.fds[0], CONTROL_BYTES)
        os.ftruncate(self.fds[1], PAGE)
        self.control = mmap.mmap(self.fds[0], CONTROL_BYTES)
        self.region = mmap.mmap(self.fds[1], PAGE)
        self.grant: GrantPage | None = GrantPage(self.fds[0], self.region, Bell(self.fds[2]))
        self.consent(TPOT_MS, GAP_MS)

    def close(self) -> None:
        for fd in self.fds:
            os.close(fd)

    def consent(self, tpot_ms: float, gap_ms: float, consented: int = 1) -> None:
        self._tell("tpot_ns", int(tpot_ms * MS))
        self._tell("gap_ns", int(gap_ms * MS))
        self._tell("consented", consented)

    def by_slices(self, by_slices: bool = True) -> None:
        """The rung of this node."""
        self._tell("by_slices", by_slices)

    def share(self, until_ns: int) -> None:
        self._tell("shared_until_ns", until_ns)

    def _tell(self, name: str, value: int) -> None:
        field_ = GRANT.fields[name]
        at = GRANT_OFFSET + field_.offset
        self.control[at : at + field_.bytes] = value.to_bytes(field_.bytes, "little")

    def _asked(self, name: str) -> int:
        field_ = REGION.fields[name]
        return int.from_bytes(self.region[field_.offset : field_.offset + field_.bytes], "little")

    @property
    def seq(self) -> int:
        return self._asked("grant_seq")

    @property
    def until_ns(self) -> int:
        return self._asked("grant_until_ns")

    @property
    def step(self) -> tuple[int, int]:
        return self._asked("step_begin_ns"), self._asked("step_end_ns")

    @property
    def rings(self) -> int:
        try:
            return os.eventfd_read(self.fds[2])
        except BlockingIOError:
            return 0

    def answer(self, answer: GrantAnswer) -> None:
        self._tell("answer", answer)
        self._tell("answer_seq", self.seq)


@dataclass
class Waiting:
    """The engine's own wait: how often and how long it was asked to, and what valved says meanwhile."""

    valved: Valved
    says: GrantAnswer | None = GrantAnswer.GIVEN
    interrupts: int = -1  # at this wait there is something to do
    waited_s: list[float] = field(default_factory=list)
    asked_until_ns: int = 0

    def __call__(self, seconds: float) -> bool:
        self.asked_until_ns = self.asked_until_ns or self.valved.until_ns
        self.waited_s.append(seconds)
        if len(self.waited_s) - 1 == self.interrupts:
            return True
        time.sleep(seconds)
        if self.says is not None:
            self.valved.answer(self.says)
        return False


def grants_of(valved: Valved, refused: str = "", **more: object) -> Asking:
    settings = GrantSettings(grants_per_s=1e9, least_worth=-1e9, misses=MissSettings(trial=0), **more)
    return Asking(valved, refused=refused, settings=settings)


def facts_of(**more: object) -> EngineFacts:
    facts = {"running": 1, "kv_used": 10, "kv_pool": 1_000, "kv_mapped": 1_000, "max_num_seqs": 64}
    return EngineFacts(**{**facts, **more})


def decoding(grants: Asking, names: tuple[str, ...] = ("a",), steps: int = 20) -> int:
    """Requests that are ahead of their target, and the time after their last step: now, for pauses are real."""
    if not grants.follows:
        return time.monotonic_ns()
    now = begun = time.monotonic_ns() - (steps + 1) * (STEP_NS + HOST_NS)
    grants.rested(begun)
    for name in names:
        grants.arrived(name, 100, begun - 500 * MS)
    for _ in range(steps + 1):
        now += HOST_NS
        grants.stepped(now, now + STEP_NS, len(names), prefill=False)
        now += STEP_NS
        grants.delivered([(name, 1, False) for name in names], now)
    return now
