"""Real helm against a control plane."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

from valve_kube import names
from valve_tools.cluster.api import ApiRefused
from valve_tools.cluster.controlplane import ControlPlane, wait_for
from valve_tools.cluster.fleet import offline_pod

NAMESPACE = "valve-system"
LOOK_S = 1.0


class HelmError(Exception):
    """What helm said."""


class Helm:
    """One release, `valve`. Each flag that a method is given goes to helm as it is."""

    def __init__(self, plane: ControlPlane, chart: Path) -> None:
        self._plane = plane
        self.chart = chart

    def run(self, *arguments: str, meanwhile: Callable[[], None] = lambda: None) -> str:
        """What helm prints. `meanwhile` is called about once a second; what it raises ends helm."""
        command = [str(self._plane.programs / "helm"), f"--kubeconfig={self._plane.kubeconfig}", *arguments]
        own = {f"HELM_{kind}_HOME": str(self._plane.folder / "helm") for kind in ("CACHE", "CONFIG", "DATA")}
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=self._plane.folder,
            env={**os.environ, **own},
        )
        out, errors = _followed(process, meanwhile)
        if process.returncode != 0:
            raise HelmError(f"helm {arguments[0]}: {errors.strip()}")

        return out

    def install(self, *flags: str, meanwhile: Callable[[], None] = lambda: None) -> str:
        where = (f"--namespace={NAMESPACE}", "--create-namespace")
        told = self.run("install", "valve", str(self.chart), *where, *flags, meanwhile=meanwhile)
        wait_for("the admission policies", self._are_enforced)

        return told

    def _are_enforced(self) -> bool:
        """The API server compiles them a moment after they are stored."""
        forged = offline_pod("forged")
        forged["metadata"]["annotations"] = {names.GPUS: "x"}
        try:
            self._plane.api.post("/api/v1/namespaces/default/pods?dryRun=All", forged)
        except ApiRefused as refused:
            return "Valve" in str(refused) or "webhook" in str(refused)

        return False

    def revision(self) -> int:
        """Of the release as it stands."""
        history = json.loads(self.run("history", "valve", f"--namespace={NAMESPACE}", "--output=json"))
        return int(history[-1]["revision"])

    def uninstall(self, *flags: str) -> str:
        return self.run("uninstall", "valve", f"--namespace={NAMESPACE}", "--wait", *flags)


def _followed(process: subprocess.Popen[str], meanwhile: Callable[[], None]) -> tuple[str, str]:
    try:
        while True:
            try:
                return process.communicate(timeout=LOOK_S)
            except subprocess.TimeoutExpired:
                meanwhile()
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()
