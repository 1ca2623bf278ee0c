"""The gate as the moving of memory uses it: one at a time, GPUs held until they are opened again."""

from __future__ import annotations

from collections.abc import Callable

from valved.gate.wake import GateService
from valved.kv.journey import Pause, until
from valved.kv.supply import Supply
from valved.machine.clock import Clock
from valved.machine.ports import GatePort
from valved.model.ids import GpuIndex

GATE_NS = 1_000_000_000  # a stop takes a millisecond; one that takes this long has failed, and the ladder is at work
TURNING_NS = 1_000_000  # look again whether a gate is through


class GateTurn:
    def __init__(self, gate: GatePort, gating: GateService, clock: Clock, supply: Supply) -> None:
        self._gate = gate
        self._gating = gating
        self._clock = clock
        self._supply = supply
        self._turn: Pause | None = None  # set when the task that has the gate for moving memory is through
        self.is_ahead = False  # GPUs are held for a reclaim that is still planned
        self._watching: list[Pause] = []  # tasks that wait for GPUs to stop

    async def mine(self) -> None:
        """Precondition of `stop`. Ends with `open`, or with `give_up` where nothing was stopped."""
        while self._turn is not None:
            await self._turn
        self._turn = Pause()

    def stop_ahead(self, gpus: frozenset[GpuIndex]) -> None:
        """The caller plans while the driver stops them, and asks for the gate next. Ends with `calm`, in this turn of
        the loop.

        Not while another task has the gate."""
        if self._turn is None:
            self.is_ahead = True
            self._gating.set_moving(gpus)

    def calm(self) -> None:
        """No reclaim took the gate after all: they run again."""
        if self.is_ahead and self._turn is None:
            self._gating.set_moving(frozenset())
        self.is_ahead = False

    def give_up(self) -> None:
        turn, self._turn = self._turn, None
        if turn is not None:
            turn.set()

    def open(self) -> None:
        """Whether it was stopped or not."""
        self._gating.set_moving(frozenset())
        self.give_up()

    async def stop(self, gpus: frozenset[GpuIndex], meanwhile: Callable[[], None] = lambda: None) -> bool:
        """Hold these GPUs; True once the last disable of each came back well."""
        self._gating.set_moving(gpus)
        meanwhile()
        deadline_ns = 0
        while not all(map(self._gating.is_proven_stopped, gpus)):
            now_ns = self._clock.now_ns()
            deadline_ns = deadline_ns or now_ns + GATE_NS
            if now_ns >= deadline_ns:
                return False
            change = Pause()
            self._watching.append(change)
            # Held again before it was enabled, a GPU stays stopped without a stamp: look from time to time, too.
            await until(change, self._clock, min(deadline_ns, now_ns + TURNING_NS))
        return True

    def gate_drained(self) -> None:
        """GPUs may have stopped."""
        watching, self._watching = self._watching, []
        for pause in watching:
            pause.set()

    async def stop_for(self, gpu: GpuIndex) -> bool:
        """In its turn, while memory may be moved at all."""
        await self.mine()
        return self._supply.is_allowed and await self.stop(frozenset({gpu}))

    def are_proven(self, gpus: frozenset[GpuIndex]) -> bool:
        """They are held for a reclaim that is still planned, and stand."""
        return self.is_ahead and all(map(self._gating.is_proven_stopped, gpus))

    def is_stopped(self, gpu: GpuIndex) -> bool:
        """Whether offline work stands there, for whatever reason."""
        return self._gating.is_stopped(gpu)

    def when_still(self, call: Callable[[], None]) -> None:
        """At once, or when no mapping is being changed under the gate any more."""
        if self._turn is None:
            call()
        else:
            self._turn.then(lambda: self.when_still(call))

    async def while_turning(self) -> None:
        """Mapping work takes the driver's locks in write mode: it waits for gates that are being closed.

        Not for ever for one that hangs: memory of the other GPUs must move on.
        """
        deadline_ns = self._clock.now_ns() + GATE_NS
        while self._gate.is_turning() and self._clock.now_ns() < deadline_ns:
            pause = Pause()
            self._clock.call_at_ns(self._clock.now_ns() + TURNING_NS, pause.set)
            await pause
