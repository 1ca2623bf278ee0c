"""The native wake decision and the policy's Python never differ: same looks, same answers, field by field."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sim_worlds import world_of
from valve_tools.sim import ours
from valve_tools.sim.machine import Settings
from valve_tools.sim.world import Compute, run
from valved.native._gate import ffi, lib

from valved.gate.permits import ACTIONS
from valved.gate.records import REASONS
from valved.machine.stamps import STAMP_BYTES, Stamps
from valved.model.figures import LARGEST
from valved.policy.wake import (
    HintView,
    LauncherView,
    WakeAction,
    WakeObservation,
    WakeSettings,
    WakeState,
    after_refusal,
    decide_wake,
)

MS = 1_000_000
NOW = 10_000_000 * MS

ages = st.one_of(
    st.integers(-5 * MS, 60 * MS), st.integers(0, 200_000 * MS), st.sampled_from((0, 1, 2000 * MS, 3000 * MS))
)
launchers = st.builds(
    LauncherView,
    is_idle=st.booleans(),
    idle_ns=ages.map(lambda age: NOW - age),
    watcher_ns=ages.map(lambda age: NOW - age),
)
hints = st.builds(HintView, open_requests=st.integers(0, 4), hint_ns=ages.map(lambda age: NOW - age))
looks = st.builds(
    WakeObservation,
    held_since_ns=ages.map(lambda age: NOW - age),
    cooldown_ns=st.integers(1, 400 * MS),
    launchers=st.lists(launchers, max_size=4).map(tuple),
    hints=st.lists(hints, max_size=3).map(tuple),
)
settings_ = st.builds(
    WakeSettings,
    watcher_lease_ns=st.integers(1, 4000 * MS),
    dead_look_ns=st.integers(1, 200 * MS),
    hint_lease_ns=st.integers(1, 4000 * MS),
    refused_backoff_ns=st.integers(1, 20 * MS),
    leak_ns=st.integers(1, 100_000 * MS),
    leak_cooldowns=st.integers(1, 50),
    look_share=st.integers(1, 64),
    look_least_ns=st.integers(1, 10 * MS),
    look_most_ns=st.integers(10 * MS, 50 * MS),
)


class Twin:
    """The native decision, behind the signature of the other."""

    def __init__(self):
        self.state = ffi.new("struct valve_wake_state *")

    def decide(self, look, now_ns, settings):
        rule = ffi.new("struct valve_wake_rule *", {"cooldown_ns": look.cooldown_ns, **asdict(settings)})
        seen, out = ffi.new("struct valve_wake_seen *"), ffi.new("struct valve_wake_decision *")
        lib.valve_wake_begin(seen, look.held_since_ns)
        for launcher in look.launchers:
            lib.valve_wake_launcher(seen, rule, now_ns, launcher.is_idle, launcher.idle_ns, launcher.watcher_ns)
        for hint in look.hints:
            lib.valve_wake_hint(seen, rule, now_ns, hint.open_requests, hint.hint_ns)
        lib.valve_wake_decide(self.state, seen, rule, now_ns, out)
        return (
            ACTIONS[out.action],
            REASONS[out.reason],
            out.look_again_ns or None,
            out.quiet_ns,
            bool(out.hinted),
            out.stale_hints,
            out.leaked,
        )

    def refused(self, cooldown_ns, now_ns, settings):
        rule = ffi.new("struct valve_wake_rule *", {"cooldown_ns": cooldown_ns, **asdict(settings)})
        lib.valve_wake_refused(self.state, rule, now_ns)

    def remembered(self):
        return WakeState(
            refusals=self.state.refusals, blocked_until_ns=self.state.blocked_until_ns, leaked=self.state.leaked
        )


def fields(decision):
    return (
        decision.action,
        decision.reason,
        decision.look_again_ns,
        decision.quiet_ns,
        decision.is_hinted,
        decision.stale_hints,
        decision.leaked,
    )


@given(st.lists(st.tuples(looks, st.integers(0, 50 * MS), st.booleans()), max_size=12), settings_)
def test_native_and_policy_never_differ_over_any_sequence_of_looks(sequence, settings):
    """Looks follow each other with what they remember; a wake is refused now and then."""
    twin, state, shift_ns = Twin(), WakeState(), 0
    for seen, pause_ns, is_refused in sequence:
        shift_ns += pause_ns
        look = _later(seen, shift_ns)
        state, decision = decide_wake(state, look, NOW + shift_ns, settings)

        assert twin.decide(look, NOW + shift_ns, settings) == fields(decision)
        assert twin.remembered() == state
        if decision.action is WakeAction.WAKE and is_refused:
            state = after_refusal(state, look.cooldown_ns, NOW + shift_ns, settings)
            twin.refused(look.cooldown_ns, NOW + shift_ns, settings)
            assert twin.remembered() == state


def _later(look, by_ns):
    return replace(
        look,
        held_since_ns=look.held_since_ns + by_ns,
        launchers=tuple(
            replace(one, idle_ns=one.idle_ns + by_ns, watcher_ns=one.watcher_ns + by_ns) for one in look.launchers
        ),
        hints=tuple(replace(one, hint_ns=one.hint_ns + by_ns) for one in look.hints),
    )


@pytest.mark.parametrize("hinted", [True, False])
def test_native_and_policy_never_differ_along_the_golden_traces(hinted, monkeypatch):
    """Every decision of a recorded world, asked of both."""
    twin, asked = Twin(), []

    def both(state, look, now_ns, settings):
        after, decision = decide_wake(state, look, now_ns, settings)
        asked.append((twin.decide(look, now_ns, settings), fields(decision)))
        return after, decision

    monkeypatch.setattr(ours, "decide_wake", both)
    rows = [(20.0, 500, 3), (21.0, 3000, 2), (200.0, 100, 4), (207.0, 60, 2), (420.0, 6000, 2)]
    settings = Settings(memory_utilization=0.5)
    world = world_of(rows, compute=Compute.CHANNEL, settings=settings, hinted=hinted, seconds=0.6)

    run(world, ours.OurMemory(), ours.ProductWake(hinted=hinted))

    assert asked
    assert all(native == policy for native, policy in asked)


def test_the_stamp_is_read_as_the_header_lays_it_out():
    assert ffi.sizeof("struct valve_stamp") == STAMP_BYTES
    names = [name for name, _ in ffi.typeof("struct valve_stamp").fields]
    native = ffi.new("struct valve_stamp[1]", [{name: 3 + i for i, name in enumerate(names)}])

    (stamp,) = Stamps(bytes(ffi.buffer(native)))

    renamed = {"kind": "code", "requests_started": "claims_started", "requests_ended": "claims_ended"}
    assert [renamed.get(name, name) for name in names] == list(stamp._fields)
    assert list(stamp) == [3 + i for i in range(len(names))]


def test_what_a_client_claims_of_its_requests_is_cut_to_what_can_be():
    native = ffi.new("struct valve_stamp[1]", [{"requests_started": 2**64 - 1, "requests_ended": 2**63}])

    (stamp,) = Stamps(bytes(ffi.buffer(native)))

    assert (stamp.requests_started, stamp.requests_ended) == (LARGEST, LARGEST)
