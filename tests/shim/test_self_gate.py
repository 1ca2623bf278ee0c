"""What an offline process does with the driver's answer when it stops and runs its own channels: over the real shim and
the emulated card, for each way in which a stop begins or ends and each fault of the driver.

Out of reach: a driver that says yes and does nothing. What it left off runs after the next stop.
"""

from __future__ import annotations

import itertools

import pytest
from card_process import process_on
from fake_daemon import FEATURE_KEEP_STOP, NOTE, OFFLINE, RUN, SCHEDULE_DONE, SCHEDULE_WAIT, STOP, FakeDaemon, until
from valve_tools.emulator.node import NO_LATENCY, Options, node

NOT_ENABLED = 7  # a note
REFUSED = "status 0x65"
STALE = "status 0x57"  # said of every channel while each of them lives
LASTING = ("long", "stale")
FAULTS = (*LASTING, "once", "thrice", "hang", "hang and refuse")


class Scene:
    """One offline process on a card of its own. `daemons`: the last one serves it."""

    def __init__(self, emulator, folder):
        self.emulator, self.folder = emulator, folder
        self.daemons = []

    def daemon(self, **settings):
        self.daemons.append(FakeDaemon(self.folder, OFFLINE, **settings))
        return self.daemons[-1]

    def is_off(self):
        mine = [channel for channel in self.emulator.state().of(self.child.pid) if channel.is_compute]
        return {channel.disabled for channel in mine}

    def refusals(self, *, on):
        return sum(gate.on == on and gate.status != 0 for gate in self.emulator.state().gates)

    def order(self, order):
        seq = self.client.give_order(order)
        until(lambda: self.client.region.order_done == seq, "carried out")
        return self.client.region.order_status

    def lose_valved(self, *, online):
        self.client.control.online_registered = online
        self.daemons[-1].end_lease(self.client)

    def heir(self, more=FEATURE_KEEP_STOP):
        if self.daemons[-1].thread.is_alive():
            self.daemons[-1].close()
        self.client = self.daemon(more=more).client()


@pytest.fixture
def scene(tmp_path):
    with node(Options(gpus=1, knobs=NO_LATENCY)) as emulator:
        made = Scene(emulator, tmp_path)
        made.daemon(more=FEATURE_KEEP_STOP)
        with process_on(emulator, made.daemons[0], "offline") as made.child:
            made.client = made.daemons[0].client()
            until(lambda: made.is_off() == {False}, "it runs")
            yield made
            emulator.clear_faults()
        for daemon in made.daemons:
            daemon.discard()


def play(scene, call, fault):
    scene.emulator.fault(
        *{
            "once": [f"on {call} 1: {REFUSED}"],
            "thrice": [f"on {call} {n}: {REFUSED}" for n in (1, 2, 3)],
            "long": [f"on {call} always: {REFUSED}"],
            "hang": [f"on {call} 1: hang 300ms"],
            "stale": [f"on {call} always: {STALE}"],
            "hang and refuse": [f"on {call} 1: hang 200ms", f"on {call} 2: {REFUSED}", f"on {call} 3: {REFUSED}"],
        }[fault]
    )


def stop_by_order(scene):
    assert scene.order(STOP) == 0


def stop_by_lease(scene):
    scene.lose_valved(online=1)


def run_by_order(scene):
    scene.client.give_order(RUN)


def run_by_drain(scene):
    scene.client.control.draining = 1


def run_by_heir(scene):
    scene.heir()


def run_by_old_heir(scene):
    scene.heir(more=0)


def run_alone(scene):
    """Nobody is left that needs it off."""
    scene.lose_valved(online=0)


ENDS = (
    (stop_by_order, run_by_order),
    (stop_by_order, run_by_drain),
    (stop_by_order, run_alone),
    (stop_by_order, run_by_heir),
    (stop_by_order, run_by_old_heir),
    (stop_by_lease, run_by_heir),
    (stop_by_lease, run_by_old_heir),
)


@pytest.mark.parametrize(("ends", "fault"), list(itertools.product(ENDS, FAULTS)))
def test_no_answer_of_the_driver_ever_leaves_a_channel_off_for_good(scene, ends, fault):
    stop, run = ends
    stop(scene)
    until(lambda: scene.is_off() == {True}, "it is off")

    play(scene, "enable", fault)
    run(scene)
    if fault in LASTING:
        until(lambda: scene.refusals(on=True) > 3, "it is tried again and again")
        assert scene.is_off() == {True}
        scene.emulator.clear_faults()

    until(lambda: scene.is_off() == {False}, "it runs")


@pytest.mark.parametrize("fault", FAULTS)
def test_no_refused_stop_of_a_process_without_a_valved_is_ever_its_last(scene, fault):
    play(scene, "disable", fault)
    stop_by_lease(scene)
    if fault in LASTING:
        until(lambda: scene.refusals(on=False) > 3, "it is tried again and again")
        scene.emulator.clear_faults()

    until(lambda: scene.is_off() == {True}, "it is off")
    scene.heir()
    until(lambda: scene.is_off() == {False}, "it runs")


@pytest.mark.parametrize("features", [FEATURE_KEEP_STOP, 0], ids=["new valved", "old valved"])
def test_a_process_never_enables_again_what_was_refused_without_asking_its_valved(scene, features):
    """The gate may have closed since."""
    asked = []
    if not features:
        scene.heir(more=0)

    def answer(client, message):
        if message.type == SCHEDULE_WAIT:
            asked.append((client, message))
        return message.type == SCHEDULE_WAIT

    scene.daemons[-1].on_message = answer
    stop_by_order(scene)
    play(scene, "enable", "long")
    scene.order(RUN)
    until(lambda: asked, "it asks")
    tries = scene.refusals(on=True)

    client, message = asked.pop()
    client.ack(message, status=11)  # EAGAIN: closed
    until(lambda: asked, "it asks again")
    assert (scene.refusals(on=True), scene.is_off()) == (tries, {True})

    scene.emulator.clear_faults()
    client, message = asked.pop()
    client.ack(message)
    while features and scene.client.expect(SCHEDULE_DONE).h_client:
        """Of the application's own calls."""
    until(lambda: scene.is_off() == {False}, "it runs")


def test_a_stop_never_meets_a_retry_of_the_run_before_it(scene):
    stop_by_order(scene)
    play(scene, "enable", "long")
    assert scene.order(RUN) == 0x65
    assert scene.order(STOP) == 0
    scene.emulator.clear_faults()
    enables = [gate for gate in scene.emulator.state().gates if gate.on]

    assert scene.order(STOP) == 0
    assert [gate for gate in scene.emulator.state().gates if gate.on] == enables
    scene.order(RUN)
    until(lambda: scene.is_off() == {False}, "it runs")


def test_an_operator_hears_of_channels_that_stay_off(scene):
    stop_by_order(scene)
    play(scene, "enable", "long")
    scene.order(RUN)

    assert scene.client.expect(NOTE).code == NOT_ENABLED
