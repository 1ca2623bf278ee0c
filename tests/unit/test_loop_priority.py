"""Real time for valved's loop, and what doctor says of the gate's threads."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from valved.cli.doctor import judge_gate, judge_wait
from valved.cli.findings import Grade
from valved.machine.priority import GateThreads, ThreadPriority, gate_threads, hurry, is_real_time

NORMAL = (os.SCHED_OTHER, 0)


def in_a_thread(what):
    """What it returns, of a thread of its own: this one keeps its policy."""
    answers = []
    thread = threading.Thread(target=lambda: answers.append(what()))
    thread.start()
    thread.join()
    return answers[0]


def policy():
    return os.sched_getscheduler(0), os.sched_getparam(0).sched_priority


def test_what_a_loop_in_real_time_starts_never_has_its_priority():
    def child_policy():
        child = os.fork()
        if child == 0:
            os._exit(policy() != NORMAL)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    def loop():
        if not hurry(1):
            return None
        return is_real_time(threading.get_native_id()), in_a_thread(policy), child_policy()

    answer = in_a_thread(loop)
    if answer is None:
        pytest.skip("this user may not have real time")
    assert answer == (True, NORMAL, 0)
    assert policy() == NORMAL


def test_a_user_who_may_not_have_real_time_is_never_kept_from_starting(monkeypatch):
    def refuse(*_):
        raise PermissionError

    monkeypatch.setattr(os, "sched_setscheduler", refuse)

    assert not hurry(1)
    assert policy() == NORMAL
    assert not is_real_time(os.getpid())


@pytest.mark.parametrize(
    ("raise_it", "grade"), [("fifo", "real time"), ("nice", "niceness -20"), ("", "like any other")]
)
def test_doctor_never_tells_of_a_priority_that_the_gate_does_not_have(raise_it, grade):
    child = os.fork()
    if child == 0:
        signal.pause()
    try:
        if raise_it == "fifo":
            os.sched_setscheduler(child, os.SCHED_FIFO, os.sched_param(1))
        elif raise_it == "nice":
            os.setpriority(os.PRIO_PROCESS, child, -20)
        finding, _ = judge_gate(child)
    except PermissionError:
        pytest.skip("this user may not raise it")
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert grade in finding.what
    assert (finding.verdict is Grade.FINE) == bool(raise_it)


def test_a_valved_whose_threads_cannot_be_seen_is_never_called_fine():
    assert [found.verdict for found in judge_gate(2**31 - 1)] == [Grade.UNKNOWN]


def test_doctor_never_calls_a_gate_sound_that_waits_for_a_core():
    def grade(waited_ns, runs):
        return judge_wait(GateThreads(ThreadPriority.NICE, waited_ns, runs)).verdict

    assert grade(49_000 * 700, 700) is Grade.FINE
    assert grade(2_000_000 * 700, 700) is Grade.NOTE
    assert grade(2_000_000 * 7, 7) is Grade.UNKNOWN
    assert grade(0, 0) is Grade.UNKNOWN


def test_no_thread_but_the_gate_s_is_counted_for_its_waits():
    """The kernel's own count, of a thread that has come back from a sleep and so has been given a core."""

    def nice():
        try:
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), -20)
        except PermissionError:
            return None
        time.sleep(0.001)
        return gate_threads(os.getpid())

    before = gate_threads(os.getpid())
    seen = in_a_thread(nice)
    if seen is None or not os.path.exists("/proc/self/schedstat"):
        pytest.skip("this user may not raise it, or the kernel does not count")
    assert (before.rank, before.runs) == (ThreadPriority.NORMAL, 0)
    assert seen.rank is ThreadPriority.NICE
    assert seen.runs > 0
    assert seen.waited_ns >= 0
