"""What the validation compares, without a GPU, emulated or not: the run in real time is a command."""

from __future__ import annotations

import numpy as np
from valve_tools.demo.figures import Gate, Request, Run
from valve_tools.replay import validate

MS = 1_000_000


def served(condition: str, trace, tpot_ms: float, gates: int = 0) -> Run:
    requests = tuple(
        Request(arrival_s=at / 1e9, ttft_ms=20.0, tpot_ms=tpot_ms, out_tokens=int(out))
        for at, out in zip(trace.arrive_ns, trace.out_tok, strict=True)
    )
    gate = Gate(launch_ns=0, seen_ns=20_000, ioctl_ns=40_000, done_ns=MS // 2)
    return Run(condition=condition, requests=requests, wall_s=31.0, units=5000, gates=(gate,) * gates)


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

    assert 10.0 < np.nanmin(alone.tpot_ms) < 11.5
    assert 10.2 < np.nanmin(alone.ttft_ms) < 13.0


def test_a_slower_host_is_measured_alone_and_given_to_the_simulator():
    trace = validate.arrivals(1, 30.0)
    run = served("valve", trace, 13.0, gates=9)
    quick = validate._simulated(trace, served("alone", trace, 9.0), run, 1)
    slow = validate._simulated(trace, served("alone", trace, 13.0), run, 1)

    assert 12.0 < slow["TPOT ms, alone"] < 14.0
    assert quick["TPOT ms, alone"] < 11.5
    assert slow["preemptions"] > 5


def test_a_ratio_outside_ten_percent_is_a_missed_claim():
    figures = dict.fromkeys(validate.FIGURES, 10.0)
    near = validate.Compared(seed=1, emulated=figures, simulated={**figures, "TTFT ms": 10.9})
    far = validate.Compared(seed=1, emulated=figures, simulated={**figures, "TPOT ms": 8.8})

    assert validate.report([near], 60.0, [1]).ok
    missed = [claim.claim for claim in validate.report([far], 60.0, [1]).claims if not claim.ok]
    assert missed == ["TPOT ms: simulated over emulated"]
