"""What a benchmark prints: a figure is judged by its budget, and a reader sees all of it on any terminal."""

import pytest
from valve_tools.bench import daemon, route, rungs
from valve_tools.bench.command import TOLD, main, registry, show, unasked
from valve_tools.bench.row import row_of

SAMPLES = [1.0, 2.0, 30.0]


def test_a_row_is_judged_by_the_figure_that_its_budget_bounds():
    assert row_of("gate", "launch", "us", SAMPLES, 2.0, judged="p50").ok
    assert not row_of("gate", "launch", "us", SAMPLES, 2.0, judged="max").ok
    assert row_of("kept", "share", "ratio", SAMPLES, 2.0, judged="p50", better="higher").ok
    assert row_of("gate", "launch", "us", SAMPLES, None).ok


def test_a_narrow_terminal_shows_every_figure_and_the_whole_note(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "60")
    note = "the first sample pays for cold caches and is left out of all of these figures"

    show([row_of("gate", "launch", "us", SAMPLES, 2.0, note=note), row_of("gate", "all of it", "us", SAMPLES, None)])

    printed = capsys.readouterr().out
    first = printed.splitlines()[0]
    assert first.split() == ["gate", "launch", "2", "30", "30", "3", "us", "over", "(p99", "<=", "2)"]
    assert note in " ".join(printed.split())
    assert "not judged" in printed


@pytest.mark.parametrize(("ratios", "is_void", "is_ok"), [([1.0] * 10, False, True), ([0.9, 1.0] * 5, True, False)])
def test_a_figure_whose_interval_is_wider_than_its_mark_is_void_and_never_a_pass(ratios, is_void, is_ok):
    (row,) = rungs.rows_of("sparse", {(1.0, "sparse"): rungs.WayFound(ratios=ratios, requests=10)})

    assert (row.is_void, row.ok) == (is_void, is_ok)


@pytest.mark.parametrize(
    ("ours", "is_void", "is_ok"),
    [([90.0] * 11, False, True), ([70.0] * 11, False, False), ([60, 140] * 6, True, False)],
)
def test_a_router_whose_pairs_disagree_never_passes(ours, is_void, is_ok):
    _, row = route.rate_rows([100.0] * len(ours), ours)

    assert (row.is_void, row.ok) == (is_void, is_ok)


def test_what_takes_a_quarter_of_an_hour_never_runs_unasked():
    benches = registry()

    assert set(benches) - set(unasked(benches)) == {"rungs", "sparse", "tune-idle"}


def test_time_that_runs_slower_asks_for_the_same_work():
    slow, plain = (rungs.Load(open_requests=1, rate=2.0, requests=5, slow=slow).trace() for slow in (2, 1))
    rows = [[line.split(",") for line in trace.splitlines()[1:]] for trace in (slow, plain)]

    assert [row[1:] for row in rows[0]] == [row[1:] for row in rows[1]]
    assert [float(row[0]) - 1 for row in rows[0]] == pytest.approx(
        [2 * (float(row[0]) - 1) for row in rows[1]], abs=0.01
    )


def test_what_the_emulated_driver_takes_is_never_subtracted_from_what_valved_is_judged_by():
    whole, driver = daemon.busy_rows([5.0] * 8, [2.0] * 8, edges=1000, calls=200)

    assert (whole.p50, whole.budget, whole.ok) == (5.0, 4.0, False)
    assert (driver.p50, driver.budget) == (2.0, None)


def test_no_benchmark_is_listed_as_a_bare_name_and_none_that_is_not_there(capsys):
    """`valve bench --list` printed names alone."""
    assert main(["--list"]) == 0

    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(registry())
    assert set(TOLD) == set(registry())
    assert [line for line in lines if len(line.split()) < 5 or not line.endswith(".") or len(line) > 118] == []
