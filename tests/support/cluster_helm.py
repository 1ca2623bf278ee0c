"""Real helm against the control plane of the tests."""

import json
import subprocess
from pathlib import Path

from valve_scheduler import names
from valve_tools.cluster.api import Refused
from valve_tools.cluster.controlplane import ControlPlane, wait_for
from valve_tools.cluster.fleet import offline_pod

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
        told = self.run("install", "valve", str(CHART), *flags, *values)
        wait_for("the admission policies", self._are_enforced)

        return told

    def _are_enforced(self) -> bool:
        """The API server compiles them a moment after they are stored."""
        forged = offline_pod("forged")
        forged["metadata"]["annotations"] = {names.GPUS: "x"}
        try:
            self._plane.api.post("/api/v1/namespaces/default/pods?dryRun=All", forged)
        except Refused as refused:
            return "Valve" in str(refused) or "webhook" in str(refused)

        return False

    def revision(self) -> int:
        """Of the release as it stands."""
        history = json.loads(self.run("history", "valve", "--namespace=valve-system", "--output=json"))
        return int(history[-1]["revision"])

    def uninstall(self) -> None:
        self.run("uninstall", "valve", "--namespace=valve-system", "--no-hooks", "--wait")
