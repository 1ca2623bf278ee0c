"""Many clients of one valved, without their engines: what a node with 100 online and 64 offline processes looks like.

Run under the emulated driver. Every client is a process of its own (forked, so they are cheap), claimed and welcomed as
a shim would be; offline ones own real channels of the emulated card. The parent keeps all online regions mapped and
plays their launches and watchers, so that a rate of edges can be set exactly.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import os
import signal
import socket
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from valve.v1 import node_pb2
from valve_tools.bench.region_pages import Page, control_page, fill_region, region_page, set_submitted

from valved.abi import link
from valved.abi.link import LinkType
from valved.cli.client import NodeClient
from valved.cli.run import start_time
from valved.model.ids import Role

PR_SET_PDEATHSIG = 1
SYS_MEMBARRIER, REGISTER_GLOBAL_EXPEDITED = 324, 1 << 2
WATCHING, IDLE = 1, 2  # enum valve_watcher
THREADS = 4  # of an engine that launch: slots that its shim has given out
BUSY_NS = 2_000_000  # one burst of GPU work
ROOT, DEVICE, SUBDEVICE, VASPACE, TSG, CHANNEL = 0x41, 0x80, 0x2080, 0x90F1, 0xA06C, 0xC86F
ALLOC = 0xC0000000 | 32 << 16 | 0x46 << 8 | 0x2B


@dataclass(slots=True, kw_only=True)
class Player:
    """One online client's pages and doorbell, and what its launching thread and watcher would remember."""

    control: Page
    region: Page
    doorbell: int
    submitted: int = 0
    rung_epoch: int = 0

    def launch(self) -> None:
        """shim/src/activity/activity.c in slow motion: count, read the word, ring once per open epoch."""
        self.submitted += 1
        set_submitted(self.region, 0, self.submitted)
        epoch = self.control["gate_epoch"]
        if epoch % 2 and epoch != self.rung_epoch:
            self.rung_epoch = epoch
            self.region["busy"] = 1
            self.region["watcher_state"] = WATCHING
            self.region["launch_ns"] = time.monotonic_ns()
            os.eventfd_write(self.doorbell, 1)

    def finish(self) -> None:
        """The watcher's proof, under its seqlock."""
        now_ns, seq = time.monotonic_ns(), self.region["idle_seq"]
        self.region["idle_seq"] = seq + 1
        self.region["idle_submitted"] = self.submitted
        self.region["idle_ns"] = now_ns
        self.region["watcher_ns"] = now_ns
        self.region["busy"] = 0
        self.region["watcher_state"] = IDLE
        self.region["idle_seq"] = seq + 2


class BenchCrowd:
    """Use as a context manager; its processes end with it."""

    def __init__(self, run_dir: Path, *, online: int, offline: int, channels: int, gpus: int) -> None:
        self._run_dir = run_dir
        self._sizes = (online, offline)
        self._channels = channels
        self._gpus = gpus
        self._children: list[tuple[int, socket.socket]] = []
        self.players: list[Player] = []

    def __enter__(self) -> BenchCrowd:
        online, offline = self._sizes
        work = [self._be_offline] * offline + [self._be_online] * online
        register_for_fences()  # its launches are the crowd's, and a fence of valved's reaches them here
        for number, be in enumerate(work):
            self._children.append(_fork(lambda sock, be=be, n=number: be(sock, n)))  # type: ignore[misc]
        connection = NodeClient(self._run_dir)  # gRPC only after the last fork
        for number, (pid, _) in enumerate(self._children):
            role = node_pb2.ROLE_OFFLINE if number < offline else node_pb2.ROLE_ONLINE
            request = node_pb2.LaunchRequest(pid=pid, start_time=start_time(pid), role=role, name=f"n{number}")
            connection.call(connection.stub.Launch, request)
        connection.close()
        for number, (_, sock) in enumerate(self._children):
            sock.send(b"go")
            data, fds, _, _ = socket.recv_fds(sock, 64, 4)
            if not data:
                raise RuntimeError(f"client {number} of the crowd died")
            if number >= offline:
                self.players.append(_player(fds))
        return self

    def __exit__(self, *_: object) -> None:
        for pid, sock in self._children:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            sock.close()

    def play(self, cycles_per_s: float, seconds: float) -> None:
        """Bursts of work, evenly over all players, in real time."""
        began = time.monotonic()
        step = 1.0 / cycles_per_s
        queue: list[tuple[float, int, int]] = [(began + step * n, n, 0) for n in range(int(cycles_per_s * seconds))]
        while queue:
            when, number, phase = heapq.heappop(queue)
            time.sleep(max(0.0, when - time.monotonic()))
            player = self.players[number % len(self.players)]
            if phase == 0:
                player.launch()
                heapq.heappush(queue, (when + BUSY_NS / 1e9, number, 1))
            else:
                player.finish()

    # What one child does

    def _be_online(self, parent: socket.socket, number: int) -> None:
        sock, fds = _welcome(self._run_dir, Role.ONLINE)
        _show_channels(sock, number % self._gpus, 1)
        socket.send_fds(parent, [b"up"], list(fds))
        parent.recv(1)

    def _be_offline(self, parent: socket.socket, number: int) -> None:
        gpu = number % self._gpus
        sock, _ = _welcome(self._run_dir, Role.OFFLINE)
        _show_channels(sock, gpu, self._channels)
        parent.send(b"up")
        parent.recv(1)


