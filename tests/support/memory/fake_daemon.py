"""A tiny valved for the shim's tests: the link socket, the shared pages, and as much manners as a test asks for.

It speaks proto/abi/link.h and region.h by hand, so that a change of layout in C shows up here as a failing test.
"""

from __future__ import annotations

import array
import fcntl
import mmap
import os
import queue
import select
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Container, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from valved.clients.fetching import UNFETCHED, fetch, pidfd_of, split
from valved.machine.helpers import Closer

MAGIC, ABI = 0x4B4E4C56, 1
HEADER = struct.Struct("<IHHIIQ")
HELLO, WELCOME, REFUSED, ACK, RM_CLIENT, CHANNEL_ADD, CHANNEL_DEL, SCHEDULE_WAIT, NOTE, SCHEDULE_DONE = range(1, 11)
ENDING = 11
KV_RANGE, KV_RANGE_DEL, KV_HELD, KV_PIN, KV_ORDER, KV_DONE, KV_LAYOUT, KV_ATTACH, KV_TABLE, KV_NEED = range(16, 26)
KV_SCRATCH, KV_STEP, KV_RUNS = 26, 27, 28
NAMES = {
    HELLO: "HELLO",
    RM_CLIENT: "RM_CLIENT",
    CHANNEL_ADD: "CHANNEL_ADD",
    CHANNEL_DEL: "CHANNEL_DEL",
    SCHEDULE_WAIT: "SCHEDULE_WAIT",
    NOTE: "NOTE",
    SCHEDULE_DONE: "SCHEDULE_DONE",
    ENDING: "ENDING",
    KV_RANGE: "KV_RANGE",
    KV_RANGE_DEL: "KV_RANGE_DEL",
    KV_HELD: "KV_HELD",
    KV_PIN: "KV_PIN",
    KV_DONE: "KV_DONE",
    KV_LAYOUT: "KV_LAYOUT",
    KV_ATTACH: "KV_ATTACH",
    KV_NEED: "KV_NEED",
    KV_SCRATCH: "KV_SCRATCH",
    KV_STEP: "KV_STEP",
}
BODIES = {
    HELLO: struct.Struct("<HHIII32s16s"),
    RM_CLIENT: struct.Struct("<16sIIIIII"),
    CHANNEL_ADD: struct.Struct("<16sIIIIIIII"),
    CHANNEL_DEL: struct.Struct("<16sIIIIIIII"),
    SCHEDULE_WAIT: struct.Struct("<II"),
    NOTE: struct.Struct("<IIII96s"),
    SCHEDULE_DONE: struct.Struct("<II"),
    ENDING: struct.Struct("<II"),
    KV_RANGE: struct.Struct("<16sIIQQIIII"),
    KV_RANGE_DEL: struct.Struct("<IIQQ"),
    KV_HELD: struct.Struct("<QIHHII1024s"),
    KV_PIN: struct.Struct("<IIQQ"),
    KV_DONE: struct.Struct("<QIIII"),
    KV_LAYOUT: struct.Struct("<6I8I1152s"),
    KV_ATTACH: struct.Struct("<HHIIIIIII48s"),
    KV_NEED: struct.Struct("<II"),
    KV_SCRATCH: struct.Struct("<16sIIQQ"),
    KV_STEP: struct.Struct("<II"),
}
FIELDS = {
    HELLO: "abi_min abi_max features wanted_role driver build comm",
    RM_CLIENT: "gpu_uuid device_instance h_client h_device h_subdevice has_fd pad0",
    CHANNEL_ADD: "gpu_uuid device_instance h_client h_channel cid h_tsg engine compute pad0",
    CHANNEL_DEL: "gpu_uuid device_instance h_client h_channel cid h_tsg engine compute pad0",
    SCHEDULE_WAIT: "h_client h_object",
    NOTE: "code h_client h_channel pad0 text",
    SCHEDULE_DONE: "h_client h_object",
    ENDING: "signal pad0",
    KV_RANGE: "gpu_uuid device_instance range base handle_bytes slots flags held pad0",
    KV_RANGE_DEL: "range pad0 offset bytes",
    KV_HELD: "order range op how count pad0 entry",
    KV_PIN: "range pad0 offset bytes",
    KV_DONE: "order done status cu_result pad0",
    KV_LAYOUT: "blocks block_tokens total first count pinned_count p0 p1 p2 p3 p4 p5 p6 p7 tensor",
    KV_ATTACH: "abi_min abi_max mode blocks block_tokens rows row_blocks ranks pad0 engine",
    KV_NEED: "wanted_blocks pad0",
    KV_SCRATCH: "gpu_uuid device_instance place base bytes",
    KV_STEP: "range pad0",
}
ONLINE, OFFLINE = 1, 2
RUN, STOP, HOLD = 0, 1, 2
PAGE, SLOTS = 4096, 256
CONTROL_BYTES, REGION_BYTES = PAGE, PAGE + SLOTS * 64 + PAGE
CONTROL_MAGIC, REGION_MAGIC = 0x314C5443564C4156, 0x314E4752564C4156
F_ADD_SEALS, F_SEAL_SHRINK, F_SEAL_GROW, F_SEAL_FUTURE_WRITE = 1033, 2, 4, 16
FEATURE_SCHEDULE_DONE, FEATURE_PLAIN_COUNT, FEATURE_MEMORY, FEATURE_SPARSE, FEATURE_KV_STEP, FEATURE_KV_FREE = (
    16,
    32,
    64,
    128,
    256,
    512,
)
FEATURE_KEEP_STOP = 1 << 12
FEATURE_FETCH = 1 << 15
FEATURE_ENDING = 1 << 16
NOTE_INCOMPLETE, NOTE_APP_DISABLED, NOTE_APP_ENABLED, NOTE_UNKNOWN_DRIVER, NOTE_UNKNOWN_SUBMIT, NOTE_MPS = range(1, 7)
LONG_S = 200.0  # no test waits that long for something that happens

