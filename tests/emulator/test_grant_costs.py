"""What a pause between two steps costs on a card: each part is a knob, and turning it changes what is measured."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable

import pytest
from rm_process import OK, RmProcess, Tree, grow_tree
from valve_tools.emulator.client import Emulator, NodeMoment

SET_TIMESLICE = 0xA06C0103
PRICE_MS, NEVER_MS = 60, 100_000


@pytest.fixture
def online(process: RmProcess) -> Tree:
    tree = grow_tree(process, channels=1)
    process.call("work", cid=tree.cids[0], gpu=0)
    return tree


@pytest.fixture
def offline(another: RmProcess) -> Tree:
    return grow_tree(another, channels=1)


def granted(tree: Tree, state: NodeMoment) -> bool:
    return any(one.granted for one in state.channels if one.cid in tree.cids)


def took_ms(call: Callable[[], int]) -> float:
    begin = time.monotonic_ns()
    assert call() == OK
    return (time.monotonic_ns() - begin) / 1e6


def slice_of(tree: Tree, us: int) -> Callable[[], int]:
    return lambda: tree.control(tree.tsg, SET_TIMESLICE, struct.pack("<Q", us)).status


@pytest.mark.parametrize(
    ("knob", "dearer"),
    [
        ("preempt_us", {"disable"}),
        ("enable_us", {"enable"}),
        ("runlist_us", {"disable", "enable", "schedule", "timeslice"}),
    ],
)
def test_each_cost_is_paid_by_its_own_calls(emulator: Emulator, offline: Tree, knob: str, dearer: set[str]) -> None:
    calls: dict[str, Callable[[], int]] = {
        "disable": lambda: offline.gate(offline.pairs, on=False),
        "enable": lambda: offline.gate(offline.pairs, on=True),
        "schedule": offline.schedule,
        "timeslice": slice_of(offline, 500),
    }
    emulator.set(**{knob: PRICE_MS * 1000})
    paid = {name for name in calls if name in dearer and took_ms(calls[name]) >= PRICE_MS}
    emulator.set(**{knob: NEVER_MS * 1000})  # whoever paid this would be seen on the slowest machine
    spared = {name for name in calls if name not in dearer and took_ms(calls[name]) < NEVER_MS}

    assert (paid, spared) == (dearer, calls.keys() - dearer)


def test_a_group_that_comes_on_after_another_begins_later(emulator: Emulator, online: Tree, offline: Tree) -> None:
    """The time that the step after a pause loses."""
    emulator.wait(lambda state: granted(online, state), "the step runs")
    emulator.set(switch_us=60_000_000)

    offline.process.call("work", cid=offline.cids[0], gpu=0)

    emulator.wait(lambda state: not granted(online, state), "its slice ends")
    assert not granted(offline, emulator.state())
    offline.gate(offline.pairs, on=False)  # nobody waits for the rest of it
    emulator.wait(lambda state: granted(online, state), "the one whose registers are still there goes on at once")


def test_a_group_that_goes_on_alone_loses_nothing(emulator: Emulator, online: Tree) -> None:
    emulator.wait(lambda state: granted(online, state), "the step runs")
    emulator.set(switch_us=60_000_000)

    for _ in range(5):
        online.gate(online.pairs, on=False)
        online.gate(online.pairs, on=True)
        emulator.wait(lambda state: granted(online, state), "its own context is still there")


@pytest.mark.parametrize("long", ["online", "offline"])
def test_who_has_the_longer_slice_has_the_larger_share(
    emulator: Emulator, online: Tree, offline: Tree, long: str
) -> None:
    emulator.set(slice_us=20_000)
    short = offline if long == "online" else online
    assert slice_of(short, 200)() == OK
    offline.process.call("work", cid=offline.cids[0], gpu=0)
    emulator.wait(lambda state: granted(offline, state), "both have had the engine")

    counts = {"online": 0, "offline": 0}

    def looked(state: NodeMoment) -> bool:
        for name, tree in (("online", online), ("offline", offline)):
            counts[name] += granted(tree, state)
        return sum(counts.values()) >= 200 and counts[long] > 2 * (sum(counts.values()) - counts[long])

    emulator.wait(looked, "its share is more than twice the other's, over dozens of slices")
