"""`valve demo` that is told to end: at no stage does a process of it stay, and nothing in its way out is disturbed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from valve_tools.demo.node import EmulatedNode, NodeError
from valve_tools.emulator import survivors

VALVE = Path(sys.executable).parent / "valve"
SERVED = "1-valve.online.out"
STAGES = [  # each is there from then on, and the demo never comes to an end of its own
    ("valve", "emu", signal.SIGINT),
    ("valve", "offline-alone.out", signal.SIGTERM),
    ("alone", "1-alone.online.out", signal.SIGHUP),
    ("valve", "run/valved.sock", signal.SIGINT),
    ("valve", SERVED, signal.SIGTERM),
]
PLAN = """
import sys
from pathlib import Path
from valve_tools.demo import command, endings
plan = command.RoundsPlan(seconds=10_000.0, order=(sys.argv[2],))
def act():
    with command.demo_folder(Path(sys.argv[1])) as folder:
        command.perform(plan, folder)
    return 0
sys.exit(endings.perform("valve demo", act))
"""


def endless_demo(folder: Path, condition: str = "valve") -> list[str]:
    return [sys.executable, "-c", PLAN, str(folder), condition]


@pytest.mark.parametrize(("condition", "stage", "number"), STAGES)
def test_no_process_of_a_demo_ever_outlives_it(
    tmp_path: Path, condition: str, stage: str, number: signal.Signals
) -> None:
    """The signal comes twice: whoever is impatient presses Ctrl-C again."""
    folder = tmp_path / "demo"
    demo = subprocess.Popen(endless_demo(folder, condition), stderr=subprocess.PIPE, text=True, start_new_session=True)
    node = EmulatedNode(folder)
    node.wait_for(lambda: (folder / stage).exists() or demo.poll() is not None, stage)

    for _ in range(2):
        demo.send_signal(number)
    said = demo.communicate()[1]

    assert demo.returncode == 128 + number, said
    assert "interrupted; everything was taken down" in said
    assert node.inhabitants() == []


def test_a_demo_that_cannot_start_says_why_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()

    done = subprocess.run([VALVE, "demo", "--keep", str(tmp_path)], capture_output=True, text=True, check=False)

    assert done.returncode == 1
    assert done.stderr == f"valve demo: {tmp_path} holds an earlier run. Remove it, or take another folder\n"


def test_a_demo_that_is_killed_never_leaves_a_process(tmp_path: Path) -> None:
    """No signal reaches it, so it takes nothing down itself."""
    folder = tmp_path / "a folder"
    demo = subprocess.Popen(endless_demo(folder), stderr=subprocess.DEVNULL)
    node = EmulatedNode(folder)
    node.wait_for(lambda: (folder / SERVED).exists() or demo.poll() is not None, "a node with a valved")
    assert len(node.inhabitants()) >= 3, "a card, a valved, a workload"

    demo.kill()
    demo.wait()

    node.wait_for(lambda: not node.inhabitants(), "none is left")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_bench_that_is_ended_never_leaves_its_card_and_its_valved(tmp_path: Path, number: signal.Signals) -> None:
    argv, env = [VALVE, "bench", "daemon-cost", "--json"], {**os.environ, "TMPDIR": str(tmp_path)}
    bench = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=env)

    def inhabitants() -> list[int]:
        return [pid for folder in tmp_path.glob("valve-bench-*") for pid in EmulatedNode(folder).inhabitants()]

    outside = EmulatedNode(tmp_path)
    outside.wait_for(lambda: len(inhabitants()) >= 2 or bench.poll() is not None, "a card and a valved")
    began = inhabitants()
    assert len(began) >= 2

    bench.send_signal(number)
    bench.wait()

    outside.wait_for(lambda: not [pid for pid in began if _lives(pid)], "none is left")


def test_what_a_killed_program_started_on_a_node_never_outlives_it(tmp_path: Path) -> None:
    """A lab or a test that knows nothing of guards, run by a demo whose guard is another: each ends its own."""
    inner = (
        "import sys; from pathlib import Path; from valve_tools.demo.node import EmulatedNode\n"
        "with EmulatedNode(Path(sys.argv[1])) as node: node.start_valved(); print('up', flush=True); sys.stdin.read()"
    )
    with survivors.ended_with_us():
        argv = [sys.executable, "-c", inner, str(tmp_path)]
        program = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert program.stdout is not None
        assert program.stdout.readline() == "up\n"
        node = EmulatedNode(tmp_path)
        assert len(node.inhabitants()) >= 2
    program.wait()

    assert program.returncode == -signal.SIGKILL, "by our guard, which knows the program alone"
    node.wait_for(lambda: not node.inhabitants(), "none is left")


def test_a_fork_of_a_killed_program_never_keeps_what_that_started() -> None:
    program = (
        "import os, subprocess, sys; from valve_tools.emulator import survivors; survivors.end_with_us()\n"
        "marked = subprocess.Popen(['sleep', '1000']).pid; fork = os.fork()\n"
        "print(marked, fork, flush=True) if fork else None; sys.stdin.read()"
    )
    argv = [sys.executable, "-c", program]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as killed:
        assert killed.stdout is not None
        marked, fork = map(int, killed.stdout.readline().split())
        killed.kill()
        try:
            EmulatedNode(Path("/")).wait_for(lambda: not _lives(marked), "what it started is gone")
            assert _lives(fork), "it would be no test: the pipe was closed by its end"
        finally:
            os.kill(fork, signal.SIGKILL)
            if _lives(marked):
                os.kill(marked, signal.SIGKILL)


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_process_that_writes_its_title_never_loses_the_mark_of_its_demo() -> None:
    """setproctitle, which engines use, writes it over the environment if nothing forbids that."""
    before = subprocess.check_output(["env"], text=True).splitlines()
    with survivors.ended_with_us():
        inside = subprocess.check_output(["env"], text=True).splitlines()
    outside = subprocess.check_output(["env"], text=True).splitlines()

    marks = [[line for line in each if line.startswith(f"{survivors.NAME}=")] for each in (before, inside, outside)]
    assert "SPT_NOENV=1" in inside
    assert len(marks[1]) == 1
    assert marks[1] != marks[0]
    assert sorted(outside) == sorted(before)


def test_what_another_demo_started_is_never_ended() -> None:
    marks = ["1.23", "1.234", "2.23", ""]
    sleepers = [subprocess.Popen(["sleep", "1000"], env={**os.environ, survivors.NAME: mark}) for mark in marks]
    try:
        assert survivors.end_marked("1.23")
        assert sleepers[0].wait() == -signal.SIGKILL
        assert not survivors.end_marked("1.23")
        assert [one.poll() for one in sleepers[1:]] == [None] * 3
    finally:
        for one in sleepers:
            one.kill()
            one.wait()


def test_a_demo_whose_valved_dies_says_so_in_a_sentence_and_leaves_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    demo = subprocess.Popen(endless_demo(folder), stderr=subprocess.PIPE, text=True)
    node = EmulatedNode(folder)
    node.wait_for(lambda: (folder / SERVED).exists() or demo.poll() is not None, "a service under Valve")
    killed = [pid for pid in node.inhabitants() if b"valved.main" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    for pid in killed:
        os.kill(pid, signal.SIGKILL)
    said = demo.communicate()[1]

    assert killed, said
    assert demo.returncode == 1, said
    assert f"valve demo: valved ended with {-signal.SIGKILL}" in said
    assert "Traceback" not in said
    assert node.inhabitants() == []


def test_a_valved_that_is_about_to_end_is_never_one_that_does_not_run(tmp_path: Path) -> None:
    """Its sockets are closed before its parent hears of its end."""
    node = EmulatedNode(tmp_path)
    (tmp_path / "valved.log").write_text("the last words")
    node.valved = subprocess.Popen(["sh", "-c", "sleep 0.3; exit 7"])
    with pytest.raises(NodeError, match=r"valved ended with 7\. The end of its log:\nthe last words"):
        node.status()


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--seconds", "nan"], "nan is no number of seconds above 0"),
        (["--seconds", "-3"], "-3 is no number of seconds above 0"),
        (["--rounds", "0"], "0 is not a whole number from 1"),
        (["memory", "--seconds", "0"], "0 is no number of seconds above 0"),
        (["granted", "--rate", "0"], "0 is no number above 0"),
        (["granted", "--gap-ms", "inf"], "inf is no number from 0 on"),
        (["tune", "--steps", "0"], "0 is not a whole number from 4"),
        (["cluster", "--nodes", "0"], "0 is not a whole number from 1"),
    ],
)
def test_a_demo_never_begins_with_numbers_that_make_no_sense(argv: list[str], said: str) -> None:
    done = subprocess.run([VALVE, "demo", *argv], capture_output=True, text=True, check=False)

    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_a_program_that_fails_a_demo_is_never_a_traceback(tmp_path: Path) -> None:
    """A Python that has no torch, say."""
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho no torch here >&2\nexit 7\n")
    python.chmod(0o755)

    done = subprocess.run([VALVE, "demo", "tune", "--python", python], capture_output=True, text=True, check=False)

    assert done.returncode == 1
    assert "ended with 7. Its end:\nno torch here" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_demo_without_a_request_never_ends_in_a_traceback(tmp_path: Path) -> None:
    trace = tmp_path / "none.csv"
    trace.write_text("t_s,in_tok,out_tok\n")
    argv = [VALVE, "demo", "--trace", str(trace), "--seconds", "0.5"]

    done = subprocess.run(argv, capture_output=True, text=True, check=False)

    assert done.returncode == 1
    assert done.stderr.endswith(f"valve demo: no request came within 0.5 s of {trace}\n")
    assert "Traceback" not in done.stderr
