"""Signals to a process that is certainly the one meant: through a pidfd, after its start time was compared."""

from __future__ import annotations

import os
import signal

from valved.machine.ports import ProcessPort
from valved.model.ids import ProcessId


def send(process: ProcessId, number: signal.Signals, processes: ProcessPort) -> bool:
    """False if the process is gone or may not be signalled."""
    try:
        fd = processes.open_pidfd(process.pid)
    except OSError:
        return False
    if fd < 0:
        return False
    try:
        if processes.start_time(process.pid) != process.start_time:
            return False
        signal.pidfd_send_signal(fd, number)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True
