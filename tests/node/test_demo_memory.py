"""A short `valve demo memory`: the five-minute one is the same with more of it."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest
from gates import wait_until
from valve_tools.demo.memory import MemoryPlan, main, most_within, perform
from valve_tools.emulator.node import is_running
from valve_tools.sim.traces import Trace, read_file


def test_the_demo_moves_memory_and_every_answer_is_right(tmp_path):
    figures = perform(MemoryPlan(seconds=8.0, every_s=2.0), tmp_path)

    assert figures.problems == []
    assert sum(figures.per_window) >= 1
    assert figures.offline["lost_blocks"] > 0
    assert figures.phases_ms["total"]
    assert 0 < figures.capacity < 1


@pytest.mark.parametrize(
    ("times_s", "most"),
    [
        ([], 0),
        ([1, 2, 3, 4, 5, 6, 7, 59], 0),
        ([40, 50, 61, 62], 2),
        ([61, 100, 119, 120.5, 121], 4),
        ([119.0, 119.5, 120.0, 120.5], 4),
    ],
    ids=["none", "all in the first", "across the first", "a window ends before its length is over", "across two"],
)
def test_the_demo_never_hides_a_minute_above_the_target_by_where_it_begins(times_s, most):
    assert most_within(times_s, 60.0, 60.0) == most


def test_no_node_outlives_a_demo_that_was_told_to_end(tmp_path):
    argv = [sys.executable, "-c", "import sys; from valve_tools.demo.command import main; sys.exit(main(sys.argv[1:]))"]
    demo = subprocess.Popen([*argv, "memory", "--keep", str(tmp_path)], stdout=subprocess.DEVNULL)
    try:
        wait_until((tmp_path / "off").exists, "the node and its job are there")
        demo.send_signal(signal.SIGTERM)
        assert demo.wait(200) == 128 + signal.SIGTERM
        assert not is_running(tmp_path / "emu")
    finally:
        demo.kill()


def test_a_recorded_hour_becomes_a_minute_and_its_tokens_shrink_with_the_pool(tmp_path):
    (tmp_path / "day.csv").write_text("t_s,in_tok,out_tok\n60,3600,72\n3600,36,1\n7200,1,1\n")
    trace = read_file(tmp_path / "day.csv")
    assert isinstance(trace, Trace)

    requests = MemoryPlan(seconds=61.0, trace=trace).requests()

    assert requests == [(1.0, 100, 2), (60.0, 1, 1)]


@pytest.mark.parametrize("text", ["a,b\n1,2\n", "t_s,in_tok,out_tok\n2,1,1\n1,1,1\n"])
def test_a_file_that_is_no_trace_is_refused_before_anything_starts(tmp_path, capsys, text):
    (tmp_path / "bad.csv").write_text(text)

    assert main(["--trace", str(tmp_path / "bad.csv")]) == 2
    assert "bad.csv" in capsys.readouterr().err
