"""What the demo prints, by hand-computed cases."""

import io
from types import SimpleNamespace

import pytest
from rich.console import Console
from valve_tools.demo import granted
from valve_tools.demo.figures import (
    AnsweredRequest,
    DemoRun,
    Latency,
    harvested_share,
    idle_beyond,
    parse_gates,
    parse_online,
    pooled,
    spread,
    units_between,
)
from valve_tools.demo.node import progress


def request(arrival_s, ttft_ms=100.0, tpot_ms=10.0, out_tokens=11):
    return AnsweredRequest(arrival_s=arrival_s, ttft_ms=ttft_ms, tpot_ms=tpot_ms, out_tokens=out_tokens)


def test_a_request_ends_after_its_first_token_and_all_the_others():
    assert pytest.approx(request(1.0).done_s) == 1.2


def test_idle_time_is_what_lies_between_requests_less_one_cooldown_each():
    """Requests at [1.0, 1.2] and [1.1, 1.3], then nothing until 2 s: idle 1.0 and 0.7, less 0.1 each."""
    served = [request(1.0), request(1.1)]

    assert pytest.approx(idle_beyond(served, wall_s=2.0, cooldown_s=0.0)) == 1.7
    assert pytest.approx(idle_beyond(served, wall_s=2.0, cooldown_s=0.1)) == 1.5
    assert pytest.approx(idle_beyond(served, wall_s=2.0, cooldown_s=5.0)) == 0.0


def test_the_harvested_share_is_work_done_over_room_under_valve_only():
    runs = [
        DemoRun(condition="valve", requests=(request(1.0),), wall_s=2.0, units=90.0),
        DemoRun(condition="ungated", requests=(request(1.0),), wall_s=2.0, units=500.0),
    ]

    assert pytest.approx(harvested_share(runs, units_per_s=100.0)) == 0.5


def test_latency_over_alone_is_in_percent_figure_by_figure():
    alone = DemoRun(condition="alone", requests=(request(0.0), request(1.0)), wall_s=2.0)
    valve = DemoRun(condition="valve", requests=(request(0.0, ttft_ms=110.0), request(1.0, ttft_ms=110.0)), wall_s=2.0)

    over = pooled([alone, valve], "valve").over(pooled([alone, valve], "alone"))

    assert pytest.approx(over) == {"ttft-mean": 10.0, "ttft-p99": 10.0, "tpot-mean": 0.0, "tpot-p99": 0.0}


def test_the_spread_of_a_condition_is_its_largest_difference_between_runs():
    runs = [DemoRun(condition="alone", requests=(request(0.0, ttft_ms=value),), wall_s=1.0) for value in (100.0, 104.0)]

    assert pytest.approx(spread(runs, "alone")["ttft-mean"]) == 4.0


def test_one_token_answers_have_no_time_per_token():
    latency = Latency.of([request(0.0, tpot_ms=0.0, out_tokens=1), request(0.0, tpot_ms=12.0)])

    assert pytest.approx(latency.values["tpot-mean"]) == 12.0


def test_lines_of_somebody_else_are_skipped():
    served = parse_online(
        [
            "valve: hello",
            '{"request": 0, "arrival_s": 1.5, "in": 3, "out": 2, "ttft_ms": 20.0, "tpot_ms": 5.0}',
            '{"summary": "online", "start_s": 100.0, "wall_s": 4.0}',
        ]
    )

    assert (served.start_s, served.wall_s, len(served.requests)) == (100.0, 4.0, 1)


def test_offline_units_are_interpolated_at_both_ends():
    lines = ['{"t_s": 0, "now_s": 10.0, "units": 100}', '{"t_s": 1, "now_s": 11.0, "units": 200}', "noise"]

    assert pytest.approx(units_between(lines, 10.25, 10.75)) == 50.0
    assert pytest.approx(units_between(lines, 10.25, 99.0)) == 75.0


def test_only_gates_that_a_launch_caused_and_that_stopped_something_count():
    times = {"launch_ns": 1000, "seen_ns": 2000, "ioctl_ns": 31000, "done_ns": 501000, "channels": 8}
    records = [
        {"kind": "gate", "detail": times},
        {"kind": "gate", "detail": {**times, "launch_ns": 0}},
        {"kind": "gate", "detail": {**times, "channels": 0}},
        {"kind": "wake", "detail": times},
    ]

    (gate,) = parse_gates(records)

    assert pytest.approx(gate.own_us) == 30.0
    assert pytest.approx(gate.total_ms) == 0.5


def test_no_word_of_a_table_is_ever_cut_on_a_terminal_of_80_columns(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    figures = {"tpot_ms": 113.1, "tpot_p99_ms": 128.1, "longest_plain_ms": 136.0, "longest_ms": 161.0, "pauses": 193}
    figures |= {"ttft_p99_ms": 142.5, "granted_s": 12.5, "offline_share": 0.37, "requests": 124, "words": ""}
    figures |= {"gaps": 5000, "gaps_paused": 200, "gaps_spoilt": 140}
    run = SimpleNamespace(consents=True, cost_ms=None, worth=None, missed=lambda _: 100, **figures)

    granted.show([run], granted.GrantedPlan())

    said = capsys.readouterr().out
    assert "…" not in said
    row = next(line for line in said.splitlines() if line.startswith(" yes"))
    assert " ".join(row.split()) == "yes 113.1 128.1 100/124 136 161 142.5 193 12.5 s 37%"


@pytest.mark.parametrize("is_quiet", [False, True])
def test_a_demo_is_never_silent_until_its_end_in_a_file_nor_says_each_half_second(is_quiet):
    """Regression: rich's line that changes is for a terminal alone; a pipe got nothing for minutes. Quiet: --json."""
    out, now_s = io.StringIO(), [0.0]
    with progress(Console(file=out, quiet=is_quiet), "starting", lambda: now_s[0]) as say:
        seen = [out.getvalue()]
        for half in range(42):
            now_s[0] = half / 2
            say(f"{half / 2:.1f} s")
            seen.append(out.getvalue())

    assert seen[0] == ("" if is_quiet else "  starting\n"), "at once, not at the end"
    assert seen[-1].split("\n") == ([""] if is_quiet else ["  starting", "  0.0 s", "  10.0 s", "  20.0 s", ""])
