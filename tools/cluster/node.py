"""A real node on this machine: containerd and a kubelet of a real control plane, the emulated GPU, valved beside them.

Needs root, runc and what `make cluster-tools` builds. The kubelet's device plugin folder is the machine's own
(/var/lib/kubelet/device-plugins cannot be moved), so there can be one such node at a time.
"""

from __future__ import annotations

import contextlib
import fcntl
import http.client
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from valve_kube import names
from valve_tools.cluster import network
from valve_tools.cluster.api import ApiRefused
from valve_tools.cluster.containerd import NO_NETWORK, Containerd
from valve_tools.cluster.controlplane import ControlPlane, NotBuilt, free_port, wait_for
from valve_tools.cluster.leftovers import PREFIX, end_containers, locked, sweep, unmount
from valve_tools.cluster.workpods import WorkPods
from valve_tools.emulator import node as emulated

from valved.cli.client import is_running
from valved.state.saved import has_successor

Json = dict[str, Any]
NAME = "real-0"
PROGRAMS = ("kubelet", "containerd", "containerd-shim-runc-v2", "ctr")
DEVICE_PLUGINS = Path("/var/lib/kubelet/device-plugins")
CGROUPS = Path("/sys/fs/cgroup")
# In logs; the second of a plugin's is NVIDIA's.
PLUGIN_UP, NRI_UP = (
    "registered with the kubelet|Registered device plugin",
    "the runtime now asks about every new container",
)
# Which process says what when it speaks again to one that was away.
SPEAKS_TO = {
    "kubelet": (("valved", PLUGIN_UP), ("gpuplugin", PLUGIN_UP)),
    "containerd": (("valved", NRI_UP),),
    "gpuplugin": (("gpuplugin", PLUGIN_UP),),
    "valved": (("valved", PLUGIN_UP), ("valved", NRI_UP)),
}


def missing(programs: Path) -> str:
    """Why no real node can run here; empty when one can."""
    absent = [name for name in PROGRAMS if not (programs / name).exists()]
    if absent:
        return f"no {', '.join(absent)}: build them once with `make cluster-tools` (Go 1.26, 7 minutes)"
    if os.geteuid() != 0:
        return "a kubelet needs root"
    if not os.access("/sys/fs/cgroup", os.W_OK):
        return "a kubelet needs a control group tree that it may write"
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False).returncode:
        return "containers need the right to mount"
    if shutil.which("runc") is None:
        return "no runc: apt-get install runc"
    if not Path("/bin/busybox").exists():
        return "no /bin/busybox: apt-get install busybox-static"
    return ""