CONTROL_WORDS = {
    "gate_epoch": ("<I", 64),
    "heartbeat_ns": ("<Q", 128),
    "lease_ns": ("<Q", 136),
    "online_registered": ("<I", 144),
    "watch": ("<I", 148),
    "order": ("<I", 152),
    "order_seq": ("<I", 156),
    "draining": ("<I", 160),
    "quiet_us": ("<I", 164),
    "kv_handle_bytes": ("<Q", 192),
    "kv_budget_bytes": ("<Q", 200),
    "kv_size_rule": ("<Q", 208),
    "run_until_0": ("<Q", 1280 + 64),
    "run_until_3": ("<Q", 1280 + 64 + 24),
}
REGION_WORDS = {
    "magic": ("<Q", 0),
    "abi": ("<I", 8),
    "bytes": ("<I", 12),
    "features": ("<I", 16),
    "slot_count": ("<I", 20),
    "pid": ("<I", 36),
    "busy": ("<I", 64),
    "rung_epoch": ("<I", 68),
    "launch_ns": ("<Q", 72),
    "rings": ("<Q", 80),
    "idle_submitted": ("<Q", 128),
    "idle_ns": ("<Q", 136),
    "watcher_ns": ("<Q", 144),
    "idle_seq": ("<I", 152),
    "watcher_state": ("<I", 156),
    "gaps": ("<Q", 160),
    "probes": ("<Q", 168),
    "capture_depth": ("<I", 192),
    "order_done": ("<I", 256),
    "order_status": ("<I", 260),
    "order_ns": ("<Q", 264),
    "self_stops": ("<Q", 272),
    "open_requests": ("<I", 320),
    "hint_ns": ("<Q", 328),
    "until_claim": ("<Q", 416),
    "until_done": ("<Q", 424),
}


def until(what: Callable[[], object], why: str = "") -> object:
    """Waits for a condition, generously: the deadline only ends a hung test."""
    deadline = time.monotonic() + LONG_S
    while not (value := what()):
        assert time.monotonic() < deadline, f"never happened: {why or what}"
        time.sleep(0.001)
    return value


