"""Whether a node's clock is off, by what the API server answers to its reports."""

import pytest

from valved.kube.nodeclock import OFF_S, RIGHT_S, NodeClock, stored_at_s


def told(clock: NodeClock, ahead_s: float, took_s: float = 0.0) -> str | None:
    """A report that the API server stored half-way, at 1,000.7 s by its own clock; it keeps whole seconds."""
    middle_s = 1_000.7 + ahead_s
    clock.stored(middle_s - took_s / 2, middle_s + took_s / 2, 1_000.0)
    return clock.text


def test_an_api_server_that_takes_its_time_is_never_taken_for_a_clock_that_is_off() -> None:
    clock = NodeClock()

    assert [told(clock, ahead_s, took_s=90.0) for ahead_s in (-40.0, 0.0, 40.0)] == ["", "", ""]


@pytest.mark.parametrize(("ahead_s", "text"), [(-90.0, "89 s behind"), (3_600.0, "3600 s ahead")])
def test_a_clock_that_is_off_is_told_with_how_far_and_which_way(ahead_s: float, text: str) -> None:
    assert told(NodeClock(), ahead_s) == f"the clock of the node is {text}"


def test_a_clock_is_never_called_right_before_it_was_compared() -> None:
    clock = NodeClock()

    assert clock.text is None
    assert told(clock, 0.0) == ""


def test_a_clock_near_the_mark_never_makes_the_condition_come_and_go() -> None:
    clock = NodeClock()
    near = [OFF_S - 2.0, OFF_S + 2.0, OFF_S - 2.0, RIGHT_S + 2.0, OFF_S + 2.0, RIGHT_S - 1.0, RIGHT_S + 2.0]

    assert [bool(told(clock, ahead_s)) for ahead_s in near] == [False, True, True, True, True, False, False]


def test_the_time_of_another_s_write_is_never_taken_for_that_of_the_report() -> None:
    entries = [
        {"manager": "valved", "subresource": "status", "time": "1970-01-01T00:16:40Z"},
        {"manager": "kubectl", "subresource": "status", "time": "1970-01-01T01:00:00Z"},
        {"manager": "valved", "time": "1970-01-01T02:00:00Z"},
    ]

    assert stored_at_s({"metadata": {"managedFields": entries}}, "valved") == 1_000.0
    assert stored_at_s({"metadata": {}}, "valved") is None
