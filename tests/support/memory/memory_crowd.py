"""Walks by a seed through all that can become of memory on two GPUs, most of it in the middle of a reclaim or a growth.

There are ranks of several processes, hooks and links that come anew, valveds that die, ranges that are freed or pinned,
users who do not trust each other, a driver and a gate that refuse or hang.
"""

from __future__ import annotations

import errno
import random
import tempfile
from functools import partial
from pathlib import Path

import numpy as np
from lent_fds import collect
from memory_world import BASE, Hook, KvWorld, Shim
from virtual import VirtualClock

from valved.abi.kv_link import KvSpan, KvTableMessage
from valved.abi.link import LinkType
from valved.config import MIB
from valved.machine.cards import CardUse
from valved.model.ids import Role
from valved.model.memory import KvTensor

PER_COLUMN = 4
MS = 1_000_000
MOMENTS_US = (0, 50, 150, 420, 480, 600, 900, 1300, 2000, 3000, 30_000, 700_000)


def begun(shim):
    """It makes steps by itself, and no kernel of it knows any block yet."""
    shim.has_stepped, shim.steps = False, True
    return shim


class MortalClock:
    """Of a valved: what it waits for never comes once it is dead."""

    def __init__(self, clock):
        self.clock, self.is_dead = clock, False
        self.now_ns = clock.now_ns

    def call_at_ns(self, when_ns, call):
        return self.clock.call_at_ns(when_ns, lambda: self.is_dead or call())


