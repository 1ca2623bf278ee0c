"""`valve cluster` as an operator types it, against the real control plane."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from valve_tools.cluster.controlplane import ControlPlane


def valve(plane: ControlPlane, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).parent / "valve"), "cluster", *arguments, f"--kubeconfig={plane.kubeconfig}"]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def shown(plane: ControlPlane, *arguments: str) -> Any:
    done = valve(plane, *arguments, "--json")
    assert done.returncode == 0, done.stderr

    return json.loads(done.stdout)
