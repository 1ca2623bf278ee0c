"""Hold and wake against a model of a few lines, in any order that hypothesis thinks of."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import ClassVar

from gates import FakeDriver, Launcher, Workload, gate_rig, wait_until
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from valved.machine.ports import WakeOutcome
from valved.model.ids import GpuIndex, ServiceId

GPUS = 2
SERVICES = (1, 2, 3)
services = st.sampled_from(SERVICES)


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
        self.busy = dict.fromkeys(SERVICES, False)
        self.expected = dict.fromkeys(range(GPUS), 2)

    def teardown(self) -> None:
        self.stack.close()

    @rule(service=services)
    def launch(self, service: int) -> None:
        rang = self.online[service].launch()

        assert rang is not self.holds[service]  # an open word asks for one ring, a closed one for none
        self.holds[service] = self.busy[service] = True
        closed = self.online[service].control
        wait_until(lambda: closed["gate_epoch"] % 2 == 0, "the ring is heard")

    @rule(service=services)
    def finish(self, service: int) -> None:
        self.online[service].finish()
        self.busy[service] = False

    @rule(service=services)
    def wake(self, service: int) -> None:
        outcome = self.rig.gate.wake(ServiceId(service))

        if not self.holds[service]:
            assert outcome is WakeOutcome.NOT_HOLDING
        else:
            assert outcome is (WakeOutcome.REFUSED if self.busy[service] else WakeOutcome.WOKEN)
            self.holds[service] = self.busy[service]

    @rule(service=services)
    def hold(self, service: int) -> None:
        self.rig.gate.hold(ServiceId(service), reason=0)
        self.holds[service] = True

    @rule(service=services, gpus=st.sets(st.integers(0, GPUS - 1)))
    def change_gpus(self, service: int, gpus: set[int]) -> None:
        self.rig.gate.put_service(ServiceId(service), frozenset(map(GpuIndex, gpus)))
        if gpus != self.gpus[service]:
            self.gpus[service], self.holds[service] = gpus, True

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
    def channels_are_off_exactly_while_somebody_holds(self) -> None:
        for gpu, workload in enumerate(self.workloads):
            gated = any(self.holds[service] and gpu in self.gpus[service] for service in SERVICES)
            wanted = 0 if gated else self.expected[gpu]
            wait_until(lambda w=workload, n=wanted: w.on() == n, f"GPU {gpu} has {wanted} channels on")

            if gated:
                assert self.rig.gate.is_gated(GpuIndex(gpu))


def test_any_order_of_launches_wakes_holds_and_changes_agrees_with_the_model(fake_library: Path) -> None:
    HoldAndWake.library = fake_library

    run_state_machine_as_test(
        HoldAndWake, settings=settings(max_examples=40, stateful_step_count=30, deadline=None, derandomize=True)
    )
