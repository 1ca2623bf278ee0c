"""The native booking of stamps and the Python one never differ: same stamps, same books and events, field by field."""

from __future__ import annotations

import tempfile
from dataclasses import asdict, fields
from pathlib import Path

from fake_gate import FakeGate
from hypothesis import given
from hypothesis import strategies as st
from instructions import calls_of
from node_world import MS, World
from valved.native._booking import ffi
from valved.native._gate import ffi as gate_ffi
from virtual import VirtualClock

from valved.gate.booking import GPU
from valved.gate.online import OnlineService, ServiceBook
from valved.machine.stamps import STAMP_BYTES, Stamp, StampKind, Stamps, StopCause
from valved.model.ids import ClientId, GpuIndex, ServiceId
from valved.state.registry import BRAKE_SERVICE

PLACES = ((0,), (0, 1), (1, 2), (2,))  # of the online services; offline work is on GPUs 0 and 1
BATCH = {"stopped", "gpus", "booked", "held"}  # fields that mean something while a batch is booked
NUMBERS = [one.name for one in fields(ServiceBook) if one.name not in BATCH]
ORDINARY = StampKind.GATE, StampKind.HOLD, StampKind.WAKE


class Twin:
    """A node of four services; the last but one has an engine that tells of requests."""

    def __init__(self, least: int) -> None:
        clock = VirtualClock(10**12)
        self.world = World(Path(tempfile.mkdtemp()), gate=FakeGate(clock, gpus=3), clock=clock)
        self.gating, self.gate = self.world.gating, self.world.gate
        for gpu in (0, 1):
            self.world.offline(gpus=(gpu,))
        self.clients = [self.world.online(gpus=gpus) for gpus in PLACES]
        self.gate.hint(self.clients[2], 3, 1)
        self.world.run(100)
        self.gating.edges.least = least
        self.services = [self.world.service_of(client) for client in self.clients]

    def use_python_alone(self) -> None:
        for online in self.gating.online.values():
            online.book = ServiceBook(**{name: getattr(online.book, name) for name in NUMBERS})

    def state_of(self, place: int) -> OnlineService:
        return self.gating.online[self.services[place]]

    def books(self) -> object:
        return (
            {online.id: figures(online) for online in self.gating.online.values()},
            self.gating.gpus,
            asdict(self.gating.counters),
            self.gating.edges.locks,
            self.world.journal.recent(lambda _: True, 10_000),
        )


def figures(online):
    tallies = [(key, vars(tally)) for key, tally in [*online.tallies.items(), *online.left.items()]]
    book = {name: getattr(online.book, name) for name in NUMBERS}
    return book, tallies, online.breaker, online.judged, online.rule, online.decision, online.cooldown_state


jitter = st.integers(-3 * MS, 3 * MS)
moves = st.one_of(
    st.none(),
    st.none(),
    st.tuples(st.just("brake"), st.frozensets(st.integers(0, 2))),
    st.tuples(st.just("gpus"), st.frozensets(st.integers(0, 2))),
    st.tuples(st.just("end"), st.just(3)),
    st.tuples(st.just("offline"), st.integers(0, 3)),
    st.tuples(st.just("lost"), st.integers(1, 9)),
    st.tuples(st.just("run"), st.integers(0, 700)),
)


