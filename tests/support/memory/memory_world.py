"""Shims and hooks that obey kv.h on virtual time, over a card that knows every physical handle and who maps it.

The card asserts what must never be: a handle mapped by two processes, a mapping changed under running kernels, bytes of
another process seen by an engine.
"""

from __future__ import annotations

import errno
import mmap
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from lent_fds import end, is_lent, lend
from node_world import World

from valved.abi.kv_files import BOOK_HEAD, ROW, TABLE_HEAD
from valved.abi.kv_link import (
    CREATE,
    ELASTIC,
    ENTRY,
    ZERO,
    KvAttach,
    KvDone,
    KvEntries,
    KvHow,
    KvLayoutPart,
    KvMode,
    KvNeed,
    KvOp,
    KvRangeMessage,
    KvScratch,
    KvSpan,
    KvStep,
    KvTableMessage,
)
from valved.abi.link import Feature, LinkType
from valved.config import MIB, Config
from valved.model.ids import Remap, Role
from valved.model.memory import KvTensor

MAP_NS = 60_000  # one handle by the public calls
STEP_NS = 5_000_000  # of an engine
BASE = 0x7EA000000000
SCRATCH = BASE - (1 << 40)


ORDERS = (LinkType.KV_ORDER, LinkType.KV_RUNS)


def entries_of(body):
    """(handle's name, range, slot, flags) of each slot of an order, in either form."""
    if isinstance(body, KvEntries):
        return [(name, body.range, slot, flags) for name, slot, flags in body.entries.tolist()]
    return [
        (handle + i, number, slot + i, flags)
        for handle, number, slot, count, flags in body.runs.tolist()
        for i in range(count)
    ]


class Card:
    """Physical memory of all GPUs."""

    def __init__(self, clock, handles_per_gpu):
        self.clock = clock
        self.limit = handles_per_gpu
        self.by_fd = {}

    def create(self, gpu, domain):
        if self.made(gpu) >= self.limit:
            return None
        fd = lend()
        self.by_fd[fd] = Physical(gpu, domain)
        return fd

    def made(self, gpu):
        """Handles that somebody maps, or of which a descriptor is open."""
        for fd in [fd for fd, one in self.by_fd.items() if one.mapped_by is None and not is_lent(fd)]:
            del self.by_fd[fd]
        return len({id(one) for one in self.by_fd.values() if one.gpu == gpu})


class Physical:
    def __init__(self, gpu, domain):
        self.gpu = gpu
        self.domain = domain  # whose shim made it, and may have kept a mapping
        self.owner = None  # whose bytes are in it
        self.mapped_by = None


