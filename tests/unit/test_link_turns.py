"""Whose turn it is on the link, and what waits for a later pass of the loop."""

from __future__ import annotations

import pytest

from valved.clients.turns import ACCOUNT_BURST_NS, KNOCKS_BURST_NS, PASS_NS, Knocks, Postponed, TurnLine


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
        later.do("flood", job(f"flood {number}"))
    later.do("other", job("other"))

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
    later.do("a", lambda: setattr(time, "now", time.now + 2 * PASS_NS))
    later.do("b", lambda: 1 / 0)
    later.do("c", lambda: done.append("c"))

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
