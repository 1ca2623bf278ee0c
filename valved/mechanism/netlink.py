"""Process events of the whole node, over the kernel's process connector. Root only.

It only finds processes that nobody registered; the end of a known client is told by its pidfd and its link. So lost
events (a storm of forks) are counted and otherwise harmless.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable
from dataclasses import dataclass

from pyroute2.netlink.connector.cn_proc import ProcEventSocket


class ProcessEventKind(enum.Enum):
    EXEC = "exec"
    EXIT = "exit"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessEvent:
    """A process (not a thread of one) that started a program or ended."""

    kind: ProcessEventKind
    pid: int


_KINDS = {"PROC_EVENT_EXEC": ProcessEventKind.EXEC, "PROC_EVENT_EXIT": ProcessEventKind.EXIT}


class ProcessEvents:
    """A thread that calls `on_event` for every exec and exit. Hand it a call_soon_threadsafe."""

    def __init__(self, on_event: Callable[[ProcessEvent], None]) -> None:
        self._on_event = on_event
        self._stopping = False
        self._listening = threading.Event()
        self._failed: OSError | None = None
        self._thread = threading.Thread(target=self._run, name="process-events", daemon=True)
        self.lost = 0  # times the kernel dropped events because we were slow

    def start(self) -> None:
        """Raises PermissionError without the privilege: the caller goes on without these events."""
        self._thread.start()
        self._listening.wait()
        if self._failed is not None:
            raise self._failed

    def stop(self) -> None:
        self._stopping = True
        threading.Thread(target=int).start()  # a new thread is itself an event: the blocking read returns
        self._thread.join()

    def _run(self) -> None:
        try:
            source = ProcEventSocket()
            source.bind()
            source.control(True)
        except OSError as error:
            self._failed = error
            return
        finally:
            self._listening.set()
        try:
            while not self._stopping:
                self._read(source)
        finally:
            source.close()

    def _read(self, source: ProcEventSocket) -> None:
        try:
            messages = list(source.get())
        except OSError:
            self.lost += 1
            return
        for message in messages:
            kind = _KINDS.get(message["event"])
            if kind is not None and message["process_pid"] == message["process_tgid"]:
                self._on_event(ProcessEvent(kind=kind, pid=message["process_pid"]))
