"""`make demo-cluster` as an operator runs it."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from valve_tools.demo.cluster import programs_or_why_not

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1200)]

ROOT = Path(__file__).resolve().parents[2]
VALVE = Path(sys.executable).parent / "valve"


def test_every_check_of_the_demo_holds_from_install_to_uninstall(tmp_path: Path) -> None:
    """A cluster of its own: the chart's pods on a real node, workloads, a fleet, and nothing left behind."""
    problem, _ = programs_or_why_not(ROOT)
    if problem:
        pytest.skip(problem)
    screen = tmp_path / "screen"
    command = [str(VALVE), "demo", "cluster", "--nodes=8", "--seconds=2", "--pairs=1"]
    with screen.open("wb") as output:
        demo = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)
        try:
            code = demo.wait()
        finally:
            demo.send_signal(signal.SIGINT)  # it takes its mounts and containers down itself
            demo.wait()

    assert code == 0, screen.read_text()[-8000:]
