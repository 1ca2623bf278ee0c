"""What ends a run of the cluster tests although every test passed: deaths and errors that nobody caused."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

from valve_tools.cluster import quiet
from valve_tools.cluster.controlplane import ControlPlane, wait_for


def test_a_process_that_ended_by_itself_is_never_overlooked_even_if_it_is_started_again(tmp_path: Path) -> None:
    plane = ControlPlane(tmp_path, tmp_path)
    for name, program in (("dies", "{}['phase']"), ("told", "import time; time.sleep(999)")):
        plane.spawn(name, "-c", program, program=sys.executable)
    plane.processes["dies"].wait()
    plane.restart("dies").wait()
    plane.kill("told")  # by a test
    plane.stop()

    assert plane.deaths == ["dies ended by itself with 1"] * 2
    assert sum("Traceback" in line for line in plane.complaints()) == 2
    plane.expected.append("Traceback")
    assert plane.complaints() == plane.deaths


ON_SIGTERM = "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: {}); print('begun', flush=True); {}"
IDLE = "[time.sleep(0.01) for _ in iter(int, 1)]"  # in one sleep, a signal that comes just before it is never heard


def test_a_process_that_does_not_end_in_order_when_it_is_told_to_is_never_overlooked(tmp_path: Path) -> None:
    plane = ControlPlane(tmp_path, tmp_path)
    programs = {
        "fails": ON_SIGTERM.format("sys.exit(7)", IDLE),
        "unheeding": "import time; print('begun', flush=True); time.sleep(999)",
        "sound": ON_SIGTERM.format("sys.exit(0)", IDLE),
        "young": "import time; time.sleep(999)",
    }
    (tmp_path / "young.log").write_text("begun\n")  # by the one before it
    for name, program in programs.items():
        plane.spawn(name, "-c", program, program=sys.executable)
        wait_for(name, lambda name=name: name == "young" or (tmp_path / f"{name}.log").stat().st_size)
    plane.stop()

    assert plane.deaths == [
        f"unheeding was told to end and ended with {-signal.SIGTERM}",
        "fails was told to end and ended with 7",
    ]


def test_a_process_that_ended_by_itself_is_never_overlooked_where_it_was_to_be_replaced(tmp_path: Path) -> None:
    plane = ControlPlane(tmp_path, tmp_path)
    process = plane.spawn("dies", "-c", "{}['phase']", program=sys.executable)
    process.wait()
    plane.end("dies", plane.processes.pop("dies"))

    assert plane.deaths == ["dies ended by itself with 1"]


def test_the_end_of_a_stand_in_or_of_another_s_program_never_fails_a_run(tmp_path: Path) -> None:
    """NVIDIA's device plugin bears the name of its stand-in; neither is Valve's."""
    plane = ControlPlane(tmp_path, tmp_path)
    plane.spawn("gpuplugin", "-m", "valve_tools.cluster.none_of_that_name", program=sys.executable).wait()
    plane.spawn("gpuplugin", "-c", "exit 1", program="/bin/sh").wait()
    plane.stop()

    assert plane.complaints() == []


def test_an_error_in_the_log_of_a_container_is_never_overlooked() -> None:
    log = "\n".join(
        [
            '2026-01-01T00:00:00Z stderr F {"time": 1.0, "level": "error", "event": "round failed"}',
            '2026-01-01T00:00:00Z stderr F {"time": 1.0, "level": "warning", "event": "watch refused"}',
            "2026-01-01T00:00:00Z stderr F Traceback (most recent call last):",
            "E0101 00:00:00.000000 1 leaderelection.go:1] a line of kube-scheduler",
        ]
    )

    assert len(list(quiet.complaints(log))) == 2
    assert len(list(quiet.complaints(log, ["round failed"]))) == 1


def test_a_restarted_container_is_never_overlooked() -> None:
    ended = {"terminated": {"reason": "Error", "exitCode": 1}}
    told = [{"name": "extender", "restartCount": 3, "lastState": ended}, {"name": "other", "restartCount": 0}]
    pods = [{"metadata": {"name": "p"}, "status": {"containerStatuses": told}}, {"metadata": {"name": "new"}}]

    assert quiet.restarts(pods) == {"p/extender": 3}
    assert list(quiet.why_restarted(pods)) == ["p/extender restarted 3 times, last: Error 1"]
