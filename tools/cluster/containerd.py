"""containerd of a real node: its configuration, the images that pods of this machine's programs need, its client."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from valve_tools.cluster import image
from valve_tools.cluster.controlplane import ControlPlane, wait_for
from valve_tools.cluster.leftovers import CONTAINERD
from valve_tools.cluster.workpods import HOST_FOLDERS, IMAGE

PAUSE = "valve.test/pause:1"
NO_NETWORK = {"cniVersion": "1.0.0", "name": "none", "plugins": [{"type": "loopback"}]}
"""Pods use the host's."""


class Containerd:
    """A process of the control plane; everything it writes is in the node's folder."""

    def __init__(self, plane: ControlPlane, folder: Path) -> None:
        self._plane, self._folder = plane, folder
        self.nri_socket = folder / "nri.sock"
        self.socket = folder / CONTAINERD

    def start(self, plumbing: Mapping[str, Any]) -> None:
        """`plumbing`: the CNI configuration of pods."""
        cni = self._folder / "cni"
        cni.mkdir()
        (cni / "10-pods.conflist").write_text(json.dumps(plumbing))
        runtime = "[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes"
        configuration = f"""
            version = 3
            root = '{self._folder}/c/root'
            state = '{self._folder}/c/state'
            [grpc]
            address = '{self.socket}'
            [plugins.'io.containerd.cri.v1.images'.pinned_images]
            sandbox = '{PAUSE}'
            [plugins.'io.containerd.cri.v1.runtime']
            disable_apparmor = true
            restrict_oom_score_adj = true
            netns_mounts_under_state_dir = true
            cdi_spec_dirs = ['{self._folder}/cdi']
            [plugins.'io.containerd.cri.v1.runtime'.cni]
            bin_dirs = ['/usr/lib/cni']
            conf_dir = '{cni}'
            {runtime}.runc]
            runtime_type = 'io.containerd.runc.v2'
            {runtime}.nvidia]
            runtime_type = 'io.containerd.runc.v2'
            [plugins.'io.containerd.nri.v1.nri']
            disable = false
            socket_path = '{self.nri_socket}'
            plugin_path = '{self._folder}/none'
            plugin_config_path = '{self._folder}/none'
        """
        path = self._folder / "containerd.toml"
        path.write_text(textwrap.dedent(configuration))
        environment = {"PATH": f"{self._plane.programs}:{os.environ['PATH']}", "TZ": "UTC"}
        self._plane.spawn("containerd", "-c", str(path), environment=environment)
        wait_for("containerd", lambda: self.ctr("version") and self.nri_socket.exists())

    def import_images(self) -> None:
        busybox = {"/box/sh": Path("/bin/busybox"), "/box/sleep": Path("/bin/busybox")}
        folders = ["/tmp", *HOST_FOLDERS]
        for name, command in ((PAUSE, ["/box/sleep", "1000000000"]), (IMAGE, ["/box/sh"])):
            with self.importing() as archive:
                image.write(archive, name, busybox, folders=folders, command=command)

    @contextlib.contextmanager
    def importing(self) -> Iterator[Path]:
        """An archive to be written, which containerd then takes."""
        archive = self._folder / "image.tar"
        yield archive
        self.ctr("images", "import", str(archive))
        archive.unlink()

    def ctr(self, *arguments: str) -> str:
        command = [str(self._plane.programs / "ctr"), "-a", str(self.socket), "-n", "k8s.io", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
        if done.returncode != 0:
            raise OSError(f"ctr {' '.join(arguments)}: {done.stderr}")
        return done.stdout
