"""Offline pods on a GPU without the shim: when they are frozen, and for how long they count as ungated."""

from __future__ import annotations

from valved.kube.ungated import Ungated
from valved.model.ids import GpuIndex, ProcessId
from valved.policy.guard import Stranger


def stranger(pid=900, uid="u1"):
    process = ProcessId(pid=pid, start_time=pid)
    return Stranger(name=f"process {pid}", gpu=GpuIndex(0), process=process, offline_uid=uid)


def watch(strangers, seconds, *, obeys=True, settle_s=0.0, registered=lambda second: (), looks=None):
    """One look a second, of a valved whose shims are all back."""
    frozen = []

    def freeze(process, name):
        frozen.append(process.pid)
        return obeys

    ungated = Ungated(freeze)
    ungated.settle_s = settle_s
    for second in range(seconds) if looks is None else looks:
        ungated.look(strangers(second), float(second), registered(second))
        ungated.settle_s = 4.0
    return ungated, frozen


def test_a_process_that_stays_unregistered_is_frozen_and_its_time_counts():
    ungated, frozen = watch(lambda second: [stranger()], 10)

    assert frozen[0] == 900
    assert ungated.seconds == 1.0, "from the look that found it to the next one, so it is found within two seconds"
    assert [(one.pod_uid, one.seconds) for one in ungated.facts({"u1"})] == [("u1", 1.0)]


def test_one_that_cannot_be_frozen_goes_on_counting():
    ungated, _ = watch(lambda second: [stranger()], 11, obeys=False)

    assert ungated.seconds == 10.0


def test_shims_that_come_back_after_a_restart_are_never_frozen():
    ungated, frozen = watch(lambda second: [stranger()] if second < 4 else [], 10, settle_s=4.0)

    assert (frozen, ungated.seconds, ungated.facts({"u1"})) == ([], 0.0, ())


def test_a_shim_that_lost_its_link_for_three_seconds_is_never_frozen():
    """It was registered: it is on its way back."""
    process = stranger().process
    _, frozen = watch(
        lambda second: [stranger()] if 2 <= second < 5 else [],
        10,
        registered=lambda second: () if 2 <= second < 5 else (process,),
    )

    assert not frozen


def test_a_valved_that_stood_gives_shims_the_time_to_come_back():
    _, frozen = watch(lambda second: [stranger()] if 6 <= second < 9 else [], 0, looks=[0, 1, 6, 7, 8, 9, 10])

    assert not frozen


def test_slow_looks_never_switch_freezing_off():
    """NVML may need a second for each look, for ever."""
    _, frozen = watch(lambda second: [stranger()], 0, settle_s=4.0, looks=[2 * look for look in range(8)])

    assert frozen


def test_one_long_stand_of_valved_never_counts_as_time_to_come_back():
    _, frozen = watch(lambda second: [stranger()] if 1 <= second < 63 else [], 0, looks=[0, 1, 60, 61, 62, 63, 64])

    assert not frozen


def test_a_stranger_that_is_no_offline_pod_is_never_frozen():
    _, frozen = watch(lambda second: [stranger(uid="")], 10)

    assert not frozen


def test_a_pod_that_is_gone_is_forgotten():
    ungated, _ = watch(lambda second: [stranger()], 10)

    assert ungated.facts(set()) == ()
