"""Whose turn it is on the link, and what waits for a later pass of the loop."""

from __future__ import annotations

import heapq
import os
from collections import Counter
from itertools import count

import pytest

import valved.clients.arrivals
from valved.clients.arrivals import PENDING, LinkArrivals
from valved.clients.turns import (
    ACCOUNT_BURST_NS,
    ACCOUNT_SHARE,
    KNOCKS_BURST_NS,
    MOST_KEPT,
    PASS_NS,
    SECOND_NS,
    SHARE_OF_ALL,
    Bucket,
    Buckets,
    Knocks,
    Postponed,
    TurnLine,
    Turns,
)
from valved.machine.callers import MOST, Accepted
from valved.machine.helpers import Closer


class Time:
    """A clock that stands still but for what is done."""

    def __init__(self):
        self.now = 1_000_000_000
        self.calls = []

    def now_ns(self):
        return self.now

    def call_at_ns(self, when_ns, call):
        self.calls.append(call)

    def next_pass(self):
        calls, self.calls = self.calls, []
        for call in calls:
            call()


def emptied(line, may=lambda _: True):
    found = []
    while (item := line.take(may)) is not None:
        found.append(item)
    return found


def test_a_group_with_many_never_stands_before_another_more_than_once():
    line = TurnLine()
    for number in range(100):
        line.put(("flood", f"group {number % 5}"), f"flood {number}")
    line.put(("other", ""), "other")

    assert emptied(line).index("other") == 1


def test_many_groups_within_one_never_stand_before_another_more_than_once():
    line = TurnLine()
    for number in range(100):
        line.put(("user", f"group {number}"), f"flood {number}")
    line.put(("user", "group 0"), "second of its group")
    line.put(("another user", ""), "other")

    order = emptied(line)

    assert order.index("other") == 1
    assert order.index("second of its group") == 101


def test_one_that_may_not_be_taken_never_keeps_those_behind_it():
    line = TurnLine()
    for name in ("rests", "goes on"):
        line.put(("user", ""), name)

    assert emptied(line, lambda name: name != "rests") == ["goes on"]
    assert emptied(line) == ["rests"]
    assert not line


def test_what_one_process_causes_never_has_more_than_its_part_of_a_pass():
    """Beyond it one of each process is done in turn."""
    time, done = Time(), []
    later = Postponed(time)

    def job(name):
        def run():
            done.append(name)
            time.now += PASS_NS

        return run

    for number in range(20):
        later.do(("flood",), job(f"flood {number}"))
    later.do(("other",), job("other"))

    assert len(done) <= 2
    passes = 0
    while time.calls:
        before = len(done)
        time.next_pass()
        assert len(done) == before + 1
        passes += 1
    assert done.index("other") <= 4
    assert len(done) == 21


def test_a_job_that_fails_never_keeps_the_others_from_being_done():
    time, done = Time(), []
    later = Postponed(time)
    later.do(("a",), lambda: setattr(time, "now", time.now + 2 * PASS_NS))
    later.do(("b",), lambda: 1 / 0)
    later.do(("c",), lambda: done.append("c"))

    with pytest.raises(ZeroDivisionError):
        time.next_pass()
    time.next_pass()

    assert done == ["c"]


