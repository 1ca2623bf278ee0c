"""What may happen to engines that share memory: the moments of a move, and walks of hypothesis through all of it.

`Node` has what honest processes, their deaths and the driver do. `Attacked` adds processes that lie, settings that
change, cards that say anything and hooks that come anew.
"""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path

import numpy as np
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from lent_fds import collect
from memory_world import BASE, Hook, KvWorld
from node_world import World

from valved.abi.kv_link import KvDone, KvNeed, KvRangeMessage, KvTableMessage
from valved.abi.link import LinkType, Malformed
from valved.config import MIB, Config
from valved.machine.cards import CardUse
from valved.model.ids import Role
from valved.model.memory import KvTensor

MOMENTS_US = (0, 100, 399, 401, 450, 500, 700, 1000, 1500, 2500, 4000)


def beside(world):
    """Offline has nearly everything, online its headroom."""
    offline = world.engine("offline", columns=16)
    world.run(500)
    offline.hold(0, list(range(4, 60)))
    online = world.engine("online", columns=16)
    world.run(500)
    return offline, online


def under_pressure(world):
    """Online asks for half of it: offline work is being stopped, and nothing else has happened yet."""
    offline, online = beside(world)
    online.want(used=4, wanted=40)
    return offline, online


WALKS = settings(
    max_examples=int(os.environ.get("VALVE_EXAMPLES", "25")),
    stateful_step_count=30,
    deadline=None,
    phases=(
        Phase.explicit,
        Phase.reuse,
        Phase.generate,
    ),  # a failing walk is told as it was found: shrinking takes long
    suppress_health_check=list(HealthCheck),
)


class Node(RuleBasedStateMachine):
    """Engines come, want, offer, hang, break and die in any order; card and books are asked after every step."""

    config: Config
    features = World.shim_features  # of its shims
    layers = 1
    gpus = 2

    def __init__(self):
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.world = KvWorld(Path(self.folder.name), config=self.config, handles=24 * self.layers, gpus=self.gpus)
        self.world.shim_features = self.features
        self.world.kv.reserve._firsts.sizes = (4 * self.layers, self.layers)
        self.hooks = []
        self.others = []  # shims whose hook has gone

    def teardown(self):
        for _ in range(5):
            self.world.run(1000)
            for hook in self.hooks:
                hook.shim.step()
        self.world.check()
        for shim in [*(hook.shim for hook in self.hooks), *self.others]:
            shim.die()
        self.world.run(5000)
        books = self.world.kv.books
        free = sum(books.pool.free_handles(info.index) for info in books.gpus)
        assert free == books.pool.total, "a handle is lost although everybody is dead"
        collect()
        self.folder.cleanup()

    @precondition(lambda self: len(self.hooks) < 4)
    @rule(role=st.sampled_from(["online", "offline"]), columns=st.integers(2, 16))
    def come(self, role, columns, gpus=(0,)):
        name = f"{role}{len(self.world.shims)}"
        hook = self.world.engine(role, columns=columns, layers=self.layers, gpus=gpus, name=name)
        if hook is not None:
            self.hooks.append(hook)
            hook.book["steps"] = 1

    @precondition(lambda self: self.hooks)
    @rule(data=st.data())
    def step(self, data):
        data.draw(st.sampled_from(self.hooks)).shim.step()

    @precondition(lambda self: self.hooks)
    @rule(data=st.data(), used=st.integers(0, 64), wanted=st.integers(0, 64), is_busy=st.booleans())
    def want(self, data, used, wanted, is_busy):
        """A service that is at work when it wants more finds that offline work stands already."""
        hook = data.draw(st.sampled_from(self.hooks))
        if is_busy and not hook.shim.is_offline:
            self.world.gate.launch(hook.shim.client)
            self.world.clock.advance(1_000_000)
        hook.want(used=used, wanted=wanted)

    @precondition(lambda self: self.hooks)
    @rule(data=st.data(), first=st.integers(0, 60), count=st.integers(0, 12), row=st.integers(0, 7))
    def hold(self, data, first, count, row):
        hook = data.draw(st.sampled_from(self.hooks))
        hook.hold(row, [block for block in range(first, first + count) if block < hook.blocks])

    @precondition(lambda self: self.hooks)
    @rule(data=st.data())
    def obey(self, data):
        data.draw(st.sampled_from(self.hooks)).obey_target()

    @rule(us=st.sampled_from([10, 100, 400, 1000, 30_000, 300_000, 2_000_000]))
    def wait(self, us):
        self.world.clock.advance(us * 1000)

    @precondition(lambda self: self.hooks)
    @rule(data=st.data())
    def die(self, data):
        hook = data.draw(st.sampled_from(self.hooks))
        self.hooks.remove(hook)
        hook.shim.die()

    @precondition(lambda self: self.hooks)
    @rule(data=st.data())
    def hang_up_and_die_later(self, data):
        hook = data.draw(st.sampled_from(self.hooks))
        self.hooks.remove(hook)
        hook.shim.hang_up()
        self.world.clock.call_at_ns(self.world.clock.now_ns() + 400_000_000, hook.shim.die)

    @precondition(lambda self: self.hooks)
    @rule(data=st.data())
    def hang(self, data):
        shim = data.draw(st.sampled_from(self.hooks)).shim
        shim.answers = False
        self.world.clock.call_at_ns(self.world.clock.now_ns() + 120_000_000, shim.catch_up)

    @precondition(lambda self: self.hooks)
    @rule(data=st.data(), done=st.integers(0, 4), status=st.sampled_from([errno.EIO, errno.ENOMEM, errno.EAGAIN]))
    def fail_next(self, data, done, status):
        data.draw(st.sampled_from(self.hooks)).shim.fails.append((done, status))

    @rule()
    def work_online(self):
        for client, entry in list(self.world.gate.clients.items()):
            if entry.role is Role.ONLINE:
                self.world.gate.launch(client)
                self.world.gate.finish(client)

    @invariant()
    def books_add_up(self):
        self.world.check_memory()


