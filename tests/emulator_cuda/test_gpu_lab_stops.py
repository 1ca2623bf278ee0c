"""The lab's verdicts and stop rules, against a card that refuses, pretends, breaks or is slow."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from valve_tools.emulator.node import Options, environment, node

DEADLINE_S = 200  # only ends a hung test
pytestmark = pytest.mark.timeout(4 * DEADLINE_S)
OK, STOPPED = 0, 3


@pytest.fixture(scope="module", autouse=True)
def programs(lab_programs):
    os.environ["VALVE_LAB_BUILD"] = str(lab_programs.folder)
    yield lab_programs
    del os.environ["VALVE_LAB_BUILD"]


def lab(*arguments, out, emulator):
    """(exit code, verdicts by experiment, what it printed)"""
    env = {**os.environ, "VALVE_EMU_DIR": str(emulator.directory)}
    command = [sys.executable, "-m", "valve_tools.gpu.command", "--dry-run", "--out", str(out), *arguments]
    done = subprocess.run(command, env=env, cwd="/", capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    rows = [
        json.loads(line)
        for path in Path(out).glob("*.dry.jsonl")
        for line in path.read_text().splitlines()
        if path.name != "trace.dry.jsonl"
    ]
    return done.returncode, {row["experiment"]: row for row in rows}, done.stdout + done.stderr


def test_a_refusal_of_foreign_channels_sends_everything_else_over_the_passed_descriptor(tmp_path):
    with node(Options(knobs={"gsp_foreign": "deny"})) as emulator:
        code, rows, printed = lab("--only", "D4,D4b,D5", out=tmp_path, emulator=emulator)

        assert code == OK, printed
        assert {name: rows[name]["verdict"] for name in ("D4", "D4b")} == {"D4": "REFUSED", "D4b": "OK"}
        assert all(part["same"] for part in rows["D5"]["answers"].values())
        assert rows["D5"]["answers"]["alu"]["frozen"] > 0
        assert "status 0x1b" in rows["D4"]["detail"]
        assert emulator.state().disabled == ()


LATE = """#!/bin/sh
sleep 1
exec {probe} "$@"
"""


def test_no_workload_ever_ends_before_a_probe_that_comes_late(programs, tmp_path, monkeypatch):
    """Of a rehearsal the work takes a third of a second; a busy machine may take longer to start the probe."""
    late = tmp_path / "bin"
    shutil.copytree(programs.folder, late)
    (late / "probe").write_text(LATE.format(probe=programs.path("probe")))
    monkeypatch.setenv("VALVE_LAB_BUILD", str(late))
    with node(Options()) as emulator:
        code, rows, printed = lab("--only", "D5", out=tmp_path / "out", emulator=emulator)

    assert code == OK, printed
    assert all(part["same"] for part in rows["D5"]["answers"].values())
    assert min(part["pauses"] for part in rows["D5"]["answers"].values()) > 0


def test_a_card_that_says_yes_and_does_nothing_is_found_out(tmp_path):
    with node(Options(knobs={"gsp_foreign": "silent"})) as emulator:
        _, rows, printed = lab("--only", "D4", out=tmp_path, emulator=emulator)

        assert rows["D4"]["verdict"] in {"SILENT", "PART"}, printed  # a busy machine may stand still by itself
        assert rows["D4"]["answers"]["status"] == 0
        assert rows["D4"]["answers"]["frozen"] < rows["D4"]["answers"]["n"]


def test_an_unplanned_xid_ends_the_session_with_everything_on(tmp_path):
    with node(Options(faults=["on disable 2: xid 109"])) as emulator:
        code, rows, printed = lab("--only", "D4,D4b,D5", out=tmp_path, emulator=emulator)

        assert code == STOPPED, printed
        assert {name: row["verdict"] for name, row in rows.items()} == {"D4": "STOPPED"}
        assert "109" in rows["D4"]["detail"]
        assert emulator.state().disabled == ()


def test_a_driver_call_of_ten_seconds_ends_the_session(tmp_path):
    with node(Options(faults=["on disable 2: hang 10500ms"])) as emulator:
        code, rows, printed = lab("--only", "D4,D5", out=tmp_path, emulator=emulator)

        assert code == STOPPED, printed
        assert {name: row["verdict"] for name, row in rows.items()} == {"D4": "STOPPED"}
        assert "10 s" in rows["D4"]["detail"]
        assert emulator.state().disabled == ()


def test_an_enable_that_does_nothing_is_mended_by_the_guard_and_ends_the_session(tmp_path):
    with node(Options(faults=["on enable 2: silent", "on enable 3: silent"])) as emulator:
        code, rows, printed = lab("--only", "D4,D5", out=tmp_path, emulator=emulator)

        assert code == STOPPED, printed
        assert "resumed only after the guard" in rows["D4"]["detail"]
        assert emulator.state().disabled == ()


def test_a_settled_question_is_not_asked_again(tmp_path):
    with node(Options()) as emulator:
        lab("--only", "D1,D2", out=tmp_path, emulator=emulator)  # D1 leaves a trace in the folder, too
        code, rows, printed = lab("--only", "D2,D3", "--resume", out=tmp_path, emulator=emulator)

    assert code == OK, printed
    assert set(rows) == {"D1", "D2", "D3"}
    assert "D2:" not in printed
    assert "D3:" in printed


def test_a_shell_on_the_emulated_gpu_measures_nothing(tmp_path):
    with node(Options()) as emulator:
        command = [sys.executable, "-m", "valve_tools.gpu.command", "--only", "D2", "--out", str(tmp_path)]
        env = environment(emulator.directory, os.environ)
        done = subprocess.run(command, env=env, cwd="/", capture_output=True, text=True, check=False)

    assert done.returncode == 1
    assert "--dry-run" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("arguments", [("--only", "D99"), ("--batch", "nonsense")])
def test_an_unknown_name_is_refused_with_those_there_are(arguments, tmp_path):
    with node(Options()) as emulator:
        code, _, printed = lab(*arguments, out=tmp_path, emulator=emulator)

    assert code == 1
    assert arguments[1] in printed
    assert "D4" in printed or "contact" in printed