def _fork(be: Callable[[socket.socket], None]) -> tuple[int, socket.socket]:
    """A child that waits to be told to go, becomes a client, and sleeps."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if pid:
        theirs.close()
        return pid, ours
    try:
        ours.close()
        register_for_fences()
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # the bench may be killed: its processes end, too
        theirs.recv(64)
        be(theirs)
    finally:
        os._exit(1)


def register_for_fences() -> None:
    """As each shim does, so that valved's fence before a wake costs here what it costs there."""
    ctypes.CDLL(None).syscall(SYS_MEMBARRIER, REGISTER_GLOBAL_EXPEDITED, 0, 0)


def _player(fds: Sequence[int]) -> Player:
    control, region, doorbell, order = fds
    player = Player(control=control_page(control), region=region_page(region), doorbell=doorbell)
    fill_region(player.region, features=link.Feature.GAPS | link.Feature.PLAIN_COUNT)
    player.region["slot_count"] = THREADS
    player.finish()
    for fd in (control, region, order):
        os.close(fd)
    return player


def _welcome(run_dir: Path, role: Role) -> tuple[socket.socket, list[int]]:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.connect(str(run_dir / "link.sock"))
    features = link.Feature.GAPS
    hello = link.Hello(abi_min=1, abi_max=1, features=features, wanted_role=role, driver=0, build="crowd", comm="crowd")
    sock.send(link.build(LinkType.HELLO, hello, seq=1, sent_ns=0))
    data, fds, _, _ = socket.recv_fds(sock, link.MAX_PACKET, 4)
    if link.parse(data).type is not LinkType.WELCOME:
        raise RuntimeError(str(link.parse(data).body))
    return sock, fds


def _request(sock: socket.socket, kind: LinkType, body: link.Body) -> None:
    sock.send(link.build(kind, body, seq=2, sent_ns=0))
    answer = link.parse(sock.recv(link.MAX_PACKET)).body
    if not isinstance(answer, link.Ack) or answer.status:
        raise RuntimeError(f"{kind.name}: {answer}")


def _channel(gpu: int, h_client: int, h_channel: int, cid: int) -> link.Channel:
    return link.Channel(
        gpu_uuid=bytes(16),
        device_instance=gpu,
        h_client=h_client,
        h_channel=h_channel,
        cid=cid,
        h_tsg=4,
        engine=1,
        compute=True,
    )


def _show_channels(sock: socket.socket, gpu: int, count: int) -> None:
    """Channels of a group, behind the proof that they are this process's."""
    ctl, channels = _driver_channels(gpu, count)
    body = link.RmClient(
        gpu_uuid=bytes(16),
        device_instance=gpu,
        h_client=channels[0].h_client,
        h_device=1,
        h_subdevice=2,
        has_fd=True,
    )
    socket.send_fds(sock, [link.build(LinkType.RM_CLIENT, body, seq=1, sent_ns=0)], [ctl])
    for channel in channels:
        _request(sock, LinkType.CHANNEL_ADD, channel)


def _driver_channels(gpu: int, count: int) -> tuple[int, list[link.Channel]]:
    """One compute group with `count` channels, allocated as libcuda would (facts of the driver: proto/abi/nvrm.h), and
    the file that owns it.
    """
    ctl = os.open("/dev/nvidiactl", os.O_RDWR)
    os.open(f"/dev/nvidia{gpu}", os.O_RDWR)
    client, _ = _alloc(ctl, 0, 0, 0, ROOT, b"")
    _alloc(ctl, client, client, 1, DEVICE, struct.pack("<II", gpu, client) + bytes(48))
    _alloc(ctl, client, 1, 2, SUBDEVICE, bytes(4))
    _alloc(ctl, client, 1, 3, VASPACE, b"")
    _alloc(ctl, client, 1, 4, TSG, struct.pack("<IIIIB3x", 0, 0, 3, 1, 0))
    channels = []
    for number in range(count):
        params = bytearray(368)
        params[28:32] = struct.pack("<I", 3)
        handle, filled = _alloc(ctl, client, 4, 0x10 + number, CHANNEL, bytes(params))
        channels.append(_channel(gpu, client, handle, struct.unpack_from("<I", filled, 132)[0]))
    return ctl, channels


def _alloc(ctl: int, root: int, parent: int, handle: int, cls: int, params: bytes) -> tuple[int, bytes]:
    body = ctypes.create_string_buffer(params, max(1, len(params)))
    address = ctypes.addressof(body) if params else 0
    argument = bytearray(struct.pack("<IIIIQII", root, parent, handle, cls, address, 0, 0))
    fcntl.ioctl(ctl, ALLOC - (1 << 32) if ALLOC >= 1 << 31 else ALLOC, argument, True)
    status = struct.unpack_from("<I", argument, 28)[0]
    if status:
        raise RuntimeError(f"RM alloc of class {cls:#x}: status {status:#x}")
    return struct.unpack_from("<I", argument, 8)[0], body.raw
