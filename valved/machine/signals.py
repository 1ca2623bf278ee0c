"""Signals to a process that is certainly the one meant: through a pidfd, after its start time was compared.

None is lost for want of a descriptor: a process that was stopped and is not continued stands for ever, and one that was
to be killed runs on beside online work. So a signal that cannot be sent now waits, and is sent as soon as it can. A
caller that needs the process stopped before it goes on asks for `Delivery.DONE`.
"""

from __future__ import annotations

import enum
import signal
from typing import Protocol

from valved.fds import Fds, is_scarce
from valved.machine.clock import Clock, TimerHandle
from valved.machine.ports import ProcessPort
from valved.machine.thawer import ThawerPort
from valved.model.ids import ProcessId

AGAIN_NS = 20_000_000
OPPOSITES = {signal.SIGSTOP: signal.SIGCONT, signal.SIGCONT: signal.SIGSTOP}


class Delivery(enum.Enum):
    DONE = "done"  # the kernel has it
    WAITS = "waits"  # for a descriptor: the process is there and has not heard of it
    FAILED = "failed"  # the process is gone, or may not be signalled


class SignalPort(Protocol):
    def send(self, process: ProcessId, number: signal.Signals) -> Delivery: ...

    def keep_standing(self, process: ProcessId) -> None:
        """It was stopped, and nobody lets it go, also when this valved is gone."""
        ...

    def waiting(self, *numbers: signal.Signals) -> set[ProcessId]:
        """The processes to which one of these is still to be sent."""
        ...


class Signals:
    def __init__(self, processes: ProcessPort, clock: Clock, thawer: ThawerPort) -> None:
        self._processes = processes
        self._clock = clock
        self._thawer = thawer
        self._waiting: dict[ProcessId, tuple[signal.Signals, ...]] = {}
        self._timers: dict[ProcessId, TimerHandle] = {}  # one for each that waits

    def send(self, process: ProcessId, number: signal.Signals) -> Delivery:
        """With whatever waits for it, in the order in which it was asked for."""
        if number is signal.SIGSTOP:
            self._thawer.put(process)
        return self._deliver(process, with_one_more(self._waiting.get(process, ()), number))

    def keep_standing(self, process: ProcessId) -> None:
        self._thawer.drop(process)

    def waiting(self, *numbers: signal.Signals) -> set[ProcessId]:
        return {process for process, queue in self._waiting.items() if not set(queue).isdisjoint(numbers)}

    def _deliver(self, process: ProcessId, queue: tuple[signal.Signals, ...]) -> Delivery:
        try:
            delivery = Delivery.DONE if self._send(process, queue) else Delivery.FAILED
        except OSError as error:
            delivery = Delivery.WAITS if is_scarce(error) else Delivery.FAILED
        if delivery is Delivery.WAITS:
            self._waiting[process] = queue
            if process not in self._timers:
                when_ns = self._clock.now_ns() + AGAIN_NS
                self._timers[process] = self._clock.call_at_ns(when_ns, lambda: self._again(process))
            return delivery
        self._waiting.pop(process, None)
        if timer := self._timers.pop(process, None):
            timer.cancel()
        if signal.SIGCONT in queue or signal.SIGKILL in queue:
            self._thawer.drop(process)
        return delivery

    def _send(self, process: ProcessId, queue: tuple[signal.Signals, ...]) -> bool:
        fd = self._processes.open_pidfd(process.pid)
        if fd < 0:
            return False
        with Fds() as fds:
            fds.own(fd)
            if self._processes.start_time(process.pid) != process.start_time:
                return False
            for number in queue:
                signal.pidfd_send_signal(fd, number)
        return True

    def _again(self, process: ProcessId) -> None:
        del self._timers[process]
        self._deliver(process, self._waiting[process])


def with_one_more(queue: tuple[signal.Signals, ...], number: signal.Signals) -> tuple[signal.Signals, ...]:
    """SIGSTOP and SIGCONT take each other's place, SIGKILL takes that of all, and nothing takes its. The others wait
    beside them."""
    if number is signal.SIGKILL or signal.SIGKILL in queue:
        return (signal.SIGKILL,)
    return (*(one for one in queue if one not in (number, OPPOSITES.get(number))), number)
