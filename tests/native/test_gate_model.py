"""Hold and wake against a model of a few lines, in any order that hypothesis thinks of."""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path
from typing import ClassVar

from gates import FakeDriver, Launcher, Workload, gate_rig, wait_until
from grant_scene import FAR, MS, NEVER_IDLE, GrantWords, Hook
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from valve_abi import GrantAnswer

from valved.machine.ports import WakeOutcome
from valved.model.ids import GpuIndex, ServiceId

GPUS = 2
SERVICES = (1, 2, 3)
services = st.sampled_from(SERVICES)
GIVEN, BUSY, OTHERS, NOT_HELD = GrantAnswer.GIVEN, GrantAnswer.BUSY, GrantAnswer.OTHERS, GrantAnswer.NOT_HELD


class HoldAndWake(RuleBasedStateMachine):
    """The model: which services hold, which GPUs each has, which launches are not proven done."""

    library: ClassVar[Path]

    def __init__(self) -> None:
        super().__init__()
        self.stack = ExitStack()
        self.rig = self.stack.enter_context(gate_rig(FakeDriver(self.library)))
        self.workloads: list[Workload] = [self.rig.offline(gpu=gpu) for gpu in range(GPUS)]
        for workload in self.workloads:
            workload.add(2)
        self.online: dict[int, Launcher] = {}
        self.gpus = {1: {0}, 2: {1}, 3: {0, 1}}
        for service in SERVICES:
            self.online[service] = self.rig.online(service, self.gpus[service])
        self.holds = dict.fromkeys(SERVICES, True)
        self.granted = dict.fromkeys(SERVICES, False)
        self.sliced = dict.fromkeys(SERVICES, False)
        self.grants = self.rig.gate.granting
        self.grants.set_grantable(frozenset(map(GpuIndex, range(GPUS))))
        self.hooks = {service: Hook(self.rig, ServiceId(service)) for service in SERVICES}
        for service in SERVICES:
            self.grants.consent(ServiceId(service), FAR, 0)
        self.busy = dict.fromkeys(SERVICES, False)
        self.expected = dict.fromkeys(range(GPUS), 2)

    def teardown(self) -> None:
        self.stack.close()

    def held(self, service: int, gpus: set[int]) -> None:
        """Whoever shares one of these GPUs in slices shares it no longer."""
        for one in SERVICES:
            self.sliced[one] &= one == service or not self.gpus[one] & gpus

    @rule(service=services)
    def launch(self, service: int) -> None:
        rang = self.online[service].launch()

        assert rang is not self.holds[service]  # an open word asks for one ring, a closed one for none
        if rang:
            self.held(service, self.gpus[service])
        self.holds[service] = self.busy[service] = True
        self.granted[service] = False
        closed = self.online[service].control
        wait_until(lambda: closed["gate_epoch"] % 2 == 0, "the ring is heard")

    @rule(service=services)
    def finish(self, service: int) -> None:
        self.online[service].finish()
        self.busy[service] = False

    @rule(service=services)
    def wake(self, service: int) -> None:
        outcome = self.rig.gate.wake(ServiceId(service))
        self.sliced[service] = False

        if not self.holds[service]:
            assert outcome is WakeOutcome.NOT_HOLDING
        else:
            assert outcome is (WakeOutcome.REFUSED if self.busy[service] else WakeOutcome.WOKEN)
            self.holds[service] = self.busy[service]

    @rule(service=services)
    def hold(self, service: int) -> None:
        self.rig.gate.hold(ServiceId(service), reason=0)
        self.held(service, self.gpus[service])
        self.sliced[service] = False
        self.holds[service], self.granted[service] = True, False

    @rule(service=services, gpus=st.sets(st.integers(0, GPUS - 1)))
    def change_gpus(self, service: int, gpus: set[int]) -> None:
        self.rig.gate.put_service(ServiceId(service), frozenset(map(GpuIndex, gpus)))
        if gpus != self.gpus[service]:
            self.held(service, gpus | self.gpus[service])
            self.sliced[service] = False
            self.gpus[service], self.holds[service], self.granted[service] = gpus, True, False

    @rule(service=services)
    def ask_for_a_pause(self, service: int) -> None:
        self.grants.set_sliceable(False, frozenset())
        self.sliced = dict.fromkeys(SERVICES, False)
        self.rig.settle()
        self.rig.gate.permit(ServiceId(service), NEVER_IDLE)
        answer = self.hooks[service].ask(time.monotonic_ns() + FAR)

        assert answer is self.answer(service)
        if answer is GIVEN:
            self.holds[service], self.granted[service] = False, True

    @rule(service=services)
    def share_in_slices(self, service: int) -> None:
        self.grants.set_sliceable(True, frozenset(map(GpuIndex, range(GPUS))))
        self.rig.settle()
        self.rig.gate.permit(ServiceId(service), NEVER_IDLE)
        answer = self.hooks[service].ask(time.monotonic_ns() + FAR)

        expected = self.answer(service)
        assert answer is (GIVEN if expected is BUSY else expected)  # beside a step as well
        self.sliced[service] |= answer is GIVEN and not self.granted[service]

    @rule(service=services)
    def a_step_moves_the_end_on(self, service: int) -> None:
        if self.sliced[service]:
            self.hooks[service].region["grant_until_ns"] = time.monotonic_ns() + 2 * FAR

    @rule(service=services)
    def stop_sharing(self, service: int) -> None:
        if self.sliced[service]:
            self.hooks[service].say(0)
            wait_until(lambda: self.grants.grants(ServiceId(service)).until_ns == 0, "its end")
            self.sliced[service] = False

    def answer(self, service: int) -> GrantAnswer:
        if self.granted[service] or self.sliced[service]:
            return GIVEN
        if not self.holds[service] or not self.gpus[service]:
            return NOT_HELD
        others = [one for one in SERVICES if one != service and self.gpus[one] & self.gpus[service]]
        if any(self.holds[one] or self.granted[one] for one in others):
            return OTHERS
        return BUSY if self.busy[service] else GIVEN

    @rule(service=services, at_once=st.booleans())
    def end_a_pause(self, service: int, at_once: bool) -> None:
        """By the hook's word, or by its time."""
        if not self.granted[service]:
            return
        self.hooks[service].say(0 if at_once else time.monotonic_ns() + 2 * MS)
        closed = self.online[service].control
        wait_until(lambda: closed["gate_epoch"] % 2 == 0, "its end")
        self.holds[service], self.granted[service] = True, False

    @rule(service=services)
    def the_hook_dies(self, service: int) -> None:
        self.rig.gate.remove_client(self.hooks[service].client)
        self.hooks[service] = Hook(self.rig, ServiceId(service))
        self.sliced[service] = False  # nobody says that it steps

    @rule()
    def offline_work_comes_that_would_not_stop_itself(self) -> None:
        self.grants.set_grantable(frozenset())
        self.grants.set_grantable(frozenset(map(GpuIndex, range(GPUS))))
        for service in SERVICES:
            self.holds[service] |= self.granted[service] and bool(self.gpus[service])
            self.granted[service] &= not self.gpus[service]
            self.sliced[service] = False

    @rule(gpu=st.integers(0, GPUS - 1))
    def add_channel(self, gpu: int) -> None:
        (result,) = self.workloads[gpu].add()
        self.expected[gpu] += 1

        assert result.status == 0

    @rule(gpu=st.integers(0, GPUS - 1))
    def free_a_channel_unannounced(self, gpu: int) -> None:
        workload = self.workloads[gpu]
        if workload.channels:
            workload.free(workload.channels.pop())
            self.expected[gpu] -= 1

    @invariant()
    def words_say_who_holds(self) -> None:
        words = {service: online.control["gate_epoch"] % 2 == 0 for service, online in self.online.items()}

        assert words == self.holds

    @invariant()
    def nothing_runs_in_a_grant_without_its_end_in_the_control_page(self) -> None:
        for gpu, workload in enumerate(self.workloads):
            ends = [self.granted[service] or self.sliced[service] for service in SERVICES if gpu in self.gpus[service]]
            is_granted = any(ends)
            wait_until(
                lambda w=workload, g=gpu, on=is_granted: w.on() == 0 or bool(GrantWords(w.control).run_until(g)) == on,
                f"GPU {gpu} has an end: {is_granted}",
            )

    @invariant()
    def channels_are_off_exactly_while_somebody_holds(self) -> None:
        for gpu, workload in enumerate(self.workloads):
            holds = (
                self.holds[service] and not self.sliced[service] for service in SERVICES if gpu in self.gpus[service]
            )
            gated = any(holds)
            wanted = 0 if gated else self.expected[gpu]
            wait_until(lambda w=workload, n=wanted: w.on() == n, f"GPU {gpu} has {wanted} channels on")

            if gated:
                assert self.rig.gate.is_gated(GpuIndex(gpu))


def test_any_order_of_launches_wakes_holds_and_changes_agrees_with_the_model(fake_library: Path) -> None:
    HoldAndWake.library = fake_library

    run_state_machine_as_test(
        HoldAndWake, settings=settings(max_examples=40, stateful_step_count=30, deadline=None, derandomize=True)
    )
