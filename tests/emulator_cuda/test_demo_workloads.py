"""The demo's two workloads: what they print, and that what they print is true."""

from __future__ import annotations

import json
import os
import signal
import struct
import subprocess
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import valve_tools.emulator
from emulated import child_env
from rm_process import RmProcess, grow_tree
from valve_tools.emulator.client import Emulator
from valve_tools.emulator.node import NO_LATENCY, Options, node

BIN = Path(valve_tools.emulator.__file__).parents[1] / "demo" / "bin"
SHORT = ["--duration", "1", "--rate", "8", "--out-tokens", "5", "--in-tokens", "20", "--decode-us", "2000"]
HINT = """
#include <fcntl.h>
#include <stdint.h>
#include <unistd.h>
void valve_hint_open_requests(uint32_t open_requests)
{
    int fd = open(HINT_FILE, O_WRONLY | O_CREAT | O_APPEND, 0600);
    if (write(fd, &open_requests, 4) == 4) close(fd);
}
"""
DEADLINE_S = 200  # only ends a hung test


@pytest.fixture
def emulator() -> Iterator[Emulator]:
    with node(Options(knobs=NO_LATENCY)) as running:
        yield running


def start(emulator: Emulator, program: str, *options: str, **env: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [BIN / f"valve-demo-{program}", *options],
        env=child_env(emulator.directory, env=env),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def lines(process: subprocess.Popen[str]) -> list[dict[str, Any]]:
    out, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, err
    return [json.loads(line) for line in out.splitlines()]


def test_the_offline_checksum_holds_while_another_process_gates_it(emulator: Emulator, tmp_path: Path) -> None:
    """Given a job of 200 units, when it is gated over and over, then its checksum is that of an undisturbed run."""
    page = tmp_path / "beats"
    with RmProcess(emulator.directory) as process:
        tree = grow_tree(process, channels=0, scheduled=False)
        job = start(emulator, "offline", "--units", "200", "--unit-us", "3000", "--heartbeat", os.fspath(page))
        state = emulator.wait(lambda s: sum(c.launches for c in s.of(job.pid)) > 1, "the job runs")
        pairs = [(c.h_client, c.h_channel) for c in state.of(job.pid) if c.is_compute]
        for _ in range(20):
            assert tree.gate(pairs, on=False) == 0
            assert tree.gate(pairs, on=True) == 0
        summary = lines(job)[-1]
    beats, last_ns, stop = struct.unpack("<QQQ", page.read_bytes()[:24])

    assert (summary["ok"], summary["units"]) == (True, 200)
    assert summary["checksum"] == summary["expected"]
    assert beats > 10
    assert (last_ns > 0, stop) == (True, 1)


def test_a_job_that_is_told_to_stop_finishes_what_it_began(emulator: Emulator) -> None:
    job = start(emulator, "offline", "--report", "0.01", "--unit-us", "1000")
    assert job.stdout is not None
    job.stdout.readline()
    job.send_signal(signal.SIGTERM)
    summary = lines(job)[-1]

    assert (summary["summary"], summary["ok"]) == ("offline", True)


@pytest.mark.parametrize("graphs", [[], ["--graphs"]], ids=["launches", "graphs"])
def test_every_online_request_gets_its_tokens(emulator: Emulator, graphs: list[str]) -> None:
    *requests, summary = lines(start(emulator, "online", *SHORT, *graphs))

    assert summary["requests"] == summary["finished"] == len(requests) > 0
    assert summary["tokens"] == sum(request["out"] for request in requests)
    assert all(request["ttft_ms"] * 1e3 >= 40 * request["in"] for request in requests)
    assert all(request["tpot_ms"] >= 2.0 for request in requests if request["out"] > 1)


def test_the_same_seed_draws_the_same_requests(emulator: Emulator) -> None:
    def drawn(seed: str) -> list[tuple[int, int]]:
        *requests, _ = lines(start(emulator, "online", *SHORT, "--seed", seed))
        return sorted((request["in"], request["out"]) for request in requests)

    first = drawn("5")

    assert first == drawn("5")
    assert first != drawn("6")


def test_arrivals_may_come_from_a_trace(emulator: Emulator, tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("t_s,in_tok,out_tok\n0.0,10,3\n1.0,20,2\n2.0,5,1\n90.0,1,1\n")
    *requests, summary = lines(
        start(emulator, "online", "--trace", os.fspath(trace), "--speed", "10", "--duration", "1")
    )

    assert [(r["arrival_s"], r["in"], r["out"]) for r in sorted(requests, key=lambda r: r["request"])] == [
        (0.0, 10, 3),
        (0.1, 20, 2),
        (0.2, 5, 1),
    ]
    assert summary["finished"] == 3


def test_the_service_tells_how_many_requests_are_open_where_somebody_listens(
    emulator: Emulator, tmp_path: Path
) -> None:
    source, library, counts = tmp_path / "hint.c", tmp_path / "hint.so", tmp_path / "counts"
    source.write_text(HINT)
    subprocess.run(
        ["cc", "-shared", "-fPIC", f'-DHINT_FILE="{counts}"', "-o", library, source],
        check=True,
    )
    *requests, _ = lines(start(emulator, "online", *SHORT, LD_PRELOAD=os.fspath(library)))
    published = [value for (value,) in struct.iter_unpack("<I", counts.read_bytes())]

    assert published[-1] == 0
    assert max(published) >= 1
    assert len(published) >= len(requests)
    assert all(a != b for a, b in pairwise(published))


@pytest.mark.parametrize("options", [["--no-such"], ["--batch", "0"], ["--rate", "many"], ["--seed"]])
def test_options_that_make_no_sense_are_refused_by_name(emulator: Emulator, options: list[str]) -> None:
    process = start(emulator, "online", *options)
    _, err = process.communicate(timeout=DEADLINE_S)

    assert process.returncode == 2
    assert options[0].lstrip("-") in err


def test_without_a_driver_it_says_what_to_do() -> None:
    done = subprocess.run([BIN / "valve-demo-online"], check=False, capture_output=True, text=True)

    assert done.returncode == 1
    assert "tools/emulator/run" in done.stderr
