"""Walks by a seed through what valved writes down: a fault, or its death, at any system call of a writer; then another.

Claims, modes, settings, pauses and drains that were answered as written are there again. Online and offline processes
come back in any order, or end.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import tempfile
from pathlib import Path

from lent_fds import collect
from memory_crowd import MortalClock
from node_world import MS, SECOND, FakePrompt, FakeWork, World
from virtual import VirtualClock

from valved.daemon import take_over
from valved.errors import NotNow
from valved.model.ids import Mode, Role
from valved.state import saved, unsaved

CALLS = ("open", "fsync", "replace", "unlink", "mknod", "mkdir", "write", "fchmod")
REAL = {name: getattr(os, name) for name in CALLS}
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT
FIRST_H_CLIENT = 0xC1D00000


class Died(BaseException):
    """valved, in the middle of a system call or right behind it."""


def write_private(path, data, *, sync=False):
    """That of valved, by calls that can fail one by one."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        os.fchmod(fd, 0o600)
        os.write(fd, data)
        if sync:
            os.fsync(fd)
    finally:
        os.close(fd)


class Faults:
    """From the `after`th call on, `left` calls fail."""

    def __init__(self, draw):
        self.draw = draw
        self.set(None, 0, 0)
        self.is_clean = True  # none was set in the life of this valved

    def set(self, kind, after, left):
        self.kind, self.after, self.left, self.is_clean = kind, after, left, False

    @contextlib.contextmanager
    def on(self):
        """What is written here may fail."""
        before = saved.write_private, Path.write_text
        saved.write_private = unsaved.write_private = write_private
        Path.write_text = lambda path, text, **_: write_private(path, text.encode())
        for name in CALLS:
            setattr(os, name, self._faulty(name))
        try:
            yield
        finally:
            for name, real in REAL.items():
                setattr(os, name, real)
            saved.write_private, Path.write_text = before
            unsaved.write_private = before[0]

    def _faulty(self, name):
        def call(*words, **more):
            if name == "open" and not words[1] & WRITES:
                return REAL[name](*words, **more)
            if self._is_due():
                self._fail(name, words, more)
            return REAL[name](*words, **more)

        return call

    def _is_due(self):
        self.after -= 1
        if self.after >= 0 or not self.left:
            return False
        self.left -= 1
        return True

    def _fail(self, name, words, more):
        if name == "write":  # a part of it
            REAL[name](words[0], words[1][: self.draw.randrange(len(words[1]) + 1)])
        elif self.kind is Died and self.draw.random() < 0.5:
            REAL[name](*words, **more)
        raise Died if self.kind is Died else OSError(self.kind, os.strerror(self.kind))


class Prompt(FakePrompt):
    def __init__(self, faults):
        self.faults, self.hangs, self.late = faults, False, []

    def do(self, job):
        if self.hangs:
            self.late.append(job)
            raise TimeoutError
        with self.faults.on():
            return job()

    def ask(self, job):
        if self.hangs:
            raise TimeoutError
        return job()

    def go_on(self):
        self.hangs, late, self.late = False, self.late, []
        for job in late:
            with contextlib.suppress(OSError):
                job()


class Disk(FakeWork):
    def __init__(self, faults):
        super().__init__()
        self.faults = faults

    def do(self, job, then):
        def write():
            with self.faults.on():
                return job()

        super().do(write, then)


class Process:
    def __init__(self, role, gpus):
        self.role, self.gpus = role, gpus
        self.client = None
        self.is_claimed = False  # and this was answered as written, or the present valved knows it
        self.is_sure = False  # the state that the present valved read names it with its GPUs
        self.is_refused = False


