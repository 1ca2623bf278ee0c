"""Real helm against the control plane of the tests."""

import subprocess
from pathlib import Path

from valve_tools.cluster.controlplane import ControlPlane

CHART = Path(__file__).resolve().parents[2] / "helm/valve"


class Helm:
    """Real helm against the control plane. Hooks are left out: no node runs their pods."""

    def __init__(self, plane: ControlPlane) -> None:
        self._plane = plane

    def run(self, *arguments: str) -> str:
        command = [str(self._plane.programs / "helm"), f"--kubeconfig={self._plane.kubeconfig}", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=self._plane.folder)
        assert done.returncode == 0, done.stderr

        return done.stdout

    def install(self, *values: str) -> str:
        # The CRDs of the session are there already and become the release's.
        flags = ("--namespace=valve-system", "--create-namespace", "--no-hooks", "--take-ownership")
        return self.run("install", "valve", str(CHART), *flags, *values)

    def uninstall(self) -> None:
        self.run("uninstall", "valve", "--namespace=valve-system", "--no-hooks", "--wait")
