"""What a benchmark prints: a figure is judged by its budget, and a reader sees all of it on any terminal."""

from valve_tools.bench.command import show
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
