"""An engine that lost the end of a request, at a service whose other requests come often."""

from __future__ import annotations

import pytest

from valved.model.events import EventKind

HOUR_S = 3600


class Engine:
    """A hook that counts requests, and the process whose GPU work they are."""

    def __init__(self, world, *, lost=0):
        self.world, self.started, self.ended = world, lost, 0
        world.offline()
        self.online = world.online()
        self.hook = world.hook(self.online)
        self.tell()

    def tell(self):
        self.world.gate.hint(self.hook, self.started, self.ended)
        self.world.beat_all()

    def begin(self):
        self.started += 1
        self.tell()

    def end(self):
        self.ended += 1
        self.tell()

    def compute(self, ms=50):
        self.world.gate.launch(self.online)
        self.world.run(ms)
        self.world.gate.finish(self.online)

    def serve(self, steps=8):
        for _ in range(steps):
            self.compute()
            self.tell()

    def rest(self, ms):
        while ms > 0:
            self.world.run(min(ms, 250))
            self.tell()
            ms -= 250

    def leaks(self):
        noted = [event.reason for event in self.world.events(EventKind.NOTED)]
        return sum("does not serve" in reason for reason in noted)


@pytest.mark.parametrize("every_s", [3, 20, 45])
def test_a_request_that_leaked_never_stops_the_harvest_of_a_service_that_has_others(world, every_s):
    """Regression: the minute of idleness that tells a leak never came, and offline work stood for good, unsaid."""
    engine = Engine(world, lost=1)
    requests = HOUR_S // 6 // every_s
    for _ in range(requests):
        engine.begin()
        engine.compute()
        engine.end()
        engine.rest(every_s * 1000)

    assert engine.leaks() == 1
    assert world.gating.counters.wakes > requests / 2


def test_a_request_that_is_served_slowly_is_never_taken_for_one_that_leaked(world):
    engine = Engine(world)
    engine.begin()
    for _ in range(300):
        engine.compute()
        engine.rest(900)

    assert not engine.leaks()
    assert not world.gating.counters.wakes


def test_requests_that_each_wait_for_something_never_add_up_to_a_leak(world):
    engine = Engine(world)
    for _ in range(60):
        engine.begin()
        engine.compute()
        engine.rest(3000)  # an adapter is fetched, say
        engine.compute()
        engine.end()
        engine.rest(500)

    assert not engine.leaks()
    assert world.gating.counters.wakes == 60


def test_requests_that_overlap_and_wait_now_and_then_are_never_taken_for_leaked_ones(world):
    """Regression: the count never came to 0, so their waits added up, and offline work stopped each of them twice."""
    engine = Engine(world)
    engine.begin()
    for _ in range(200):
        for _ in range(2):
            engine.serve()
            engine.rest(1500)  # no memory, say
        engine.begin()  # before the last one ends
        engine.serve()
        engine.end()

    assert not engine.leaks()
    assert not world.gating.counters.wakes


def test_a_session_that_computes_now_and_then_is_never_taken_for_a_request_that_leaked(world):
    engine = Engine(world)
    engine.begin()
    for _ in range(100):
        engine.serve(2)
        engine.rest(10_000)

    assert not engine.leaks()
    assert not world.gating.counters.wakes
