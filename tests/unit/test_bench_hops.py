"""Where the time of one reclaim goes: each moment outside of driver calls belongs to one hop."""

import pytest
from valve_tools.bench.hops import HOPS, hops_ns
from valve_tools.emulator.process import ThreadCall, union_ns

VALVED, OFFLINE, ONLINE = 1, 2, 3
END, MAPPED = 10_000, 9_000
DETAIL = {"heard_ns": 50, "total_ns": 9_950, "tell_ns": 100, "take_ns": 3_000, "give_ns": 5_000}  # begins at 0


def call(begin, end, kind, thread=99):
    return ThreadCall(begin_ns=begin, end_ns=end, kind=kind, thread=thread)


def calls(*, stop=(400, 1_500)):
    taking = [call(2_300, 3_000, "unmap"), call(3_100, 4_600, "access")]
    giving = [call(5_800, 7_000, "map"), call(7_050, MAPPED, "access")]
    own = [call(5_100, 5_200, "wait", ONLINE)]  # of the receiver's engine
    return {VALVED: [call(*stop, "gate ioctl")] if stop else [], OFFLINE: taking, ONLINE: own + giving}


def test_each_hop_has_its_own_time():
    assert hops_ns(DETAIL, END, calls(), ONLINE, MAPPED) == {
        "ask": 400,
        "stop": 0,
        "stopped": 400,
        "tell": 100,
        "order": 300,
        "taking": 100,
        "taken": 400,
        "give": 700,
        "giving": 50,
    }


@pytest.mark.parametrize("stop", [(400, 1_500), (0, 100), (1_700, 2_500), None])
def test_the_hops_never_leave_out_a_moment_and_never_count_one_twice(stop):
    """Also where the GPU stood already, or its stop had begun before the hook rang."""
    made = calls(stop=stop)
    intervals = [(one.begin_ns, one.end_ns) for of in made.values() for one in of]

    hops = hops_ns(DETAIL, END, made, ONLINE, MAPPED)

    assert list(hops) == list(HOPS)
    assert sum(hops.values()) == MAPPED - union_ns(intervals, 0, MAPPED)
    assert min(hops.values()) >= 0
