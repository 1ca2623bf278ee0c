"""The GPU lab on the emulated GPU: every experiment runs, and nothing stays disabled whatever dies."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from valve_tools.emulator.client import Emulator
from valve_tools.emulator.node import Options, node
from valve_tools.gpu import build, leash, report
from valve_tools.gpu.catalog import BATCH_LIMIT_S, BATCHES, experiments

DEADLINE_S = 200  # only ends a hung test
pytestmark = pytest.mark.timeout(4 * DEADLINE_S)


def lab(*arguments, out, node_dir=None):
    """A lab process in a group of its own."""
    env = {**os.environ, **({"VALVE_EMU_DIR": str(node_dir)} if node_dir else {})}
    command = [sys.executable, "-m", "valve_tools.gpu.command", "--dry-run", "--out", str(out), *arguments]
    with (Path(out) / "printed").open("wb") as printed:
        return subprocess.Popen(
            command, env=env, cwd="/", stdout=printed, stderr=subprocess.STDOUT, start_new_session=True
        )


@pytest.fixture(scope="module", autouse=True)
def programs(lab_programs):
    os.environ["VALVE_LAB_BUILD"] = str(lab_programs.folder)
    yield lab_programs
    del os.environ["VALVE_LAB_BUILD"]


@pytest.fixture(autouse=True)
def no_folders_left():
    """A lab that is killed cannot clear up; the next one would, half an hour later."""
    before = set(Path("/dev/shm").glob("valve-lab-*"))
    yield
    for folder in set(Path("/dev/shm").glob("valve-lab-*")) - before:
        if not leash.is_alive(int(folder.name.split("-")[2])):
            shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def rehearsal(tmp_path_factory):
    """Every experiment there is, the dangerous one too; (its folder, what it printed)."""
    out = tmp_path_factory.mktemp("rehearsal")
    process = lab("--only", ",".join(experiments()), out=out)
    process.wait(3 * DEADLINE_S)
    output = (out / "printed").read_text()
    assert process.returncode == 0, output
    return out, output


def rows_of(out, batch):
    return [json.loads(line) for line in (Path(out) / f"{batch}.dry.jsonl").read_text().splitlines()]


def test_every_program_builds_without_a_warning(programs):
    assert set(build.PROGRAMS) <= {path.name for path in programs.folder.iterdir()}


def test_a_batch_fits_into_one_call_of_ten_minutes():
    assert all(batch.seconds <= BATCH_LIMIT_S for batch in BATCHES)


@pytest.mark.parametrize("batch", BATCHES, ids=[batch.name for batch in BATCHES])
def test_a_batch_is_rehearsed_in_full(batch, rehearsal):
    out, _ = rehearsal
    rows = rows_of(out, batch.name)

    assert [row["experiment"] for row in rows] == [each.name for each in batch.experiments]
    assert {row["experiment"]: row["detail"] for row in rows if row["verdict"] in {"BAD", "STOPPED"}} == {}


def test_a_rehearsal_never_looks_like_a_measurement(rehearsal):
    out, output = rehearsal
    rows = [row for batch in BATCHES for row in rows_of(out, batch.name)]

    assert all(row["dry_run"] and row["gpu"].startswith("emulated") for row in rows)
    assert not [path for path in out.glob("*.jsonl") if path.stem in {batch.name for batch in BATCHES}]
    assert output.count("DRY RUN") == 1
    assert report.measured([out]) == []


@pytest.mark.parametrize("victim", ["lab", "group", "guard"])
def test_whoever_is_killed_while_channels_are_off_they_come_back(victim, tmp_path):
    with node(Options()) as emulator:
        emulator.fault("on enable 1: hold")
        process = lab("--only", "D4", out=tmp_path, node_dir=emulator.directory)
        emulator.wait_held(1)
        assert emulator.state().disabled
        if victim == "lab":
            process.kill()
        elif victim == "group":
            os.killpg(process.pid, signal.SIGKILL)
        else:
            guard = next(pid for pid in os.listdir("/proc") if pid.isdigit() and is_guard_of(int(pid), process.pid))
            os.kill(int(guard), signal.SIGKILL)
        emulator.release()

        process.wait(DEADLINE_S)
        emulator.wait(lambda state: not state.channels, "the workloads have ended", DEADLINE_S)
        assert emulator.state().disabled == ()
        enabled = [gate for gate in emulator.state().gates if gate.on]
        assert enabled


def test_a_lab_killed_amid_the_product_leaves_nobody_stopped(tmp_path):
    process = lab("--only", "P1", out=tmp_path)
    folder = wait_for(lambda: product_folder(process.pid), "the product's node is up")
    with Emulator(folder / "emu") as emulator:
        emulator.wait(lambda state: state.disabled, "valved has stopped offline work", DEADLINE_S)
        process.kill()
        process.wait(DEADLINE_S)
        emulator.wait(lambda state: not state.disabled, "the leash has drained valved", DEADLINE_S)
    wait_for(lambda: not any(map(leash.is_alive, leash.noted(folder))), "everything that the lab started has ended")


def wait_for(look, what):
    end = time.monotonic() + DEADLINE_S
    while not (seen := look()):
        assert time.monotonic() < end, f"never happened: {what}"
        time.sleep(0.01)
    return seen


def product_folder(lab_pid):
    """Where the node of a lab's product runs, once its emulated card listens."""
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
        except OSError:
            continue
        if len(command) > 4 and command[1].endswith("leash.py") and command[2] == str(lab_pid) and command[3] != "-":
            folder = Path(command[4])
            return folder if (folder / "emu" / "emu.sock").exists() else None
    return None


def is_guard_of(pid, lab_pid):
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return command[0].endswith(b"/guard") and str(lab_pid).encode() in command
