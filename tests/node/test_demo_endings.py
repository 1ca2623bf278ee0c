"""`valve demo` that is told to end: at no stage does a process of it stay, and nothing in its way out is disturbed."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from valve_tools.demo.node import EmulatedNode

VALVE = Path(sys.executable).parent / "valve"
STAGES = [  # each is there from then on
    ("emu", signal.SIGINT),
    ("offline-alone.out", signal.SIGTERM),
    ("1-alone.online.out", signal.SIGHUP),
    ("run/valved.sock", signal.SIGINT),
    ("2-valve.online.out", signal.SIGTERM),
]
PLAN = """
import sys
from pathlib import Path
from valve_tools.demo import command, endings
plan = command.RoundsPlan(seconds=2.0, rounds=1, ungated=False)
def act():
    with command.demo_folder(Path(sys.argv[1])) as folder:
        command.perform(plan, folder)
    return 0
sys.exit(endings.perform("valve demo", act))
"""


@pytest.mark.parametrize(("stage", "number"), STAGES)
def test_no_process_of_a_demo_ever_outlives_it(tmp_path: Path, stage: str, number: signal.Signals) -> None:
    """The signal comes twice: whoever is impatient presses Ctrl-C again."""
    folder = tmp_path / "demo"
    demo = subprocess.Popen(
        [sys.executable, "-c", PLAN, str(folder)], stderr=subprocess.PIPE, text=True, start_new_session=True
    )
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
