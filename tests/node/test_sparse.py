"""Memory taken from outside its process, between real engines on the emulated GPU: answers stay right, whoever dies."""

from __future__ import annotations

import json
import signal

import pytest
from kv_rig import BLOCKS, BURST, Engines, check_offline, check_online, config


@pytest.fixture
def engines(make_node):
    return Engines(make_node(config=config(remap="sparse")))


def is_trusted(engines):
    return engines.engine("offline").state == "lends and borrows"


def ways(engines):
    """How memory was taken, in each reclaim that took some. Lines are written within a second."""
    path = engines.node.run_dir / "audit.jsonl"
    reclaims = engines.node.status().memory.reclaims

    def told():
        events = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
        found = [event["detail"] for event in events if event["kind"] == "reclaimed"]
        return found if len(found) >= reclaims else None

    return {detail["how"] for detail in engines.node.wait_for(told, "the audit file is written") if detail["freed"]}


def test_online_gets_what_it_needs_and_offline_answers_as_if_nothing_had_happened(engines):
    engines.start_offline()
    engines.node.wait_for(lambda: is_trusted(engines), "it has passed the trial")
    engines.start_online([*BURST, (4.6, 1500, 40), (4.7, 800, 80)])

    check_online(engines.summary(engines.online, "online"))
    engines.node.wait_for(lambda: engines.engine("offline").backed_blocks == BLOCKS, "the memory is lent again")
    offline = engines.stop_offline()

    check_offline(offline)
    assert offline["lost_blocks"] > 0
    memory = engines.node.status().memory
    assert (memory.remap, memory.demotions, memory.late_orders) == ("sparse", 0, 0)
    assert ways(engines) == {"sparse"}
    engines.nothing_is_left()


@pytest.mark.parametrize("victim", ["valved", "offline"])
def test_whoever_is_killed_while_memory_is_made_sparse_the_others_go_on(engines, victim):
    engines.start_offline()
    engines.node.wait_for(lambda: is_trusted(engines), "it has passed the trial")
    engines.start_online(BURST)
    node = engines.node
    node.emulator.fault("on sparse 1: hold")
    node.emulator.wait_held()

    if victim == "valved":
        node.valved.kill()
        node.valved.wait()
    else:
        engines.offline.send_signal(signal.SIGKILL)
    node.emulator.release()
    node.emulator.clear_faults()
    if victim == "valved":
        node.start_valved()

    check_online(engines.summary(engines.online, "online"))
    if victim != "offline":
        check_offline(engines.stop_offline())
    engines.nothing_is_left()


def test_a_card_that_says_yes_and_does_nothing_is_found_out(engines):
    engines.node.emulator.fault("on sparse always: silent")
    engines.start_offline()
    why = "cooperative: the trial failed: memory that was taken did not read as zero"
    engines.node.wait_for(lambda: engines.engine("offline").state == why, "the trial has failed")
    engines.start_online(BURST)

    check_online(engines.summary(engines.online, "online"))
    check_offline(engines.stop_offline())

    memory = engines.node.status().memory  # a process whose link was cut and is back is tried once more
    assert (memory.trials_passed, memory.demotions) == (0, memory.trials_failed)
    assert ways(engines) <= {"cooperative"}
    engines.nothing_is_left()


AUTO = [
    ("", "passed", "sparse"),
    ("on sparse 1: status 0x1f", "refused", "cooperative"),
    ("on sparse 1: silent", "wrong bytes", "cooperative"),
    ("on sparse 1: hang 3s", "hung", "cooperative"),
]


@pytest.mark.parametrize(("rule", "outcome", "rung"), AUTO, ids=[f"{one[1]} {one[0]}".strip() for one in AUTO])
def test_auto_never_takes_memory_from_outside_a_process_that_has_not_passed(make_node, rule, outcome, rung):
    """The default on a node: every outcome of the trial is seen, answers stay right, and nothing is left behind."""
    engines = Engines(make_node(config=config(remap="auto").replace("order_s = 20.0", "order_s = 2.0")))
    node = engines.node
    if rule:
        node.emulator.fault(rule)
    engines.start_offline()

    def trial():
        found = [one for one in node.status().memory.trials if one.outcome != "not tried yet"]
        return found[0] if found else None

    seen = node.wait_for(trial, "the trial is over")
    assert (seen.outcome, seen.rung) == (outcome, rung)
    memory = node.status().memory
    assert (memory.trials_passed, memory.trials_failed) == ((1, 0) if outcome == "passed" else (0, 1))
    engines.start_online(BURST)
    check_online(engines.summary(engines.online, "online"))
    check_offline(engines.stop_offline())

    assert ways(engines) <= {rung}
    assert node.status().memory.late_orders == 0
    engines.nothing_is_left()
