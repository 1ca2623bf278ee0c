"""Jobs that are done aside of the loop: whose turn it is, and in which order."""

from __future__ import annotations

import asyncio
import threading
from functools import partial

import pytest

import valved.clients.dear
from valved.clients.dear import THREADS, DearAccounts, LinkLane

PATIENCE_S = 200.0  # ends only a hung test


@pytest.fixture
def loop():
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


class Jobs:
    """Jobs that wait until `go_on` is set, and others."""

    def __init__(self, loop):
        self.loop = loop
        self.go_on = threading.Event()
        self.begun, self.over = [], []

    def slow(self, name):
        self.begun.append(name)
        self.go_on.wait(PATIENCE_S)

    def end(self, name, _, error):
        assert error is None
        self.over.append(name)

    def give(self, lane, name, job=None):
        lane.do(partial(job or self.begun.append, name), partial(self.end, name))

    def until(self, condition):
        async def wait():
            while not condition():
                await asyncio.sleep(0.001)

        self.loop.run_until_complete(asyncio.wait_for(wait(), PATIENCE_S))


def test_the_jobs_of_one_account_never_keep_another_account_waiting(loop):
    """Its packets cost what it likes, without end."""
    accounts, jobs = DearAccounts(loop), Jobs(loop)
    flood, other = LinkLane(accounts, "flood"), LinkLane(accounts, "other")

    for number in range(2 * THREADS):
        jobs.give(flood, f"flood {number}", jobs.slow)
    jobs.give(other, "other")
    jobs.until(lambda: jobs.over or len(jobs.begun) == THREADS)

    assert jobs.over == ["other"]
    jobs.go_on.set()
    jobs.until(lambda: len(jobs.over) == 2 * THREADS + 1)


def test_a_job_of_a_link_never_begins_before_the_one_before_it_is_done(loop):
    """The end of a link would overtake its last words, and end the socket that another thread reads."""
    accounts, jobs = DearAccounts(loop), Jobs(loop)
    link, other = LinkLane(accounts, "account"), LinkLane(accounts, "other")

    jobs.give(link, "last words", jobs.slow)
    jobs.give(link, "end")
    for name in "abc":  # by then a thread that was free would have had it
        jobs.give(other, name)
    jobs.until(lambda: "c" in jobs.over)

    assert "end" not in jobs.begun
    jobs.go_on.set()
    jobs.until(lambda: "end" in jobs.over)
    assert jobs.over.index("last words") < jobs.over.index("end")


def test_a_link_never_comes_back_to_the_loop_while_a_thread_is_at_it(loop, monkeypatch):
    """The loop would close the number that the thread reads from."""
    monkeypatch.setattr(valved.clients.dear, "FORGOTTEN_NS", 0)
    accounts, jobs = DearAccounts(loop), Jobs(loop)
    lane = LinkLane(accounts, "account")
    accounts.note("account")

    jobs.give(lane, "read", jobs.slow)

    assert lane.is_aside
    jobs.go_on.set()
    jobs.until(lambda: jobs.over)
    assert not lane.is_aside
