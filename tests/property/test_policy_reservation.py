"""What the reservation policy keeps under any load."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from valve_tools.sim.eviction_headroom import BURSTY, STATIONARY, DemandSettings, demand, run_headroom

from valved.model.memory import OnlineMemory, ReservationAction, ReservationRule
from valved.policy import reservation, usage
from valved.policy.reservation import SECOND_NS, ReservationSettings
from valved.policy.resuming import resume

TEN_MINUTES = ReservationSettings(target_per_hour=6.0, pressure_ratio=0.9, headroom_max_handles=4096)
"""A frugal operator's settings: one reclaim in ten minutes, and headroom without a cap."""
SHORT = ReservationSettings(
    headroom_max_handles=64, tau_max_ns=300 * SECOND_NS, window_ns=600 * SECOND_NS, target_per_hour=12
)
MIAD = replace(SHORT, rule=ReservationRule.MIAD)
POOL = 200


def memory(used: int, mapped: int, unmet: int = 0) -> OnlineMemory:
    return OnlineMemory(used_handles=used, mapped_handles=mapped, unmet_handles=unmet, pool_handles=POOL)


class OneNode(RuleBasedStateMachine):
    """A pool that obeys every decision at once; demand and time move as hypothesis likes."""

    policy = SHORT

    @initialize(used=st.integers(0, POOL))
    def begin(self, used: int) -> None:
        self.now_ns = 0
        self.state = reservation.start(0, self.policy)
        self.used = used
        self.mapped = used
        self.last_take_ns = -(10**18)
        self.used_at_give: int | None = None
        self.uses = [(0, used)]
        self.observe()

    @rule(used=st.integers(0, POOL), pause_s=st.integers(0, 400))
    def demand_moves(self, used: int, pause_s: int) -> None:
        self.now_ns += pause_s * SECOND_NS
        self.uses += [(self.now_ns, self.used), (self.now_ns, used)]
        self.used = used
        self.observe()

    @rule(ticks=st.integers(1, 30), pause_s=st.integers(1, 120))
    def time_passes(self, ticks: int, pause_s: int) -> None:
        for _ in range(ticks):
            self.now_ns += pause_s * SECOND_NS
            self.observe()

    def observe(self) -> None:
        before = self.state
        served = min(self.used, self.mapped)
        seen = memory(served, self.mapped, self.used - served)
        self.uses.append((self.now_ns, self.used))
        self.state, decision = reservation.decide(before, seen, self.now_ns, self.policy)
        if decision.action is ReservationAction.TAKE:
            assert self.used_at_give is None or self.used > self.used_at_give, "gave and took with no growth between"
            self.mapped += decision.handles
            self.last_take_ns = self.now_ns
            assert self.mapped == POOL or not reservation.is_pressure(memory(self.used, self.mapped), self.policy)
        elif decision.action is ReservationAction.GIVE:
            assert self.now_ns - self.last_take_ns >= before.tau_ns - self.policy.delta_ns, "freed within tau of taking"
            recent = max(used for at, used in self.uses if at >= self.now_ns - self.state.tau_ns)
            least = self.state.headroom_handles if self.policy is MIAD else self.policy.headroom_min_handles
            assert self.mapped - decision.handles >= recent + least, "freed what was in use"
            self.mapped -= decision.handles
            self.used_at_give = self.used

    @invariant()
    def everything_stays_in_bounds(self) -> None:
        assert self.policy.headroom_min_handles <= self.state.headroom_handles <= self.policy.headroom_max_handles
        least_ns = min(self.policy.tau_min_ns, self.policy.keep_ns)
        assert least_ns <= self.state.tau_ns <= self.policy.tau_max_ns
        assert self.used <= self.mapped <= POOL
        assert list(self.state.reclaims_ns) == sorted(self.state.reclaims_ns)
        assert all(at > self.now_ns - self.policy.window_ns for at in self.state.reclaims_ns)


class PublishedNode(OneNode):
    """The same under the published rule."""

    policy = MIAD


TestOneNode = OneNode.TestCase
TestPublishedNode = PublishedNode.TestCase
TestOneNode.settings = TestPublishedNode.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)

states = st.builds(
    reservation.ReservationState,
    headroom_handles=st.integers(2, 64),
    tau_ns=st.integers(SHORT.tau_min_ns, SHORT.tau_max_ns),
    quiet_since_ns=st.integers(0, 500 * SECOND_NS),
    adjusted_ns=st.integers(0, 500 * SECOND_NS),
    reclaims_ns=st.lists(st.integers(0, 500 * SECOND_NS), max_size=5).map(lambda at: tuple(sorted(at))),
)
NOW_NS = 550 * SECOND_NS