class Attacked(Node):
    """Whatever a client says, it harms itself: books, table and card agree, and nobody gets bytes of another."""

    @precondition(lambda self: self.hooks)
    @rule(data=st.data(), seed=st.integers(0, 1 << 16), is_rung=st.booleans())
    def lie(self, data, seed, is_rung):
        """Its book says what cannot be. Steps are never 0: an engine that hides them asks for its own harm."""
        hook, noise = data.draw(st.sampled_from(self.hooks)), np.random.default_rng(seed)
        for name in ("used_blocks", "wanted_blocks", "steps"):
            hook.book[name] = noise.integers(1, 1 << int(noise.integers(1, 33)))
        hook.book["mode"] = noise.integers(0, 5)
        hook.book["epoch_seen"] = hook.table["epoch"] if noise.random() < 0.7 else noise.integers(0, 1 << 63)
        hook.offered[:] = noise.integers(0, 3, hook.blocks)
        hook.heads["blocks"][:] = noise.integers(0, 1 << int(noise.integers(1, 33)), hook.rows)
        hook.heads["tokens"][:] = noise.integers(0, 1 << 32, hook.rows)
        hook.cells[:] = noise.integers(0, 1 << int(noise.integers(1, 33)), hook.cells.shape)
        if is_rung:
            hook.say(LinkType.KV_NEED, KvNeed(wanted_blocks=int(noise.integers(0, 1 << 32))))

    @precondition(lambda self: self.hooks)
    @rule(data=st.data(), order=st.integers(0, 200), done=st.integers(0, 1 << 16))
    def answer_what_nobody_asked(self, data, order, done):
        """valved drops who does."""
        hook = data.draw(st.sampled_from(self.hooks))
        mine = {one.number for one in self.world.kv.books.orders.under_way(hook.shim.client)}
        if order in mine:
            return
        try:
            hook.shim.say(LinkType.KV_DONE, KvDone(order=order, done=done, status=0, cu_result=0))
        except Malformed:
            self.hang_up(hook)
            return
        raise AssertionError("an answer to an order of nobody was taken")

    def hang_up(self, hook):
        self.hooks.remove(hook)
        hook.shim.hang_up()
        self.world.clock.call_at_ns(self.world.clock.now_ns() + 400_000_000, hook.shim.die)

    @precondition(lambda self: self.hooks)
    @rule(data=st.data(), past=st.integers(0, 3), slots=st.integers(0, 1 << 20))
    def reserve_over_itself(self, data, past, slots):
        shim = data.draw(st.sampled_from(self.hooks)).shim
        base, size, count = shim.ranges_of[min(shim.ranges)]
        body = KvRangeMessage(
            gpu_uuid=bytes([1]) * 16,
            device_instance=0,
            range=77,
            base=base + size * min(past, count - 1),
            handle_bytes=size,
            slots=slots,
            flags=0,
            held=0,
        )
        asked = shim.say(LinkType.KV_RANGE, body)
        assert shim.acked(asked), "two ranges share addresses"

    @precondition(lambda self: self.hooks)
    @rule(data=st.data())
    def free_a_range(self, data):
        """Its engine is one no more."""
        hook = data.draw(st.sampled_from(self.hooks))
        if hook.shim.answers:
            self.hooks.remove(hook)
            self.others.append(hook.shim)
            hook.shim.free_range(min(hook.shim.ranges))

    @precondition(lambda self: self.hooks)
    @rule(data=st.data(), is_silent=st.booleans())
    def hook_comes_anew(self, data, is_silent):
        """Or does not: then its process is left as it is."""
        before = data.draw(st.sampled_from(self.hooks))
        self.hooks.remove(before)
        self.others.append(before.shim)
        self.world.register.leave(before.client, "link closed")
        if is_silent or before.shim.client not in self.world.books.clients:
            return
        again = Hook(before.shim, before.blocks)
        stride = self.config.memory.handle_mib * MIB // 4
        tensors = [
            KvTensor(base_addr=BASE + (number << 40), block_stride_bytes=stride, block_bytes=stride)
            for number in before.shim.ranges
        ]
        if again.register(tensors, (0,)) != 0:
            return
        again.ask_table()
        for _ in range(50):
            before.shim.step()
            self.world.run(100)
            if isinstance(again.connection.sent[-1][1], KvTableMessage):
                again.take_table()
                again.book["steps"] = 1
                self.others.remove(before.shim)
                self.hooks.append(again)
                self.world.hooks.append(again)
                return

    @rule(is_allowed=st.booleans())
    def brake(self, is_allowed):
        self.world.kv.allow(is_allowed)

    @rule(per_hour=st.sampled_from([None, 1e-9, 0.5, 30.0, 1e6]))
    def accept(self, per_hour):
        self.world.kv.reserve.accept(per_hour)

    @rule(total=st.integers(0, 200), used=st.integers(0, 400), held=st.integers(0, 1 << 40), is_gone=st.booleans())
    def read_the_card(self, total, used, held, is_gone):
        """NVML says anything, or nothing."""
        pids = {hook.shim.entry.process.pid: held for hook in self.hooks[:2]}
        use = CardUse(total_bytes=total * MIB, used_bytes=used * MIB, by_pid=pids, is_mig=False)
        self.world.kv.service.see_cards({} if is_gone else {bytes([1]) * 16: use})

    @rule()
    def twenty_seconds_pass(self):
        self.world.clock.advance(20_000_000_000)
