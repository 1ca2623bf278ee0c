"""The asking half of granted time, for any history: what is never asked, and what a pause never outlasts."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from grant_valved import GAP_MS, HOST_NS, STEP_NS, TPOT_MS, Valved, Waiting, decoding, facts_of, grants_of, stop_time
from hypothesis import given
from hypothesis import strategies as st
from valve_abi import GrantAnswer
from valve_hook.grant_cost import WAIT_MOST_MS, LearntCost
from valve_hook.grants import ANSWER_NS, KEPT_NS, LOOK_S, MS, Asking
from valve_hook.policy.granting import GrantReason, GrantSettings


@pytest.fixture
def valved(monkeypatch: pytest.MonkeyPatch) -> Iterator[Valved]:
    stop_time(monkeypatch)
    valved = Valved()
    yield valved
    valved.close()


def test_a_service_that_is_ahead_asks_and_waits_until_its_next_step(valved: Valved) -> None:
    grants = grants_of(valved)
    now = decoding(grants)
    resume_ns = grants.wants(now, facts_of())
    wait = Waiting(valved)

    assert resume_ns > now
    assert grants.pause(resume_ns, wait, is_done=True)
    assert valved.rings == 1
    assert now < wait.asked_until_ns < resume_ns
    assert valved.until_ns == wait.asked_until_ns  # its end is valved's business
    assert sum(wait.waited_s) == pytest.approx((resume_ns - now) / 1e9)
    assert grants.sums.given == 1


def silent(valved: Valved) -> None:
    assert valved.seq == 0
    assert valved.rings == 0


def test_without_consent_nothing_is_asked_or_kept(valved: Valved) -> None:
    valved.consent(TPOT_MS, GAP_MS, consented=0)
    grants = grants_of(valved)
    now = decoding(grants)

    assert grants.wants(now, facts_of()) == 0
    assert grants.policy is None
    assert not grants.pause(now + 50 * MS, Waiting(valved), is_done=True)
    silent(valved)


def test_no_pause_begins_after_consent_was_taken_back(valved: Valved) -> None:
    grants = grants_of(valved)
    resume_ns = grants.wants(decoding(grants), facts_of())
    valved.consent(TPOT_MS, GAP_MS, consented=0)

    assert not grants.pause(resume_ns, Waiting(valved), is_done=True)
    assert grants.wants(time.monotonic_ns(), facts_of()) == 0
    silent(valved)


def test_an_engine_that_was_refused_by_name_never_asks(valved: Valved) -> None:
    grants = grants_of(valved, refused="several pipeline stages")
    assert grants.wants(decoding(grants), facts_of()) == 0
    silent(valved)


def test_nothing_is_asked_while_work_is_not_proven_done(valved: Valved) -> None:
    grants = grants_of(valved)
    resume_ns = grants.wants(decoding(grants), facts_of())

    assert not grants.pause(resume_ns, Waiting(valved), is_done=False)
    silent(valved)


def test_a_request_that_was_there_before_consent_is_never_paced_unseen(valved: Valved) -> None:
    """Its tokens were not followed, so nobody knows when its next one is due."""
    grants = grants_of(valved)
    now = decoding(grants)
    grants.delivered([("a", 1, False), ("unknown", 1, False)], now)
    assert grants.readers == 1  # the engine says 2 run: one of them counts as a prompt, and that refuses
    assert grants.wants(now, facts_of(running=2, prefilling=2 - grants.readers)) == 0


@pytest.mark.parametrize(
    "fact", [{"waiting": 1}, {"prefilling": 1}, {"reclaim_pending": True}, {"kv_used": 900}, {"running": 60}]
)
def test_a_fact_of_the_engine_refuses_without_a_word_to_valved(valved: Valved, fact: dict[str, object]) -> None:
    grants = grants_of(valved)
    assert grants.wants(decoding(grants), facts_of(**fact)) == 0
    silent(valved)


def test_a_service_that_misses_its_target_alone_never_asks(valved: Valved) -> None:
    valved.consent(5.0, GAP_MS)  # below its own step
    grants = Asking(valved, settings=GrantSettings(grants_per_s=1e9, least_worth=-1e9))
    now = 0
    for turn in range(100):
        now = decoding(grants, (f"r{turn}",), steps=4)
        assert grants.wants(now, facts_of()) == 0
        grants.delivered([(f"r{turn}", 1, True)], now + STEP_NS)
    assert set(grants.reasons) == {GrantReason.MISSES}
    silent(valved)


def test_a_new_request_ends_a_pause_at_once(valved: Valved) -> None:
    for interrupts in range(3):
        grants = grants_of(valved)
        resume_ns = grants.wants(decoding(grants), facts_of())
        wait = Waiting(valved, interrupts=interrupts)
        grants.pause(resume_ns, wait, is_done=True)
        if interrupts < 2:
            assert len(wait.waited_s) == interrupts + 1
            assert valved.until_ns == 0  # taken back


REFUSALS = [each for each in GrantAnswer if each not in (GrantAnswer.GIVEN, GrantAnswer.ANSWERS)]


@pytest.mark.parametrize("answer", REFUSALS)
def test_a_refusal_ends_the_pause_and_is_not_asked_again_at_once(valved: Valved, answer: GrantAnswer) -> None:
    grants = grants_of(valved)
    resume_ns = grants.wants(decoding(grants), facts_of())
    wait = Waiting(valved, answer)

    assert not grants.pause(resume_ns, wait, is_done=True)
    assert len(wait.waited_s) == 1
    assert grants.wants(time.monotonic_ns(), facts_of()) == 0
    assert grants.answers == {answer: 1}
    assert grants.sums.given == 0


def test_a_refusal_of_a_later_valved_never_fails_the_hook(valved: Valved) -> None:
    grants = grants_of(valved)
    resume_ns = grants.wants(decoding(grants), facts_of())

    assert not grants.pause(resume_ns, Waiting(valved, says=200), is_done=True)  # type: ignore[arg-type]
    assert grants.answers == {GrantAnswer.NONE: 1}


def test_a_prompt_that_ends_a_pause_counts_as_a_burst(valved: Valved) -> None:
    """Prompts come in pauses for the most part; the step after a pause was left out, and the reserve knew of few."""
    grants = grants_of(valved)
    now = decoding(grants)
    assert grants.policy is not None
    assert grants.pause(grants.wants(now, facts_of()), Waiting(valved), is_done=True)

    now = time.monotonic_ns()
    for ms, prefill in ((300, True), (6, False)):
        grants.stepped(now, now + ms * MS, 1, prefill=prefill)
        now += ms * MS
        grants.delivered([("a", 1, False)], now)

    assert grants.policy.reserve._bursts.value == pytest.approx(300.0)


def test_a_valved_that_hangs_costs_no_more_than_the_time_to_answer(valved: Valved) -> None:
    grants = grants_of(valved)
    resume_ns = grants.wants(decoding(grants), facts_of())
    wait = Waiting(valved, says=None)

    assert not grants.pause(resume_ns, wait, is_done=True)
    assert sum(wait.waited_s) * 1e9 <= ANSWER_NS + MS
    assert valved.until_ns == 0
    assert grants.wants(time.monotonic_ns(), facts_of()) == 0


def test_a_dead_valveds_page_is_never_asked(valved: Valved) -> None:
    grants = grants_of(valved)
    resume_ns = grants.wants(decoding(grants), facts_of())
    valved.grant = None

    assert not grants.pause(resume_ns, Waiting(valved), is_done=True)
    silent(valved)


def test_a_valved_that_is_started_again_finds_what_was_learnt(valved: Valved) -> None:
    grants = grants_of(valved)
    now, page = decoding(grants), valved.grant
    valved.grant = None
    assert grants.follows
    assert grants.wants(now, facts_of()) == 0
    valved.grant = page
    assert grants.wants(now, facts_of()) > now


def test_what_was_learnt_is_not_kept_for_ever_without_consent(valved: Valved, monkeypatch: pytest.MonkeyPatch) -> None:
    grants = grants_of(valved)
    now = decoding(grants)
    valved.consent(TPOT_MS, GAP_MS, consented=0)
    assert grants.follows
    monkeypatch.setattr(time, "monotonic_ns", lambda: now + 2 * KEPT_NS)
    assert not grants.follows
    assert grants.policy is None


def resume_after(grants: Asking, taken_ns: int) -> int:
    """When the engine would go on if it paused after such a step; else 0."""
    time.sleep((HOST_NS + taken_ns) / 1e9)
    now = time.monotonic_ns()
    grants.stepped(now - taken_ns, now, 1, prefill=False)
    grants.delivered([("a", 1, False)], now)
    return grants.wants(now, facts_of())


BOTH_RUNGS = pytest.mark.parametrize("by_slices", [False, True])


@BOTH_RUNGS
def test_one_stall_after_a_pause_never_ends_granting_for_good(valved: Valved, by_slices: bool) -> None:
    """What the stall cost is learnt as the cost of a grant, and no grant comes that could show another."""
    valved.by_slices(by_slices)
    grants = grants_of(valved)
    now = decoding(grants)
    assert grants.pause(grants.wants(now, facts_of()), Waiting(valved), is_done=True)

    assert not resume_after(grants, 3_000 * MS)
    assert not any(resume_after(grants, STEP_NS) for _ in range(1_000))  # 6.5 s; the tokens that were late are made up
    assert any(resume_after(grants, STEP_NS) for _ in range(30_000))


@dataclass
class LateWaiting(Waiting):
    """Each wait for the engine's input ends late, as on a busy machine; a look for valved's answer does not."""

    late_ms: float = 0.0

    def __call__(self, seconds: float) -> bool:
        return super().__call__(seconds + (self.late_ms / 1e3 if seconds > 2 * LOOK_S else 0.0))


@BOTH_RUNGS
@pytest.mark.parametrize("late_ms", [0.5, 4.0, 9.5])
def test_waits_that_end_late_never_make_gap_after_gap_too_long(valved: Valved, by_slices: bool, late_ms: float) -> None:
    """A pause took all that the gap left, so each was too long by what its wait was late."""
    valved.by_slices(by_slices)
    valved.consent(10 * TPOT_MS, GAP_MS)  # each pause is as long as the gap leaves
    grants, over = grants_of(valved), []
    resume_ns, last_ns = grants.wants(decoding(grants), facts_of()), time.monotonic_ns()
    while len(over) < 40:
        paused = resume_ns and grants.pause(resume_ns, LateWaiting(valved, late_ms=late_ms), is_done=True)
        resume_ns, began_ns = resume_after(grants, STEP_NS), last_ns
        last_ns = time.monotonic_ns()
        if paused:
            over.append(last_ns - began_ns > GAP_MS * MS)
    assert not any(over[20:])


@pytest.mark.parametrize("late_ms", [50.0, 3_000.0])
def test_stalls_that_no_plan_can_help_never_take_more_of_a_pause_than_the_bound(late_ms: float) -> None:
    learnt = LearntCost()
    for _ in range(100):
        learnt.waited(late_ms)
        assert learnt.wait_ms <= WAIT_MOST_MS
    for _ in range(1_000):
        learnt.waited(0.1)
    assert learnt.wait_ms == pytest.approx(0.1)


@BOTH_RUNGS
def test_a_cost_that_is_real_never_comes_back_again_and_again(valved: Valved, by_slices: bool) -> None:
    """Half of it is forgotten every 30 s at first: were it always, a reader would wait 3 s every three minutes."""
    valved.by_slices(by_slices)
    grants = grants_of(valved)
    resume_ns, begun_ns = grants.wants(decoding(grants), facts_of()), time.monotonic_ns()
    while time.monotonic_ns() < begun_ns + 1_500_000 * MS:
        paused = resume_ns and grants.pause(resume_ns, Waiting(valved), is_done=True)
        resume_ns = resume_after(grants, 3_000 * MS if paused else 5 * STEP_NS)

    assert grants.sums.given == 2


@pytest.mark.parametrize("facts", [{"kv_used": 900}, {"running": 60}, {"reclaim_pending": True}])
def test_a_cost_is_never_forgotten_while_something_else_keeps_grants_away(
    valved: Valved, facts: dict[str, object]
) -> None:
    grants = grants_of(valved)
    grants.pause(grants.wants(decoding(grants), facts_of()), Waiting(valved), is_done=True)
    resume_after(grants, 20 * MS)
    cost = grants.policy.cost
    for seconds in range(100):
        grants.wants(time.monotonic_ns() + seconds * 1_000 * MS, facts_of(**facts))
    assert grants.policy.cost is cost


def test_a_cost_is_never_forgotten_because_no_request_came(valved: Valved) -> None:
    grants = grants_of(valved)
    grants.pause(grants.wants(decoding(grants), facts_of()), Waiting(valved), is_done=True)
    resume_after(grants, 20 * MS)
    grants.delivered([("a", 1, True)], time.monotonic_ns())
    cost = grants.policy.cost
    for _ in range(10):
        time.sleep(1_000)
        grants.rested(time.monotonic_ns())
        decoding(grants, ("b",), steps=1)
        assert not grants.wants(time.monotonic_ns(), facts_of())
        grants.delivered([("b", 1, True)], time.monotonic_ns())
    assert grants.policy.cost is cost


def test_another_target_is_learnt_anew(valved: Valved) -> None:
    grants = grants_of(valved)
    decoding(grants)
    before = grants.policy
    valved.consent(30.0, GAP_MS)

    assert grants.follows
    assert grants.policy is not before
    assert grants.readers == 0


@given(
    st.lists(
        st.tuples(st.sampled_from("abcd"), st.sampled_from(["arrive", "token", "two", "end", "leave"])), max_size=60
    )
)
def test_readers_and_context_are_those_of_the_requests_that_have_their_first_token(
    history: list[tuple[str, str]],
) -> None:
    valved = Valved()
    grants = grants_of(valved)
    assert grants.follows
    model: dict[str, tuple[int, bool]] = {}
    now = time.monotonic_ns()
    for name, what in history:
        now += STEP_NS
        tokens, _ = model.get(name, (0, False))
        if what == "arrive":
            grants.arrived(name, 10, now)
            model.setdefault(name, (10, False))
        elif what in ("token", "two"):
            count = 1 + (what == "two")
            grants.delivered([(name, count, False)], now)
            if name in model:
                model[name] = (tokens + count, True)
        elif what == "end":
            grants.delivered([(name, 0, True)], now)
            model.pop(name, None)
        else:
            grants.left([name], now)
            model.pop(name, None)
        readers = [tokens for tokens, has_first in model.values() if has_first]
        assert grants.readers == len(readers)
        facts = facts_of(running=max(1, len(readers)))
        if grants.wants(now, facts) or readers:
            assert facts.context_tokens == sum(readers)
        assert grants.policy is not None
        assert len(grants.policy.credits) == len(readers)
    valved.close()
