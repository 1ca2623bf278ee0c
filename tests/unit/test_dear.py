"""Jobs that are done aside of the loop: whose turn it is, and in which order."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import defaultdict
from functools import partial

import pytest

from valved.clients.dear import (
    CORE_BURST_NS,
    DEAR_THREADS,
    LOOP_BURST_NS,
    LOOP_SHARE,
    OWES_NS,
    USUAL_NS,
    DearAccounts,
    LinkLane,
)
from valved.clients.turns import LONGEST_NS, SECOND_NS

MUCH_NS = 10 * LOOP_BURST_NS
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

    for number in range(2 * DEAR_THREADS):
        jobs.give(flood, f"flood {number}", jobs.slow)
    jobs.give(other, "other")
    jobs.until(lambda: jobs.over)

    assert jobs.over == ["other"]
    assert jobs.begun == ["flood 0", "other"]
    jobs.go_on.set()
    jobs.until(lambda: len(jobs.over) == 2 * DEAR_THREADS + 1)


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


def test_a_link_never_comes_back_to_the_loop_while_a_thread_is_at_it(loop, seconds):
    """The loop would close the number that the thread reads from."""
    accounts, jobs = DearAccounts(loop), Jobs(loop)
    lane = LinkLane(accounts, "account", is_awaited=True)
    accounts.took_of_loop("account", MUCH_NS, is_awaited=True)
    assert lane.is_aside

    jobs.give(lane, "read", jobs.slow)
    seconds(LONGEST_NS / SECOND_NS + 1)  # all is paid for

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


def pays(thread_time, lane, ns):
    """The loop reads a packet of this link that takes long."""
    began_ns = time.thread_time_ns()
    thread_time[threading.get_ident()] += ns
    lane.took(began_ns)


def paid(thread_time, seconds, lanes, each_ns):
    """What the loop pays in an hour for packets that cost so much each, whenever it handles them itself."""
    paid_ns = 0
    for number in range(36_000):
        lane = lanes[number % len(lanes)]
        if not lane.is_aside:
            pays(thread_time, lane, each_ns)
            paid_ns += each_ns
        seconds(0.1)
    return paid_ns


def test_a_link_of_no_service_never_costs_the_loop_a_packet_before_it_was_welcomed(loop):
    """Its first may cost what a million epolls do. Later the loop sends it orders to give memory back: no hop more."""
    lane = LinkLane(DearAccounts(loop), "account")
    assert lane.is_aside

    lane.is_new = False

    assert not lane.is_aside


def test_what_others_cost_the_loop_never_puts_services_aside(loop):
    accounts = DearAccounts(loop)
    others, service = LinkLane(accounts, "account"), LinkLane(accounts, "service", is_awaited=True)
    others.is_new = False

    accounts.took_of_loop("another", MUCH_NS, is_awaited=False)

    assert others.is_aside
    assert not service.is_aside


def test_an_account_never_waits_for_threads_that_dear_ones_keep_busy(loop):
    accounts, jobs = DearAccounts(loop), Jobs(loop)
    for number in range(2 * DEAR_THREADS):
        accounts.took(number, CORE_BURST_NS // 2)
        jobs.give(LinkLane(accounts, number), f"dear {number}", jobs.slow)

    jobs.give(LinkLane(accounts, "other"), "other")
    jobs.until(lambda: jobs.over)

    assert jobs.over == ["other"]
    jobs.go_on.set()
    jobs.until(lambda: len(jobs.over) == 2 * DEAR_THREADS + 1)


def test_an_account_never_keeps_a_thread_busy_for_longer_than_it_is_allowed(loop, thread_time):
    """Such packets are the account's to choose. What comes after one of a minute waits for another."""
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


@pytest.fixture
def seconds(monkeypatch):
    """`seconds(n)`: so many have passed."""
    now = [time.monotonic_ns()]
    monkeypatch.setattr(time, "monotonic_ns", lambda: now[0])
    return lambda count: now.__setitem__(0, now[0] + round(count * SECOND_NS))


