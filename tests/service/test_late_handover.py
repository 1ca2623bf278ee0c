"""Channels that the driver would not run when they left the gate, and a valved that ends before it does."""

from __future__ import annotations

import pytest
from node_world import World

from valved.abi.link import LinkType, Note, NoteMessage
from valved.state import saved as state


@pytest.fixture
def world(tmp_path):
    return World(tmp_path)


def saved_channels(world):
    world.handover.save()
    saved, problem = state.load(world.folder / "state.json")
    assert not problem
    return {(client.pid, channel.h_client) for client in saved.clients for channel in client.channels}


def test_a_late_channel_whose_process_lives_is_never_missing_from_the_file_of_a_successor(world):
    """The native gate forgets what is late when it ends; who lives stands in the books all the same."""
    given_up, left = world.offline(pid=300), world.offline(pid=301)
    world.online(pid=200)
    mps = NoteMessage(code=int(Note.MPS), h_client=0, h_channel=0, text="an MPS object was allocated")
    world.register.handle(given_up, world.packet(LinkType.NOTE, mps), [])
    world.register.leave(left, "its link broke")

    assert saved_channels(world) == {(300, 0xC1D00000 + given_up), (301, 0xC1D00000 + left)}
