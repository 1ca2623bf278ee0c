"""Bench hello: how long a fresh online process waits for its welcome, alone and beside processes that want it to wait.

Each sample is a process of its own, claimed just before. It asks a trivial server as well, so a row says how late the
machine itself was in the same seconds; how long valved's loop ran while it waited; and when valved sent the welcome,
for beside many processes the sample itself may wait for a core until it reads that.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import count
from pathlib import Path
from typing import NoReturn

from valve.v1 import node_pb2
from valve_tools.bench.row import Row, percentile, row_of
from valve_tools.demo.node import EmulatedNode
from valve_tools.hostile.link_ends import Attack, hello_of
from valve_tools.hostile.processes import ATTACKS
from valve_tools.hostile.threads import die_with_parent

from valved.abi import link
from valved.abi.link import LinkType
from valved.cli.client import NodeClient
from valved.cli.run import start_time
from valved.model.ids import Role

SAMPLES = 60
BUDGET_MS = 50.0  # the patience of a shim whose process is online
PAUSE_S = 0.02
WARM_S = 0.5
ANSWER = struct.Struct("5d")  # ms: the welcome was read, and sent; the trivial answer; valved's loop ran, and waited
WAIT = struct.pack("ll", 0, 10_000)  # WAIT_MS of the shim


def _forked(go: int, run: Callable[..., object], *arguments: object) -> int:
    """A child without the descriptor whose last close tells all of them to begin."""
    pid = os.fork()
    if pid:
        return pid
    try:
        die_with_parent()
        os.close(go)
        run(*arguments)
    finally:
        os._exit(1)


def _attack(path: str, attack: Attack, uid: int, depth: int, begin: int) -> NoReturn:
    for _ in range(depth):
        if pid := os.fork():
            os.waitpid(pid, 0)
            os._exit(0)
        die_with_parent()
    if uid and os.geteuid() == 0:
        os.setuid(uid)
        die_with_parent()
    os.read(begin, 1)  # until the other end is closed
    while True:
        with contextlib.suppress(OSError):
            attack(path)


# What is measured


def _loop_ns(valved: int) -> tuple[int, int]:
    """Of valved's first thread, which runs the loop: on a core, and waiting for one."""
    ran, waited, _ = Path(f"/proc/{valved}/task/{valved}/schedstat").read_text().split()
    return int(ran), int(waited)


def _ask(path: str, packet: bytes) -> tuple[float, int, bytes]:
    """How long the answer took, in ms, and when it began to ask: the wait in the kernel's queue, as a shim waits there
    (shim/src/link/link.c), is for valved."""
    began = time.monotonic_ns()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, WAIT)
        while sock.connect_ex(path):
            pass
        sock.send(packet)
        answer = sock.recv(link.MAX_PACKET)
        return (time.monotonic_ns() - began) / 1e6, began, answer


def _sample(run_dir: Path, valved: int, parent: socket.socket) -> None:
    parent.recv(1)
    trivial_ms, _, _ = _ask(str(run_dir / "trivial.sock"), b"x")
    before = _loop_ns(valved)
    hello_ms, began_ns, answer = _ask(str(run_dir / "link.sock"), hello_of(Role.ONLINE))
    ran, waited = (after - early for after, early in zip(_loop_ns(valved), before, strict=True))
    welcome = link.parse(answer)
    if welcome.type is not LinkType.WELCOME:
        raise RuntimeError(str(welcome.body))
    parent.send(ANSWER.pack(hello_ms, (welcome.sent_ns - began_ns) / 1e6, trivial_ms, ran / 1e6, waited / 1e6))
    parent.recv(1)


def _trivial(path: Path, ready: int) -> None:
    """An asyncio server that answers each packet."""
    loop = asyncio.new_event_loop()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(path))
    listener.listen()

    def answer(sock: socket.socket) -> None:
        if packet := sock.recv(64):
            sock.send(packet)
        else:
            loop.remove_reader(sock)
            sock.close()

    def accept() -> None:
        sock, _ = listener.accept()
        loop.add_reader(sock, answer, sock)

    loop.add_reader(listener, accept)
    os.write(ready, b"!")
    loop.run_forever()


def measure_main(run_dir: Path, valved: int, name: str) -> None:
    attack, processes, uid, depth = ATTACKS[name]
    path = str(run_dir / "link.sock")
    begin, go = os.pipe()
    told, ready = os.pipe()
    born = [_forked(go, _attack, path, attack, uid, depth, begin) for _ in range(processes)]
    born.append(_forked(go, _trivial, run_dir / "trivial.sock", ready))
    os.read(told, 1)
    innocents = []
    for _ in range(SAMPLES):
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        innocents.append((_forked(go, _sample, run_dir, valved, theirs), ours))
        theirs.close()
    client = NodeClient(run_dir)  # gRPC only after the last fork
    for number, (pid, _) in enumerate(innocents):
        role = node_pb2.ROLE_ONLINE
        claim = node_pb2.LaunchRequest(pid=pid, start_time=start_time(pid), role=role, name=f"n{number}")
        client.call(client.stub.Launch, claim)
    client.close()
    os.close(go)
    time.sleep(WARM_S)
    found = []
    for _, ours in innocents:
        ours.send(b"!")
        answer = ours.recv(ANSWER.size)
        if not answer:
            raise RuntimeError(f"beside {name}: a process was not welcomed")
        found.append(ANSWER.unpack(answer))
        time.sleep(PAUSE_S)
    for pid in (*born, *(pid for pid, _ in innocents)):
        os.kill(pid, signal.SIGKILL)
    (run_dir / "trivial.sock").unlink()
    print(json.dumps(found))


def _row(name: str, found: list[list[float]]) -> Row:
    hello, sent, trivial, ran, waited = (sorted(figures) for figures in zip(*found, strict=True))

    def words(ordered: list[float]) -> str:
        return "/".join(f"{percentile(ordered, q):.2g}" for q in (0.5, 0.99, 1.0))

    note = (
        f"p50/p99/max in ms: valved sent it after {words(sent)}; "
        f"its loop ran {words(ran)} of it and waited {words(waited)} for a core; "
        f"a trivial loop answered in {words(trivial)}; load {os.getloadavg()[0]:.1f}"
    )
    # The machine was late, not valved: the loop did little, or the sample waited for a core with its welcome unread.
    late = hello[-1] > BUDGET_MS and (ran[-1] < BUDGET_MS / 2 or sent[-1] < BUDGET_MS)
    return row_of("hello", f"beside {name}", "ms", hello, BUDGET_MS, judged="max", note=note, is_void=late)


def bench_hello() -> Iterator[Row]:
    with tempfile.TemporaryDirectory(prefix="valve-bench-") as folder, EmulatedNode(Path(folder)) as node:
        pid = node.start_valved().pid
        os.chmod(folder, 0o755)  # a user is among the hostile
        for number, name in zip(count(), ATTACKS):
            words = [sys.executable, "-m", "valve_tools.bench.hello", str(node.run_dir), str(pid), str(number)]
            done = subprocess.run(words, check=True, capture_output=True, text=True, start_new_session=True)
            yield _row(name, json.loads(done.stdout))


BENCHES: dict[str, Callable[[], Iterable[Row]]] = {"hello": bench_hello}

if __name__ == "__main__":
    measure_main(Path(sys.argv[1]), int(sys.argv[2]), list(ATTACKS)[int(sys.argv[3])])
