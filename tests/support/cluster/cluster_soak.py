"""Faults for a whole cluster with the chart on it, drawn from a seed, and what must hold whatever they were."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import signal
import urllib.request
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
from valve_kube import names
from valve_tools.cluster import quiet
from valve_tools.cluster.api import ApiRefused
from valve_tools.cluster.controlplane import wait_for
from valve_tools.cluster.fleet import UntilStopped, bound_pods, node_name, offline_pod, report
from valve_tools.cluster.helm import NAMESPACE
from valve_tools.cluster.node import NAME
from valve_tools.cluster.workpods import PODS
from valve_tools.demo.cluster_node import Stage, values

Json = dict[str, object]
OURS = f"/api/v1/namespaces/{NAMESPACE}/pods"
LEASES = f"/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases"
REPORTS = f"{names.API_PATH}/gpuharvestnodes"
PATIENCE_S = 600.0  # ends only a hung run
ODD_STATUS: tuple[Json, ...] = (
    {"gpus": []},
    {"memoryMiB": 1e308},
    {"alignment": [1.0]},
    {"observedAt": "0001-01-01T00:00:00Z"},
    {"observedAt": "9999-12-31T23:59:59Z", "phase": "Off"},
    {"gpus": [{"uuid": "", "idle": {}, "freeMemory": [0] * 32, "observedSeconds": 1e308}]},
    {"offline": [{"podUID": "nobody"}], "epoch": 2**62},
)
ODD_SPEC: tuple[Json, ...] = (
    {"resolved": {"cooldown": {"startMilliseconds": 2**62}}},
    {"resolved": {"reclaimsPerHour": 1e308, "granted": {"slo": "\N{SUPERSCRIPT TWO}"}}},
    {"resolved": {"namespaces": [{"name": "", "mode": "off"}] * 2, "profile": [""]}},
)


class LogWatch(UntilStopped):
    """What Valve's containers tell of errors, read while their logs are there: they go with their pods."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder
        self._read: dict[Path, int] = {}
        self.found: list[str] = []

    def run(self) -> None:
        while not self._done.wait(0.5):
            self.look()

    def look(self) -> None:
        for path in self._folder.glob(f"{NAMESPACE}_*/*/*.log"):
            with contextlib.suppress(OSError):
                with path.open("rb") as log:
                    log.seek(self._read.get(path, 0))
                    whole, _, _ = log.read().rpartition(b"\n")
                self._read[path] = self._read.get(path, 0) + len(whole)
                told = quiet.complaints(whole.decode(errors="replace"))
                self.found += (f"{path.parent.parent.name}/{path.parent.name}: {line}" for line in told)


class Faults:
    """One method a fault. Each comes back once the fault is there, not once it is over."""

    def __init__(self, stage: Stage, nodes: int, seed: int) -> None:
        self._stage, self._api, self._nodes = stage, stage.plane.api, nodes
        self._chance = random.Random(seed)
        self._names = (f"soak-{number}" for number in itertools.count())
        self.killed = 0  # processes in containers, each of which is started again
        self.kinds: tuple[Callable[[], str], ...] = (
            self.restart_api_server,
            self.kill_process,
            self.delete_pod,
            self.delete_leases,
            self.write_nonsense,
            self.churn,
            self.drain_node,
            self.upgrade,
            self.compact,
        )

    def draw(self, count: int) -> list[Callable[[], str]]:
        """Each kind once at least, in an order that the seed decides."""
        drawn = [*self.kinds, *self._chance.choices(self.kinds, k=max(0, count - len(self.kinds)))]
        self._chance.shuffle(drawn)
        return drawn

    def restart_api_server(self) -> str:
        self._stage.plane.kill("kube-apiserver")
        self._stage.plane.restart("kube-apiserver")
        wait_for("the API server", lambda: self._api.get("/readyz"), PATIENCE_S)
        return "API server killed and started"

    def kill_process(self) -> str:
        """Of a container of the chart: its kubelet starts it again."""
        pods = {pod["metadata"]["uid"]: pod["metadata"]["name"] for pod in self._pods()}
        found = [(pid, name) for pid, uid, name in processes() if uid in pods]
        if not found:
            return "no process to kill"
        pid, name = self._chance.choice(sorted(found))
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            self.killed += 1
        return f"{name} killed"

    def delete_pod(self) -> str:
        pods = sorted(pod["metadata"]["name"] for pod in self._pods())
        name = self._chance.choice(pods) if pods else ""
        with contextlib.suppress(ApiRefused):
            self._api.delete(f"{OURS}/{name}") if name else None
        return f"pod {name} deleted"

    def delete_leases(self) -> str:
        for one in self._api.get(LEASES)["items"]:
            with contextlib.suppress(ApiRefused):
                self._api.delete(f"{LEASES}/{one['metadata']['name']}")
        return "leases deleted"

    def write_nonsense(self) -> str:
        """What the schema lets in, into the reports of made-up nodes and into the spec of the real one."""
        for index in range(self._nodes):
            status = self._chance.choice(ODD_STATUS)
            self._api.patch(f"{REPORTS}/{node_name(index)}/status", {"status": status})
        self._api.patch(f"{REPORTS}/{NAME}", {"spec": self._chance.choice(ODD_SPEC)})
        self._api.patch(f"{REPORTS}/{NAME}/status", {"status": self._chance.choice(ODD_STATUS)})
        return "nonsense written"

    def mend_reports(self) -> None:
        """As the daemons of made-up nodes would at their next report; the real one does so itself."""
        numbers = np.random.default_rng(1)
        for index in range(self._nodes):
            told = report(index, numbers, idle=0.8)
            self._api.patch(f"{REPORTS}/{node_name(index)}/status", {"status": {**told, "offline": None, "epoch": 1}})

    def churn(self) -> str:
        count = self._chance.randint(10, 40)
        made = [name for _, name in zip(range(count), self._names, strict=False)]
        for name in made:
            with contextlib.suppress(ApiRefused):  # the webhook may be away: it fails closed
                self._api.post(PODS, offline_pod(name))
        for name in self._chance.sample(made, count // 2):
            with contextlib.suppress(ApiRefused):
                self._api.delete(f"{PODS}/{name}", {"gracePeriodSeconds": 0})
        return f"{count} offline pods made, half of them deleted"

    def drain_node(self) -> str:
        """Cordon, evict, uncordon."""
        node = node_name(self._chance.randrange(self._nodes))
        self._api.patch(f"/api/v1/nodes/{node}", {"spec": {"unschedulable": True}})
        for pod in list(bound_pods(self._api)):
            if pod["spec"]["nodeName"] == node:
                with contextlib.suppress(ApiRefused):
                    self._api.delete(f"{PODS}/{pod['metadata']['name']}", {"gracePeriodSeconds": 0})
        self._api.patch(f"/api/v1/nodes/{node}", {"spec": {"unschedulable": None}})
        return f"{node} drained"

    def upgrade(self) -> str:
        told = values(self._stage.node) | {"controller.sla.monitorSeconds": self._chance.choice((5, 6, 7))}
        flags = (f"--set={key}={value}" for key, value in told.items())
        where = (f"--namespace={NAMESPACE}", "--wait", "--timeout=10m")
        self._stage.helm.run("upgrade", "valve", str(self._stage.helm.chart), *where, *flags)
        return "helm upgrade"

    def compact(self) -> str:
        """All that etcd remembers of the past: a watch that resumes there is told 410 Gone."""
        flags = " ".join(self._stage.plane._arguments["kube-apiserver"])
        etcd = flags.partition("--etcd-servers=")[2].partition(" ")[0]
        revision = asked(f"{etcd}/v3/maintenance/status", {})["header"]["revision"]
        asked(f"{etcd}/v3/kv/compaction", {"revision": revision, "physical": True})
        return f"etcd compacted at {revision}"

    def _pods(self) -> list[Json]:
        return [pod for pod in self._api.get(OURS)["items"] if pod["status"].get("phase") == "Running"]


def asked(url: str, body: Json) -> Json:
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode())) as answer:
        found: Json = json.loads(answer.read())
        return found


