"""The connection of this process to valved: one thread that connects, registers, renews and reconnects.

The engine's own threads never wait for valved. They leave what they want to say (`attach`, `register_layout`) and
pick up what has come (`session`, `region`); both survive a restart of valved, which gives a new session. Without a
daemon the thread looks for one every two seconds and nothing else happens.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import logging
import os
import struct
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from valve_hook import VERSION, wire
from valve_hook.grant_page import GrantPage
from valve_hook.packets import NoDaemon, NotYet, Packets, bring_table, close, refusal
from valve_hook.sessions import Session, Sessions
from valve_hook.shared import Bell, Book, Foreign, Lifecycle, Region, Table
from valve_hook.shim import kv_ranges, may_have_holes, shim_call

log = logging.getLogger("valve")
ENV_RUN_DIR = "VALVE_RUN_DIR"
ENV_ROLE = "VALVE_ROLE"  # what `valve run` was asked for: a hint how long to wait, nothing else
RETRY_S = 2.0
AGAIN_S = 60.0  # until what was refused, a layout or an engine for which there is no room, is told again
LOOK_S = 0.1
GONE_S = 30.0  # so long a first step waits for a valved that is being started again, or for its ranks
UNMET_S = 5.0  # and for one that this process never met, where its ranks might have: a restart takes two seconds
OFFLINE_GONE_S = 90.0  # nobody waits for an answer; and after memory.attach_s (60 s) its cache is backed, hook or not
RENEW_S = 0.2  # a fifth of the default lease; the control page says what holds here


@dataclass(frozen=True, slots=True, kw_only=True)
class Attach:
    """What the scheduler's hook asks for."""

    engine: str
    mode: wire.Mode
    blocks: int
    block_tokens: int
    rows: int
    row_blocks: int
    ranks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """`struct valve_kv_tensor`: block b stands at base + sum(i_k * stride_k) + b * block_stride."""

    base: int
    block_stride: int
    block_bytes: int
    repeats: Sequence[tuple[int, int]] = ()  # (count, stride), three at most


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockLayout:
    """Where this rank's blocks lie."""

    blocks: int
    block_tokens: int
    tensors: Sequence[Tensor]
    pinned: Sequence[int] = (0,)  # null and padding blocks: never taken

    def bodies(self) -> list[bytes]:
        groups = [self.tensors[at : at + wire.KV_TENSORS] for at in range(0, len(self.tensors), wire.KV_TENSORS)]
        pinned = [*self.pinned[: wire.KV_PINNED], *[0] * (wire.KV_PINNED - len(self.pinned))]
        return [
            wire.KV_LAYOUT.pack(
                self.blocks,
                self.block_tokens,
                len(self.tensors),
                number * wire.KV_TENSORS,
                len(group),
                min(len(self.pinned), wire.KV_PINNED),
                *pinned,
            )
            + b"".join(_tensor_bytes(tensor) for tensor in group).ljust(wire.KV_TENSORS * wire.KV_TENSOR.size, b"\0")
            for number, group in enumerate(groups)
        ]


def _tensor_bytes(tensor: Tensor) -> bytes:
    repeats = [*tensor.repeats, *[(0, 0)] * (3 - len(tensor.repeats))]
    return wire.KV_TENSOR.pack(
        tensor.base, tensor.block_stride, tensor.block_bytes, *(number for pair in repeats for number in pair)
    )


def socket_path() -> Path | None:
    """The order of the shim: VALVE_RUN_DIR, /run/valve, the user's run folder. None: there is no valved here."""
    asked = os.environ.get(ENV_RUN_DIR)
    if asked:
        return Path(asked, "link.sock")
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    places = [Path("/run/valve"), *([Path(runtime, "valve")] if runtime else [])]
    return next((place / "link.sock" for place in places if (place / "link.sock").exists()), None)


