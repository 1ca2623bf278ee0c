"""The slow loop: every few seconds, how many replicas should be awake, and which could sleep. It only advises."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from valve_router.plan.active import Active, Demand, advise
from valve_router.replicas import Replica, Replicas
from valve_router.settings import RouterSettings

log = logging.getLogger("valve_router")
LOOK_S = 5.0
LATELY_S = 60.0
LENGTHS = 1000  # requests whose lengths are looked at


class Advice:
    """`now_s`: the clock of the replicas."""

    def __init__(
        self, settings: RouterSettings, replicas: Replicas, now_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._settings, self._replicas, self._now_s = settings, replicas, now_s
        self.active: Active | None = None

    async def run(self) -> None:
        while True:
            try:
                self.look()
            except Exception:  # the next look may do better
                log.exception("the advice on how many replicas should be awake failed")
            await asyncio.sleep(LOOK_S)

    def look(self) -> None:
        now_s, there = self._now_s(), self._there()
        lately = [tokens for at_s, tokens in self._replicas.recent if now_s - at_s <= LATELY_S]
        law = there[0].timeline.profile.forward if there else self._settings.first_guess.forward
        demand = Demand(per_s=len(lately) / LATELY_S, tokens=tuple(lately[-LENGTHS:]), law=law)
        self.active = advise(self.active, demand, len(there), now_s, self._settings.active)

    def _there(self) -> list[Replica]:
        """Also those that are drained: they could be awake."""
        return [one for one in self._replicas.all if one.is_alive]

    def surplus(self) -> set[str]:
        """Names of those that could train or sleep: drained ones first, then those with the least work behind them."""
        there = self._there()
        count = len(there) - self.active.wanted if self.active is not None else 0
        order = sorted(there, key=lambda one: (not one.is_drained, one.under_way, one.timeline.work_s))
        return {one.name for one in order[: max(0, count)]}
