"""Memory moves between a real online and a real offline engine on the emulated GPU.

The fault script holds one step of a reclaim inside the driver, kills a party there, and lets go. Afterwards the books
add up, no channel is off, and every answer that was given is right: both engines compute theirs from owner tags that a
kernel finds in their KV blocks.
"""

from __future__ import annotations

import os
import signal

import pytest
from kv_rig import BLOCKS, BURST, Engines, check_offline, check_online, config

STEPS = {
    "gate": "on disable 1: hold",
    "unmap": "on unmap 1: hold",
    "quarantine": "on map 1: hold",
    "hand over": "on map 9: hold",
}


@pytest.fixture
def engines(make_node):
    return Engines(make_node(config=config()))


def test_online_gets_what_it_needs_and_offline_answers_as_if_nothing_had_happened(engines):
    engines.start_offline()
    engines.start_online([*BURST, (4.6, 1500, 40), (4.7, 800, 80)])

    check_online(engines.summary(engines.online, "online"))
    engines.node.wait_for(lambda: engines.engine("offline").backed_blocks == BLOCKS, "the memory is lent again")
    offline = engines.stop_offline()

    check_offline(offline)
    assert offline["lost_blocks"] > 0
    memory = engines.node.status().memory
    assert memory.reclaims >= 1
    assert memory.lost_tokens == offline["lost_tokens"]
    engines.nothing_is_left()


def test_between_its_steps_an_engine_gives_what_is_asked_of_it(make_node):
    engines = Engines(make_node(config=config(remap="cooperative")))
    engines.start_offline()
    engines.start_online(BURST)

    check_online(engines.summary(engines.online, "online"))
    check_offline(engines.stop_offline())

    memory = engines.node.status().memory
    assert (memory.remap, list(memory.trials), memory.late_orders) == ("cooperative", [], 0)
    assert memory.reclaims >= 1
    engines.nothing_is_left()


def test_after_valved_slept_longer_than_its_lease_memory_moves_again(engines):
    """Its clients left it and came back, their hooks did not notice: the engines must become whole again."""
    engines.start_offline()
    engines.start_online(BURST)
    node = engines.node
    node.valved.send_signal(signal.SIGSTOP)
    node.wait_for(lambda: "valved is gone" in (engines.folder / "offline.out").read_text(), "its lease ends")
    node.valved.send_signal(signal.SIGCONT)

    check_online(engines.summary(engines.online, "online"))
    check_offline(engines.stop_offline())
    engines.nothing_is_left()


EVERYWHERE = [(step, victim) for step in STEPS for victim in ("offline", "online", "valved")]
# Each takes some seconds: a run has the corners, VALVE_ALL_STEPS=1 all of them. Virtual time has every moment.
CORNERS = [
    ("gate", "valved"),
    ("unmap", "offline"),
    ("unmap", "valved"),
    ("quarantine", "online"),
    ("hand over", "offline"),
]


@pytest.mark.parametrize(("step", "victim"), EVERYWHERE if os.environ.get("VALVE_ALL_STEPS") else CORNERS)
def test_whoever_is_killed_at_whatever_step_the_others_go_on(engines, step, victim):
    engines.start_offline()
    engines.start_online(BURST)
    node = engines.node
    node.emulator.fault(STEPS[step])
    node.emulator.wait_held()

    if victim == "valved":
        node.valved.kill()
        node.valved.wait()
    else:
        getattr(engines, victim).send_signal(signal.SIGKILL)
    node.emulator.release()
    node.emulator.clear_faults()
    if victim == "valved":
        node.start_valved()

    if victim == "online":
        engines.node.wait_for(lambda: engines.engine("offline").backed_blocks == BLOCKS, "the memory is lent again")
    else:
        check_online(engines.summary(engines.online, "online"))
    if victim != "offline":
        check_offline(engines.stop_offline())
    engines.nothing_is_left()
