"""Real time for valved's loop, where it is asked for.

Niceness says nothing between sessions where the kernel groups them (sched_autogroup_enabled), nor between control
groups. A niceness of the whole group would be that of every helper thread. Real time is of one thread, and what it
starts begins as any other.
"""

from __future__ import annotations

import os


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
