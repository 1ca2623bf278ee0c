"""Processes that leave valved and live on while the driver hangs: are their channels off? Nobody knows at once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from gates import Rig
from native_world import NativeWorld

from valved.abi.link import Channel
from valved.model.ids import ChannelRef, ClientId, GpuIndex, ProcessId, ServiceId

GUARD = ServiceId(7)


@pytest.fixture
def node(hasty: Rig, tmp_path: Path) -> Iterator[NativeWorld]:
    node = NativeWorld(tmp_path, hasty)
    yield node
    node.close()


def hang(node: NativeWorld, other: ClientId) -> None:
    """A question of another process, given up in the end."""
    node.rig.driver.rules.hang_query = 1
    node.tell(other, *node.allocate())


def come_back(node: NativeWorld) -> None:
    node.rig.driver.rules.hang_query = 0
    node.rig.settle()
    node.rig.gate.alive()


def hold(node: NativeWorld) -> None:
    node.rig.gate.put_service(GUARD, frozenset([0]))


def ref(channel: Channel) -> ChannelRef:
    words = {name: getattr(channel, name) for name in ("h_client", "h_channel", "cid", "h_tsg", "engine", "compute")}
    return ChannelRef(gpu=GpuIndex(0), **words)


def left(node: NativeWorld) -> set[tuple[int, int]]:
    leftovers = node.world.register.channels.leftovers.all()
    return {(one.channel.h_client, one.channel.h_channel) for one in leftovers}


def test_who_leaves_while_the_driver_hangs_never_bars_grants_once_that_is_over(node: NativeWorld) -> None:
    other = node.world.offline(gpus=())
    client, key = node.offline()
    hang(node, other)

    node.world.register.leave(client, "link closed")
    assert left(node) == {key}, "a stop may have come first"
    assert node.world.register.channels.leftovers.bar_grants()
    come_back(node)

    assert node.is_on(key)
    node.until(lambda: not left(node), "it was on all the time")


def test_who_leaves_a_running_gpu_is_never_taken_for_off_because_it_was_held_before_that_was_read(
    node: NativeWorld,
) -> None:
    """Its plan is gone by then, and a stop is of the next one."""
    hold(node)
    node.rig.gate.wake(GUARD)
    other = node.world.offline(gpus=())
    client, key = node.offline()
    hang(node, other)
    node.rig.gate.channels.enable_foreign([ref(node.allocate()[0])])  # lies before it
    node.world.register.leave(client, "link closed")
    steps = [lambda: None, lambda: node.rig.gate.hold(GUARD, 0)]  # the question is through, and the next is begun

    @node.rig.driver.ffi.callback("void(int)")
    def take(point: int) -> None:
        if point == 4 and steps and not node.rig.driver.rules.hang_query:
            steps.pop(0)()

    node.rig.driver.lib.fake_set_between(take)
    come_back(node)

    assert not steps
    assert node.is_on(key)
    node.until(lambda: not left(node), "it was on all the time")


def test_who_leaves_a_stopped_gpu_while_the_driver_hangs_is_never_forgotten(node: NativeWorld) -> None:
    other = node.world.offline(gpus=())
    client, key = node.offline()
    hold(node)
    node.rig.wait_gated(0)
    hang(node, other)
    node.world.register.leave(client, "link closed")

    come_back(node)
    for _ in range(20):
        node.pump()
    node.world.run(1000)

    assert not node.is_on(key)
    assert left(node) == {key}


def test_who_was_stopped_by_a_mail_that_was_read_with_its_leave_is_never_forgotten(node: NativeWorld) -> None:
    """It came and left while the driver hung, and a service took the GPU."""
    other = node.world.offline(gpus=())
    client = node.world.offline(gpus=())
    hang(node, other)
    hold(node)
    key = node.tell(client, *node.allocate())
    node.world.register.leave(client, "link closed")

    come_back(node)
    node.world.run(1000)

    assert node.is_on(key) != (key in left(node))


def test_who_comes_back_before_the_driver_has_answered_is_never_forgotten_for_that_answer(node: NativeWorld) -> None:
    other = node.world.offline(gpus=())
    client = node.world.offline(pid=300, gpus=())
    channel, owner = node.allocate()
    key = node.tell(client, channel, owner)
    hang(node, other)
    node.world.register.leave(client, "link closed")
    again = node.world.hello(300).client
    node.tell(again, channel, owner)
    hold(node)
    node.world.register.leave(again, "link closed")

    come_back(node)
    node.world.run(1000)

    assert node.is_on(key) or key in left(node)


def test_nothing_of_who_left_is_ever_kept_once_the_driver_has_answered(node: NativeWorld) -> None:
    other = node.world.offline(gpus=())
    clients = [node.offline()[0] for _ in range(20)]
    hang(node, other)
    for client in clients:
        node.world.register.leave(client, "link closed")

    come_back(node)

    node.until(lambda: not left(node), "all were on")


@pytest.mark.parametrize("is_held", [False, True])
@pytest.mark.parametrize("ends", [False, True])
def test_an_enable_that_a_hung_driver_owes_is_never_forgotten_when_its_process_leaves(
    node: NativeWorld, is_held: bool, ends: bool
) -> None:
    """A predecessor's channel: its process is back, has told of it, and leaves again before the driver answers."""
    other = node.world.offline(gpus=())
    channel, owner = node.allocate()
    node.rig.driver.lib.fake_switch(channel.h_client, channel.h_channel, 0)
    node.world.processes.add(300)
    node.world.register.channels.leftovers.put(ref(channel), ProcessId(pid=300, start_time=3000))
    client = node.world.offline(pid=300, gpus=(), claimed=False)
    hang(node, other)
    key = node.tell(client, channel, owner)
    if is_held:
        hold(node)
    if ends:
        node.world.processes.table.pop(300)
    node.world.register.leave(client, "link closed")

    come_back(node)
    for _ in range(20):
        node.pump()
    node.world.run(1000)

    assert node.is_on(key) or (key in left(node) and not ends)
    if is_held and not ends and not node.is_on(key):
        node.world.processes.table.pop(300)
        node.world.run(1000)
    elif not is_held:
        assert not left(node)
    node.until(lambda: node.is_on(key) or not ends, "who ends has its channels on")
