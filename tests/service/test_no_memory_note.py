"""What a service is told to its operator that finds no device memory."""

from __future__ import annotations

import pytest
from node_world import World

from valved.abi.link import LinkType, Note, NoteMessage


@pytest.fixture
def world(tmp_path):
    return World(tmp_path)


def test_a_service_that_finds_no_memory_beside_offline_work_never_fails_in_silence(world):
    online = world.online(gpus=())
    note = NoteMessage(code=int(Note.NO_MEMORY), h_client=0, h_channel=0, text="an allocation failed")
    world.register.handle(online, world.packet(LinkType.NOTE, note), [])
    assert not world.books.clients[online].notes, "its own doing"

    world.offline(pid=300)
    world.register.handle(online, world.packet(LinkType.NOTE, note), [])

    (told,) = next(client for client in world.node.status().clients if client.id == online).notes
    assert "start services first" in told
