"""Processes that are frozen, killed, left and handed on, in any order: none stands for ever, and none is killed while
its channels are off."""

from __future__ import annotations

import tempfile
from pathlib import Path

from fake_gate import FakeGate
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from node_world import World

from valved.config import Config, LadderTable
from valved.model.ids import Role
from valved.state import saved as files

FIRST = 300  # pid of the first job; its h_client is H_CLIENT + pid
H_CLIENT = 0xC1D00000
ONLINE = 200
CONFIG = Config(ladder=LadderTable(kill_after_s=5))
PICK = st.integers(0, 7)


def fall_silent(world: World) -> None:
    """It was killed: nothing of it goes on, and its file stays."""
    world._signal = lambda process, number: True
    world.handover._file.is_ours = lambda: False
    world.leaving._ticker.stop()
    world.register.departures._ticker.stop()
    world.ladder._endings._under_way.clear()
    for waiting in (world.ladder._signals._timers, {f.entry.id: f.timer for f in world.ladder._frozen.values()}):
        for timer in waiting.values():
            timer.cancel()
    for online in world.gating.online.values():
        if online.timer is not None:
            online.timer.cancel()


class AnyOrder(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.faults: list[object] = []
        self.states: dict[int, str] = {}  # by pid: the last signal that counts
        self.take(World(Path(self.folder.name), config=CONFIG))
        self.next_pid = FIRST
        self.world.online(pid=ONLINE)
        for _ in range(3):
            self.come()

    def take(self, world: World) -> None:
        self.world = world
        world._signal = self.signal

    def signal(self, process, number) -> bool:
        if process.pid not in self.world.processes.table or self.states.get(process.pid) == "SIGKILL":
            return process.pid in self.world.processes.table
        if number.name == "SIGKILL" and any(h_client == H_CLIENT + process.pid for h_client, _ in self.world.gate.off):
            self.faults.append(f"{process.pid} is killed with a channel off")
        if number.name != "SIGTERM":
            self.states[process.pid] = number.name
        return True

    def jobs(self) -> list[int]:
        return sorted(pid for pid in self.world.processes.table if pid >= FIRST)

    def clients(self, role: Role) -> list[int]:
        return sorted(entry.id for entry in self.world.books.with_role(role))

    def join(self, pid: int) -> None:
        is_here = any(entry.process.pid == pid for entry in self.world.books.clients.values())
        if not is_here and self.states.get(pid) not in ("SIGSTOP", "SIGKILL"):
            client = self.world.hello(pid).client
            if client is not None:
                self.world.add_channel(client, h_client=H_CLIENT + pid, cid=pid)

    @rule()
    def come(self) -> None:
        self.world.processes.add(self.next_pid, cgroup=f"/job{self.next_pid}")
        self.join(self.next_pid)
        self.next_pid += 1

    @rule()
    def come_back(self) -> None:
        for pid in self.jobs():
            self.join(pid)

    @rule(which=PICK)
    def leave(self, which: int) -> None:
        for client in self.clients(Role.OFFLINE)[which : which + 1]:
            self.world.register.leave(client, "link closed")

    @rule(which=PICK)
    def die(self, which: int) -> None:
        for pid in self.jobs()[which : which + 1]:
            self.world.processes.end(pid)

    @rule(which=PICK)
    def end(self, which: int) -> None:
        for client in self.clients(Role.OFFLINE)[which : which + 1]:
            self.world.ladder.end(client, "it broke a promise")

    @rule(which=PICK)
    def a_signal_ends_it(self, which: int) -> None:
        """One that may outstay its leave: `die` is another rule."""
        for client in self.clients(Role.OFFLINE)[which : which + 1]:
            self.world.say_ending(client)

    @rule(is_scarce=st.booleans())
    def descriptors(self, is_scarce: bool) -> None:
        self.world.is_scarce = is_scarce

    @rule(is_slow=st.booleans())
    def machine(self, is_slow: bool) -> None:
        self.world.processes.slow_to_stop = set(self.jobs()) if is_slow else set()

    @rule(fails=st.booleans())
    def launch(self, fails: bool) -> None:
        for online in self.clients(Role.ONLINE):
            self.world.gate.launch(online)
            self.world.run(1)
            (self.world.gate.fail if fails else self.world.gate.come_back)(gpu=0, service=self.world.service_of(online))

    @rule()
    def finish(self) -> None:
        for online in self.clients(Role.ONLINE):
            self.world.gate.finish(online)

    @rule(on=st.booleans())
    def drain(self, on: bool) -> None:
        if on:
            self.world.node.drain("me", stop=False)
        else:
            self.world.node.resume()

    @rule(ms=st.sampled_from([1, 20, 700, 5000, 61_000]))
    def pass_time(self, ms: int) -> None:
        self.world.run(ms)

    @rule(fails=st.booleans(), is_killed=st.booleans(), ms=st.sampled_from([1, 20, 100]))
    def launch_and_replace_valved(self, fails: bool, is_killed: bool, ms: int) -> None:
        self.launch(fails)
        self.world.run(ms)
        self.replace_valved(is_killed)

    @rule(is_killed=st.booleans())
    def replace_valved(self, is_killed: bool) -> None:
        first = self.world
        if not is_killed:
            first.brake.hand_over()
            first.run(10)
            first.handover.save()
        gate = FakeGate(first.clock, 2)
        gate.off.update(first.gate.off)
        second = World(first.folder, gate=gate, clock=first.clock, processes=first.processes, config=CONFIG)
        second.is_scarce = first.is_scarce
        fall_silent(first)
        self.take(second)
        saved, problem = files.load(first.folder / "state.json")
        assert not problem
        if saved is not None:
            second.handover.restore(saved, come_back_s=2.0)

    @invariant()
    def is_right(self) -> None:
        assert not self.faults

    def teardown(self) -> None:
        world = self.world
        self.descriptors(False)
        self.machine(False)
        self.drain(False)
        if ONLINE in world.processes.table:
            world.processes.end(ONLINE)
        world.run(20_000)
        assert not self.faults
        assert not [pid for pid in self.jobs() if self.states.get(pid) == "SIGSTOP"]
        assert not world.ladder.standing()
        self.folder.cleanup()


def test_no_order_of_events_leaves_a_process_standing_or_kills_it_with_its_channels_off() -> None:
    run_state_machine_as_test(AnyOrder, settings=settings(max_examples=60, stateful_step_count=60, deadline=None))