@st.composite
def stamp(draw):
    """What a stamp says but for its time, client and epoch, which count on from the last: here by how much."""
    is_odd = draw(st.integers(0, 11)) == 0  # one in twelve may say anything
    return {
        "who": draw(st.integers(0, 5 if is_odd else 3)),  # 4: nobody's; 5: the brake's
        "code": draw(st.sampled_from(list(StampKind) if is_odd else ORDINARY)),
        "epoch": draw(st.sampled_from([0, 1, 1, 1, 2, -1] + [1 << 31, 3 << 29, -7] * is_odd)),
        "pause": draw(st.integers(0, 2 * MS)),
        "launch": draw(st.one_of(st.none(), jitter)),
        "seen": draw(st.one_of(st.none(), jitter) if is_odd else jitter),
        "done": draw(st.one_of(st.none(), jitter, st.just(1 << 61)) if is_odd else jitter),
        "ioctl": draw(st.one_of(st.none(), jitter)),
        "asked": draw(st.integers(0, 3)) == 0,
        "gpu": draw(st.integers(0, 3 if is_odd else 2)),
        "channels": draw(st.integers(0, 2)),
        "leaked": draw(st.integers(0, 2)) if is_odd else 0,
        "status": draw(st.integers(0, 8)),
        "cause": int(draw(st.sampled_from(list(StopCause)))),
        "tells": draw(st.booleans()),
        "started": draw(st.integers(0, 2)),
        "ended": draw(st.integers(0, 2)),
    }


class Maker:
    """Makes stamps of what `stamp` drew."""

    def __init__(self, twin: Twin) -> None:
        self._services = [*twin.services[:4], ServiceId(999), BRAKE_SERVICE]
        self._clients = [*twin.clients[:4], ClientId(0), ClientId(0)]
        self._epochs = [(1 << 32) - 5 + number for number in range(6)]  # they wrap soon
        self._requests = [3, 1]
        self.now_ns = twin.world.clock.now_ns()

    def stamp(self, drawn) -> Stamp:
        who, is_wake = drawn["who"], drawn["code"] == StampKind.WAKE
        self.now_ns += drawn["pause"]
        self._epochs[who] = (self._epochs[who] + drawn["epoch"]) % (1 << 32)
        tells = who == 2 and drawn["tells"]
        if tells:
            self._requests[0] += drawn["started"]
            self._requests[1] = min(self._requests[0], self._requests[1] + drawn["ended"])

        def at(name):
            return 0 if drawn[name] is None else self.now_ns + drawn[name]

        return Stamp(
            service=self._services[who],
            client=ClientId(0) if is_wake or drawn["asked"] else self._clients[who],
            launch_ns=0 if is_wake else at("launch"),
            seen_ns=0 if is_wake else at("seen"),
            ioctl_ns=0 if is_wake else at("ioctl"),
            done_ns=at("done"),
            code=int(drawn["code"]),
            gpu=GpuIndex(drawn["gpu"]),
            epoch=self._epochs[who],
            channels=drawn["leaked"] if is_wake else drawn["channels"],
            status=drawn["status"],
            cause=0 if is_wake else drawn["cause"],
            teller=self._clients[2] if tells else 0,
            claims_started=self._requests[0] if tells else 0,
            claims_ended=self._requests[1] if tells else 0,
        )


def move(twin: Twin, what) -> None:
    """What else changes the books."""
    name, value = what or ("", 0)
    gating = twin.gating
    if name == "brake":
        gating.set_standing(BRAKE_SERVICE, frozenset(map(GpuIndex, value)))
    elif name == "gpus":
        gating.set_gpus(twin.services[1], frozenset(map(GpuIndex, value)))
    elif name == "end" and twin.services[3] in gating.online:
        twin.world.processes.end(twin.world.books.clients[twin.clients[3]].process.pid)
    elif name == "offline":
        gating.set_offline_channels(GpuIndex(2), value)
    elif name == "lost":
        twin.gate.lost += value
    elif name == "run":
        twin.world.run(value)


def book(twin: Twin, stamps) -> str:
    """Returns the error, if there is one."""
    twin.gate.stamps += stamps
    try:
        twin.gating.drain()
    except Exception as error:
        return repr(error)
    return ""


@given(st.lists(st.tuples(st.lists(stamp(), max_size=40), moves), min_size=1, max_size=6))
def test_native_and_python_never_differ_over_any_sequence_of_stamps(batches):
    native, python = Twin(least=1), Twin(least=1 << 30)
    python.use_python_alone()
    maker = Maker(native)
    for batch, then in batches:
        stamps = [maker.stamp(drawn) for drawn in batch]
        lag_ns = max(0, maker.now_ns - native.world.clock.now_ns())

        told = [
            (twin.world.clock.advance(lag_ns), book(twin, stamps), move(twin, then))[1] for twin in (native, python)
        ]

        assert told[0] == told[1]
        assert native.books() == python.books()


