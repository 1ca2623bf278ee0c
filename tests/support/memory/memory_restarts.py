"""Walks of a crowd over valveds that die in the middle of whatever they do, and whose successor finds anything.

The state folder may be whole, old, cut short, lost, or refuse what is written. Processes come back at once, late, twice
or never, and some lie about what they hold. Channels that a dead valved had switched off stay so until somebody
switches them on.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from pathlib import Path

import numpy as np
from lent_fds import is_lent, lend
from memory_crowd import MOMENTS_US, Crowd, MortalClock, begun
from memory_world import KvWorld, Physical
from node_world import FakePrompt, FakeWork

from valved.abi.kv_link import ELASTIC, ENTRY, HEEDED, KvEntries, KvHow, KvOp, KvRangeMessage
from valved.abi.link import LinkType, Malformed
from valved.daemon import take_over
from valved.model.ids import Role

STATE = ("state.json", "unsaved.jsonl", "online")


class Disk:
    """Of the run folder. It may be full, or hang: what was begun then may be done later, or not at all."""

    def __init__(self):
        self.trouble = 0
        self.hangs = False

    def check(self):
        if self.trouble:
            raise OSError(self.trouble, "the disk")


class Prompt(FakePrompt):
    def __init__(self, disk):
        self.disk = disk

    def do(self, job):
        self.disk.check()
        return self.ask(job)

    def ask(self, job):
        if self.disk.hangs:
            raise TimeoutError
        return job()


class Writes(FakeWork):
    def __init__(self, disk):
        super().__init__()
        self.disk = disk

    def do(self, job, then):
        def write():
            self.disk.check()
            return job()

        self.later = self.disk.hangs
        super().do(write, then)


class Restarts(Crowd):
    """Beside what a crowd does. `disk_is_full` also makes it well again."""

    def __init__(self, seed, config, layers=1):
        self.disk = Disk()
        self.away = []  # (shim, hook or None): processes that have not come back to this valved
        self.liars = []
        self.launched = set()
        self.unknown = {}  # channels that are off, and of which no valved may know
        self.is_told = True  # the folder took all that this valved wrote
        self.sure, self.claimed, self.welcomed = set(), set(), set()  # processes that this valved was told of
        self.older = None
        super().__init__(seed, config, layers)

    # A valved

    def _valved(self, **more):
        life = MortalClock(self.clock)
        folder = Path(self.folder.name)
        world = KvWorld(
            folder, config=self.config, handles=24 * self.layers, clock=life, prompt=Prompt(self.disk), **more
        )
        world.life, world.clock = life, self.clock
        world.processes.cgroup = "/{}".format  # else who lost its claim is taken for another
        world.disk = world.handover._file._disk = Writes(self.disk)
        make = world.shim
        world.shim = lambda *words, **more: begun(make(*words, **more))
        world.online = lambda **more: self._hello(Role.ONLINE, **more)
        world.offline = lambda **more: self._hello(Role.OFFLINE, **more)
        return world

    def _hello(self, role, *, pid, name="", gpus=(0,), uid=1000, claimed=True):
        """Its `valve run` claims it once; channels keep their names."""
        world = self.world
        if claimed and pid not in self.launched and world.processes.table[pid][1] == 1:  # else its parent is
            self.launched.add(pid)
            assert world.node.launch(pid, world.processes.start_time(pid), role, name)
        client = world.hello(pid, role, uid=uid, features=world.shim_features).client
        if client is None:
            return None
        for gpu in gpus:
            world.add_channel(client, gpu=gpu, h_client=0xC1D00000 + pid, h_channel=0xCAF00001 + gpu)
        return client

    # What happens

    def names(self):
        names = [*[self.in_the_middle] * 4, *[self.wait] * 3, *[self.come] * 3, self.come_in_ranks, self.come_plain]
        names += [*[self.restart] * 4, *[self.one_comes_back] * 4, self.fails, self.pins, self.driver_refuses]
        names += [self.gate_hangs, self.is_braked, self.offers, self.card_is_read, self.driver_hangs]
        return [*names, self.disk_is_full, self.state_is_copied, self.lies]

    def disk_is_full(self):
        disk = self.disk
        if disk.trouble or disk.hangs:
            self._disk_works()
            return
        if self.draw.random() < 0.3:
            disk.hangs = True
        else:
            disk.trouble = self.draw.choice([errno.ENOSPC, errno.EROFS, errno.EIO])
        self.is_told = False

    def _disk_works(self):
        self.disk.trouble, self.disk.hangs = 0, False
        self.world.disk.finish()

    def state_is_copied(self):
        self.older = self._copies()

    def _copies(self):
        folder, found = Path(self.folder.name), {}
        for name in STATE:
            path = folder / name
            if path.is_dir():
                found[name] = sorted(one.name for one in path.iterdir())
            elif path.exists():
                found[name] = path.read_bytes()
        return found

    def _put_copies(self, copies):
        folder = Path(self.folder.name)
        for name in STATE:
            path = folder / name
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
            kept = copies.get(name)
            if isinstance(kept, bytes):
                path.write_bytes(kept)
            elif kept is not None:
                path.mkdir()
                for one in kept:
                    (path / one).touch()

    def frees(self, hook):
        if not self.world.outside.hangs:  # a free waits for the driver, too
            super().frees(hook)

    def lays_anew(self, hook):
        if not self.world.outside.hangs:
            super().lays_anew(hook)

    def driver_hangs(self):
        port = self.world.outside
        port.hangs = True
        self._later(self.draw.choice([1, 30, 120]), port.go_on)
        self.in_the_middle()

    # valved dies

    def restart(self):
        old = self.world
        if self.draw.random() < 0.6:
            for hook in self.hooks:
                if not hook.shim.is_offline:
                    hook.want(used=4, wanted=self.draw.choice([4, hook.blocks // 2, hook.blocks]))
            old.clock.advance(self.draw.choice(MOMENTS_US) * 1000)
        self._find_state(old)
        self._end_of(old)
        self.world = new = self._valved(processes=old.processes)
        new.card, new.shims, new.hooks = old.card, old.shims, []
        offline = {0xC1D00000 + shim.entry.process.pid for shim in new.shims if shim.is_offline}
        new.gate.off.update((key, ref) for key, ref in old.gate.off.items() if key[0] in offline)
        for shim in new.shims:
            shim.left, shim.client = shim.client, 0  # a number that means another one now
        for shim in (shim for shim in new.shims if shim.is_alive and self.draw.random() < 0.08):
            self.told.append("dies between")
            shim.die()
        take_over(new, new.config, Path(self.folder.name))
        self.welcomed = {process.pid for process in new.register.lived.former}
        self._check_off()
        self._check_held()
        self._come_back(old)

    def _check_off(self):
        """A channel that was off is known to the successor, unless the folder could not say so."""
        expected = {
            (one.channel.h_client, one.channel.h_channel) for one in self.world.register.channels.leftovers.all()
        }
        unknown = {key: ref for key, ref in self.world.gate.off.items() if key not in expected}
        assert unknown.keys() <= self.unknown.keys() or not self.is_told, "nobody knows of a channel that is off"
        self.unknown |= unknown
        self.is_told = not (self.disk.trouble or self.disk.hangs)  # from here on

    def _find_state(self, old):
        way = self.draw.choice(["as it is"] * 3 + ["whole"] * 2 + ["older", "cut", "lost", "no folder"])
        self.told.append(f"state {way}")
        file, was_well = Path(self.folder.name) / "state.json", not (self.disk.trouble or self.disk.hangs)
        if way == "whole":
            old.handover.save()
        self.is_told &= way in ("as it is", "whole")
        is_whole = way == "whole" and was_well
        known = old.books.clients.values()
        self.sure = {one.process.pid for one in known} if is_whole else set()
        roots = old.books.claims.items() if is_whole or self.is_told else ()
        self.claimed = {root.pid for root, claim in roots if is_whole or claim.role is Role.ONLINE}
        if way == "older" and self.older is not None:
            self._put_copies(self.older)
        elif way == "cut" and file.exists():
            data = file.read_bytes()
            file.write_bytes(data[: self.draw.randrange(len(data) + 1)])
        elif way == "lost":
            file.unlink(missing_ok=True)
        elif way == "no folder":
            self._put_copies({})

    def _end_of(self, old):
        """What the driver had begun with it ends first; what it had not is never done."""
        old.life.is_dead = True
        old.outside.die(self.draw.choice([0, 0, 1, 100]))
        for shim in old.shims:
            if shim.is_alive:
                self._cut(shim)
        for fd in list(old.outside.open_fds):
            with contextlib.suppress(OSError):
                os.close(fd)
        old.kv.books.pool.close()
        card = old.card
        for fd in [fd for fd in card.by_fd if not is_lent(fd)]:  # numbers that mean another file soon
            one = card.by_fd.pop(fd)
            if one.mapped_by is not None:
                card.by_fd[-2 - len(self.told) * 1000 - fd] = one

    def _cut(self, shim):
        """The end of its link, which it reads to the end."""
        shim.connection.on_send = lambda *_: None
        shim.uid = shim.connection.uid
        client, shim.client = shim.client, 0
        late = [*shim.coming, *(body for _, body, _ in shim.held_back)]
        shim.coming, shim.held_back, shim.at_step, shim.answers = [], [], [], True
        for body in late:
            if body.how == KvHow.OUTSIDE and body.op == KvOp.QUARANTINE:
                shim._hear_of(body)
        shim.client = client

    def _come_back(self, old):
        hooks, self.hooks = {hook.shim: hook for hook in self.hooks}, []
        waiting = {id(shim): (shim, hook) for shim, hook in self.away}
        self.away = []
        engines = [*hooks.values(), *(hook for _, hook in waiting.values() if hook is not None)]
        seconds = {hook.second for hook in engines if hook.second is not None}
        shims = [shim for shim in old.shims if shim.is_alive and shim not in seconds]
        self.draw.shuffle(shims)
        for shim in shims:
            hook = hooks.get(shim) or waiting.get(id(shim), (None, None))[1]
            if shim in self.liars:
                shim.die()
            elif not shim.is_alive:
                continue
            elif self.draw.random() < 0.55:
                self._rejoin(shim, hook)
            else:
                self.told.append("late")
                self.away.append((shim, hook))
            if self.draw.random() < 0.3:
                self.world.run(self.draw.choice([0, 1, 900]))

    def one_comes_back(self):
        self.away = [(shim, hook) for shim, hook in self.away if shim.is_alive]
        if self.away:
            self._rejoin(*self.away.pop(self.draw.randrange(len(self.away))))

    def _rejoin(self, shim, hook):
        shims = [shim, *([hook.second] if hook is not None and hook.second is not None else [])]
        for one in [one for one in shims if one.is_alive]:
            if not self._tell(one, hook is not None):
                self.told.append("refused")
                pid = one.entry.process.pid
                assert pid not in self.claimed | self.welcomed, "a process that valved knew is refused"
                self._later(self.draw.choice([10, 3000]), one.die)
                hook = None
            elif len(shims) == 1 and self.draw.random() < 0.15:
                self.told.append("twice")
                one.hang_up()
                self.world.run(self.draw.choice([0, 1, 400]))
                assert not one.is_alive or self._tell(one, hook is not None)
        if hook is None:
            return
        if not all(one.is_alive for one in shims):
            for one in shims:
                if one.is_alive:
                    self._later(300, one.die)
            return
        is_split = len({one.entry.service for one in shims}) > 1
        assert not is_split or shim.entry.process.pid not in self.claimed, "an engine that valved knew is two"
        if is_split or self.draw.random() < 0.1:
            self.told.append("no hook")
            for one in shims:
                self._later(2000, one.die)
            return
        self._attach(hook)

    def _tell(self, shim, is_heeded):
        join = self.world.offline if shim.is_offline else self.world.online
        client = join(pid=shim.entry.process.pid, gpus=shim.served, uid=shim.uid)
        if client is None:
            return False
        shim.retell(client, self.world, flags=HEEDED if is_heeded else 0)
        for gpu in shim.served if shim.is_offline and self.world.passes_scratch else ():
            shim.offer_scratch(gpu)
        return True

    # Who lies

    def lies(self):
        """About what is mapped, and ends soon."""
        if not self.away:
            return
        shim, hook = self.away.pop()
        if not shim.is_alive:
            return
        if hook is not None and hook.second is not None:
            hook.second.die()
        self.liars.append(shim)
        shim.has_stepped = False  # what is mapped beside its kernels is its own harm
        join = self.world.offline if shim.is_offline else self.world.online
        client = join(pid=shim.entry.process.pid, gpus=shim.served, uid=shim.uid, claimed=True)
        if client is None:
            shim.die()
            return
        shim.world, shim.client, shim.entry = self.world, client, self.world.books.clients[client]
        shim.connection = self.world.connections[client]
        shim.connection.on_send = shim._hear
        try:
            for number in sorted(shim.ranges_of):
                self._lie(shim, number)
        except Malformed as error:
            self.told.append(f"malformed: {str(error)[:40]}")
            self.world.register.leave(client, "malformed")
        self._later(self.draw.choice([1, 700, 3000, 15_000]), shim.die)

    def _lie(self, shim, number):
        base, size, slots = shim.ranges_of[number]
        kind = self.draw.choice(
            ["more", "size", "bytes", "slot twice", "name twice", "names of others", "untold", "junk"]
        )
        kind = kind if self.draw.random() < 0.9 else "more"
        self.told.append(f"lie: {kind}")
        gpu = shim.gpus[number]
        rows = [(name, slot) for slot, (name, _) in shim.ranges.get(number, {}).items()]
        free = [slot for slot in range(slots) if slot not in {slot for _, slot in rows}]
        new = iter(range(int(self.draw.getrandbits(60)), 1 << 62))
        if kind == "size":
            slots = max(1, self.draw.choice([slots // 2, slots + 3]))
            rows = [row for row in rows if row[1] < slots or self.draw.random() < 0.1]
        if kind in ("more", "junk"):
            rows += [(next(new), slot) for slot in free[: self.draw.randint(1, 4)]]
        if kind == "slot twice" and rows:
            rows.append((next(new), rows[0][1]))
        if kind == "name twice" and rows and free:
            rows.append((rows[0][0], free[0]))
        if kind == "names of others":
            names = [name for one in self.world.shims for held in one.ranges.values() for name, _ in held.values()]
            self.draw.shuffle(names)
            rows += [(name, slot) for name, slot in zip(names[:3], free, strict=False)]
        held = len(rows) + (self.draw.randint(1, 3) if kind == "untold" else 0)
        body = KvRangeMessage(
            gpu_uuid=bytes([self.draw.choice([gpu, gpu, 1 - gpu]) + 1]) * 16,
            device_instance=gpu,
            range=number,
            base=base,
            handle_bytes=size * (2 if kind == "bytes" else 1),
            slots=slots,
            flags=self.draw.choice([0, ELASTIC, ELASTIC | HEEDED]),
            held=min(held, slots),
        )
        shim.say(LinkType.KV_RANGE, body)
        for first in range(0, len(rows), 64):
            part = rows[first : first + 64]
            raw = np.array([(name, slot, 0) for name, slot in part], ENTRY).tobytes()
            fds = []
            for name, slot in part:
                fd = lend()
                known = shim.ranges.get(number, {}).get(slot)
                mine = known[1] if known is not None and known[0] == name else None
                self.world.card.by_fd[fd] = mine or Physical(gpu, shim.entry.domain)
                fds.append(fd)
            if kind == "junk" and fds:
                self.world.outside.junk.add(fds[-1])
            try:
                shim.say(LinkType.KV_HELD, KvEntries(order=0, range=number, op=0, how=0, raw=raw), fds)
            finally:
                self.world.outside.junk.clear()

    # What must hold

    def _check_held(self):
        """An online process that valved knew, and that is not back, keeps its GPUs."""
        world = self.world
        for shim in world.shims:
            is_sure = shim.entry.process.pid in self.sure
            if shim.is_alive and is_sure and not shim.is_offline and shim.client not in world.books.clients:
                for gpu in shim.served if shim not in self.liars else ():
                    assert world.gate.is_gated(gpu), "offline work may run beside a service that is not back"

    def check(self):
        super().check()
        self._check_held()

    def end(self):
        self._disk_works()
        for shim in self.liars:
            shim.die()
        while self.away:
            shim, hook = self.away.pop()
            if shim.is_alive and self.draw.random() < 0.5:
                self._rejoin(shim, hook)
                self.check()
            elif shim.is_alive and self.draw.random() < 0.5:
                shim.die()
        self.world.run(5000)
        for shim in self.world.shims:  # who has not come back does so no more
            if shim.is_alive and shim.client not in self.world.books.clients:
                shim.die()
        self.world.run(5000)
        for key in self.unknown:  # the driver forgets those of the dead
            pid = key[0] - 0xC1D00000
            if pid not in self.world.processes.table:
                self.world.gate.off.pop(key, None)
        if self.draw.random() < 0.5:
            self._begin_anew()
        super().end()

    def _read_cards(self):
        self._see_cards(range(2))
        self._later(100, self._read_cards)

    def _begin_anew(self):
        """With everybody dead nothing is left of them, and a service gets its memory as on a new node."""
        world, books = self.world, self.world.kv.books
        for shim in world.shims:
            if shim.is_alive:
                shim.die()
        self.hooks = []
        world.outside.fails.clear()
        world.run(5000)
        assert sum(books.pool.free_handles(info.index) for info in books.gpus) == books.pool.total, "a handle is lost"
        assert not world.gate.off, "a channel is off, and its process is gone"
        assert not world.gate.launches_held
        assert not any(account.holders for account in world.gating.gpus.values()), "a GPU is held for nobody"
        kept = set(books.pool._fd.tolist())  # numbers of others that were closed mean other files by now
        world.card.by_fd = {fd: one for fd, one in world.card.by_fd.items() if fd in kept}
        self._read_cards()
        offline = world.engine("offline", columns=16, layers=self.layers, name="new offline")
        world.run(500)
        offline.hold(0, list(range(4, 60)))
        online = world.engine("online", columns=16, layers=self.layers, name="new online")
        world.run(500)
        online.want(used=4, wanted=40)
        world.run(5000)
        assert len(online.backed()) >= 40, "a service waits for memory that offline work has"
