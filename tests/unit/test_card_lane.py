"""The card lane on a driver of our own: what it calls, in which order, and what is left where a call fails."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from fake_card import MAKES, OUT_OF_MEMORY, FakeDriver
from valve_hook.cotrain.card.driver import CALLS, CardDriver, CardRefused
from valve_hook.cotrain.card.flight import TilesInFlight, TileStuck, open_flight
from valve_hook.cotrain.card.shares import SHARES, open_shares


class Clock:
    def __init__(self) -> None:
        self.now, self.looks = 0.0, 0
        self.act: Callable[[], None] = bool

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.looks += 1
        self.now += seconds
        self.act()


def flight_of(fake: FakeDriver, clock: Clock | None = None, **more: Any) -> TilesInFlight[str]:
    clock = clock or Clock()
    return open_flight(CardDriver(fake), stuck_s=1.0, clock=clock, sleep=clock.sleep, **more)


def test_shares_are_made_once_in_the_order_that_the_driver_asks_for_and_undone_in_the_other():
    fake = FakeDriver()
    shares = open_shares(CardDriver(fake))
    one = ["cuDeviceGetDevResource", "cuDevSmResourceSplitByCount", "cuDevResourceGenerateDesc", "cuGreenCtxCreate"]
    one += ["cuCtxFromGreenCtx", "cuGreenCtxStreamCreate"]
    assert fake.said == [
        *("cuInit", "cuDevicePrimaryCtxRetain", "cuDeviceGetDevResource", "cuDevSmResourceSplitByCount"),
        *("cuCtxPushCurrent_v2", "cuCtxGetStreamPriorityRange", "cuCtxPopCurrent_v2"),
        *one * 3,
        *[call for call in one if call != "cuDevSmResourceSplitByCount"],
    ]
    assert [each.sms for each in shares.all] == [32, 64, 96, 130]
    before = len(fake.said)
    shares.close()
    shares.close()
    assert fake.said[before:] == ["cuStreamDestroy_v2", "cuGreenCtxDestroy"] * 4 + ["cuDevicePrimaryCtxRelease_v2"]
    assert not any(fake.alive.values())


def test_a_trainer_never_has_more_of_the_card_than_its_plan_says_but_for_the_smallest_share_there_is():
    shares = open_shares(CardDriver(FakeDriver()))
    for wanted in (0.25, 0.3, 0.5, 0.62, 0.99, 1.0):
        assert shares.of(wanted).sms <= wanted * 130
    assert shares.of(0.01) is shares.all[0]


def test_shares_that_the_card_rounds_to_the_same_processors_are_made_once():
    assert [each.sms for each in open_shares(CardDriver(FakeDriver()), wanted=(0.01, 0.05, 0.06, 0.1)).all] == [8]


@pytest.mark.parametrize("name", [*CALLS])
def test_a_driver_without_a_call_is_refused_by_that_calls_name(name):
    fake = FakeDriver(absent=name)
    with pytest.raises(CardRefused, match=f"no green contexts: {name} is missing"):
        CardDriver(fake)
    assert fake.said == []


def test_a_machine_without_a_driver_is_refused(monkeypatch):
    monkeypatch.setattr("ctypes.CDLL", lambda name: (_ for _ in ()).throw(OSError(name)))
    with pytest.raises(CardRefused, match="no CUDA driver"):
        CardDriver()


def made_at_start() -> list[tuple[str, int]]:
    """Every call that is made until tiles may run."""
    fake = FakeDriver()
    flight_of(fake)
    return [(name, fake.said[: place + 1].count(name)) for place, name in enumerate(fake.said)]


@pytest.mark.parametrize(("name", "at"), made_at_start())
def test_a_start_that_fails_at_any_call_names_it_and_leaves_nothing(name, at):
    fake = FakeDriver(fails=name, at=at)
    fake.code = OUT_OF_MEMORY
    with pytest.raises(CardRefused, match=f"{name}: CUDA_ERROR_OUT_OF_MEMORY"):
        open_flight(CardDriver(fake), stuck_s=1.0)
    left = {what: count for what, count in fake.alive.items() if count}
    assert left == ({"cuCtxPushCurrent_v2": 1} if name == "cuCtxPopCurrent_v2" else {})  # that one cannot be undone


def test_a_third_tile_is_never_launched_before_the_first_has_ended():
    fake, clock = FakeDriver(), Clock()
    flight = flight_of(fake, clock)
    launched = []
    fake.done = 0
    clock.act = lambda: setattr(fake, "done", 2)  # the first tile's two events
    for tag in ("a", "b", "c"):
        landed = flight.ready()
        launched.append((tag, len(flight), landed))
        flight.launch(tag, lambda share: None)
    assert launched == [("a", 0, []), ("b", 1, []), ("c", 1, [("a", 3.0)])]
    assert clock.looks == 1
    assert len(flight) == 2
    fake.done = 1 << 30
    assert [tag for tag, _ in flight.drain()] == ["b", "c"]


def test_another_share_is_never_taken_up_while_a_tile_is_in_flight():
    fake, clock = FakeDriver(), Clock()
    flight = flight_of(fake, clock)
    flight.launch("whole", lambda share: None)
    fake.done = 0
    clock.act = lambda: setattr(fake, "done", 1 << 30)
    assert flight.ready(0.5) == [("whole", 3.0)]
    assert clock.looks == 1
    assert flight.launch("half", lambda share: share.sms) == 64


def test_a_tile_that_does_not_end_is_given_up_at_its_deadline_and_nothing_is_freed_under_it():
    fake, clock = FakeDriver(), Clock()
    flight = flight_of(fake, clock)
    fake.done = 0
    flight.launch("a", lambda share: None)
    flight.launch("b", lambda share: None)
    with pytest.raises(TileStuck, match="longer than 1 s"):
        flight.ready()
    assert 1.0 < clock.now < 1.1
    before = list(fake.said)
    flight.close()
    assert fake.said == before


def test_the_second_tile_has_its_whole_time_after_the_first():
    fake, clock = FakeDriver(), Clock()
    flight = flight_of(fake, clock)
    fake.done = 0
    flight.launch("a", lambda share: None)
    flight.launch("b", lambda share: None)
    clock.now = 0.9
    fake.done = 2
    assert flight.ready() == [("a", 3.0)]
    clock.now, clock.act = 1.8, lambda: setattr(fake, "done", 4)
    assert flight.drain() == [("b", 3.0)]


def test_an_error_inside_a_tile_is_the_callers_and_what_it_had_launched_is_waited_for():
    fake = FakeDriver()
    flight = flight_of(fake)

    def runs_out(share: Any) -> None:
        fake.said.append("a kernel")
        raise MemoryError("of the card")

    with pytest.raises(MemoryError, match="of the card"):
        flight.launch("a", runs_out)
    assert fake.said[-3:] == ["a kernel", "cuEventRecord", "cuCtxPopCurrent_v2"]
    assert len(flight) == 1
    flight.close()
    assert not any(fake.alive.values())


def test_no_tile_begins_in_the_memory_that_stays_with_the_engine():
    fake = FakeDriver()
    flight = flight_of(fake, reserve_bytes=1 << 30)
    fake.free = (1 << 30) - 1
    ran = []
    with pytest.raises(CardRefused, match="1023 MiB are free, 1024 MiB stay with the engine"):
        flight.launch("a", ran.append)
    assert ran == []
    flight.close()
    assert not any(fake.alive.values())


@pytest.mark.parametrize("name", ["cuEventRecord", "cuEventQuery", "cuEventElapsedTime"])
def test_a_driver_that_fails_while_tiles_run_is_named_and_what_was_made_is_left_to_the_process(name):
    fake = FakeDriver()
    flight = flight_of(fake)
    fake.fails, fake.at, fake.code = name, 2 if name == "cuEventRecord" else 1, 700

    def two_tiles() -> None:
        flight.launch("a", lambda share: None)
        flight.ready()
        flight.launch("b", lambda share: None)
        flight.drain()

    with pytest.raises(CardRefused, match=name):
        two_tiles()
    before = len(fake.said)
    flight.close()
    assert fake.said[before:] == []


def test_a_first_record_that_fails_runs_nothing_and_all_is_undone():
    fake = FakeDriver(fails="cuEventRecord")
    flight = flight_of(fake)
    ran = []
    with pytest.raises(CardRefused, match="cuEventRecord"):
        flight.launch("a", ran.append)
    flight.close()
    assert ran == []
    assert not any(fake.alive.values())


def test_two_thousand_tiles_make_nothing_new():
    fake = FakeDriver()
    flight = flight_of(fake)
    before = {name: fake.said.count(name) for name in MAKES if name != "cuCtxPushCurrent_v2"}
    for tile in range(2000):
        flight.ready(SHARES[tile // 50 % 4])
        flight.launch("t", lambda share: None)
    assert {name: fake.said.count(name) for name in before} == before
    flight.close()
    assert not any(fake.alive.values())
