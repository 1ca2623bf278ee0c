"""Everything that a process on the link can say, in random order, beside an online service that must not notice.

`make attack` says more of it. A failure names its seed: ATTACK_SEED=... repeats it.
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
import struct
import threading

from node_rig import Online, service
from stranger import Stranger

from valved.abi import link
from valved.abi.link import ABI, MAGIC, LinkType, packet_bytes

HEADER = struct.Struct("<IHHIIQ")
ROUNDS = int(os.environ.get("ATTACK_ROUNDS", "0"))  # 0: `make test`, which says the same each time
SEED = int(os.environ.get("ATTACK_SEED", "0")) or (random.SystemRandom().randrange(1 << 32) if ROUNDS else 1)
ROUNDS = ROUNDS or 12
ATTACKERS = 4
TYPES = [*link.CODECS, 0, 11, 99, 0xFFFF]
CORNERS = (0, 1, 2, 7, 255, 4096, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0xC1D00000, 0xC1D00001, 0xCAF00001, 0x5C000010)
DESCRIPTORS = ("none", "none", "none", "event", "memory", "pipe", "socket", "null", "folder", "many")


class Attacker(threading.Thread):
    """Says one thing after another; whoever is thrown out comes back."""

    def __init__(self, node, seed, known, ending):
        super().__init__(daemon=True)
        self._node, self._random, self._known, self._ending = node, random.Random(seed), known, ending
        self.said = self.thrown_out = 0

    def run(self):
        stranger = None
        while not self._ending.is_set():
            try:
                stranger = stranger or Stranger(self._node)
                stranger.sock.setblocking(False)
                self._say(stranger.sock)
                with contextlib.suppress(BlockingIOError):
                    while stranger.sock.recv(4096):
                        pass
                    raise ConnectionResetError
            except BlockingIOError:
                self._ending.wait(0.001)
            except (OSError, AssertionError, link.Malformed, TypeError):
                self.thrown_out += 1
                if stranger is not None:
                    stranger.sock.close()
                stranger = None
        if stranger is not None:
            stranger.sock.close()

    def _say(self, sock):
        kind = self._random.choice(TYPES)
        size = packet_bytes(LinkType(kind)) if kind in link.CODECS else self._random.choice([24, 32, 72])
        words = [self._word() for _ in range((size - HEADER.size) // 4)]
        stated = size if self._random.random() < 0.97 else self._random.choice([0, 24, size - 1, 0xFFFFFFFF])
        magic = MAGIC if self._random.random() < 0.98 else self._word()
        body = struct.pack(f"<{len(words)}I", *words).ljust(size - HEADER.size, b"\0")
        packet = HEADER.pack(magic, ABI, kind, stated, self._word(), 0) + body
        fds = self._descriptors(kind)
        try:
            with contextlib.suppress(PermissionError):
                socket.send_fds(sock, [packet], fds) if fds else sock.send(packet)
            self.said += 1
        finally:
            for fd in fds:
                os.close(fd)

    def _word(self):
        return self._random.choice([*CORNERS, *self._known, self._random.getrandbits(32)])

    def _descriptors(self, kind):
        chosen = self._random.choice(DESCRIPTORS)
        if chosen == "event":
            return [os.eventfd(0)]
        if chosen == "memory":
            return [os.memfd_create("x")]
        if chosen == "pipe":
            return list(os.pipe())
        if chosen == "socket":
            one, other = socket.socketpair()
            other.close()
            return [one.detach()]
        if chosen == "null":
            return [os.open(os.devnull, os.O_RDWR)]
        if chosen == "folder":
            return [os.open("/", os.O_RDONLY)]
        if chosen == "many" and self._random.random() < 0.2:
            return [os.eventfd(0) for _ in range(self._random.choice([64, 253]))]
        return []


def test_whatever_is_said_on_the_link_an_online_service_is_served(node):
    online = Online(node, "chat")
    online.wait_ready()
    online.launch(us=100)
    state = node.emulator.state()
    known = sorted({word for c in state.channels for word in (c.h_client, c.h_channel, c.cid, c.tsg)})
    ending = threading.Event()
    attackers = [Attacker(node, SEED + number, known, ending) for number in range(ATTACKERS)]
    for attacker in attackers:
        attacker.start()

    for _ in range(ROUNDS):
        before, launched, done = online.launch(us=2_000)
        assert before < launched < done, f"ATTACK_SEED={SEED}"
        assert not node.emulator.state().disabled, f"ATTACK_SEED={SEED}"
        Stranger(node).sock.close()  # is welcomed beside them
    node.wait_for(lambda: all(attacker.said > 20 * ROUNDS for attacker in attackers), "the attack was one")
    ending.set()
    for attacker in attackers:
        attacker.join()

    said, out = sum(a.said for a in attackers), sum(a.thrown_out for a in attackers)
    print(f"seed {SEED}: {said} messages, thrown out {out} times")
    assert node.valved.poll() is None, f"ATTACK_SEED={SEED}"
    assert "Traceback" not in (node.folder / "valved.log").read_text(errors="replace"), f"ATTACK_SEED={SEED}"
    node.wait_for(lambda: len(node.status().clients) == 1, "the strangers are forgotten")
    assert service(node, "chat") is not None
    assert [gpu.channels for gpu in node.status().gpus] == [0]
    online.launch(us=100)
