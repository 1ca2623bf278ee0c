"""What the validation compares, without a GPU, emulated or not: the run in real time is a command."""

from __future__ import annotations

import numpy as np
import pytest
from valve_tools.demo.figures import AnsweredRequest, DemoRun, Preemption
from valve_tools.replay import validate
from valve_tools.replay.report import claims_table

MS, SCALE = 1_000_000, validate.SCALE


def served(condition: str, trace, tpot_ms: float, gates: int = 0) -> DemoRun:
    requests = tuple(
        AnsweredRequest(arrival_s=at / 1e9, ttft_ms=20.0 * SCALE, tpot_ms=tpot_ms * SCALE, out_tokens=int(out))
        for at, out in zip(trace.arrive_ns, trace.out_tok, strict=True)
    )
    gate = Preemption(launch_ns=0, seen_ns=20_000, ioctl_ns=40_000, done_ns=MS // 2)
    return DemoRun(condition=condition, requests=requests, wall_s=31.0 * SCALE, units=5000, gates=(gate,) * gates)


def test_drawn_arrivals_are_the_same_again_and_fill_the_time():
    one, again = validate.arrivals(3, 60.0), validate.arrivals(3, 60.0)

    assert one.arrive_ns.tolist() == again.arrive_ns.tolist()
    assert 40 < one.requests < 200
    assert one.in_tok.min() >= validate.FEWEST_PROMPT
    assert (np.diff(one.arrive_ns) >= 0).all()


def test_the_model_has_the_timings_that_the_service_is_told():
    trace = validate.arrivals(1, 30.0)
    told = validate._world(trace, served("valve", trace, 11.0, gates=9), 1, host_ms=validate.GAP_MS)
    alone = validate._alone(told)

    assert 10.0 < np.nanmin(alone.tpot_ms) / SCALE < 11.5
    assert 10.2 < np.nanmin(alone.ttft_ms) / SCALE < 13.0


def test_a_slower_host_is_measured_alone_and_given_to_the_simulator():
    trace = validate.arrivals(1, 30.0)
    run = served("valve", trace, 13.0, gates=9)
    quick = validate._simulated(trace, served("alone", trace, 9.0), run, 1)
    slow = validate._simulated(trace, served("alone", trace, 13.0), run, 1)

    assert 12.0 < slow["TPOT ms, alone"] / SCALE < 14.0
    assert quick["TPOT ms, alone"] / SCALE < 11.5
    assert slow["preemptions"] > 5


FLAT = dict.fromkeys(validate.FIGURES, 10.0)


def compared(seed: int, ratio: float = 1.0, again: float = 10.0) -> validate.Compared:
    return validate.Compared(
        seed=seed,
        emulated=FLAT,
        simulated={**FLAT, "TPOT ms": 10.0 * ratio},
        again=dict.fromkeys(validate.ALONE, again),
    )


def verdict(found) -> tuple[str, float | None, bool]:
    claim = next(one for one in validate.report(found, 20.0, []).claims if one.claim.startswith("TPOT"))
    return claim.note, claim.value, claim.ok


def test_ten_quiet_seeds_within_the_mark_hold_and_outside_it_are_missed():
    assert validate.report([compared(i) for i in range(10)], 20.0, []).ok
    note, value, ok = verdict([compared(i, 0.88) for i in range(10)])

    assert not ok
    assert value == pytest.approx(1.12)
    assert "median 0.880" in note


def test_fewer_than_ten_seeds_never_pass():
    assert verdict([compared(i) for i in range(9)])[1:] == (None, False)


def test_a_seed_is_dropped_by_its_runs_alone_and_never_by_its_ratio():
    quiet = [compared(i) for i in range(9)]
    kept = validate.report([*quiet, compared(9, 3.0)], 20.0, [])
    dropped = validate.report([*quiet, compared(9, 3.0, again=10.4)], 20.0, [])

    assert "Dropped here: none" in kept.summary[1]
    assert "Dropped here: 9 (4.0 %)" in dropped.summary[1]
    assert "9 of 10 seeds" in dropped.claims[0].note


def test_too_few_undisturbed_seeds_are_void_and_never_a_pass():
    found = [compared(i, again=11.0 if i < 5 else 10.0) for i in range(10)]
    note, value, ok = verdict(found)

    assert (note, value, ok) == ("5 of 10 seeds undisturbed", None, False)
    assert claims_table(validate.report(found, 20.0, []).claims).rows[0][4] == "VOID"


def test_an_interval_wider_than_the_mark_is_void_and_never_a_pass():
    found = [compared(i, 0.93 + 0.02 * i) for i in range(10)]
    note, value, ok = verdict(found)

    assert (value, ok) == (None, False)
    assert note.startswith("wider than the mark")


@pytest.mark.parametrize(("n", "outside"), [(5, 0), (6, 0), (8, 0), (9, 1), (10, 1), (12, 2), (20, 5)])
def test_the_interval_of_a_median_is_that_of_the_binomial(n, outside):
    found = validate.middle([float(i) for i in range(n)])

    assert (found.low, found.high) == (outside, n - 1 - outside)
    assert found.median == (n - 1) / 2