@dataclass(slots=True, kw_only=True)
class Link:
    """Call `start` once; then leave wishes and look at `session` and `region` whenever it suits."""

    build: str
    path: Path
    retry_s: float = RETRY_S
    gone_s: float = GONE_S
    unmet_s: float = UNMET_S
    is_offline: bool = True
    is_preloaded: bool = True  # the shim is here: the engine's cache may have no memory yet
    ranges: Callable[[], int | None] = kv_ranges
    lifecycle: Lifecycle = field(default_factory=Lifecycle)
    grant: GrantPage | None = None  # while there is a connection
    session: Session | None = None  # the newest
    sessions: Sessions = field(default_factory=Sessions)
    role: int = 0
    said: str = ""  # why there is no session; for people
    owner: weakref.ref[object] | None = None  # whose wishes these are
    wanted: Attach | None = None
    layout: BlockLayout | None = None
    told_mode: Callable[[], wire.Mode | None] | None = None  # the hook's now; it may be lower than was wanted
    on_tick: Callable[[], None] | None = None  # called by the thread now and then, while there is a connection
    connections: int = 0
    _packets: Packets | None = None  # while there is a connection
    _told: tuple[object, object] = (None, None)
    _renew_s: float = RENEW_S
    _has_memory: bool = False
    _brings_table: bool = False
    _again_at: float | None = None  # when to tell again what was refused
    _refused: BlockLayout | None = None  # and said so, once
    _has_failed: bool = False  # and said so, once
    _is_waiting: bool = False  # somebody waits for `_answered`
    _poke: threading.Event = field(default_factory=threading.Event)
    _answered: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)  # of wishes, and of what answers them
    _stop: bool = False
    _thread: threading.Thread | None = None

    def start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="valve-hook", daemon=True)
            self._thread.start()

    def propose(self, wanted: Attach) -> None:
        """Ask for the table; the answer comes into `session` when it suits valved."""
        with self._lock:
            self._answered.clear()
            self.wanted = wanted
        self._poke.set()

    def is_taken(self) -> bool:
        """Whether an engine of this process has the table: of two that heed the same one, one computes from memory that
        it does not have. An engine that is gone leaves nothing."""
        if self.owner is not None and self.owner() is not None:
            gc.collect()  # it may be done with, and wait for this
        self._bury()
        return self.owner is not None

    def _bury(self) -> None:
        with self._lock:  # the look, too: whoever waited for the lock may find the next engine's wishes
            if self.owner is None or self.owner() is not None:
                return
            self.owner = self.wanted = self.layout = self.session = self.on_tick = self.told_mode = None
            self.sessions = Sessions()

    def attach(self, wanted: Attach, wait_s: float) -> Session | None:
        """Ask for the table and wait for valved's answer."""
        self.propose(wanted)
        return self.answer(wait_s)

    def answer(self, wait_s: float) -> Session | None:
        """Wait for valved's answer, once: a cache whose memory is valved's may have none until
        then, and what a step computes from it would be believed. A valved that died comes back; one that waits for
        the engine's ranks will have heard of them. One that left nothing here but its socket is not waited for.
        """
        self._is_waiting = True
        self._poke.set()
        if not self._answered.wait(wait_s):
            self._answered.wait(self._patience_s())
        self._is_waiting = False
        return self.session

    def _patience_s(self) -> float:
        """How much longer a first step may wait: by what of this engine may be valved's memory."""
        if not may_have_holes():
            return 0.0  # a table that comes later is acted on then
        if self.connections or (self.is_preloaded and self.ranges() != 0):
            return self.gone_s
        if not self.is_preloaded:
            return 0.0
        return self.unmet_s if self.wanted is not None and self.wanted.ranks > 1 else 0.0

    def next_session(self, last: Session | None) -> Session | None:
        return self.sessions.after(last)

    def register_layout(self, layout: BlockLayout) -> None:
        self.layout = layout
        self._poke.set()

    def need(self, wanted_blocks: int) -> None:
        """Ask valved to look at the book. Never waits; a full socket means that it is being asked already."""
        packets = self._packets
        if packets is not None:
            with contextlib.suppress(OSError):
                packets.send(wire.Message.KV_NEED, wire.KV_NEED.pack(min(wanted_blocks, 0xFFFFFFFF)))

    def close(self) -> None:
        self._stop = True
        self._poke.set()
        if self._thread is not None:
            self._thread.join(timeout=5)

    # ---- the thread ----

    def _run(self) -> None:
        while not self._stop:
            try:
                with contextlib.closing(self._connect()) as self._packets:
                    self._serve(self._packets)
            except (OSError, NoDaemon, Foreign, ValueError, struct.error) as error:
                self.said = f"{type(error).__name__}: {error}"
                is_nobody = isinstance(error, ConnectionRefusedError | FileNotFoundError) and not self._patience_s()
                if is_nobody or not isinstance(error, OSError | NotYet):
                    self._answered.set()
            self._packets, self._told, self.grant = None, (None, None), None
            self._poke.wait(min(self.retry_s, LOOK_S) if self._is_waiting else self.retry_s)
            self._poke.clear()

    def _connect(self) -> Packets:
        packets = Packets(self.path)
        try:
            features = wire.FEATURE_HINT | wire.FEATURE_MEMORY
            name = self.build.encode()[:31]
            hello = wire.HELLO.pack(wire.LINK_ABI, wire.LINK_ABI, features, wire.ROLE_HOOK, 0, name, b"engine")
            kind, body, fds = packets.ask(wire.Message.HELLO, hello)
            if kind != wire.Message.WELCOME:
                close(fds)
                raise NoDaemon(refusal(kind, body))
            abi, _, theirs, _, _, _, region_bytes = wire.WELCOME.unpack(body)
            if abi != wire.LINK_ABI or len(fds) < 4:
                close(fds)
                raise NoDaemon(f"valved speaks abi {abi}, this hook {wire.LINK_ABI}")
            self._take_pages(fds, region_bytes, features & theirs, packets.clock_ns)
            self.connections += 1
            self._has_memory = bool(theirs & wire.FEATURE_MEMORY)
            self._brings_table = bool(theirs & wire.FEATURE_KV_MAKE)
            if not self._has_memory:
                self.said = "this valved manages no KV memory: only requests and tokens are counted"
        except BaseException:
            packets.close()
            raise
        return packets

    def _take_pages(self, fds: Sequence[int], region_bytes: int, features: int, clock_ns: int) -> None:
        try:
            self.role, self._renew_s = read_control(fds[0])
            region = Region(fds[1], region_bytes, features, Bell(fds[2]), clock_ns)
            self.lifecycle.begin(region)
            self.grant = GrantPage(fds[0], region.map, region.bell, clock_ns)
        finally:
            close(fds)

    def _serve(self, packets: Packets) -> None:
        """Tell what is new, renew the hint, and notice that valved is gone."""
        while not self._stop:
            self._bury()
            told = self.layout, self.wanted  # one that is equal may be of another engine
            is_due = self._again_at is not None and time.monotonic() >= self._again_at
            if is_due or self._told[0] is not told[0] or self._told[1] is not told[1]:
                self._again_at = None
                if self._has_memory:
                    self._tell(packets, *told)
                self._told = told
                with self._lock:
                    if told[1] is not None and told[1] is self.wanted:
                        self._answered.set()
            self._tick()  # first: what is open is told before the page says that it is fresh
            self.lifecycle.renew()
            packets.drain()
            self._poke.wait(self._renew_s)
            self._poke.clear()

    def _tick(self) -> None:
        """What an engine does in here must not end the thread: its hint would run out."""
        try:
            on_tick = self.on_tick  # an engine's thread may take it away
            if on_tick is not None:
                on_tick()
        except Exception:
            if not self._has_failed:
                log.exception("valve: a look at the idle engine failed; the engine goes on")
            self._has_failed = True

    def _tell(self, packets: Packets, layout: BlockLayout | None, wanted: Attach | None) -> None:
        for body in layout.bodies() if layout is not None else ():
            kind, answer, fds = packets.ask(wire.Message.KV_LAYOUT, body)
            close(fds)
            status = wire.ACK.unpack(answer)[0] if kind == wire.Message.ACK else -1
            if status:
                self._stay_out(layout, f"KV_LAYOUT was refused: {os.strerror(status)}")
                return
        if wanted is not None:
            self._attach(packets, wanted)

    def _stay_out(self, layout: BlockLayout | None, why: str) -> None:
        """valved would say the same in two seconds. Requests are counted on; and it is asked again in a while."""
        self.said, self._again_at = why, time.monotonic() + AGAIN_S
        if layout is not self._refused:
            log.warning("valve: %s; nothing is reclaimed from this process", why)
        self._refused = layout

    def _attach(self, packets: Packets, wanted: Attach) -> None:
        body = wire.KV_ATTACH.pack(
            *(wire.KV_ABI, wire.KV_ABI, _mode(wanted, self.told_mode), wanted.blocks, wanted.block_tokens),
            *(wanted.rows, wanted.row_blocks, wanted.ranks, wanted.engine.encode()[:47]),
        )
        if self._brings_table:
            bring_table(packets, body)
        kind, answer, fds = packets.ask(wire.Message.KV_ATTACH, body)
        try:
            if kind == wire.Message.ACK:
                status = wire.ACK.unpack(answer)[0]
                if status == errno.EAGAIN:  # it does not know yet what has memory: in a moment, then
                    raise NotYet("valved waits for the engine's ranks")
                self.said = f"KV_ATTACH was refused: {os.strerror(status)}"
                if status == errno.EDQUOT:  # others have too much now
                    self._again_at = time.monotonic() + AGAIN_S
                return
            if kind != wire.Message.KV_TABLE or len(fds) != 2:
                raise NoDaemon(f"valved answered KV_ATTACH by a message of type {kind} with {len(fds)} descriptors")
            abi, table_bytes, book_bytes = wire.KV_TABLE.unpack(answer)
            if abi != wire.KV_ABI:
                raise NoDaemon(f"valved speaks KV abi {abi}, this hook {wire.KV_ABI}")
            table, book = Table(fds[0], table_bytes), Book(fds[1], book_bytes)
            if (table.blocks, table.block_tokens) != (wanted.blocks, wanted.block_tokens):
                raise Foreign(f"valved sent a table of {table.blocks} blocks to an engine of {wanted.blocks}")
            if self.session is not None and self.session.table.columns and not table.columns:
                raise NotYet("valved has not heard of the engine's ranges yet")
            with self._lock:
                if self.wanted is not wanted:
                    return  # of an engine that is gone
                number = self.session.number + 1 if self.session is not None else 1
                self.sessions.begin(fresh := Session(number=number, table=table, book=book))
                self.session = fresh  # last: a thread that sees that we are attached finds the table in the queue
            self.said = ""
        finally:
            close(fds)


