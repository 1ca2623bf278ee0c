"""Signals to a process that is certainly the one meant: through a pidfd, after its start time was compared.

None is lost for want of a descriptor: a process that was stopped and is not continued stands for ever, and one that was
to be killed runs on beside online work. So a signal that cannot be sent now is sent as soon as it can.
"""

from __future__ import annotations

import signal

from valved.fds import Fds, is_scarce
from valved.machine.clock import Clock
from valved.machine.ports import ProcessPort
from valved.model.ids import ProcessId

AGAIN_NS = 20_000_000


class Signals:
    def __init__(self, processes: ProcessPort, clock: Clock) -> None:
        self._processes = processes
        self._clock = clock
        self._waiting: dict[ProcessId, signal.Signals] = {}  # the last one of each counts

    def send(self, process: ProcessId, number: signal.Signals) -> bool:
        """False if the process is gone or may not be signalled. One that cannot be looked at now is there."""
        self._waiting.pop(process, None)
        try:
            return self._send(process, number)
        except OSError as error:
            if not is_scarce(error):
                return False
            self._waiting[process] = number
            self._clock.call_at_ns(self._clock.now_ns() + AGAIN_NS, lambda: self._again(process, number))
            return True

    def _send(self, process: ProcessId, number: signal.Signals) -> bool:
        fd = self._processes.open_pidfd(process.pid)
        if fd < 0:
            return False
        with Fds() as fds:
            fds.own(fd)
            if self._processes.start_time(process.pid) != process.start_time:
                return False
            signal.pidfd_send_signal(fd, number)
        return True

    def _again(self, process: ProcessId, number: signal.Signals) -> None:
        if self._waiting.get(process) is number:
            self.send(process, number)
