"""A workload measured by hand: one run per limit, what it prints is its speed, and a failure is a limit too small."""

import json
import sys
from pathlib import Path

import pytest
import yaml
from valve_scheduler.cli.commands import main
from valve_scheduler.cli.measuring import PATTERN, command_at, read_speed
from valve_scheduler.controller.profiling import read_by_hand

BENCHMARK = """
import sys
mib, share = float(sys.argv[1]), float(sys.argv[2])
print("warming up: 1 tokens/s")
if mib < 15000:
    sys.exit("out of memory")
print(f"Throughput: 3.1 requests/s, {mib / 10 * share:,.1f} tokens/s")
"""


def run(tmp_path: Path, *flags: str) -> int:
    file = tmp_path / "benchmark.py"
    file.write_text(BENCHMARK)
    command = [sys.executable, str(file), "{mib}", "{share}"]

    return main(["measure", "llama", *flags, "--", *command])


def test_a_curve_comes_of_one_run_per_limit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, "--limits=10000,20000,40000,80000", "--gpu-model=H100", "--json") == 0

    spec = json.loads(capsys.readouterr().out)["spec"]
    assert spec["workload"] == {"model": "llama", "gpuModel": "H100", "tensorParallel": 1}
    assert (spec["standaloneTokensPerSecond"], spec["fitMiB"]) == (8000.0, 20000.0)
    assert [point["tokensPerSecond"] for point in spec["curve"]] == [500.0, 2000.0, 8000.0]


def test_what_is_printed_is_what_can_be_brought_by_hand(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(tmp_path, "--limits=20000,80000", "--namespace=batch")

    text = capsys.readouterr().out
    assert read_by_hand(text)["metadata"] == {"name": "llama", "namespace": "batch"}
    assert yaml.safe_load(text)["kind"] == "OfflineProfile"


def test_a_command_that_prints_no_speed_is_an_error_with_its_last_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, "--limits=1000") == 1
    assert "out of memory" in capsys.readouterr().err


def test_limits_that_are_no_numbers_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, "--limits=10G") == 1
    assert "--limits is '10G'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "speed"),
    [
        ("Throughput: 12.34 requests/s, 5,678.90 total tokens/s, 3 output tok/s", 3.0),
        ("Throughput: 5678 total tokens/s", 5678.0),
        ("total 1_200.5 tokens per second", 1200.5),
        ("no figure", None),
    ],
)
def test_the_last_figure_printed_counts(line: str, speed: float | None) -> None:
    assert read_speed(f"10 tokens/s\n{line}" if speed else line, PATTERN) == speed


def test_a_limit_reaches_the_command_in_mib_and_as_a_share() -> None:
    assert command_at(["x", "--mem={mib}", "{share}"], 20_000, 80_000) == ["x", "--mem=20000", "0.250"]