class Crowd:
    def __init__(self, seed, config, layers=1):
        self.draw, self.layers, self.config = random.Random(seed), layers, config
        self.folder = tempfile.TemporaryDirectory()
        self.clock = VirtualClock()
        self.world = self._valved()
        self.hooks = []
        self.told = []  # what happened, for whom a walk fails

    def _valved(self, **more):
        life = MortalClock(self.clock)
        world = KvWorld(Path(self.folder.name), config=self.config, handles=24 * self.layers, clock=life, **more)
        world.life, world.clock = life, self.clock
        make = world.shim
        world.shim = lambda *words, **more: begun(make(*words, **more))
        return world

    def walk(self, actions):
        self.come("offline", 12)
        self.come("online", 8)
        names = self.names()
        for _ in range(actions):
            action = self.draw.choice(names)
            self.told.append(action.__name__)
            action()
            self.check()
        self.end()

    def names(self):
        """What may happen, as often as it is named."""
        names = [*[self.in_the_middle] * 6, *[self.wait] * 3, *[self.come] * 3, self.come_in_ranks, self.come_plain]
        names += [self.restart, self.fails, self.pins, self.driver_refuses, self.gate_hangs, self.is_braked]
        return [*names, self.offers, self.card_is_read]

    # Who comes

    def come(self, role="", columns=0):
        if len(self.hooks) > 4:
            return
        role = role or self.draw.choice(["online", "offline"])
        columns = columns or self.draw.randint(2, 12)
        gpus, uid = self.draw.choice([(0,), (0,), (1,), (0, 1)]), self.draw.choice([1000, 1000, 1000, 2000])
        name = f"{role}{len(self.world.shims)}"
        hook = self.world.engine(role, columns=columns, layers=self.layers, gpus=gpus, name=name, uid=uid)
        self.world.shims[-1].served = gpus
        if hook is not None:
            self._joined(hook, gpus, len(gpus) * self.layers)

    def _joined(self, hook, gpus, ranges, second=None):
        hook.gpus, hook.ranges, hook.second = gpus, ranges, second
        hook.book["steps"] = 1
        self.hooks.append(hook)
        if hook.shim.is_offline:
            self.world.run(self.draw.choice([0, 30, 300]))
            hook.hold(0, list(range(4, hook.blocks - 4)))

    def come_in_ranks(self):
        """One process for each GPU."""
        world, role, columns = self.world, self.draw.choice(["online", "offline"]), self.draw.randint(2, 8)
        first = world.shim(role, gpus=(0,), name=f"{role}{len(world.shims)}")
        pid = 5000 + len(world.shims)
        world.processes.add(pid, parent=first.entry.process.pid)
        more = {"claimed": False} if role == "offline" else {}
        second = begun(Shim(world, world.card, getattr(world, role)(pid=pid, gpus=(1,), name="rank", **more)))
        world.shims.append(second)
        shims = first, second
        for gpu, shim in enumerate(shims):
            shim.served = (gpu,)
            if role == "offline" and world.passes_scratch:
                shim.offer_scratch(gpu)
            self._reserve(shim, 0, columns, gpu)
        if not all(shim.ranges for shim in shims):
            for shim in shims:
                shim.die()
            return
        scheduler, rank = [Hook(shim, columns * PER_COLUMN, ranks=2) for shim in shims]
        for hook in (scheduler, rank):
            assert hook.register([self._tensor(0)], (0,)) == 0
        assert scheduler.attach() == 0
        world.hooks.append(scheduler)
        self._joined(scheduler, (0, 1), 1, second)

    def _reserve(self, shim, number, slots, gpu, **more):
        asked = shim.reserve(number, slots, gpu, **more)
        for ms in [1] * 20 + [20] * 250:
            self.world.run(ms)
            if shim.acked(asked) is not None:
                break
        if shim.acked(asked) != 0:
            shim.free_range(number)

    def _tensor(self, number):
        stride = self.world.config.memory.handle_mib * MIB // PER_COLUMN
        return KvTensor(base_addr=BASE + (number << 40), block_stride_bytes=stride, block_bytes=stride)

    def come_plain(self):
        """No hook: its range is whole, or its allocation fails. It leaves soon."""
        gpu = self.draw.randint(0, 1)
        shim = self.world.shim(self.draw.choice(["online", "offline"]), gpus=(gpu,), name=f"p{len(self.world.shims)}")
        shim.served = (gpu,)
        self._reserve(shim, 3, self.draw.randint(1, 8), gpu, elastic=False)
        self._later(self.draw.choice([10, 2000]), shim.die)

    # What becomes of them

    def in_the_middle(self):
        """All want memory; then something happens to one, and to another one a moment later."""
        for hook in self.hooks:
            if not hook.shim.is_offline:
                wanted = self.draw.choice([0, 4, hook.blocks // 2, hook.blocks])
                hook.want(used=min(wanted, 4), wanted=wanted)
                self.world.clock.advance(self.draw.choice([0, 0, 50]) * 1000)
        for _ in range(self.draw.randint(1, 2)):
            self.world.clock.advance(self.draw.choice(MOMENTS_US) * 1000)
            if self.hooks:
                happens = [self.hook_anew, self.link_anew, self.death, self.hang, self.frees, self.nothing]
                happens += [self.lays_anew, self.cannot_recompute]
                action, hook = self.draw.choice(happens), self.draw.choice(self.hooks)
                self.told.append((action.__name__, self.hooks.index(hook), hook.shim.entry.role.name))
                action(hook)

    def nothing(self, hook):
        """Of all that could happen."""

    def death(self, hook):
        self.hooks.remove(hook)
        shims = [shim for shim in (hook.shim, hook.second) if shim is not None]
        self.draw.shuffle(shims)
        shims[0].die()
        if shims[1:]:
            self._later(700, shims[1].die)

    def hang(self, hook):
        hook.shim.answers = False
        self._later(self.draw.choice([20, 120]), hook.shim.catch_up)

    def frees(self, hook):
        """A range; what is left of it cannot compute, and ends."""
        shim = hook.shim
        if hook.second is not None or not shim.answers or shim.free_ns > self.world.clock.now_ns() or shim.clearing:
            return
        self.hooks.remove(hook)
        number = self.draw.choice(sorted(shim.ranges))
        for place in [place for place in shim.thought_gone if place[0] == number]:
            shim._let_go(*place)
        shim.free_range(number)
        self._later(1000, shim.die)

    def lays_anew(self, hook):
        """The engine makes its cache anew, with other columns."""
        shim, world = hook.shim, self.world
        if hook.second is not None or not shim.answers or shim.free_ns > world.clock.now_ns() or shim.clearing:
            return
        if shim.client not in world.books.clients or shim.held_back or shim.at_step:
            return
        world.register.leave(hook.client, "link closed")
        self.hooks.remove(hook)
        world.hooks.remove(hook)
        for number in sorted(shim.ranges):
            for place in [place for place in shim.thought_gone if place[0] == number]:
                shim._let_go(*place)
            shim.free_range(number)
        hook.blocks = PER_COLUMN * self.draw.randint(2, 12)
        places = [(gpu, layer) for gpu in hook.gpus for layer in range(hook.ranges // len(hook.gpus))]
        for number, (gpu, _) in enumerate(places):
            self._reserve(shim, number, hook.blocks // PER_COLUMN, gpu)
        if len(shim.ranges) < len(places):
            self._later(0, shim.die)
        else:
            self._attach(hook)

    def cannot_recompute(self, hook):
        """For a while it says that it could not make good a loss."""
        if hook.book is not None:
            book, mode = hook.book, int(hook.mode)
            book["mode"] = 0
            self._later(self.draw.choice([1, 100]), lambda: book.__setitem__("mode", mode))

    def hook_anew(self, hook):
        if hook.second is None and hook.shim.client in self.world.books.clients:
            self.world.register.leave(hook.client, "link closed")
            self.hooks.remove(hook)
            self.world.hooks.remove(hook)
            self._attach(hook)

    def _attach(self, before):
        """The hook of an engine, once more."""
        world, shims = self.world, [before.shim, *([before.second] if before.second else [])]
        again, *others = [Hook(shim, before.blocks, ranks=len(shims)) for shim in shims]
        for hook in (again, *others):
            if hook.register([self._tensor(number) for number in range(before.ranges)], (0,)) != 0:
                for shim in shims:
                    self._later(0, shim.die)
                return
        again.ask_table()
        for _ in range(1000):
            if isinstance(again.connection.sent[-1][1], KvTableMessage):
                break
            world.run(10)
        assert isinstance(again.connection.sent[-1][1], KvTableMessage), "a hook that comes anew gets no table"
        assert again.take_table() == 0
        again.book["steps"] = 5
        world.hooks.append(again)
        again.gpus, again.ranges, again.second = before.gpus, before.ranges, before.second
        self.hooks.append(again)
        wanted = int(before.book["wanted_blocks"][0])
        again.want(used=min(4, wanted), wanted=wanted)

    def link_anew(self, hook):
        shim = hook.shim
        if hook.second is not None:
            return
        pid, offline, uid = shim.entry.process.pid, shim.is_offline, self.world.connections[shim.client].uid
        shim.hang_up()
        shim.at_step.clear()
        shim.answers, shim.held_back = True, []
        self.world.run(self.draw.choice([0, 1, 30, 900]))
        join = self.world.offline if offline else self.world.online
        shim.retell(join(pid=pid, gpus=hook.gpus, uid=uid))
        for gpu in hook.gpus if offline and self.world.passes_scratch else ():
            shim.offer_scratch(gpu)
        self.hook_anew(hook)

    def restart(self):
        """valved dies, in the middle of whatever it does, and another one takes its place."""
        old = self.world
        shims = [shim for shim in old.shims if shim.is_alive]
        for shim in shims:
            if shim.client in old.books.clients:
                shim.hang_up()
            shim.at_step.clear()
            shim.answers, shim.held_back = True, []
        old.life.is_dead = True
        old.kv.books.pool.close()
        self.world = new = self._valved(processes=old.processes)
        new.card, new.shims, new.hooks = old.card, old.shims, []
        for shim in new.shims:
            shim.left, shim.client = shim.client, 0  # a number that means another one now
        self.world.run(self.draw.choice([0, 1, 900]))
        hooks, self.hooks = self.hooks, []
        for shim in shims:
            if shim.is_alive:
                self._join(shim, old)
        for hook in hooks:
            if hook.shim.is_alive:
                self._attach(hook)

    def _join(self, shim, old):
        gpus, uid = shim.served, old.connections[shim.left].uid
        is_rank = shim.is_offline and old.processes.table[shim.entry.process.pid][1] != 1
        more = {"claimed": False} if is_rank else {}
        join = self.world.offline if shim.is_offline else self.world.online
        shim.retell(join(pid=shim.entry.process.pid, gpus=gpus, uid=uid, **more), self.world)
        for gpu in gpus if shim.is_offline and self.world.passes_scratch else ():
            shim.offer_scratch(gpu)

    # The rest

    def wait(self):
        self.world.clock.advance(self.draw.choice([*MOMENTS_US, 2_000_000]) * 1000)

    def fails(self):
        if self.hooks:
            status = self.draw.choice([errno.EIO, errno.ENOMEM, errno.EAGAIN])
            self.draw.choice(self.hooks).shim.fails.append((self.draw.randint(0, 4), status))

    def pins(self):
        for hook in self.draw.sample(self.hooks, min(1, len(self.hooks))):
            _, size, slots = hook.shim.ranges_of[0]
            slot = self.draw.randrange(slots)
            if slot in hook.shim.ranges[0]:
                hook.shim.say(LinkType.KV_PIN, KvSpan(range=0, offset=slot * size, bytes=1))

    def offers(self):
        for hook in self.hooks:
            hook.obey_target()

    def driver_refuses(self):
        self.world.outside.fails.append(0x40)

    def card_is_read(self):
        """By NVML, which may be silent."""
        self._see_cards(range(2) if self.draw.random() < 0.7 else ())

    def _see_cards(self, gpus):
        world, size = self.world, self.world.config.memory.handle_mib * MIB
        spare = world.config.memory.spare_mib * MIB
        uses = {}
        for gpu in gpus:
            free, total = (world.card.limit - world.card.made(gpu)) * size, world.card.limit * size + spare
            uses[bytes([gpu + 1]) * 16] = CardUse(
                total_bytes=total, used_bytes=total - spare - free, by_pid={}, is_mig=False
            )
        world.kv.service.see_cards(uses)

    def gate_hangs(self):
        gate, gpu = self.world.gate, self.draw.randint(0, 1)
        if gate.is_stopped(gpu):
            return
        gate.deaf.add(gpu)
        self._later(self.draw.choice([5, 300, 1500]), lambda: (gate.deaf.discard(gpu), gate.on_stamps()))

    def is_braked(self):
        supply = self.world.kv.supply
        supply.is_allowed = False
        self._later(self.draw.choice([1, 200]), partial(setattr, supply, "is_allowed", True))

    def _later(self, ms, call):
        self.world.clock.call_at_ns(self.world.clock.now_ns() + ms * MS, call)

    # What must hold

    def check(self):
        self.world.check_memory()
        books = self.world.kv.books
        for engine in books.engines.values():
            if engine.is_complete and books.orders.is_idle and not engine.going.any():
                stands = engine.are_whole(engine.standing_columns())
                assert np.array_equal(engine.table.is_backed(), stands), "a table misses memory that is there"
        assert not self.world.journey_failures, self.world.journey_failures

    def end(self):
        world, kv = self.world, self.world.kv
        world.outside.fails.clear()
        for _ in range(40):
            world.run(250)
            for hook in self.hooks:
                hook.shim.fails.clear()
        assert not kv.supply.oldest, "a need never ends"
        assert kv.turn._turn is None, "the gate is never given back"
        for engine in kv.books.engines_with(Role.ONLINE):
            online = kv.reserve.online[engine.service]
            assert not online.growing
            assert not online.giving
            assert not len(engine.partial_columns()), "a part of a column is nobody's use"
            wanted = min(engine.columns, -(-engine.view().wanted_blocks // engine.blocks_per_column))
            is_short = engine.standing_count() < wanted and len(engine.bare_columns()) > 0
            to_be_had = kv.supply.obtainable(engine, kv.supply.within_reach(engine))
            assert not is_short or to_be_had == 0, "a service waits for memory that can be had"
        self.check()
        world.check()
        for shim in world.shims:
            if shim.is_alive:
                shim.die()
        world.run(5000)
        free = sum(kv.books.pool.free_handles(info.index) for info in kv.books.gpus)
        assert free == kv.books.pool.total, "a handle is lost although everybody is dead"
        assert not kv.outside._ways, "a way into a process outlives it"
        collect()
        self.folder.cleanup()
