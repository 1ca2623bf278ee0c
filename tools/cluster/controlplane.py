"""etcd, kube-apiserver, kube-controller-manager and kube-scheduler with Valve's extender, all on loopback.

The binaries come from `make cluster-tools`, or from KUBEBUILDER_ASSETS as envtest users have them. Every
process is a child of this one and dies with it."""

from __future__ import annotations

import contextlib
import ctypes
import http.client
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from valve_tools.cluster import quiet, told
from valve_tools.cluster.api import ApiRefused, ClusterApi

TOKEN = "administrator-of-a-test"
PROGRAMS = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler")
CHART_LEASE = {"leaseDuration": "10s", "renewDeadline": "7s", "retryPeriod": "2s"}
SHORT_LEASE = {"leaseDuration": "2s", "renewDeadline": "1500ms", "retryPeriod": "500ms"}  # for tests that wait for it
# As the chart sets it.
SCHEDULER_ENVIRONMENT = {"GOGC": "400", "GOMEMLIMIT": "400MiB"}
START_S = 240.0  # what a machine that is busy with other things may take for it
STOP_S, PATIENCE_S = 10.0, 120.0  # who does not end is killed; of Valve's own that is a finding
_BY_US = (-signal.SIGKILL, -signal.SIGTERM)
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


class NotBuilt(Exception):
    """The control plane's programs are not here."""


def binaries(root: Path) -> Path:
    """Where they are; raises NotBuilt with the command that makes them."""
    script = root / "tests/cluster/build_tools.sh"
    found = subprocess.run([str(script), "--where"], capture_output=True, text=True, check=True)
    folder = Path(found.stdout.strip())
    missing = [name for name in PROGRAMS if not (folder / name).exists()]
    if missing:
        raise NotBuilt(f"no {', '.join(missing)}: build them once with `make cluster-tools` (Go 1.26, 7 minutes)")

    return folder


def free_port() -> int:
    """Below those that the kernel gives to clients: one that tries again while its server is away could be given the
    server's own port, connect to itself, and keep the server from coming back."""
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii").split()[0])
    while True:
        port = random.randrange(10_000, max(lowest, 20_000))
        with socket.socket() as listener, contextlib.suppress(OSError):  # taken: another
            listener.bind(("127.0.0.1", port))
            return port


def wait_for(what: str, check: Callable[[], Any], deadline_s: float = 60.0) -> Any:
    """The first true answer; a refusal or no connection counts as not yet.

    The deadline only ends a hung run.
    """
    begin = time.monotonic()
    while True:
        try:
            if found := check():
                return found
            last: object = "not yet"
        except (OSError, http.client.HTTPException, ApiRefused) as error:
            last = error
        waited_s = time.monotonic() - begin
        if waited_s > deadline_s:
            raise TimeoutError(f"{what}: {last}")
        time.sleep(min(0.5, 0.02 + waited_s / 20))  # looking costs the API server what we wait for


