"""What may happen to engines that share memory: the moments of a move, and walks of hypothesis through all of it."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from lent_fds import collect
from memory_world import KvWorld
from node_world import World

from valved.config import Config
from valved.model.ids import Role

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

    def __init__(self):
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.world = KvWorld(Path(self.folder.name), config=self.config, handles=24 * self.layers)
        self.world.shim_features = self.features
        self.hooks = []

    def teardown(self):
        for _ in range(5):
            self.world.run(1000)
            for hook in self.hooks:
                hook.shim.step()
        self.world.check()
        for hook in self.hooks:
            hook.shim.die()
        self.world.run(5000)
        books = self.world.kv.books
        free = sum(books.pool.free_handles(info.index) for info in books.gpus)
        assert free == books.pool.total, "a handle is lost although everybody is dead"
        collect()
        self.folder.cleanup()

    @precondition(lambda self: len(self.hooks) < 4)
    @rule(role=st.sampled_from(["online", "offline"]), columns=st.integers(2, 16))
    def come(self, role, columns):
        hook = self.world.engine(role, columns=columns, layers=self.layers, name=f"{role}{len(self.world.shims)}")
        if hook is not None:
            self.hooks.append(hook)
            hook.book["steps"] = 1

    @precondition(lambda self: self.hooks)
    @rule(data=st.data())
    def step(self, data):
        data.draw(st.sampled_from(self.hooks)).shim.step()

    @precondition(lambda self: self.hooks)
    @rule(data=st.data(), used=st.integers(0, 64), wanted=st.integers(0, 64))
    def want(self, data, used, wanted):
        data.draw(st.sampled_from(self.hooks)).want(used=used, wanted=wanted)

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
