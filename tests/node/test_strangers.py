"""A process that reaches the link and has no GPU, beside an online service: whatever it says, the service is served."""

from __future__ import annotations

import errno
import os

from msgspec.structs import replace
from node_rig import Online, service, settled
from stranger import Stranger

from valved.abi.link import Channel, LinkType, RmClient


def channel_of(channel, cid=0):
    return Channel(
        gpu_uuid=bytes(16),
        device_instance=channel.gpu,
        h_client=channel.h_client,
        h_channel=channel.h_channel,
        cid=cid,
        h_tsg=channel.tsg,
        engine=channel.engine,
        compute=True,
    )


def test_a_stranger_never_stops_the_channels_of_an_online_service(node):
    """It names each of them, with numbers it cannot have and with files that are not theirs."""
    online = Online(node, "chat")
    online.wait_ready()
    online.launch(us=100)
    theirs = [channel for channel in node.emulator.state().channels if channel.is_compute]
    assert theirs
    stranger = Stranger(node)
    fd = os.eventfd(0)
    for h_client in {channel.h_client for channel in theirs}:
        body = RmClient(
            gpu_uuid=bytes(16),
            device_instance=0,
            h_client=h_client,
            h_device=0x5C000001,
            h_subdevice=0x5C000002,
            has_fd=True,
        )
        stranger.say(LinkType.RM_CLIENT, body, [fd])
    said = {stranger.say(LinkType.CHANNEL_ADD, channel_of(c, cid)) for c in theirs for cid in (0, c.cid)}
    nobodys = stranger.say(LinkType.CHANNEL_ADD, replace(channel_of(theirs[0]), h_channel=0xDEAD))

    before, launched, done = online.launch(us=20_000)

    assert before < launched < done
    assert set(stranger.answers(said | {nobodys})) == {errno.EOPNOTSUPP}
    assert not node.emulator.state().disabled
    assert [gpu.channels for gpu in node.status().gpus] == [0]  # in no book
    online.launch(us=100)
    stranger.sock.close()
    os.close(fd)


def test_an_honest_job_is_gated_beside_a_stranger(node):
    stranger = Stranger(node)
    offline, online = settled(node)

    online.launch(us=100)
    offline.wait_stopped()
    offline.wait_running()

    node.wait_for(lambda: service(node, "chat").preemptions, "the stop is counted")
    stranger.sock.close()
