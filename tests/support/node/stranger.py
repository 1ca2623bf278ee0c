"""A process on the link with nothing but the link: what hostile neighbours are played with."""

from __future__ import annotations

import array
import itertools
import os
import socket

from valved.abi.link import Ack, Hello, LinkType, Welcome, build, parse
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