class RealNode:
    """Use as a context manager. Processes are the control plane's, so that they end with it at the latest."""

    def __init__(self, plane: ControlPlane, *, gpus: int = 1, pod_network: bool = False) -> None:
        problem = missing(plane.programs)
        if problem:
            raise NotBuilt(problem)
        self.plane = plane
        # Short: a socket's path has 107 characters.
        self.folder = Path(tempfile.mkdtemp(prefix=PREFIX))
        self._alone = contextlib.ExitStack()
        self._alone.enter_context(locked(self.folder))
        self.run_dir = self.folder / "run"
        self.shim_folder = self.folder / "shim"
        self.containerd = Containerd(plane, self.folder)
        self.pods = WorkPods(plane.api, NAME, self.folder)
        self.pod_resources = self.folder / "kubelet/pod-resources/kubelet.sock"
        self.uuids: list[str] = []
        self._gpus, self.metrics = gpus, free_port()  # the latter of valved
        self._network = network.PodNetwork(plane, self.folder) if pod_network else None
        self._emulator: subprocess.Popen[str] | None = None
        self._has_stand_in = False

    def __enter__(self) -> RealNode:
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError, http.client.HTTPException, ApiRefused, TimeoutError):
            self.pods.delete_all()
        for name in ("kubelet", "valved", "valved-next", "gpuplugin", "containerd"):
            if name in self.plane.processes:
                self.plane.kill(name)
        end_containers(self.folder)
        if self._emulator is not None:
            emulated.stop(self._emulator)
        unmount(self.folder)
        # Its report too: the controller that deletes those of nodes that left need not run here.
        for path in (f"/api/v1/nodes/{NAME}", f"{names.API_PATH}/gpuharvestnodes/{NAME}"):
            with contextlib.suppress(OSError, http.client.HTTPException, ApiRefused):
                self.plane.api.delete(path)
        shutil.rmtree(self.folder, ignore_errors=True)
        self._alone.close()

    # Coming up

    def _start(self) -> None:
        self._alone.enter_context(the_only_node())
        if sweep() and not network.missing():
            network.PodNetwork(self.plane, self.folder).stop()  # the bridge of a killed one
        self.run_dir.mkdir()
        self._emulator = emulated.start(self.folder / "emu", emulated.Options(gpus=self._gpus))
        self.uuids = _uuids(self.folder / "emu")
        plumbing = NO_NETWORK
        if self._network is not None:
            self._alone.callback(self._network.stop)
            self._network.start()
            plumbing = self._network.configuration()
        self.containerd.start(plumbing)
        self.containerd.import_images()
        self._start_kubelet()
        wait_for("the node", self._is_ready, 120)
        # The controller that would lift the taint of a new node is off.
        self.plane.api.patch(f"/api/v1/nodes/{NAME}", {"spec": {"taints": None}})
        self.start_gpuplugin()
        wait_for("nvidia.com/gpu on the node", lambda: self.allocatable("nvidia.com/gpu") == self._gpus)

    def _start_kubelet(self) -> None:
        configuration = {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "failCgroupV1": False,
            "cgroupDriver": "cgroupfs",
            "enforceNodeAllocatable": [],
            "failSwapOn": False,
            "localStorageCapacityIsolation": False,
            "evictionHard": dict.fromkeys(("memory.available", "nodefs.available", "imagefs.available"), "0%"),
            "containerRuntimeEndpoint": f"unix://{self.containerd.socket}",
            "podLogsDir": str(self.folder / "logs"),
            "resolvConf": "",
            "address": "127.0.0.1",
            "port": free_port(),
            "healthzPort": 0,
            "readOnlyPort": 0,
            "authentication": {"anonymous": {"enabled": False}, "webhook": {"enabled": False}},
            "authorization": {"mode": "AlwaysAllow"},
            "imageGCHighThresholdPercent": 100,
            "nodeStatusUpdateFrequency": "2s",
            "syncFrequency": "5s",
            "volumeStatsAggPeriod": "0s",
        }
        path = self.folder / "kubelet.json"
        path.write_text(json.dumps(configuration))
        # As on any node, where both are one folder: a component that is told the kubelet's folder finds the plugins in
        # it.
        (self.folder / "kubelet").mkdir()
        (self.folder / "kubelet/device-plugins").symlink_to(DEVICE_PLUGINS)
        self.plane.spawn(
            "kubelet",
            f"--config={path}",
            f"--kubeconfig={self.plane.kubeconfig}",
            f"--root-dir={self.folder}/kubelet",
            f"--hostname-override={NAME}",
            f"--cert-dir={self.folder}/pki",
            "--node-labels=nvidia.com/gpu.present=true",
            environment={"PATH": f"{self.plane.programs}:{os.environ['PATH']}"},
        )

    def start_gpuplugin(self, *, stand_in: bool = False) -> None:
        """NVIDIA's, on the emulated NVML; where it was not built, the stand-in."""
        nvidia = self.plane.programs / "nvidia-device-plugin"
        if nvidia.exists() and not stand_in:
            environment = emulated.environment(self.folder / "emu", {})
            self.plane.spawn("gpuplugin", program=str(nvidia), environment=environment)
            self._has_stand_in = False
        else:
            self._has_stand_in = True
            self.plane.spawn("gpuplugin", "-m", "valve_tools.cluster.gpuplugin", *self.uuids, program=sys.executable)

    # valved

    def start_valved(
        self, *, mode: str = "harvest", nri: bool = True, backend: str = "envvar", kubeconfig: Path | None = None
    ) -> None:
        """Start it as the chart does, less the container: on this node's emulated GPU."""
        lines = [
            f'mode = "{mode}"',
            f'run_dir = "{self.run_dir}"',
            f"metrics_port = {self.metrics}\nlease_ms = 10000.0",  # a busy machine must not make shims act alone
            "[kube]",
            f'kubeconfig = "{kubeconfig or self.plane.kubeconfig}"',
            f'pod_resources = "{self.pod_resources}"',
            f'shim_folder = "{self.shim_folder}"',
            f'backend = "{backend}"',
            f'toolkit_folders = ["{self.folder}/cdi"]',
            f'cdi_folder = "{self.folder}/cdi"',
            f'nri_socket = "{self.containerd.nri_socket if nri else ""}"',
            "report_s = 2.0",
        ]
        path = self.folder / "valved.toml"
        path.write_text("\n".join(lines))
        before = self._said("valved", NRI_UP)
        self._spawn_valved("valved")
        wait_for("valved", lambda: is_running(self.run_dir))
        wait_for("NRI", lambda: not nri or self._said("valved", NRI_UP) > before)

    def upgrade_valved(self) -> None:
        """A successor beside it, then SIGTERM to the present one: the surge of the DaemonSet."""
        old, self.metrics = self.plane.processes["valved"], free_port()  # pods of a DaemonSet share no port
        self._spawn_valved("valved-next", "--wait", f"--metrics-port={self.metrics}")
        wait_for("a successor in line", lambda: has_successor(self.run_dir))
        self.plane.end("valved", old)
        self.plane.processes["valved"] = self.plane.processes.pop("valved-next")
        wait_for("the successor", lambda: is_running(self.run_dir))

    def _spawn_valved(self, name: str, *more: str) -> None:
        environment = emulated.environment(self.folder / "emu", {})
        flags = ("-m", "valved.main", f"--config={self.folder}/valved.toml", f"--node={NAME}", *more)
        self.plane.spawn(name, *flags, program=sys.executable, environment=environment)

    # Processes that go and come back

    @contextlib.contextmanager
    def back_afterwards(self, victim: str) -> Iterator[None]:
        """Whatever is done to it inside: it is over when every process that speaks to it does so again.

        A pod that is made before may be one that no webhook injects and no device plugin serves.
        """
        before = {sign: self._said(*sign) for sign in SPEAKS_TO[victim]}
        yield
        for sign, count in before.items():
            wait_for(": ".join(sign), lambda sign=sign, count=count: self._said(*sign) > count, 240)  # type: ignore[misc]

    def _said(self, name: str, words: str) -> int:
        """How often. What the API server shows of a node is older than its processes' own words."""
        logs = self.plane.folder.glob(f"{name}*.log")
        return sum(len(re.findall(words, log.read_text(errors="replace"))) for log in logs)

    def replace(self, name: str) -> None:
        """As an upgrade does it: SIGTERM, and another program goes on with what the former left."""
        if name == "valved":
            self.upgrade_valved()
            return
        self.plane.end(name, self.plane.processes.pop(name))
        if name == "gpuplugin":
            self.start_gpuplugin(stand_in=not self._has_stand_in)
            return
        newer = self.folder / f"newer-{name}"
        if not newer.exists():
            shutil.copy(self.plane.programs / name, newer)
        self.plane.run_from(name, newer)

    def allocatable(self, resource: str) -> int:
        node = self.plane.api.get(f"/api/v1/nodes/{NAME}")
        return int(node["status"].get("allocatable", {}).get(resource, 0))

    def report(self) -> Json:
        found = self.plane.api.get(f"{names.API_PATH}/gpuharvestnodes/{NAME}")
        return dict(found.get("status") or {})

    # Going down

    def _is_ready(self) -> bool:
        conditions = self.plane.api.get(f"/api/v1/nodes/{NAME}")["status"].get("conditions") or []
        return any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)


@contextlib.contextmanager
def the_only_node(*, wait: bool = True) -> Iterator[None]:
    """What of a kubelet is the whole machine's, for one at a time; clean afterwards. BlockingIOError: it is taken."""
    DEVICE_PLUGINS.mkdir(parents=True, exist_ok=True)
    lock = os.open(DEVICE_PLUGINS, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        yield
        for path in DEVICE_PLUGINS.glob("*"):
            path.unlink(missing_ok=True)
        for root in (*CGROUPS.glob("*/kubepods"), CGROUPS / "kubepods"):
            for folder, _, _ in os.walk(root, topdown=False):
                with contextlib.suppress(OSError):  # a process uses it
                    os.rmdir(folder)
    finally:
        os.close(lock)


def _uuids(directory: Path) -> list[str]:
    """The emulated GPUs' UUIDs, as a program on the node sees them."""
    script = (
        "import pynvml as n; n.nvmlInit();"
        "print(*[n.nvmlDeviceGetUUID(n.nvmlDeviceGetHandleByIndex(i)) for i in range(n.nvmlDeviceGetCount())])"
    )
    environment = emulated.environment(directory, os.environ)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=environment)
    return done.stdout.split()
