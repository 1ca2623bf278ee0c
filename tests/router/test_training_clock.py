"""Fleet jobs on a router whose clock is set, or whose process stood still: no trainer is given up for it."""

from __future__ import annotations

import asyncio

import pytest
from training_books import begin, push
from valve_router.replicas import Replicas
from valve_router.settings import RouterSettings
from valve_router.training import api as module
from valve_router.training.api import TrainingApi
from valve_router.training.desk import Desk
from valve_router.training.records import Gone


class Sweeps:
    """The sweeping of a router, second by second of a clock that the test sets."""

    def __init__(self, ledger, monkeypatch, now_s: float) -> None:
        settings = RouterSettings(replicas=("http://r0:1",))
        self._api = TrainingApi(settings, ledger, Desk(settings, Replicas(settings, lambda: 0.0)))
        self._clock, self._seconds = now_s, []
        monkeypatch.setattr(module.time, "time", lambda: self._clock)

    def over(self, *seconds: float) -> None:
        """A sweep after each of them has passed by the clock; a router starts before the first."""
        self._seconds = list(seconds)

        async def sleep(_: float) -> None:
            if not self._seconds:
                raise asyncio.CancelledError
            self._clock += self._seconds.pop(0)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module.asyncio, "sleep", sleep)
            with pytest.raises(asyncio.CancelledError):
                asyncio.run(self._api._sweep())


@pytest.mark.parametrize("jump_s", [3600.0, -3600.0, 90.0])
def test_a_clock_that_is_set_never_gives_trainers_up_nor_keeps_dead_ones(tmp_path, monkeypatch, jump_s):
    """Forward: all trainers were silent for an hour. Back: a dead one held its micro-batches for an hour more."""
    ledger = begin(tmp_path, silent_s=60.0)
    one = ledger.join("j", "a", 1e6)
    number = ledger.take("j", one.trainer, one.version, 1e6)
    sweeps = Sweeps(ledger, monkeypatch, 1e6)

    sweeps.over(1.0, jump_s, 1.0, 1.0)

    assert push(ledger, one, [number], 100, now=1e6 + jump_s + 3)
    sweeps.over(1.0, *[20.0] * 4)  # now it is silent
    with pytest.raises(Gone):
        ledger.take("j", one.trainer, one.version, 1e6 + jump_s + 100)


def test_a_router_that_was_away_never_gives_up_trainers_that_waited_for_it(tmp_path, monkeypatch):
    """It was killed, and started an hour later: its first sweep came before their next question."""
    ledger = begin(tmp_path, silent_s=60.0)
    one = ledger.join("j", "a", 1e6)
    number = ledger.take("j", one.trainer, one.version, 1e6)
    sweeps = Sweeps(ledger, monkeypatch, 1e6 + 3600)

    sweeps.over(*[1.0] * 20)

    assert push(ledger, one, [number], 100, now=1e6 + 3620)
