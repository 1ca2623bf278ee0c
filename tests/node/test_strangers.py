"""A process that reaches the link and has no GPU, beside an online service: whatever it says, the service is served."""

from __future__ import annotations

import array
import errno
import itertools
import os
import socket
from dataclasses import replace

from node_rig import Offline, Online, service

from valved.abi.link import Ack, Channel, Hello, LinkType, RmClient, Welcome, build, parse
from valved.model.ids import Role

PATIENCE_S = 200.0  # ends only a hung test


class Stranger:
    """An unclaimed process of this machine with a link of its own and nothing else."""

    def __init__(self, node):
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.sock.settimeout(PATIENCE_S)
        self.sock.connect(str(node.run_dir / "link.sock"))
        self._seq = itertools.count(2)
        role = int(Role.OFFLINE)
        hello = Hello(abi_min=1, abi_max=1, features=0xFFFF, wanted_role=role, driver=0, build="x", comm="x")
        self.sock.send(build(LinkType.HELLO, hello, seq=1, sent_ns=0))
        packet, fds = self.hear()
        assert isinstance(packet.body, Welcome)
        for fd in fds:
            os.close(fd)

    def hear(self):
        data, fds, _, _ = socket.recv_fds(self.sock, 2048, 8)
        return parse(data), fds

    def say(self, kind, body, fds=()):
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        seq = next(self._seq)
        self.sock.sendmsg([build(kind, body, seq=seq, sent_ns=0)], rights)
        return seq

    def answers(self, seqs):
        """What valved said to each."""
        found = {}
        while not seqs <= found.keys():
            packet, _ = self.hear()
            if isinstance(packet.body, Ack):
                found[packet.seq] = packet.body.status
        return [found[seq] for seq in sorted(seqs)]


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
    offline, online = Offline(node, "batch"), Online(node, "chat")
    online.wait_ready()
    offline.wait_running()

    online.launch(us=100)
    offline.wait_stopped()
    offline.wait_running()

    assert service(node, "chat").preemptions
    stranger.sock.close()
