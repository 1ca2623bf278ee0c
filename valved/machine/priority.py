"""Real time for valved's loop, where it is asked for, what the gate's threads have, and how long they wait for a core.

Niceness says nothing between sessions where the kernel groups them (sched_autogroup_enabled), nor between control
groups. A niceness of the whole group would be that of every helper thread. Real time is of one thread, and what it
starts begins as any other.
"""

from __future__ import annotations

import enum
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

BEST_NICENESS = -20  # valved/native/worker.c


class ThreadPriority(enum.Enum):
    """How the kernel prefers threads to others."""

    REAL_TIME = "real time"
    NICE = "niceness -20"
    NORMAL = "like any other"


def hurry(priority: int) -> bool:
    """This thread. False: it may not, and waits like any other."""
    try:
        os.sched_setscheduler(0, os.SCHED_RR | os.SCHED_RESET_ON_FORK, os.sched_param(priority))
    except OSError:
        return False
    return True


def is_real_time(pid: int) -> bool:
    """The first thread of that process, which for valved runs the loop."""
    try:
        return os.sched_getscheduler(pid) & ~os.SCHED_RESET_ON_FORK == os.SCHED_RR
    except OSError:
        return False


@dataclass(frozen=True, slots=True)
class GateThreads:
    """What the kernel says of them: of all threads of valved that have SCHED_FIFO or that niceness, as no others do."""

    rank: ThreadPriority
    waited_ns: int = 0  # ready to run, and no core was given to them
    runs: int = 0  # each began with such a wait, of whatever length


def gate_threads(pid: int) -> GateThreads:
    rank, waited_ns, runs = ThreadPriority.NORMAL, 0, 0
    for thread in map(int, os.listdir(f"/proc/{pid}/task")):
        with suppress(OSError, ValueError):  # it has ended; a kernel without CONFIG_SCHED_INFO
            if os.sched_getscheduler(thread) == os.SCHED_FIFO:
                rank = ThreadPriority.REAL_TIME
            elif os.getpriority(os.PRIO_PROCESS, thread) != BEST_NICENESS:
                continue
            elif rank is ThreadPriority.NORMAL:
                rank = ThreadPriority.NICE
            _, waited, times = map(int, Path(f"/proc/{pid}/task/{thread}/schedstat").read_text().split())
            waited_ns, runs = waited_ns + waited, runs + times
    return GateThreads(rank, waited_ns, runs)