def mask(pid: int, name: str) -> set[signal.Signals]:
    """Of /proc/PID/status: the signals that a process catches (SigCgt), ignores (SigIgn)."""
    lines = dict(line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    bits = int(lines[name], 16)
    return {number for number in signal.Signals if bits >> (number - 1) & 1}


def obey(client: Client, order: int) -> None:
    """Gives an order and waits until the shim has obeyed it."""
    seq = client.give_order(order)
    until(lambda: client.region.order_done == seq, "obeyed")


def drain(inbox: queue.Queue[Message]) -> list[Message]:
    found = []
    with suppress(queue.Empty):
        while True:
            found.append(inbox.get_nowait())
    return found


@dataclass(frozen=True)
class Message:
    type: int
    seq: int
    fields: dict[str, int | bytes]
    fds: tuple[int, ...]

    def __getattr__(self, name: str) -> int | bytes:
        try:
            return self.fields[name]
        except KeyError:
            raise AttributeError(name) from None

    def close(self) -> None:
        """The descriptors that came with it, unless somebody took them."""
        for fd in self.fds:
            with suppress(OSError):
                os.close(fd)
        object.__setattr__(self, "fds", ())

    def take_fds(self) -> tuple[int, ...]:
        fds = self.fds
        object.__setattr__(self, "fds", ())
        return fds

    @property
    def name(self) -> str:
        return NAMES.get(self.type, f"type {self.type}")


class Words:
    """A shared page by field names."""

    def __init__(self, memory: mmap.mmap, words: dict[str, tuple[str, int]]) -> None:
        object.__setattr__(self, "memory", memory)
        object.__setattr__(self, "words", words)

    def __getattr__(self, name: str) -> int:
        form, at = self.words[name]
        return struct.unpack_from(form, self.memory, at)[0]

    def __setattr__(self, name: str, value: int) -> None:
        form, at = self.words[name]
        self.memory[at : at + struct.calcsize(form)] = struct.pack(form, value)


@dataclass
class Client:
    """One connection, as valved sees it."""

    link: socket.socket
    role: int
    lease_ns: int
    words: dict[str, int] = field(default_factory=dict)  # of the control page, from the start
    inbox: queue.Queue[Message] = field(default_factory=queue.Queue)
    seen: list[Message] = field(default_factory=list)
    lent: list[int] = field(default_factory=list)  # types of messages whose descriptors came by number
    gone: threading.Event = field(default_factory=threading.Event)
    hello: Message | None = None

    def make_pages(self) -> list[int]:
        control_fd = os.memfd_create("control", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
        region_fd = os.memfd_create("region", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
        os.ftruncate(control_fd, CONTROL_BYTES)
        os.ftruncate(region_fd, REGION_BYTES)
        page = mmap.mmap(control_fd, CONTROL_BYTES)
        head = struct.pack("<QIIIIQ", CONTROL_MAGIC, ABI, CONTROL_BYTES, FEATURE_SCHEDULE_DONE, self.role, 7)
        page[: len(head)] = head
        fcntl.fcntl(control_fd, F_ADD_SEALS, F_SEAL_FUTURE_WRITE | F_SEAL_SHRINK | F_SEAL_GROW)
        fcntl.fcntl(region_fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW)
        self.control = Words(page, CONTROL_WORDS)
        self.control.lease_ns = self.lease_ns
        self.control.heartbeat_ns = time.monotonic_ns()
        for name, value in self.words.items():
            setattr(self.control, name, value)
        self.region_memory = mmap.mmap(region_fd, REGION_BYTES)
        self.region = Words(self.region_memory, REGION_WORDS)
        self.doorbell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.order_bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        return [control_fd, region_fd, self.doorbell, self.order_bell]

    def discard(self) -> None:
        """Gives back descriptors and pages; nothing can be read any more."""
        self.link.close()
        for message in [*self.seen, *drain(self.inbox)]:
            message.close()
        if "region_memory" not in self.__dict__:
            return
        self.control.memory.close()
        self.region_memory.close()
        os.close(self.doorbell)
        os.close(self.order_bell)
        del self.region_memory

    # -- what a test reads --

    def has_begun_or_gone(self) -> bool:
        return bool(self.region.magic) or self.gone.is_set()

    def slots(self) -> list[tuple[int, int]]:
        """(tid, submitted) of each claimed slot, as far as valved looks."""
        found = []
        for index in range(self.region.slot_count):
            submitted, tid = struct.unpack_from("<QI", self.region_memory, PAGE + index * 64)
            if tid or submitted:
                found.append((tid, submitted))
        return found

    def submitted(self) -> int:
        return sum(count for _, count in self.slots())

    def gaps(self) -> list[tuple[int, int]]:
        """(end_ns, gap_ns), oldest first; no test makes more than the ring holds."""
        at = PAGE + SLOTS * 64
        return [struct.unpack_from("<QQ", self.region_memory, at + 16 * i) for i in range(self.region.gaps)]

    def bells(self) -> int:
        """Doorbell writes since the last look."""
        with suppress(BlockingIOError):
            return os.eventfd_read(self.doorbell)
        return 0

    def expect(self, kind: int, **wanted: int | bytes) -> Message:
        """The next message of this kind, which must have these fields; others before it are kept in `seen`."""
        while True:
            message = self.inbox.get(timeout=LONG_S)
            self.seen.append(message)
            if message.type != kind:
                continue
            got = {name: message.fields[name] for name in wanted}
            assert wanted == got
            return message

    def has_said(self, kind: int) -> bool:
        with self.inbox.mutex:
            return any(message.type == kind for message in [*self.seen, *self.inbox.queue])

    def none_of(self, kind: int) -> bool:
        self.seen += drain(self.inbox)
        return all(message.type != kind for message in self.seen)

    # -- what a test does --

    def gate(self, epoch: int) -> None:
        self.control.gate_epoch = epoch

    def give_order(self, order: int) -> int:
        self.control.order = order
        self.control.order_seq = seq = self.control.order_seq + 1
        os.eventfd_write(self.order_bell, 1)
        return seq

    def send(self, kind: int, seq: int, body: bytes, fds: list[int] | None = None) -> None:
        header = HEADER.pack(MAGIC, ABI, kind, HEADER.size + len(body), seq, time.monotonic_ns())
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        with suppress(OSError):
            self.link.sendmsg([header + body], rights)

    def ack(self, message: Message, status: int = 0, want_fd: int = 0) -> None:
        self.send(ACK, message.seq, struct.pack("<II", status, want_fd))


class FakeDaemon:
    """Accepts clients and answers as told. `on_message` returns True when it answered itself."""

    def __init__(
        self,
        folder: Path,
        role: int = ONLINE,
        words: dict[str, int] | None = None,
        more: int = 0,
        on_message: Callable[[Client, Message], bool] | None = None,
    ) -> None:
        self.role = role
        self.lease_ns = 10**15  # long: a test that is about the lease sets its own
        self.refusal: int | None = None
        self.silent = False
        self.unfetched: Container[int] = ()  # types of messages of which nothing lent can be had
        self.features = FEATURE_SCHEDULE_DONE | FEATURE_PLAIN_COUNT | more
        self.words = dict(words or {})  # of every client's control page
        self.on_hello: Callable[[Client, Message], bool] | None = None
        self.on_message = on_message
        self.clients: queue.Queue[Client] = queue.Queue()
        self.alive: list[Client] = []
        self.serving: list[threading.Thread] = []
        self.path = folder / "link.sock"
        with suppress(FileNotFoundError):
            self.path.unlink()
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        self.listener.bind(str(self.path))
        self.listener.listen(16)
        self.stop_r, self.stop_w = os.pipe()
        self.thread = threading.Thread(target=self._accept, daemon=True)
        self.thread.start()

    def client(self) -> Client:
        """The next client that was welcomed and has taken its region. One that gave up waiting (a loaded machine is
        slower than the 50 ms of an online start) is passed over: it comes again."""
        while True:
            client = self.clients.get(timeout=LONG_S)
            until(client.has_begun_or_gone, "the region is filled")
            if client.region.magic:
                return client

    def has_another(self) -> bool:
        """A client came after the last that `client` gave. One that gave up waiting, also earlier, took no region."""
        return any(client.region.magic for client in list(self.clients.queue))

    def close(self) -> None:
        """As if valved had been killed: every socket goes, no word is written."""
        os.write(self.stop_w, b"x")
        self.thread.join()
        os.close(self.stop_r)
        os.close(self.stop_w)
        self.listener.close()
        with suppress(FileNotFoundError):
            self.path.unlink()
        for client in self.alive:
            with suppress(OSError):
                client.link.shutdown(socket.SHUT_RDWR)
            client.link.close()

    def end_lease(self, client: Client) -> None:
        """Killed, and its lease is short. In this order: a process that found the lease over under a daemon that still
        listens would come back to it, and have a long one."""
        self.close()
        client.control.lease_ns = 50_000_000

    def discard(self) -> None:
        if self.thread.is_alive():
            self.close()
        for thread in self.serving:
            thread.join(LONG_S)  # it may be making the pages of one that has gone
        for client in self.alive:
            client.discard()

    def _accept(self) -> None:
        waiting = select.poll()  # not select(): it fails for descriptors from 1024 on
        waiting.register(self.listener, select.POLLIN)
        waiting.register(self.stop_r, select.POLLIN)
        while True:
            if self.stop_r in {fd for fd, _ in waiting.poll()}:
                return
            link, _ = self.listener.accept()
            client = Client(link=link, role=self.role, lease_ns=self.lease_ns, words=dict(self.words))
            self.alive.append(client)
            self.serving.append(threading.Thread(target=self._serve, args=(client,), daemon=True))
            self.serving[-1].start()

    def _serve(self, client: Client) -> None:
        for message in _messages(client, self.unfetched):
            if message.type == HELLO:
                client.hello = message
                self._greet(client, message)
                continue
            for fd in message.fds if message.type == RM_CLIENT else ():  # valved closes it, too
                null = os.open(os.devnull, os.O_RDWR)
                os.dup2(null, fd, inheritable=False)
                os.close(null)
            client.inbox.put(message)
            if self.on_message and self.on_message(client, message):
                continue
            if message.type in {RM_CLIENT, CHANNEL_ADD, SCHEDULE_WAIT} and not self.silent:
                client.ack(message)
        client.gone.set()

    def _greet(self, client: Client, hello: Message) -> None:
        if self.on_hello and self.on_hello(client, hello):
            return
        if self.silent:
            return
        if self.refusal is not None:
            client.send(REFUSED, hello.seq, struct.pack("<IHH96s", self.refusal, 1, 1, b"no"))
            return
        self.welcome(client, hello)

    def welcome(self, client: Client, hello: Message) -> None:
        fds = client.make_pages()
        body = struct.pack("<HHIQQII", ABI, self.role, self.features, 7, len(self.alive), CONTROL_BYTES, REGION_BYTES)
        self.clients.put(client)  # first: who has ended by the time that we go on was welcomed all the same
        client.send(WELCOME, hello.seq, body, fds)
        os.close(fds[0])
        os.close(fds[1])


def _messages(client: Client, unfetched: Container[int]) -> Iterator[Message]:
    while True:
        try:
            data, fds, _, _ = socket.recv_fds(client.link, 2048, 64)
        except OSError:
            return
        if not data:
            return
        data, lent = split(data)
        magic, _, kind, length, seq, _ = HEADER.unpack_from(data)
        assert (magic, length) == (MAGIC, len(data))
        values = BODIES[kind].unpack_from(data, HEADER.size)
        message = Message(kind, seq, dict(zip(FIELDS[kind].split(), values, strict=True)), tuple(fds))
        if lent is not None:
            client.lent.append(kind)
            if kind in unfetched:
                client.ack(message, UNFETCHED)
                continue
            fds = fetch(pidfd_of(client.link), lent, Closer())
            message = Message(kind, seq, message.fields, tuple(fds))
            if kind == KV_DONE:
                client.ack(message)
        yield message