class Shim:
    """The shim of one process: ranges, orders in the order they came, answers after the time that mapping takes."""

    def __init__(self, world, card, client):
        self.world, self.card, self.client = world, card, client
        self.connection = world.connections[client]
        self.entry = world.books.clients[client]
        self.ranges = {}  # number -> {slot: (name, Physical)}
        self.gpus = {}
        self.ranges_of = {}
        self.answers = True
        self.fails = deque()  # (done, status) for the next orders
        self.at_step = []
        self.held_back = []
        self.thought_gone = {}  # (range, slot) -> (name, Physical): what valved said it makes sparse
        self.read_zero = set()  # (range, slot) that it did make sparse
        self.scratch_zero = set()  # GPUs
        self.clearing = set()  # (range, slot): mapped, and not valved's word yet
        self.trials = {KvHow.OUTSIDE: 0, KvHow.AT_ONCE: 0}  # what the shim finds in a trial
        self.coming = []  # orders that its thread has not come to
        self.before_steps = set()  # orders that came before its first step
        self.free_ns = 0
        self._heard = len(self.connection.sent)
        self.connection.on_send = self._hear
        self.is_alive = True
        is_sparse = world.passes_scratch
        self.has_stepped = not is_sparse  # kernels may be running whenever its channels are on
        self.steps = is_sparse  # it makes steps of its own

    @property
    def is_offline(self):
        return self.entry.role is Role.OFFLINE

    def say(self, kind, body, fds=()):
        packet = self.world.packet(kind, body)
        fds = list(fds)
        try:
            self.world.register.handle(self.client, packet, fds)
        finally:
            end(fds)  # which valved did not keep
        return packet.seq

    def reserve(self, number, slots, gpu=0, *, elastic=True, held=0, handle_mib=None, flags=0):
        size = (handle_mib or self.world.config.memory.handle_mib) * MIB
        self.ranges[number], self.gpus[number] = {}, gpu
        base = BASE + (number << 40)
        body = KvRangeMessage(
            gpu_uuid=bytes([gpu + 1]) * 16,
            device_instance=gpu,
            range=number,
            base=base,
            handle_bytes=size,
            slots=slots,
            flags=flags | (ELASTIC if elastic else 0),
            held=held,
        )
        self.ranges_of[number] = (base, size, slots)
        return self.say(LinkType.KV_RANGE, body)

    def acked(self, seq):
        """The status of an answer, None while there is none."""
        return next((status for number, status in self.connection.acks() if number == seq), None)

    def _hear(self, kind, body, seq, fds):
        if kind not in ORDERS:
            return
        if not self.has_stepped:
            self.before_steps.add(body.order)
        if not self.answers or not self.is_alive:
            self.held_back.append((kind, body, fds))
            return
        if body.how == KvHow.AT_STEP or (self.at_step and body.how == KvHow.AT_ONCE):  # behind one that waits
            self.at_step.append((body, fds))
            self._step_soon()
            return
        self._later(body, fds)

    def _later(self, body, fds):
        """One after the other, as the helper thread does."""
        self.free_ns = max(self.free_ns, self.world.clock.now_ns()) + MAP_NS * len(entries_of(body))
        self.coming.append(body)
        self.world.clock.call_at_ns(self.free_ns, lambda: body in self.coming and self._come_to(body, fds))

    def _come_to(self, body, fds):
        waits = any(entry[1:3] in self.clearing for entry in entries_of(body))  # nothing is done with it before ...
        if waits or body is not self.coming[0]:  # ... nor with what came after it
            self.world.clock.call_at_ns(
                self.world.clock.now_ns() + 1_000_000, lambda: body in self.coming and self._come_to(body, fds)
            )
            return
        self.coming.remove(body)
        self._do(body, fds)

    def _step_soon(self):
        if self.steps:
            self.world.clock.call_at_ns(self.world.clock.now_ns() + STEP_NS, self._step_if_it_runs)

    def _step_if_it_runs(self):
        gate = self.world.gate
        if any(gate.is_gated(gpu) for gpu in self.gpus.values()) or self.client in gate.launches_held:
            self._step_soon()
        else:
            self.step()

    def begin_step(self):
        """What valve_kv_step() asks first. 0: a step may begin; EAGAIN: what it launches waits."""
        return self.acked(self.say(LinkType.KV_STEP, KvStep(range=max(self.ranges))))

    def step(self):
        """valve_kv_step(): between two steps, with the context drained."""
        waiting, self.at_step = self.at_step, []
        for body, fds in waiting:
            self._do(body, fds)

    def catch_up(self):
        """It hung; now it does what it was told."""
        self.answers = True
        waiting, self.held_back = self.held_back, []
        for _, body, fds in waiting:
            self._do(body, fds)

    def _do(self, body, fds):
        if self.is_alive and body.op == KvOp.QUARANTINE and body.how == KvHow.OUTSIDE:
            self._hear_of(body)
            return
        if not self.is_alive or self.client not in self.world.books.clients:
            return
        if body.op == KvOp.TRY:
            self._try(body)
            return
        entries = entries_of(body)
        most, status = self.fails.popleft() if self.fails else (len(entries), 0)
        made, done = [], 0
        for index, (name, number, slot, flags) in enumerate(entries[:most]):
            slots = self.ranges.get(number)
            if slots is None:
                status = errno.ESTALE
                break
            fd = fds[index] if fds else None
            if body.op == KvOp.BACK:
                fd = self.card.create(self.gpus[number], self.entry.domain) if flags & CREATE else fd
                if fd is None:
                    status = errno.ENOMEM
                    break
                made += [fd] if flags & CREATE else []
                self._let_go(number, slot)
                self._map(slots, slot, name, self.card.by_fd[fd], flags)
            elif (number, slot) in self.thought_gone:
                self._let_go(number, slot)
            elif slot in slots:  # else it shows the zero page, or nothing, already
                self._unmap(slots, slot)
            done += 1
        self._check_stopped(body)
        if body.op == KvOp.BACK:
            self.clearing |= {(number, slot) for _, number, slot, _ in entries[:done]}
        self._answer(body, KvDone(order=body.order, done=done, status=status, cu_result=0), made, self.connection)

    def _answer(self, body, done, made, link):
        """Zeroing goes on beside later orders, and needs channels that are on. `link`: by which it came."""
        if not self.is_alive:
            return
        is_zeroing = body.op == KvOp.TRY or (body.op == KvOp.BACK and entries_of(body))
        gpu = body.range if body.op == KvOp.TRY else self._gpu_of(body)
        if is_zeroing and self.is_offline and self.world.gate.is_gated(gpu):
            again_ns = self.world.clock.now_ns() + 1_000_000
            self.world.clock.call_at_ns(again_ns, lambda: self._answer(body, done, made, link))
            return
        backed = [entry[1:3] for entry in entries_of(body)[: done.done]] if body.op == KvOp.BACK else []
        self.clearing -= set(backed)
        if link is self.connection and self.client in self.world.books.clients:
            self.say(LinkType.KV_DONE, done, made)
            return
        end(made)
        for number, slot in backed:  # no valved will hear of it
            if slot in self.ranges.get(number, {}):
                self._unmap(self.ranges[number], slot)

    def _gpu_of(self, body):
        return next((self.gpus[number] for _, number, _, _ in entries_of(body) if number in self.gpus), 0)

    def _map(self, slots, slot, name, physical, flags):
        assert physical.mapped_by is None, f"handle {name} would have two owners"
        assert slot not in slots, f"slot {slot} is backed already"
        assert physical.domain == self.entry.domain, "memory crosses from one trust domain to another"
        physical.mapped_by = self
        if flags & ZERO:
            physical.owner = None
        assert physical.owner in (None, self.entry.service), "bytes of another tenant come to light"
        physical.owner = self.entry.service
        slots[slot] = (name, physical)

    def _unmap(self, slots, slot):
        _, physical = slots.pop(slot)
        physical.mapped_by = None

    # What valved does from outside

    def offer_scratch(self, gpu):
        fd = lend()
        self.world.outside.memory[fd] = self._become_sparse
        body = KvScratch(
            gpu_uuid=bytes([gpu + 1]) * 16, device_instance=gpu, place=gpu, base=SCRATCH + (gpu << 32), bytes=2 * MIB
        )
        self.say(LinkType.KV_SCRATCH, body, [fd])

    def _become_sparse(self, address, size, is_real):
        gate, client = self.world.gate, self.client
        if address < BASE:
            assert gate.is_stopped((address - SCRATCH) >> 32) or self.world.outside.hung, (
                "a trial beside running kernels"
            )
            self.scratch_zero |= {(address - SCRATCH) >> 32} if is_real else set()
            return
        if not self.is_alive:
            return
        number, slots = (address - BASE) >> 40, self.ranges[(address - BASE) >> 40]
        is_safe = gate.is_stopped(self.gpus[number]) or client in gate.launches_held or not self.has_stepped
        assert is_safe or client not in gate.clients, "memory made sparse under running kernels"
        _, handle_bytes, _ = self.ranges_of[number]
        first = (address - BASE - (number << 40)) // handle_bytes
        for slot in range(first, first + size // handle_bytes):
            assert self._was_told(number, slot), "made sparse before the shim was told"
            _, physical = slots.get(slot) or self.thought_gone[number, slot]
            physical.mapped_by = None
            self.read_zero.add((number, slot))

    def _was_told(self, number, slot):
        sent = [body for kind, body, _, _ in self.connection.sent if kind in ORDERS and body.how == KvHow.OUTSIDE]
        return any((number, slot) == entry[1:3] for body in sent for entry in entries_of(body))

    def _hear_of(self, body):
        for _, number, slot, _ in entries_of(body):
            slots = self.ranges.get(number, {})
            if slot in slots:
                self.thought_gone[number, slot] = slots.pop(slot)
        if self.client in self.world.books.clients:
            done = KvDone(order=body.order, done=len(entries_of(body)), status=0, cu_result=0)
            self.say(LinkType.KV_DONE, done)

    def _let_go(self, number, slot):
        _, physical = self.thought_gone.pop((number, slot), (0, None))
        self.read_zero.discard((number, slot))
        if physical is not None and physical.mapped_by is self:
            physical.mapped_by = None  # valved never came to it

    def _try(self, body):
        status = self.trials[body.how]
        if body.how == KvHow.OUTSIDE and body.range not in self.scratch_zero:
            status = status or errno.ENODATA
        self.scratch_zero.discard(body.range)
        self._answer(body, KvDone(order=body.order, done=0, status=status, cu_result=0), [], self.connection)

    def _check_stopped(self, body):
        """A change of mapping in an offline process happens between steps or under a closed gate."""
        if not self.is_offline or body.how == KvHow.AT_STEP or not entries_of(body):
            return
        gate, gpu = self.world.gate, self._gpu_of(body)
        has_channels = any(ref.gpu == gpu for ref in gate.clients[self.client].channels.values())
        is_safe = gate.is_stopped(gpu) or self.client in gate.launches_held or body.order in self.before_steps
        assert is_safe or not self.has_stepped or not has_channels, "mapping work under running kernels"

    def free_range(self, number):
        for _, physical in self.ranges.pop(number).values():
            physical.mapped_by = None
        self.say(LinkType.KV_RANGE_DEL, KvSpan(range=number))

    def die(self):
        self.is_alive = False
        mine = [one for slots in self.ranges.values() for one in slots.values()]
        for _, physical in [*mine, *self.thought_gone.values()]:
            if physical.mapped_by is self:
                physical.mapped_by = None
        self.world.processes.end(self.entry.process.pid)

    def hang_up(self):
        """The link breaks, the process lives and keeps what it has mapped."""
        self.world.register.leave(self.client, "link closed")
        self.connection.on_send = lambda *_: None
        late, self.held_back = [body for _, body, _ in self.held_back], []
        late, self.coming = [*self.coming, *late], []
        for body in late:  # read to the end of the file
            if body.how == KvHow.OUTSIDE and body.op == KvOp.QUARANTINE:
                self._hear_of(body)

    def retell(self, successor_client, world=None, flags=0):
        """Say to a new connection, or a new valved, what is mapped."""
        self.world = world or self.world
        self.client = successor_client
        self.entry = self.world.books.clients[successor_client]
        self.connection = self.world.connections[successor_client]
        self.connection.on_send = self._hear
        ranges, self.ranges = self.ranges, {}
        for number, slots in ranges.items():
            _, _, count = self.ranges_of[number]
            rows = [row for row in slots.items() if (number, row[0]) not in self.clearing]
            self.reserve(number, count, self.gpus[number], held=len(rows), flags=flags)
            self.ranges[number] = slots
            for first in range(0, len(rows), 64):
                part = rows[first : first + 64]
                raw = np.array([(name, slot, 0) for slot, (name, _) in part], ENTRY).tobytes()
                fds = []
                for _, (_, physical) in part:
                    fd = lend()
                    self.card.by_fd[fd] = physical
                    fds.append(fd)
                self.say(LinkType.KV_HELD, KvEntries(order=0, range=number, op=0, how=0, raw=raw), fds)


class Hook:
    """The engine's side: it reads the table and writes the book."""

    def __init__(self, shim, blocks, *, rows=32, row_blocks=256, block_tokens=16, ranks=1, mode=KvMode.FULL):
        self.world, self.shim = shim.world, shim
        pid = shim.entry.process.pid
        features = Feature.HINT | Feature.MEMORY
        connection = self.world.hello(pid, Role.HOOK, uid=shim.entry.uid, features=features)
        self.client, self.connection = connection.client, connection
        self.blocks, self.rows, self.row_blocks, self.block_tokens = blocks, rows, row_blocks, block_tokens
        self.ranks, self.mode = ranks, mode
        self.table = self.book = None
        self.brings_table = True  # one of an older version does not

    def say(self, kind, body):
        packet = self.world.packet(kind, body)
        self.world.register.handle(self.client, packet, [])
        return packet.seq

    def register(self, tensors, pinned=()):
        seq = 0
        for first in range(0, len(tensors), 16):
            part = KvLayoutPart(
                blocks=self.blocks,
                block_tokens=self.block_tokens,
                total=len(tensors),
                first=first,
                pinned=tuple(pinned),
                tensors=tuple(tensors[first : first + 16]),
            )
            seq = self.say(LinkType.KV_LAYOUT, part)
        if seq not in dict(self.connection.acks()):
            self.world.run(600)  # it waits a moment for ranges that may still come
        return dict(self.connection.acks())[seq]

    def ask_table(self):
        body = KvAttach(
            abi_min=1,
            abi_max=1,
            mode=self.mode,
            blocks=self.blocks,
            block_tokens=self.block_tokens,
            rows=self.rows,
            row_blocks=self.row_blocks,
            ranks=self.ranks,
            engine="fake 1",
        )
        if self.brings_table:
            self.say(LinkType.KV_MAKE, body)
            self.bring(*self.connection.sent.pop())
        self.say(LinkType.KV_ATTACH, body)

    def bring(self, kind, answer, _seq, fds):
        """As bring_table of the hook: it makes the pages of its table."""
        if kind is LinkType.KV_TABLE:
            with mmap.mmap(fds[0], answer.table_bytes, prot=mmap.PROT_READ) as pages:
                assert not any(pages[:: mmap.PAGESIZE])

    def attach(self):
        self.ask_table()
        return self.take_table()

    def take_table(self):
        _, answer, _, fds = self.connection.sent[-1]
        if not isinstance(answer, KvTableMessage):
            return answer.status
        self._table = mmap.mmap(fds[0], answer.table_bytes, prot=mmap.PROT_READ)
        self._book = mmap.mmap(fds[1], answer.book_bytes)
        self.table = np.frombuffer(self._table, TABLE_HEAD, 1)
        self.entries = np.frombuffer(self._table, "<u4", self.blocks, int(self.table["entry_offset"][0]))
        self.book = np.frombuffer(self._book, BOOK_HEAD, 1)
        self.offered = np.frombuffer(self._book, np.uint8, self.blocks, int(self.book["offered_offset"][0]))
        self.heads = np.frombuffer(self._book, ROW, self.rows, int(self.book["head_offset"][0]))
        cells = np.frombuffer(self._book, "<u4", self.rows * self.row_blocks, int(self.book["cell_offset"][0]))
        self.cells = cells.reshape(self.rows, self.row_blocks)
        self.book["mode"] = self.mode
        return 0

    def backed(self):
        return np.flatnonzero(self.entries & 1)

    def want(self, used, wanted=None):
        """What the engine uses and would use; the node hears of it."""
        self.book["used_blocks"], self.book["wanted_blocks"] = used, max(used, wanted or 0)
        self.say(LinkType.KV_NEED, KvNeed(wanted_blocks=max(used, wanted or 0)))

    def hold(self, row, blocks, tokens=0):
        self.heads["request"][row] = row + 1 if len(blocks) else 0
        self.cells[row, : len(blocks)] = blocks
        self.heads["tokens"][row], self.heads["blocks"][row] = tokens, len(blocks)
        self.book["steps"] += 1
        self.shim.has_stepped = True

    def obey_target(self):
        """Offer whole columns, the last ones first, until no more than the target are in use."""
        backed = self.backed()
        target = int(self.table["target_blocks"][0])
        self.offered[:] = 0
        self.book["epoch_seen"] = int(self.table["epoch"][0])
        for block in backed[::-1][: max(0, len(backed) - target)]:
            self.offered[block] = 1
        self.say(LinkType.KV_NEED, KvNeed(wanted_blocks=int(self.book["wanted_blocks"][0])))


class KvWorld(World):
    """A node on which engines share memory."""

    is_new = False
    passes_scratch = property(lambda world: world.config.memory.remap is Remap.SPARSE or world.is_new)
    """Offline shims pass their uvm descriptor and scratch memory, and make steps of their own."""

    def __init__(self, folder, *, handles=64, **more):
        super().__init__(folder, **more)
        self.card = Card(self.clock, handles)
        self.shims, self.hooks = [], []

    def shim(self, role, *, gpus=(0,), name=None, pid=None, uid=1000):
        pid = pid or 5000 + len(self.shims)  # never again
        if pid not in self.processes.table:
            self.processes.add(pid)
        make = self.online if role == "online" else self.offline
        client = make(name=name or role, gpus=gpus, pid=pid, uid=uid)
        shim = Shim(self, self.card, client)
        self.shims.append(shim)
        return shim

    def engine(self, role, *, columns=16, blocks_per_column=4, gpus=(0,), layers=1, pinned=(0,), mode=KvMode.FULL, **m):
        """A process with one range per layer and GPU, and its hook, attached. Block 0 is the null block. None: its KV
        cache is not valved's memory."""
        shim = self.shim(role, gpus=gpus, **m)
        if role == "offline" and self.passes_scratch:
            for gpu in gpus:
                shim.offer_scratch(gpu)
        size = self.config.memory.handle_mib * MIB
        blocks, stride, tensors = columns * blocks_per_column, size // blocks_per_column, []
        for number, (gpu, _) in enumerate((gpu, layer) for gpu in gpus for layer in range(layers)):
            asked = shim.reserve(number, columns, gpu)
            tensors.append(KvTensor(base_addr=BASE + (number << 40), block_stride_bytes=stride, block_bytes=stride))
            for ms in [1] * 20 + [20] * 250:  # until its allocation returns, or the shim has waited in vain
                self.run(ms)
                if shim.acked(asked) is not None:
                    break
            if shim.acked(asked) != 0:  # it is ordinary memory
                for made in list(shim.ranges):
                    shim.free_range(made)
                return None
        hook = Hook(shim, blocks, mode=mode)
        assert hook.register(tensors, pinned) == 0
        assert hook.attach() == 0
        self.hooks.append(hook)
        self.clock.settle()
        hook.obey_target()
        return hook

    def check(self):
        super().check()
        self.check_memory()

    def check_memory(self):
        self.kv.check_integrity()
        for engine in self.kv.books.engines.values():
            remembered = dict(engine.known())
            engine.known().clear()
            for question, answer in remembered.items():
                assert np.array_equal(getattr(engine, question)(), answer), f"{question} was remembered and has changed"
        for shim in self.shims:
            believed = {(number, slot) for number, slots in shim.ranges.items() for slot in slots}
            waiting = shim.free_ns > self.clock.now_ns() or not shim.answers
            assert waiting or not shim.is_alive or believed.isdisjoint(shim.read_zero), "it believes what reads zero"
        for hook in self.hooks:
            engine = self.kv.books.engines.get(hook.shim.entry.service)
            if engine is None or engine.hook != hook.client or not engine.is_complete:
                continue
            told, orders = hook.backed(), self.kv.books.orders
            for rank in engine.ranks.values():
                for book in rank.books:
                    shim = next(shim for shim in self.shims if shim.client == book.key.client)
                    number = book.key.number
                    mapped = {slot for slot in shim.ranges[number] if (number, slot) not in shim.clearing}
                    books = {int(slot) for slot in np.flatnonzero(book.at >= 0)}
                    if not (orders.under_way(shim.client) or orders.leaving(frozenset({shim.client}))):
                        assert books == mapped, "valved and the shim disagree about what is mapped"
            assert engine.are_whole(engine.backed_columns())[told].all(), "the table promises memory that is not there"

    def settle(self, ms=50):
        self.run(ms)


def kv_world(config: Config, handles: int = 20) -> Callable[[Path], Iterator[KvWorld]]:
    """The fixture `world` of a file of tests: its books add up after each of them."""

    @pytest.fixture
    def world(tmp_path):
        world = KvWorld(tmp_path, config=config, handles=handles)
        yield world
        world.check()

    return world
