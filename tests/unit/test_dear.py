"""Jobs that are done aside of the loop: whose turn it is, and in which order."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import defaultdict
from functools import partial

import pytest

import valved.clients.dear
from valved.clients.dear import CORE_BURST_NS, DEAR_NS, LOOP_BURST_NS, THREADS, DearAccounts, LinkLane

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
    accounts.note("account", 0)

    jobs.give(lane, "read", jobs.slow)

    assert lane.is_aside
    jobs.go_on.set()
    jobs.until(lambda: jobs.over)
    assert not lane.is_aside


@pytest.fixture
def thread_time(loop, monkeypatch):
    """The time that each thread has run, as it says itself."""
    ran = defaultdict(int)
    monkeypatch.setattr(time, "thread_time_ns", lambda: ran[threading.get_ident()])
    return ran


def pays(thread_time, lane):
    """The loop reads a packet of this link that takes long."""
    began_ns = time.thread_time_ns()
    thread_time[threading.get_ident()] += DEAR_NS + 1
    lane.took(began_ns)


def test_the_loop_never_pays_a_dear_packet_of_each_of_many_accounts(loop, thread_time):
    """Root of a container may become any user."""
    accounts = DearAccounts(loop)
    lanes = [LinkLane(accounts, number) for number in range(100)]

    paid = 0
    for lane in lanes:
        if not lane.is_aside:
            pays(thread_time, lane)
            paid += 1

    assert paid <= LOOP_BURST_NS // DEAR_NS + 1


def test_a_service_that_is_awaited_is_never_put_aside_for_what_others_cost(loop, thread_time):
    accounts = DearAccounts(loop)
    service = LinkLane(accounts, "service", is_awaited=True)

    for number in range(100):
        pays(thread_time, LinkLane(accounts, number))

    assert not service.is_aside


def test_an_account_never_waits_for_threads_that_dear_ones_keep_busy(loop, thread_time):
    accounts, jobs = DearAccounts(loop), Jobs(loop)
    for number in range(2 * THREADS):
        dear = LinkLane(accounts, number)
        pays(thread_time, dear)
        jobs.give(dear, f"dear {number}", jobs.slow)

    jobs.give(LinkLane(accounts, "other"), "other")
    jobs.until(lambda: jobs.over)

    assert jobs.over == ["other"]
    jobs.go_on.set()
    jobs.until(lambda: len(jobs.over) == 2 * THREADS + 1)


def test_an_account_never_keeps_a_thread_busy_for_longer_than_it_is_allowed(loop, thread_time):
    """Such packets are the account's to choose. What comes after one of a minute waits for an hour."""
    told = []
    accounts, jobs = DearAccounts(loop, lambda account, text: told.append((account, text))), Jobs(loop)
    lane, each_ns = LinkLane(accounts, "account"), 60 * CORE_BURST_NS

    def burn(name):
        thread_time[threading.get_ident()] += each_ns
        jobs.begun.append(name)

    for number in range(20):
        jobs.give(lane, number, burn)
    jobs.until(lambda: len(told) == 2)
    jobs.give(LinkLane(accounts, "other"), "other")
    jobs.until(lambda: "other" in jobs.over)

    assert jobs.begun == [0, "other"]
    assert {account for account, _ in told} == {"account"}
