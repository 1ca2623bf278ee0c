"""Channels that a predecessor left off, and that this valved cannot enable or a client comes back for in vain."""

from __future__ import annotations

import errno

import pytest
from node_world import World, successor

from valved.clients.leftovers import Leftovers
from valved.machine.ports import ArmResult, LeftOff
from valved.model.events import EventKind
from valved.model.ids import ChannelRef, GpuIndex, ProcessId, Reach


@pytest.fixture
def first(tmp_path):
    return World(tmp_path)


def test_a_leftover_that_no_valved_here_can_enable_never_bars_grants_for_ever(first):
    """It is kept for its process, its end and a valved that can."""
    first.offline(pid=300)
    second = successor(first)
    leftovers = second.register.channels.leftovers
    assert leftovers.bar_grants() == {0}

    second.gate.out_of_reach = True
    second.run(5000)

    assert len(leftovers) == 1
    assert not leftovers.bar_grants()
    assert len(successor(second).register.channels.leftovers) == 1


def test_a_leftover_never_bars_grants_on_another_gpu(first):
    first.offline(pid=300)
    second = successor(first)

    second.granting.refresh()

    assert second.gate.granting.grantable == {1}


@pytest.mark.parametrize("out_of_reach", [True, False])
def test_a_leftover_that_its_client_reports_and_no_rung_reaches_is_never_forgotten(first, out_of_reach):
    h_client = 0xC1D00000 + first.offline(pid=300)
    second = successor(first)
    second.gate.out_of_reach = out_of_reach
    second.gate.next_arm = ArmResult(status=0x1B, reach=Reach.NONE, want_fd=True, gated=False)

    client = second.hello(300).client
    second.add_channel(client, h_client=h_client)

    assert len(second.register.channels.leftovers) == int(out_of_reach)


def test_a_leftover_that_its_client_reports_to_a_driver_that_hangs_is_never_forgotten(first):
    """A plan has it by then, but no walk of it is due where the GPU runs."""
    h_client = 0xC1D00000 + first.offline(pid=300)
    second = successor(first)
    second.gate.next_arm = ArmResult(status=-errno.ETIMEDOUT, reach=Reach.CHANNEL_OWN, want_fd=False, gated=False)
    second.gate.enable_unless_held = lambda channel: LeftOff.HELD  # it is not even asked

    client = second.hello(300).client
    second.add_channel(client, h_client=h_client)

    assert [channel.h_client for channel in second.gate.foreign_enabled] == [h_client]


@pytest.mark.parametrize("compute", [True, False])
def test_a_copy_channel_that_is_owed_an_enable_never_bars_grants_for_as_long_as_a_service_holds(compute):
    """No plan stops one at the end of a grant, whoever enables it."""
    leftovers = Leftovers()
    channel = ChannelRef(gpu=GpuIndex(0), h_client=1, h_channel=2, cid=3, h_tsg=4, engine=1, compute=compute)

    leftovers.keep(channel, ProcessId(pid=300, start_time=1), LeftOff.HELD)

    assert len(leftovers) == 1
    assert leftovers.bar_grants() == ({0} if compute else set())


def test_a_client_that_came_back_is_never_said_to_have_stayed_away(first):
    """What it reports while the GPU is held is enabled once the GPU opens."""
    h_client = next(iter(first.books.clients[first.offline(pid=300)].channels))[0]
    second = successor(first)
    second.gate.enable_unless_held = lambda channel: LeftOff.HELD
    second.add_channel(second.hello(300).client, h_client=h_client, compute=False)
    second.gate.enable_unless_held = lambda channel: LeftOff.ENABLED

    second.handover.settle(patience_over=True)

    told = second.journal.recent(lambda event: event.kind is EventKind.ENABLED_LEFTOVER, 1)
    assert told
    assert "come back" not in told[0].reason