class StateWalk:
    def __init__(self, seed):
        self.draw = random.Random(seed)
        self.faults = Faults(self.draw)
        self.temporary = tempfile.TemporaryDirectory()
        self.folder, self.clock = Path(self.temporary.name), VirtualClock()
        self.told, self.pid = [], 3000
        self.processes = {}
        self.modes, self.starts = [Mode.HARVEST], [None]  # what a successor may find
        self.paused, self.drained = {False}, {False}
        self.unknown = set()  # channels that are off, and no file says so
        self.world = None
        self._start({})
        self.faults.is_clean = True

    def _start(self, off):
        old = self.world
        known = {} if old is None else {"processes": old.processes}
        life = MortalClock(self.clock)
        self.world = world = World(self.folder, clock=life, prompt=Prompt(self.faults), **known)
        world.life, world.clock, world.processes.cgroup = life, self.clock, "/{}".format
        world.disk = world.handover._file._disk = Disk(self.faults)
        world.gate.off.update(off)
        try:
            take_over(world, world.config, self.folder)
        except Died:
            life.is_dead = True
            self._start(dict(world.gate.off))

    def walk(self, actions):
        names = [*[self.claims] * 3, *[self.comes] * 6, *[self.offline_starts] * 2, *[self.launches] * 3, self.dies]
        names += [self.sets, self.pauses, self.drains, self.resumes, *[self.looks] * 2, *[self.wait] * 3]
        names += [*[self.fails] * 4, *[self.is_well] * 2, self.hangs, self.hands_over, *[self.restart] * 4]
        for _ in range(actions):
            action = self.draw.choice(names)
            self.told.append(action.__name__)
            try:
                action()
            except Died:
                self._may_have_done(action)
                self.restart()
            self.check()
        self.end()

    # What is asked of valved

    def _new(self, role):
        self.pid += 1
        self.world.processes.add(self.pid)
        process = self.processes[self.pid] = Process(role, self.draw.choice([(0,), (1,), (0, 1)]))
        return self.pid, process

    def _of(self, role):
        return [(pid, process) for pid, process in self.processes.items() if process.role is role]

    def _is_saved(self):
        """As a caller of the API is told."""
        answers = []
        self.world.node.when_saved(answers.append, 10 * MS)
        self.world.run(0 if answers else 20)
        if answers[0]:
            self.modes, self.starts = self.modes[-1:], self.starts[-1:]
        return answers[0]

    def claims(self):
        if len(self._of(Role.ONLINE)) < 4:
            pid, process = self._new(Role.ONLINE)
            self.world.node.launch(pid, self.world.processes.start_time(pid), Role.ONLINE, "chat")
            process.is_claimed = self._is_saved()

    def offline_starts(self):
        if len(self._of(Role.OFFLINE)) < 4:
            pid, process = self._new(Role.OFFLINE)
            with contextlib.suppress(NotNow):
                self.world.node.launch(pid, self.world.processes.start_time(pid), Role.OFFLINE, "batch")
            self._join(pid, process)

    def comes(self):
        away = [(pid, one) for pid, one in self.processes.items() if one.client is None and not one.is_refused]
        if away:
            self._join(*self.draw.choice(away))

    def _join(self, pid, process):
        world = self.world
        is_known = process.is_claimed or self._has_lived(pid) or process.role is Role.OFFLINE
        process.client = world.hello(pid, process.role, features=world.shim_features).client
        if process.client is None:
            assert not is_known, "a process that valved knew is refused"
            process.is_refused = True
            return
        assert world.books.clients[process.client].role is process.role
        for gpu in process.gpus:
            world.add_channel(process.client, gpu=gpu, h_client=FIRST_H_CLIENT + pid, h_channel=0xCAF00001 + gpu)

    def _has_lived(self, pid):
        return (self.folder / "online" / f"{pid}-{self.world.processes.start_time(pid)}").exists()

    def launches(self):
        here = [one.client for _, one in self._of(Role.ONLINE) if one.client in self.world.gate.clients]
        if here:
            client = self.draw.choice(here)
            self.world.gate.launch(client)
            if self.draw.random() < 0.5:
                self.world.gate.finish(client)

    def dies(self):
        if self.processes:
            pid = self.draw.choice(list(self.processes))
            del self.processes[pid]
            self.world.processes.end(pid)

    def sets(self):
        mode, start = self.draw.choice([Mode.HARVEST, Mode.OBSERVE, Mode.OFF]), self.draw.choice([7, 9]) * MS
        self.modes, self.starts = [*self.modes, mode], [*self.starts, start]
        self.world.node.set_policy(mode, {"start_ns": start}, 0)
        self._is_saved()

    def pauses(self):
        brake = self.world.brake
        self.world.node.pause("somebody")
        assert brake.is_paused
        self.paused = {True} if brake._pause_file not in brake._unwritten else {*self.paused, True}

    def drains(self):
        brake = self.world.brake
        self.world.node.drain("somebody", stop=False)
        assert brake.is_draining
        self.drained = {True} if brake._drain_file not in brake._unwritten else {*self.drained, True}

    def resumes(self):
        try:
            self.world.node.resume()
        except OSError:
            self._may_have_done(self.resumes)
        else:
            self.paused, self.drained = {False}, {False}

    def _may_have_done(self, action):
        if action == self.pauses:
            self.paused.add(True)
        if action == self.drains:
            self.drained.add(True)
        if action == self.resumes:
            self.paused.add(False)
            self.drained.add(False)

    def looks(self):
        self.world.brake.look_at_file()

    def wait(self):
        self.world.run(self.draw.choice([0, 1, 20, 60, 1100, 5000, 70_000]))

    # What befalls it

    def fails(self):
        kind = self.draw.choice([errno.ENOSPC, errno.EROFS, errno.EIO, Died, Died])
        self.faults.set(kind, self.draw.randrange(14), 1 if kind is Died else self.draw.choice([1, 2, 50]))

    def hangs(self):
        self.faults.is_clean = False
        if self.draw.random() < 0.5:
            self.world.handover._prompt.hangs = True
        else:
            self.world.disk.later = True

    def is_well(self):
        self.faults.left = 0
        self.world.handover._prompt.go_on()
        self.world.disk.later = False
        self.world.disk.finish()

    def hands_over(self):
        self.is_well()
        self.world.brake.hand_over()
        self.world.handover.save()
        self.restart()

    def restart(self):
        old, file, was_clean = self.world, self.world.handover._file, self.faults.is_clean
        old.life.is_dead, self.faults.left, self.faults.is_clean = True, 0, True
        is_whole = file._written == file._asked and not file.problem and file._timer is None
        for process in self.processes.values():
            process.is_sure = is_whole if process.client is not None else process.is_sure
            process.client = None
        for pid in [pid for pid in self.processes if self.draw.random() < 0.1]:
            del self.processes[pid], old.processes.table[pid]
        if self.draw.random() < 0.25:
            self.fails()
        self._start(dict(old.gate.off))
        self._check_found(was_clean)

    # What must hold

    def _check_found(self, was_clean):
        world, brake = self.world, self.world.brake
        cooldown = world.handover.policy.cooldown
        start = cooldown[0] if cooldown else None
        assert brake.mode in self.modes, "a mode that was answered is lost"
        assert start in self.starts, "a setting that was answered is lost"
        assert brake.is_paused in self.paused
        assert brake.is_draining in self.drained
        self.modes, self.starts, self.paused, self.drained = (
            [brake.mode],
            [start],
            {brake.is_paused},
            {brake.is_draining},
        )
        claims = {claim.root.pid: claim.role for claim in world.books.claims.values()}
        for pid, process in self._of(Role.ONLINE):
            assert not process.is_claimed or claims.get(pid) is Role.ONLINE, "a claim that was answered is lost"
            process.is_claimed = claims.get(pid) is Role.ONLINE
        if any(self._has_lived(pid) for pid, _ in self._of(Role.ONLINE)):
            assert all(map(world.gate.is_gated, (0, 1))), "offline work runs before a process that lived is back"
        online = {FIRST_H_CLIENT + pid for pid, _ in self._of(Role.ONLINE)}
        known = {(one.channel.h_client, one.channel.h_channel) for one in world.register.channels.leftovers.all()}
        unknown = {key for key in world.gate.off.keys() - known if key[0] not in online}
        assert unknown <= self.unknown or not was_clean, "a channel is off, and no file says so"
        self.unknown |= unknown

    def check(self):
        world = self.world
        world.gating.drain()
        world.books.check_integrity()
        for gpu, account in world.gating.gpus.items():
            assert account.holders == {key for key, one in world.gate.services.items() if one.holds and gpu in one.gpus}
        for _, process in self._of(Role.ONLINE):
            if process.is_sure and process.client is None and not process.is_refused:
                assert all(map(world.gate.is_gated, process.gpus)), "offline work may run beside who is not back"

    def end(self):
        """No online process is left, and every offline one is back: nothing stands."""
        self.is_well()
        self.world.node.resume()
        self.world.node.set_policy(Mode.HARVEST, {}, 0)
        self.world.run(5000)
        for pid, _ in self._of(Role.ONLINE):
            self.world.processes.end(pid)
        self.clock.advance(100 * SECOND)
        for _ in range(3):
            self.world.handover.settle(patience_over=True)
            self.world.run(5000)
        for pid, process in self._of(Role.OFFLINE):
            if process.client is None:
                self._join(pid, process)
        self.clock.advance(100 * SECOND)
        living = {FIRST_H_CLIENT + pid for pid, _ in self._of(Role.OFFLINE)}
        assert not {key for key in self.world.gate.off if key not in self.unknown or key[0] in living}, (
            "stopped for ever"
        )
        assert not any(account.holders for account in self.world.gating.gpus.values()), "a GPU is held for nobody"
        collect()
        self.temporary.cleanup()