def cycles(twin: Twin, count: int) -> list[Stamp]:
    """Ordinary holds and wakes of one service beside a brake's hold, so that none of them stops anybody."""
    service, client, at_ns = twin.services[0], twin.clients[0], twin.world.clock.now_ns()
    epoch, stamps = 1000, []
    for _ in range(count):
        epoch, at_ns = epoch + 2, at_ns + MS
        hold = Stamp(service, client, at_ns, at_ns, 0, at_ns, int(StampKind.HOLD), GpuIndex(0), epoch, 0, 0, 1)
        wake = Stamp(service, ClientId(0), 0, 0, 0, at_ns + MS // 2, int(StampKind.WAKE), GpuIndex(0), epoch + 1, 0, 2)
        stamps += [hold, wake]
    return stamps


def test_what_is_ordinary_never_costs_python_a_call_for_each():
    twin = Twin(least=16)
    book(twin, cycles(twin, 8))

    def calls(count):
        twin.gate.stamps += cycles(twin, count)
        return calls_of(twin.gating.drain)

    few, many = calls(8), calls(80)

    assert "take" in few  # of the booking
    assert [call for call in many if call != "<genexpr>"] == [call for call in few if call != "<genexpr>"]


def test_what_is_out_of_the_ordinary_never_costs_a_batch_for_each():
    twin = Twin(least=16)
    twin.gate.stamps += [stamp._replace(service=ServiceId(999)) for stamp in cycles(twin, 80)]

    assert calls_of(twin.gating.drain).count("_take_many") == 10
    assert twin.gating.counters.wakes >= 80


def test_who_waits_for_each_event_never_misses_one_that_was_booked_in_c():
    twin = Twin(least=1)
    watcher = twin.world.journal.watch((), 100, lambda: None)
    stamps = cycles(twin, 5)
    book(twin, stamps)

    seen = [event for event, _ in watcher.take() if event.kind.value in ("hold", "wake")]
    assert [event.t_ns for event in seen] == [stamp.done_ns for stamp in stamps]
    assert [event.seq for event in seen] == sorted({event.seq for event in seen})


def test_a_reader_of_events_that_fails_never_costs_the_books_a_stamp():
    twin = Twin(least=1)
    twin.world.journal.watch((), 100, iter(()).__next__)  # raises, each time
    first, last = cycles(twin, 3), cycles(twin, 6)[6:]
    unusual = first[0]._replace(service=ServiceId(999))

    stamps = [*first, unusual, *last[:-1]]
    assert book(twin, stamps)

    kept = twin.world.journal.recent(lambda event: event.detail.get("epoch", 0) >= 1000, 100)
    assert [event.t_ns for event in kept] == [stamp.done_ns for stamp in stamps]
    assert twin.state_of(0).book.since_ns == last[-2].launch_ns
    assert twin.state_of(0).holding


def test_the_books_are_laid_out_as_the_header_says():
    assert [name for name, _ in ffi.typeof("struct valve_book_service").fields] == [
        one.name for one in fields(ServiceBook)
    ]
    assert GPU.size == ffi.sizeof("struct valve_book_gpu")
    assert gate_ffi.sizeof("struct valve_stamp") == STAMP_BYTES
    native = ffi.new("struct valve_book_gpu *")
    numbers = [name for name, _ in ffi.typeof("struct valve_book_gpu").fields if name != "latency"]
    for at, name in enumerate(numbers):
        setattr(native, name, at + 1)
    native.latency = list(range(100, 121))
    (row,) = GPU.iter_unpack(ffi.buffer(native))
    assert row == (*range(1, 11), *range(100, 121), len(numbers))
    assert len(Stamps(bytes(STAMP_BYTES * 2))) == 2