def _mode(wanted: Attach, told_mode: Callable[[], wire.Mode | None] | None) -> wire.Mode:
    """What an attachment may say. That nothing is reclaimed any more is the book's word: here it would mean that
    blocks without memory are handed out.
    """
    told = told_mode() if told_mode is not None else None
    return min(wanted.mode, max(wanted.mode if told is None else told, wire.Mode.COARSE))


def read_control(fd: int) -> tuple[int, float]:
    """This client's role, and how often it shows that it lives."""
    control = os.pread(fd, 4096, 0)
    role = int.from_bytes(control[wire.CONTROL_ROLE : wire.CONTROL_ROLE + 4], "little")
    lease_ns = int.from_bytes(control[wire.CONTROL_LEASE_NS : wire.CONTROL_LEASE_NS + 8], "little")
    return role, lease_ns / 5e9 if lease_ns else RENEW_S


_links: dict[int, Link] = {}


def process_link() -> Link | None:
    """The one connection of this process; made at first use, and again in a forked child."""
    path = socket_path()
    if path is None:
        return None
    pid = os.getpid()
    if pid not in _links:
        is_offline = os.environ.get(ENV_ROLE) == "offline"  # its launcher has met a valved
        _links[pid] = Link(
            build=f"valve_hook {VERSION}",
            path=path,
            gone_s=OFFLINE_GONE_S if is_offline else GONE_S,
            unmet_s=OFFLINE_GONE_S if is_offline else UNMET_S,
            is_offline=is_offline,
            is_preloaded=shim_call("valve_kv_begin") is not None,
        )
        _links[pid].start()
    return _links[pid]