def test_new_processes_without_end_never_have_more_than_their_account():
    """Each of them is new, and has a share of its own."""
    knocks = Knocks()
    for pid in range(ACCOUNT_BURST_NS // KNOCKS_BURST_NS + 1):
        knocks.took(pid, "flood", KNOCKS_BURST_NS, 0)

    assert knocks.wait_ns(999, "flood", 0)
    assert not knocks.wait_ns(999, "another", 0)
    assert not knocks.wait_ns(999, None, 0)  # an awaited process


class Door:
    """Everything around arrivals: a loop on time that stands still but for what is done, and a server whose HELLOs cost
    `cost_ns` each."""

    def __init__(self, monkeypatch, cost_ns):
        monkeypatch.setattr(valved.clients.arrivals, "time", self)
        self.now_ns, self.cost_ns, self.served = 0, cost_ns, []
        self.expected, self.looked_at = Counter(), []
        self._calls, self._order = [], count()
        self.closer = Closer()
        self.arrivals = LinkArrivals(self, self, self, 600.0)

    def come(self, pids):
        accepted = [Accepted(os.eventfd(1), pid, 1000) for pid in pids]
        for first in range(0, len(accepted), MOST):
            self.call_soon(self.arrivals.come, accepted[first : first + MOST])
        while len(self.served) < len(accepted):
            when_ns, _, handle = heapq.heappop(self._calls)
            self.now_ns = max(self.now_ns, when_ns)
            handle.run()
        self.arrivals.close()

    # the clock, the loop, the server, what is awaited

    def monotonic_ns(self):
        return self.now_ns

    thread_time_ns = monotonic_ns

    def add_reader(self, *_):
        """What comes has spoken by then."""

    remove_reader = add_reader

    def call_later(self, seconds, call, *arguments):
        handle = Handle(call, arguments)
        heapq.heappush(self._calls, (self.now_ns + round(seconds * SECOND_NS), next(self._order), handle))
        return handle

    def call_soon(self, call, *arguments):
        return self.call_later(0.0, call, *arguments)

    def read_hello(self, fd, caller):
        os.close(fd)
        self.now_ns += self.cost_ns
        self.served.append(caller.pid)
        return False

    def turn_away(self, caller, fds, why):
        raise AssertionError(f"{caller.pid}: {why}")

    def pids(self):
        return set()

    def cgroup(self, pid):
        self.looked_at.append(pid)
        return "/login"

    def root_of(self, pid, cgroup, known):
        return 0

    def came(self, pid):
        self.expected[pid] -= 1


class Handle:
    def __init__(self, call, arguments):
        self._call, self._arguments = call, arguments

    def run(self):
        self._call(*self._arguments)

    def cancel(self):
        self._call, self._arguments = lambda: None, ()


def test_a_restart_never_keeps_the_processes_of_a_predecessor_waiting_for_a_share_of_their_account(monkeypatch):
    """400 of one user, whose HELLOs take 2 ms each: promised is that a restart takes over within 2 s."""
    pids = range(100, 500)
    door = Door(monkeypatch, cost_ns=2_000_000)
    door.expected.update(pids)

    door.come(pids)

    assert sorted(door.served) == list(pids)
    assert door.now_ns == len(pids) * door.cost_ns


def test_new_processes_of_one_account_never_have_more_than_its_share_of_the_loop(monkeypatch):
    door = Door(monkeypatch, cost_ns=2_000_000)

    door.come(range(100, 500))

    assert door.now_ns >= (399 * door.cost_ns - ACCOUNT_BURST_NS) / ACCOUNT_SHARE


def test_processes_that_were_turned_away_never_stay_in_line_to_be_looked_at(monkeypatch):
    """More may come in one pass than are looked at: the line would grow for as long as they do."""
    door = Door(monkeypatch, cost_ns=0)
    monkeypatch.setattr(door, "turn_away", lambda caller, fds, why: [os.close(fd) for fd in fds])

    for first in range(0, 20 * MOST, MOST):
        door.arrivals.come([Accepted(os.eventfd(1), first + at, 1000) for at in range(MOST)])

    assert len(door.arrivals._fresh) <= PENDING
    door.arrivals.close()


def test_a_process_of_a_predecessor_never_has_an_account_of_no_control_group_afterwards(monkeypatch):
    """All of root's would have that one, whatever container they are in."""
    door = Door(monkeypatch, cost_ns=0)
    door.expected.update([100])

    door.come([100, 100])

    assert door.looked_at == [100]


@pytest.mark.parametrize("packets", [1, 32])
def test_however_many_owe_answers_they_never_have_all_of_the_loop_nor_what_others_need_later(packets):
    """Regression: an answer may be withheld for good, and each such process had a tenth of the loop beside the others.
    What they took was owed by all for minutes. And where one is read many packets at a time, nearly all of these were
    what those who owe had in common, while the little that was left to the others let the next one in."""
    turns, now_ns, took_ns, cost_ns = Turns(), 0, 0, 4_000_000
    while now_ns < 60 * SECOND_NS:
        for pid in range(20):
            if not turns.wait_ns(pid, now_ns, is_awaited=True):
                for _ in range(packets):
                    now_ns, took_ns = now_ns + cost_ns // packets, took_ns + cost_ns // packets
                    turns.took(pid, cost_ns // packets, now_ns, is_awaited=True)
        now_ns += 1_000_000

    assert took_ns < now_ns * (2 * SHARE_OF_ALL + 0.05)
    assert turns.wait_ns("another", now_ns) < SECOND_NS // 10
    turns.took("more", SECOND_NS, now_ns)
    assert turns.wait_ns("one that owes an answer", now_ns, is_awaited=True) < SECOND_NS // 10


def test_a_machine_that_stood_for_an_hour_while_it_read_one_never_keeps_anybody_waiting_for_longer_than_a_minute():
    """Where a driver may be busy the wait is charged, too, and nothing tells the two apart."""
    turns = Turns()
    for owes in (False, True):
        turns.took("one", 3600 * SECOND_NS, 0, is_awaited=owes)

    waits_ns = [turns.wait_ns(who, 0, is_awaited=owes) for who in ("one", "another") for owes in (False, True)]

    assert max(waits_ns) < 61 * SECOND_NS


def test_one_that_is_new_never_costs_a_look_at_all_that_are_not_full(monkeypatch):
    """A link of a day's count is owed for more than a minute: thousands of accounts may be so at once."""
    looks, fill = [], Bucket.taken_ns
    monkeypatch.setattr(Bucket, "taken_ns", lambda bucket, now_ns: looks.append(1) or fill(bucket, now_ns))
    buckets = Buckets(share=1.0, burst_ns=3600 * SECOND_NS)
    accounts = MOST_KEPT + 500

    for account in range(accounts):
        buckets.took(account, SECOND_NS, account)

    assert len(looks) <= 2 * accounts
    assert len(buckets.of) == accounts, "none is full"
    buckets.took("late", 1, 10**15)
    for account in range(accounts):
        buckets.took(("later", account), 1, 10**15)
    assert len(buckets.of) <= 2 * accounts + 1
