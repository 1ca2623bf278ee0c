"""Jobs of one base change at step borders, by weight, whatever the order in which their threads run."""

from __future__ import annotations

import threading
import time

import pytest
from valve_tune.serve.turns import StepTurns

NEVER = bool


class Steps:
    """Each step takes one second of a clock that only steps move."""

    def __init__(self, weights: dict[str, float], whole: int) -> None:
        self.now, self.whole, self.weights = 0.0, whole, weights
        self.order: list[str] = []
        self.turns = StepTurns(lambda: self.now)
        self.inside = 0

    def work(self, job: str) -> None:
        while self.turns.enter(job, lambda: len(self.order) >= self.whole, look_s=0.001):
            if len(self.order) >= self.whole:
                break
            self.inside += 1
            assert self.inside == 1
            self.order.append(job)
            self.now += 1
            self.inside -= 1
            self.turns.border(job, self.weights[job])
        self.turns.forget(job)

    def run(self) -> None:
        """All want their turn before anyone gets one."""
        assert self.turns.enter("first", NEVER)
        threads = [threading.Thread(target=self.work, args=(job,)) for job in self.weights]
        for thread in threads:
            thread.start()
        while len(self.turns._waiting) < len(threads):
            time.sleep(0.001)
        self.turns.forget("first")
        for thread in threads:
            thread.join()


@pytest.mark.parametrize("weights", [{"a": 1, "b": 1}, {"a": 1, "b": 3}, {"a": 0.5, "b": 2, "c": 1}])
def test_each_gets_its_share_and_never_two_at_once(weights):
    steps = Steps(weights, 700)
    steps.run()
    for job, weight in weights.items():
        share = weight / sum(weights.values()) * 700
        assert abs(steps.order[:700].count(job) - share) <= 3


def test_one_that_was_away_is_never_owed_arrears():
    clock = [0.0]
    turns = StepTurns(lambda: clock[0])
    assert turns.enter("a", NEVER)
    turns.leave("a")
    assert turns.enter("b", NEVER)
    clock[0] += 100
    turns.border("b", 1)
    assert turns.enter("b", NEVER)
    turns.leave("b")
    done = []
    for _ in range(4):  # both come anew: a does not get a hundred seconds first
        for job in ("a", "b"):
            assert turns.enter(job, NEVER)
            clock[0] += 1
            turns.border(job, 1)
            turns.leave(job)
            done.append(job)
    assert done.count("a") == done.count("b")


def test_whoever_does_not_want_its_turn_any_more_waits_no_longer():
    turns = StepTurns()
    assert turns.enter("a", NEVER)
    assert not turns.enter("b", lambda: True)
    turns.leave("a")
    assert turns.enter("b", NEVER)