def processes() -> list[tuple[int, str, str]]:
    """(pid, pod UID, what it is) of the processes of Valve in containers."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (folder / "cmdline").read_text(errors="replace").split("\0")
            group = (folder / "cgroup").read_text()
            name = next((word for word in ("extender", "controller", "webhook", "valved") if named(words, word)), "")
            if name and "pod" in group:
                uid = group.partition("/pod")[2].partition("/")[0].strip()
                found.append((int(folder.name), uid, name))
    return found


def named(words: list[str], name: str) -> bool:
    """The program or its subcommand; not a helper that it started."""
    return any(Path(word).name == name for word in words[:4])


def resident_kib(pid: int) -> int:
    told = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace")
    return int(told.partition("VmRSS:")[2].split()[0])


def held_twice(stage: Stage) -> list[str]:
    """GPUs that more than one living pod was given."""
    given: Counter[tuple[str, str]] = Counter()
    for pod in bound_pods(stage.plane.api):
        held = (pod["metadata"].get("annotations") or {}).get(names.GPUS, "")
        if pod["status"].get("phase") not in ("Succeeded", "Failed") and not pod["metadata"].get("deletionTimestamp"):
            given.update((pod["spec"]["nodeName"], uuid) for uuid in held.split(",") if uuid)
    return [f"{node} {uuid}" for (node, uuid), count in given.items() if count > 1]


def delete_soak_pods(stage: Stage) -> None:
    """All but the pods that stay for the whole run."""
    for pod in stage.plane.api.get(PODS)["items"]:
        if pod["metadata"]["name"].startswith("soak-"):
            with contextlib.suppress(ApiRefused):
                stage.plane.api.delete(f"{PODS}/{pod['metadata']['name']}", {"gracePeriodSeconds": 0})


def left(stage: Stage) -> list[str]:
    """Marks of Valve that nobody needs once no offline pod is there but `batch`."""
    api = stage.plane.api
    leases = sorted(one["metadata"]["name"] for one in api.get(LEASES)["items"])
    found = [] if leases == ["valve-controller", "valve-scheduler"] else [f"leases {leases}"]
    for node in api.get("/api/v1/nodes")["items"]:
        taints = [taint for taint in node["spec"].get("taints") or [] if names.DOMAIN in taint["key"]]
        found += [f"{node['metadata']['name']} {taint}" for taint in taints]
        if node["spec"].get("unschedulable"):
            found.append(f"{node['metadata']['name']} is cordoned")
    pods = [pod["metadata"]["name"] for pod in api.get(PODS)["items"]]
    return found + [f"pod {name}" for name in pods if name not in ("chat", "batch")]