class ControlPlane:
    """Start with `start`, add a scheduler with `start_scheduler`, end with `stop`."""

    def __init__(self, folder: Path, programs: Path, environment: Mapping[str, str] | None = None) -> None:
        """`environment` is that of etcd and the API server."""
        self.folder = folder
        self._environment = environment or {}
        self.programs = programs
        self.port = free_port()
        self.api = ClusterApi(self.port, TOKEN)
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._arguments: dict[str, list[str]] = {}
        self._environments: dict[str, dict[str, str]] = {}
        self._valves: set[str] = set()  # names of Valve's own processes
        self._logs: dict[int, tuple[Path, int]] = {}  # of each process, and how long it was when that began
        self.deaths: list[str] = []  # of those: what ended by itself, and nobody had asked it to
        self.expected: list[str] = []  # patterns of lines of level error that a test causes
        self.kubeconfig = folder / "kubeconfig"
        self._server = f"https://127.0.0.1:{self.port}"
        folder.mkdir(parents=True, exist_ok=True)

    def start(self) -> None:
        told.identity(self.folder, TOKEN)
        told.kubeconfig(self.kubeconfig, TOKEN, self._server)
        etcd, peers = free_port(), free_port()
        self.spawn("etcd", *told.etcd(self.folder, etcd, peers), environment=self._environment)
        self.spawn("kube-apiserver", *told.apiserver(self.folder, self.port, etcd), environment=self._environment)
        # Ready, not only up: the controller manager gives up by itself if it is not, within ten seconds.
        wait_for("the API server", lambda: self.api.get("/readyz"), START_S)
        self.spawn(
            "kube-controller-manager",
            f"--kubeconfig={self.kubeconfig}",
            "--use-service-account-credentials",
            f"--service-account-private-key-file={self.folder}/accounts.key",
            f"--root-ca-file={self.folder}/apiserver/apiserver.crt",  # what pods know the API server by
            "--leader-elect=false",
            # No kubelet renews the leases of made-up nodes; and their kubelets would not read the annotation that the
            # TTL controller writes to each, at 20 a second for as long as a fleet is being made.
            "--controllers=*,-nodelifecycle,-taint-eviction-controller,-ttl-controller",
            f"--secure-port={free_port()}",
            "--bind-address=127.0.0.1",
            f"--cert-dir={self.folder}/manager",
        )
        wait_for("the default service account", self._has_default_account, START_S)

    def _has_default_account(self) -> bool:
        """Made by the controller manager; one that ended is started again, as a kubelet would."""
        if self.processes["kube-controller-manager"].poll() is not None:
            self.restart("kube-controller-manager")
        return bool(self.api.get("/api/v1/namespaces/default/serviceaccounts/default"))

    def spawn(
        self,
        name: str,
        *arguments: str,
        program: str | None = None,
        hostname: str = "",
        environment: Mapping[str, str] | None = None,
    ) -> subprocess.Popen[bytes]:
        """Start a process under a name; its output goes to NAME.log in the folder.

        A hostname of its own (root only) lets two schedulers elect a leader as if they were two pods.
        """
        command = [program or str(self.programs / name), *arguments]
        if hostname:
            command = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', hostname, *command]
        self._arguments[name] = command
        self._environments[name] = {**os.environ, **(environment or {})}
        if program == sys.executable and not any(one.startswith("valve_tools.") for one in arguments[:2]):
            self._valves.add(name)  # a stand-in of these tools is none, and another's program may bear its name next
        return self.restart(name)

    def restart(self, name: str) -> subprocess.Popen[bytes]:
        if name in self.processes:
            self._note_end(name, self.processes[name])
        path = self.folder / f"{name}.log"
        with path.open("ab") as log:
            said = log.tell()
            process = subprocess.Popen(
                self._arguments[name],
                stdout=log,
                stderr=log,
                cwd=self.folder,
                env=self._environments[name],
                preexec_fn=_die_with_parent,  # noqa: PLW1509 - two system calls, nothing that locks
            )
        self.processes[name] = process
        self._logs[process.pid] = path, said

        return process

    def run_from(self, name: str, program: Path) -> None:
        """Start it as before, but another file."""
        self._arguments[name][0] = str(program)
        self.restart(name)

    def kill(self, name: str) -> None:
        process = self.processes.pop(name)
        self._note_end(name, process)
        process.kill()
        process.wait()

    def stop(self) -> None:
        """In reverse order of start, so that nothing waits for what is already gone."""
        for name in reversed(list(self.processes)):
            self.end(name, self.processes.pop(name))

    def end(self, name: str, process: subprocess.Popen[bytes]) -> None:
        """As a kubelet does it. One of Valve's ends in order then: not with an error, not by a second signal, nor by
        the first one unless it had hardly begun."""
        self._note_end(name, process)
        if process.poll() is not None:
            return
        process.terminate()
        try:
            code = process.wait(PATIENCE_S if name in self._valves else STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()
        path, said = self._logs[process.pid]
        has_begun = path.stat().st_size > said
        if name in self._valves and code != 0 and (has_begun or code != -signal.SIGTERM):
            self.deaths.append(f"{name} was told to end and ended with {code}")

    def _note_end(self, name: str, process: subprocess.Popen[bytes]) -> None:
        """Before something is done to it: whether it was still there."""
        code = process.poll()
        if name in self._valves and code not in (None, 0, *_BY_US):
            self.deaths.append(f"{name} ended by itself with {code}")

    def complaints(self) -> list[str]:
        """Deaths that nobody caused, and what Valve's processes told of errors that nobody expected."""
        logs = [path for name in sorted(self._valves) if (path := self.folder / f"{name}.log").exists()]
        return [*self.deaths, *(line for path in logs for line in quiet.of_file(path, self.expected))]

    def account_kubeconfig(self, namespace: str, name: str, pod: Mapping[str, Any] | None = None) -> Path:
        """A kubeconfig with the rights of a service account and nothing more; as mounted in `pod`, if one is given."""
        path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{name}/token"
        spec: dict[str, Any] = {"expirationSeconds": 3600}
        if pod is not None:  # names the pod's node, too
            metadata = pod["metadata"]
            bound = {"apiVersion": "v1", "kind": "Pod", "name": metadata["name"], "uid": metadata["uid"]}
            spec["boundObjectRef"] = bound
        token = self.api.post(path, {"spec": spec})["status"]["token"]
        return told.kubeconfig(self.folder / f"{namespace}-{name}.kubeconfig", token, self._server)

    def start_extender(
        self,
        *,
        name: str = "extender",
        arguments: tuple[str, ...] = (),
        kubeconfig: Path | None = None,
        hostname: str = "",
    ) -> tuple[int, int]:
        """Returns its port for kube-scheduler and its port for probes."""
        port, probes = free_port(), free_port()
        access = f"--kubeconfig={kubeconfig or self.kubeconfig}"
        flags = ["-m", "valve_scheduler.main", access, "extender", f"--port={port}"]
        flags += ["--probe-host=127.0.0.1", f"--probe-port={probes}", *(arguments or ("--no-leader-election",))]
        self.spawn(name, *flags, program=sys.executable, hostname=hostname)

        return port, probes

    def start_controller(self, *arguments: str, name: str = "controller", kubeconfig: Path | None = None) -> int:
        """Returns its port for probes."""
        access = f"--kubeconfig={kubeconfig or self.kubeconfig}"
        flags = ["-m", "valve_scheduler.main", access, "controller", "--lease=3"]  # as SHORT_LEASE
        probes = free_port()
        flags += ["--probe-host=127.0.0.1", f"--probe-port={probes}", *arguments]
        self.spawn(name, *flags, program=sys.executable)

        return probes

    def start_scheduler(
        self,
        extender_port: int,
        *,
        name: str = "kube-scheduler",
        lease: str = "",
        lease_times: Mapping[str, str] = SHORT_LEASE,
        kubeconfig: Path | None = None,
        hostname: str = "",
    ) -> int:
        """A stock kube-scheduler with the configuration of the chart; returns its secure port.

        `lease` is the namespace of its lease; without one it leads at once.
        """
        configuration = self.folder / f"{name}.json"
        access = kubeconfig or self.kubeconfig
        election: dict[str, Any] = {"leaderElect": bool(lease)}
        if lease:
            election |= {"resourceName": "valve-scheduler", "resourceNamespace": lease, **lease_times}
        configuration.write_text(json.dumps(told.scheduler(extender_port, election, access)))
        port = free_port()
        self.spawn(
            name,
            f"--config={configuration}",
            f"--authentication-kubeconfig={access}",
            f"--authorization-kubeconfig={access}",
            "--authorization-always-allow-paths=/healthz,/readyz,/metrics",
            f"--secure-port={port}",
            "--bind-address=127.0.0.1",
            f"--cert-dir={self.folder}/{name}",
            program=str(self.programs / "kube-scheduler"),
            hostname=hostname,
            environment=SCHEDULER_ENVIRONMENT,
        )

        return port

    def start_default_scheduler(self) -> None:
        """The scheduler that every cluster has, for pods that are not Valve's."""
        flags = (f"--kubeconfig={self.kubeconfig}", "--leader-elect=false", f"--secure-port={free_port()}")
        own = ("--bind-address=127.0.0.1", f"--cert-dir={self.folder}/default-scheduler")
        self.spawn("default-scheduler", *flags, *own, program=str(self.programs / "kube-scheduler"))

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def write_kubeconfig(self, path: Path, server: str) -> Path:
        """For the administrator, by another way to the API server."""
        return told.kubeconfig(path, TOKEN, server)


def _die_with_parent() -> None:
    os.setpgid(0, 0)  # a Ctrl-C is for us; we end them in order
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


@contextlib.contextmanager
def control_plane(programs: Path, environment: Mapping[str, str] | None = None) -> Iterator[ControlPlane]:
    """One in a folder of its own, for the caller to start. Everything of it ends with the block."""
    with tempfile.TemporaryDirectory(prefix="valve-bench-") as folder:
        plane = ControlPlane(Path(folder), programs, environment)
        try:
            yield plane
        finally:
            plane.stop()
