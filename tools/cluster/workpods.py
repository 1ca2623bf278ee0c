"""Pods of a real node that run programs of this machine on its emulated GPU."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from valve_tools.cluster.api import ApiRefused, ClusterApi, Json
from valve_tools.cluster.controlplane import wait_for
from valve_tools.emulator import node as emulated

IMAGE = "valve.test/work:1"
# What a program of this machine needs to run in a container without an image of its own.
HOST_FOLDERS = ("/usr", "/lib", "/lib64", "/bin", "/etc")
PODS = "/api/v1/namespaces/default/pods"


class WorkPods:
    def __init__(self, api: ClusterApi, node: str, folder: Path) -> None:
        """`folder`: of the node; its emulated GPU and its logs are in it."""
        self._api, self._node, self._folder = api, node, folder

    def make(
        self,
        name: str,
        command: Sequence[str],
        *,
        limit: str = "",
        env: Mapping[str, str] | None = None,
        on_node: bool = True,
        annotations: Mapping[str, str] | None = None,
        labels: Mapping[str, str] | None = None,
        folders: Sequence[str] = (),
        **spec: Any,
    ) -> Json:
        """A pod that runs a program of this machine on the emulated GPU; what it starts with is the test's to say."""
        emulation = emulated.environment(self._folder / "emu", {})
        shared = list(dict.fromkeys([*HOST_FOLDERS, str(self._folder / "emu"), str(emulated.LIBRARIES), *folders]))
        mounts = [{"name": f"v{index}", "mountPath": path} for index, path in enumerate(shared)]
        volumes = [{"name": f"v{index}", "hostPath": {"path": path}} for index, path in enumerate(shared)]
        container: Json = {
            "name": "work",
            "image": IMAGE,
            "imagePullPolicy": "Never",
            "command": list(command),
            "env": [{"name": key, "value": value} for key, value in {**emulation, **(env or {})}.items()],
            "volumeMounts": mounts,
            "resources": {"limits": {limit: "1"}} if limit else {},
        }
        return {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, "annotations": dict(annotations or {}), "labels": dict(labels or {})},
            "spec": {
                "hostNetwork": True,
                "enableServiceLinks": False,
                "automountServiceAccountToken": False,
                "terminationGracePeriodSeconds": 1,
                "restartPolicy": "Never",
                "containers": [container],
                "volumes": volumes,
                **({"nodeName": self._node} if on_node else {}),
                **spec,
            },
        }

    def create(self, pod: Json) -> Json:
        return self._api.post(PODS, pod)

    def get(self, name: str) -> Json:
        return self._api.get(f"{PODS}/{name}")

    def wait_phase(self, name: str, phase: str = "Running") -> Json:
        """The pod once it is there; one that has ended otherwise says why at once."""

        def look() -> Json | None:
            pod = self.get(name)
            now = pod["status"].get("phase")
            if now != phase and now in ("Failed", "Succeeded"):
                raise AssertionError(f"{name} is {now}: {json.dumps(pod['status'])[:2000]}\n{self.log(name)}")
            return pod if now == phase else None

        return dict(wait_for(f"{name} {phase}", look, 120))

    def delete(self, name: str) -> None:
        self._api.delete(f"{PODS}/{name}", {"gracePeriodSeconds": 1})
        wait_for(f"{name} to go", lambda: self.is_gone(name), 60)

    def is_gone(self, name: str) -> bool:
        try:
            self.get(name)
        except ApiRefused as refused:
            return refused.status == 404
        return False

    def log(self, name: str) -> str:
        logs = sorted((self._folder / "logs").glob(f"default_{name}_*/*/*.log"))
        return "\n".join(path.read_text(errors="replace")[-2000:] for path in logs)

    def delete_all(self) -> None:
        """Of every namespace: containers whose pods stay outlive their node."""
        mine = f"/api/v1/pods?fieldSelector=spec.nodeName%3D{self._node}"
        for pod in self._api.get(mine)["items"]:
            metadata = pod["metadata"]
            path = f"/api/v1/namespaces/{metadata['namespace']}/pods/{metadata['name']}"
            with contextlib.suppress(ApiRefused):
                self._api.delete(path, {"gracePeriodSeconds": 1})
        wait_for("the pods to go", lambda: not self._api.get(mine)["items"], 30)
