"""Real time for valved's loop."""

from __future__ import annotations

import os
import threading

import pytest

from valved.machine.priority import hurry, is_real_time

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