def test_an_interrupt_while_the_loop_handles_a_packet_never_puts_a_service_aside(loop, thread_time, seconds):
    """A virtual machine loses 6 ms every ten seconds, always while it serves the same account."""
    told = []
    accounts = DearAccounts(loop, lambda *what: told.append(what))
    lane = LinkLane(accounts, "service", is_awaited=True)

    for _ in range(100):
        pays(thread_time, lane, 6_000_000)
        assert not lane.is_aside
        seconds(10)

    assert not told


@pytest.mark.parametrize("is_awaited", [True, False])
@pytest.mark.parametrize("accounts", [1, 20])
@pytest.mark.parametrize("each_ns", [USUAL_NS + 500_000, 4_900_000, LOOP_BURST_NS, 10 * LOOP_BURST_NS])
def test_the_loop_never_pays_all_services_or_all_others_more_than_their_share(
    loop, thread_time, seconds, each_ns, accounts, is_awaited
):
    """However many one tenant has, and whatever it chooses that a packet costs."""
    dear = DearAccounts(loop)
    lanes = [LinkLane(dear, number, is_awaited=is_awaited) for number in range(accounts)]
    for lane in lanes:
        lane.is_new = False  # it was welcomed

    paid_ns = paid(thread_time, seconds, lanes, each_ns)

    beyond_ns = paid_ns * (1 - USUAL_NS / each_ns)
    hour_ns = 3600 * SECOND_NS
    assert beyond_ns <= max(hour_ns * LOOP_SHARE, each_ns * hour_ns / LONGEST_NS) + LOOP_BURST_NS + 2 * each_ns


def test_a_packet_that_costs_the_usual_never_puts_a_service_aside(loop, thread_time):
    lane = LinkLane(DearAccounts(loop), "service", is_awaited=True)

    for _ in range(100_000):
        pays(thread_time, lane, USUAL_NS)

    assert not lane.is_aside


def test_nobody_ever_owes_for_longer_than_a_minute_after_the_last_packet(loop, thread_time, seconds):
    accounts, jobs = DearAccounts(loop), Jobs(loop)
    lane = LinkLane(accounts, "service", is_awaited=True)
    pays(thread_time, lane, 3600 * SECOND_NS)
    accounts.took("service", 3600 * SECOND_NS)

    seconds(LONGEST_NS / SECOND_NS + 1)

    assert not lane.is_aside
    jobs.give(lane, "job")
    jobs.until(lambda: jobs.over)


def test_an_account_that_owes_little_never_has_the_threads_of_dear_ones(loop, seconds):
    """What interrupts make it owe."""
    accounts = DearAccounts(loop)
    for _ in range(100):
        accounts.took("account", OWES_NS // 2)
        assert not accounts.owes("account")
        seconds(1)


def test_a_link_that_nobody_has_answered_never_waits_for_more_than_one_job_of_its_account(loop):
    """All services of a user are one account on a machine without containers, and a new one has little patience."""
    accounts, jobs = DearAccounts(loop), Jobs(loop)
    links = [LinkLane(accounts, "account") for _ in range(30)]
    jobs.give(links[0], "message", jobs.slow)
    for lane in links:
        lane.is_new = False
        jobs.give(lane, "message")
    new = LinkLane(accounts, "account")

    for name in ("hello", "welcome"):
        jobs.give(new, name)
    new.is_new = False
    jobs.give(new, "its first message")
    jobs.go_on.set()
    jobs.until(lambda: "its first message" in jobs.over)

    assert jobs.begun[:3] == ["message", "hello", "welcome"]
    assert jobs.begun[-1] == "its first message"


def test_a_link_that_was_welcomed_as_online_is_never_aside_as_others_are(loop):
    """Of a pod nobody knows that it is a service before its first HELLO is read."""
    lane = LinkLane(DearAccounts(loop), "pod")

    lane.is_awaited = True

    assert not lane.is_aside