@given(state=states, used=st.integers(0, POOL), mapped=st.integers(0, POOL), more=st.integers(0, POOL))
@settings(deadline=None)
def test_more_demand_never_leads_to_less_memory(
    state: reservation.ReservationState, used: int, mapped: int, more: int
) -> None:
    """Monotone response: with the same past, a higher demand never ends with fewer handles mapped or a lower H."""

    def outcome(demanded: int) -> tuple[int, int]:
        served = min(demanded, mapped)
        after, decision = reservation.decide(state, memory(served, mapped, demanded - served), NOW_NS, SHORT)
        change = -decision.handles if decision.action is ReservationAction.GIVE else decision.handles
        return mapped + change, after.headroom_handles

    low, high = outcome(used), outcome(min(POOL, used + more))

    assert low[0] <= high[0]
    assert low[1] <= high[1]


@given(state=states, extra=st.integers(0, 500 * SECOND_NS), mapped=st.integers(20, POOL))
@settings(deadline=None)
def test_one_more_reclaim_in_the_window_never_shortens_tau(
    state: reservation.ReservationState, extra: int, mapped: int
) -> None:
    busier = replace(state, reclaims_ns=tuple(sorted((*state.reclaims_ns, extra))))
    for used in (0, mapped):
        calm_after, _ = reservation.decide(state, memory(used, mapped), NOW_NS, SHORT)
        busy_after, _ = reservation.decide(busier, memory(used, mapped), NOW_NS, SHORT)

        assert calm_after.tau_ns <= busy_after.tau_ns


@given(state=states, used=st.integers(0, POOL), mapped=st.integers(0, POOL))
@settings(deadline=None)
def test_the_same_inputs_give_the_same_decision(state: reservation.ReservationState, used: int, mapped: int) -> None:
    seen = memory(min(used, mapped), mapped)

    assert reservation.decide(state, seen, NOW_NS, SHORT) == reservation.decide(state, seen, NOW_NS, SHORT)


@given(
    seed=st.integers(0, 2**32 - 1),
    arrivals_per_s=st.floats(0.05, 1.0),
    handles_median=st.floats(1.0, 4.0),
    hold_s_median=st.floats(2.0, 60.0),
)
@settings(max_examples=8, deadline=None)
def test_on_a_stationary_load_the_reclaim_rate_settles_at_the_target(
    seed: int, arrivals_per_s: float, handles_median: float, hold_s_median: float
) -> None:
    """From the second hour on the mean rate is at most the target, whatever the load."""
    load = replace(
        STATIONARY, hours=6, arrivals_per_s=arrivals_per_s, handles_median=handles_median, hold_s_median=hold_s_median
    )

    result = run_headroom(demand(load, seed), load.pool_handles, ReservationSettings())

    later = result.reclaims_per_hour[1:]
    assert sum(later) / len(later) <= ReservationSettings().target_per_hour


def test_on_bursty_loads_no_later_hour_exceeds_the_target_by_more_than_one_climb() -> None:
    """A burst larger than any before costs a climb of the headroom, one reclaim for each doubling."""
    for seed in range(4):
        load: DemandSettings = replace(BURSTY, hours=8)
        result = run_headroom(demand(load, seed), load.pool_handles, TEN_MINUTES)

        assert sum(result.reclaims_per_hour[1:]) / 7 <= 6
        assert result.worst_sliding_hour <= 9


@given(
    headroom=st.integers(1, 64),
    uses=st.lists(st.integers(0, 60), min_size=1, max_size=5),
    sizes=st.tuples(st.sampled_from([2, 16, 128]), st.sampled_from([2, 16, 128])),
    rule=st.sampled_from(list(ReservationRule)),
)
def test_what_is_kept_never_becomes_another_amount_of_memory_in_another_layout(headroom, uses, sizes, rule):
    first, then = sizes
    wide = ReservationSettings(rule=rule, headroom_min_handles=1, headroom_max_handles=1 << 20)
    state = replace(
        reservation.start(0, wide), headroom_handles=headroom, exact_handles=float(headroom), handle_bytes=first
    )
    for second in range(1, 1500):
        history = usage.note(state.history, uses[second // 7 % len(uses)], second * SECOND_NS)
        state = replace(state, history=history)

    again = resume(state, then, wide)

    heading, heading_again = (
        usage.expected(one.history, 30 * first / one.handle_bytes) * one.handle_bytes for one in (state, again)
    )
    assert abs(max(headroom * first, then) - again.headroom_handles * then) < then
    assert abs(heading - heading_again) < 1e-3 * first
    assert again.peaks == state.peaks  # of a node that has seen nothing
    assert resume(again, then, wide) == again
