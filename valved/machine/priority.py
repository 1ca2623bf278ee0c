"""Real time for valved's loop, where it is asked for, and what the gate's threads have.

Niceness says nothing between sessions where the kernel groups them (sched_autogroup_enabled), nor between control
groups. A niceness of the whole group would be that of every helper thread. Real time is of one thread, and what it
starts begins as any other.
"""

from __future__ import annotations

import enum
import os
from contextlib import suppress

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


def gate_rank(pid: int) -> ThreadPriority:
    """Of the gate's threads: no others of valved have SCHED_FIFO or that niceness."""
    found = ThreadPriority.NORMAL
    for thread in map(int, os.listdir(f"/proc/{pid}/task")):
        with suppress(OSError):  # it has ended
            if os.sched_getscheduler(thread) == os.SCHED_FIFO:
                return ThreadPriority.REAL_TIME
            if os.getpriority(os.PRIO_PROCESS, thread) == BEST_NICENESS:
                found = ThreadPriority.NICE
    return found
