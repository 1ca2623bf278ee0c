"""The cluster demo on its real node: chart, an online pod, offline work beside it, and what injection costs."""

from __future__ import annotations

import contextlib
import itertools
import json
import mmap
import os
import statistics
import struct
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from valve_kube import names
from valve_tools.bench.podstart import start
from valve_tools.cluster import image, product
from valve_tools.cluster.controlplane import ControlPlane, wait_for
from valve_tools.cluster.helm import NAMESPACE, Helm
from valve_tools.cluster.node import NAME, RealNode
from valve_tools.cluster.workpods import PODS
from valve_tools.demo.cluster_pods import PodWatch
from valve_tools.demo.cluster_screen import Screen
from valve_tools.demo.rounds import OFFLINE, ONLINE

from valved.cli.client import NodeClient
from valved.cli.exits import CliError

Json = dict[str, Any]
PATIENCE_S = 300.0  # ends only a hung run
HEARD_S = 30.0  # for an online pod to be heard; one that is not never will be
REGISTRY, TAG = "valve.test", "demo"
VALVE = Path(sys.executable).parent / "valve"
CHAT = "--duration 3600 --rate 0.7 --burst 1 --in-tokens 200 --out-tokens 40"
BATCH = "--unit-us 5000 --report 1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """What all steps play on."""

    screen: Screen
    plane: ControlPlane
    node: RealNode
    helm: Helm

    def valve(self, *arguments: str, run_dir: bool = False) -> str:
        """The command as an operator runs it; of the cluster, or on the node."""
        access = [] if run_dir else [f"--kubeconfig={self.plane.kubeconfig}"]
        own = {"VALVE_RUN_DIR": str(self.node.run_dir)} if run_dir else {}
        done = subprocess.run(
            [str(VALVE), *arguments, *access],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "COLUMNS": "120", **own},
        )
        if done.returncode != 0:
            raise RuntimeError(f"valve {' '.join(arguments)}: {done.stderr.strip() or done.stdout.strip()}")
        return done.stdout

    def status(self) -> Any:
        return wait_for("valved answers", self._asked, PATIENCE_S)

    def _asked(self) -> Any:
        connection = NodeClient(self.node.run_dir)
        try:
            return connection.status()
        except CliError:  # a busy machine: again
            return None
        finally:
            connection.close()


class DemoPod:
    """One of the demo's programs in a pod; what it prints lands in a file that both sides see."""

    def __init__(self, stage: Stage, name: str, program: Path, flags: str, **pod: Any) -> None:
        self.stage, self.name = stage, name
        self.folder = stage.node.folder / name
        self.folder.mkdir(exist_ok=True)
        self.out = self.folder / "out"
        # The emulated GPUs are all there; NVIDIA's runtime would show the pod its own alone.
        own = "CUDA_VISIBLE_DEVICES=$NVIDIA_VISIBLE_DEVICES"
        command = ["/box/sh", "-c", f"export {own}; exec {program} {flags} > {self.out}"]
        shared = [str(program.parent), str(self.folder)]
        self.made = stage.node.pods.create(stage.node.pods.make(name, command, folders=shared, on_node=False, **pod))

    def lines(self) -> list[Json]:
        """Whole lines only: the last one may be half written."""
        text = self.out.read_text() if self.out.exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    @property
    def service(self) -> Any:
        """What valved says of it; None while it does not know it."""
        found = self.stage.status().services
        return next((one for one in found if one.name == f"default/{self.name}" and one.pids), None)


class Chat(DemoPod):
    """The online service."""

    def __init__(self, stage: Stage) -> None:
        super().__init__(
            stage, "chat", ONLINE, CHAT, limit=names.ONLINE_RESOURCE, annotations={names.ROLE: names.ONLINE}
        )

    @property
    def answered(self) -> int:
        return sum("request" in line for line in self.lines())


class BatchPod(DemoPod):
    """The offline job; its kernels count beats in a page while they may run."""

    def __init__(self, stage: Stage) -> None:
        page = stage.node.folder / "batch" / "page"
        flags = f"{BATCH} --heartbeat {page}"
        super().__init__(
            stage, "batch", OFFLINE, flags, annotations={names.ROLE: names.OFFLINE}, terminationGracePeriodSeconds=30
        )
        self._page = page

    @property
    def beats(self) -> int:
        if not self._page.exists() or self._page.stat().st_size < mmap.PAGESIZE:
            return 0
        return int(struct.unpack_from("<Q", self._page.read_bytes(), 0)[0])

    @property
    def units(self) -> int:
        return max((int(line.get("units", 0)) for line in self.lines()), default=0)

    @property
    def summary(self) -> Json | None:
        return next((line for line in self.lines() if line.get("summary") == "offline"), None)


def load_images(stage: Stage) -> None:
    """From what is installed and built here, as a node would have pulled them."""
    with stage.screen.waiting("images of Valve and kube-scheduler assembled and imported"):
        with stage.node.containerd.importing() as archive:
            product.write_valve(archive, f"{REGISTRY}/valve:{TAG}", stage.node.folder / "emu")
        scheduler = {"/usr/local/bin/kube-scheduler": stage.plane.programs / "kube-scheduler"}
        with stage.node.containerd.importing() as archive:
            image.write(archive, f"{REGISTRY}/kube-scheduler:{TAG}", scheduler)


def values(node: RealNode) -> dict[str, object]:
    """Of the chart: where the images are, one replica on two cores, and the node's folders, which are its own here."""
    return {
        "mode": "harvest",
        "image.repository": f"{REGISTRY}/valve",
        "image.tag": TAG,
        "image.pullPolicy": "Never",
        "scheduler.kubeScheduler.repository": f"{REGISTRY}/kube-scheduler",
        "scheduler.kubeScheduler.tag": TAG,
        "scheduler.replicas": 1,
        "controller.replicas": 1,
        "controller.sla.monitorSeconds": 5,
        "admission.replicas": 1,
        "daemon.kubeletFolder": f"{node.folder}/kubelet",
        "daemon.runFolder": node.run_dir,
        "daemon.shimFolder": node.folder,
        "daemon.config": "lease_ms = 10000.0",  # a busy machine must not make shims act by themselves
    }


def install(stage: Stage) -> float:
    """Returns when helm was started."""
    screen, api = stage.screen, stage.plane.api
    runtime = {"apiVersion": "node.k8s.io/v1", "kind": "RuntimeClass", "metadata": {"name": "nvidia"}}
    api.post("/apis/node.k8s.io/v1/runtimeclasses", runtime | {"handler": "nvidia"})
    begun = time.monotonic()
    watch = PodWatch(api=api, screen=screen, logs=stage.node.folder / "logs", namespace=NAMESPACE)
    with screen.waiting("helm install valve helm/valve --set mode=harvest --wait"):
        stage.helm.install(
            "--wait",
            "--timeout=10m",
            *(f"--set={key}={value}" for key, value in values(stage.node).items()),
            meanwhile=watch.look,
        )
        api.patch("/api/v1/namespaces/default", {"metadata": {"labels": {names.INJECT: "enabled"}}})
        offline = stage.node.pods.make("dry", ["/box/sh"], annotations={names.ROLE: names.OFFLINE}, on_node=False)
        wait_for("the webhook", lambda: api.post(f"{PODS}?dryRun=All", offline), PATIENCE_S)
    pods = api.get(f"/api/v1/namespaces/{NAMESPACE}/pods")["items"]
    for pod in pods:
        containers = ", ".join(one["name"] for one in pod["spec"]["containers"])
        screen.say(
            f"[dim]{pod['metadata']['name']} ({containers}): {pod['status']['phase']} on {pod['spec']['nodeName']}[/]"
        )
    running = [pod for pod in pods if pod["status"]["phase"] == "Running" and pod["spec"]["nodeName"] == NAME]
    screen.check("daemon, scheduler, controller and webhook run as the chart's own pods on the node", len(running) == 4)
    return begun


def start_online(stage: Stage) -> Chat:
    screen = stage.screen
    with screen.waiting("pod chat asks for nvidia.com/gpu: 1 and says valve.gpu/role: online; it serves"):
        chat = Chat(stage)
        stage.node.pods.wait_phase(chat.name)
        while not _is_heard(chat):
            screen.say("[dim]not injected: the machine was too busy, and an online pod never waits for that; again[/]")
            stage.node.pods.delete(chat.name)
            chat = Chat(stage)
            stage.node.pods.wait_phase(chat.name)
        wait_for("chat answers", lambda: chat.answered, PATIENCE_S)
    variables = {one["name"]: one.get("value", "") for one in chat.made["spec"]["containers"][0]["env"]}
    screen.say(f"[dim]LD_PRELOAD={variables['LD_PRELOAD']}[/]")
    shim = f"{stage.node.shim_folder}/current/libvalve.so"
    screen.check("the webhook put the shim in front of the pod's own preload", variables["LD_PRELOAD"].startswith(shim))
    marked = chat.made["metadata"]["annotations"].get(names.INJECTION)
    screen.check(f"{names.INJECTION}: {marked}", marked == "ok")
    screen.check("valved knows it as the service default/chat", chat.service is not None)
    return chat


def _is_heard(chat: Chat) -> bool:
    with contextlib.suppress(TimeoutError):
        return bool(wait_for("chat is heard", lambda: chat.service, HEARD_S))
    return False


def start_offline(stage: Stage, began: float) -> BatchPod:
    screen = stage.screen
    with screen.waiting("pod batch says valve.gpu/role: offline and asks for nothing else; it runs"):
        batch = BatchPod(stage)
        pod = stage.node.pods.wait_phase(batch.name)
        took_s = time.monotonic() - began
        wait_for("batch computes", lambda: batch.beats, PATIENCE_S)
    screen.figure("helm install to first harvested pod running", f"{took_s:.1f} s", "target < 60 s, images on the node")
    uuid = pod["metadata"]["annotations"].get(names.GPUS, "")
    screen.say(f"[dim]webhook: schedulerName {pod['spec']['schedulerName']}, {names.RESOURCE}: 1; binding: {uuid}[/]")
    screen.check("Valve's scheduler placed it on the real node", pod["spec"]["nodeName"] == NAME)
    online = {gpu["uuid"]: gpu.get("online", []) for gpu in stage.node.report()["gpus"]}
    screen.check("its GPU is the one that chat has", "default/chat" in online.get(uuid, []))
    return batch


def show_gating(stage: Stage, chat: Chat, batch: BatchPod, seconds: float) -> None:
    """A line a second; ends once batch was seen standing for a request and running again, and `seconds` have passed."""
    screen = stage.screen
    uuid = stage.node.pods.get(batch.name)["metadata"]["annotations"][names.GPUS]
    first = chat.service
    answered, units, stops, stood, resumed = chat.answered, batch.units, 0, False, False
    begun = shown = time.monotonic()
    screen.say("[dim]         chat                            GPU          batch[/]")
    while not (stood and resumed and stops and chat.answered > answered and time.monotonic() > begun + seconds):
        if time.monotonic() > begun + PATIENCE_S:
            break
        beats = batch.beats
        status = stage.status()
        gated = any(gpu.uuid == uuid and gpu.gated for gpu in status.gpus)
        still = batch.beats == beats  # over a round trip to valved
        stood = stood or (gated and still)
        resumed = resumed or (stood and not still)
        service = next(one for one in status.services if one.name == "default/chat")
        stops = service.preemptions - first.preemptions
        if time.monotonic() - shown >= 1.0:
            shown = time.monotonic()
            work = ("stands" if still else "stops") if gated else "runs"
            gate = "[yellow]gated[/]" if gated else "[green]open [/]"
            columns = f"{chat.answered:4d} answered, {service.open_requests} open   {stops:3d} stops   {gate}"
            screen.say(f"{shown - begun:5.0f} s  {columns}   {batch.units:6d} units, {work}")
        time.sleep(0.05)
    last = chat.service
    stopped, requests = last.preemptions - first.preemptions, chat.answered - answered
    screen.check("batch stood still while a request of chat was open: no beat during a round trip to valved", stood)
    screen.check("and ran on by itself when chat had no request", resumed)
    screen.check(
        f"both made progress: {requests} requests, {batch.units - units} units", requests and batch.units > units
    )
    screen.check(f"chat's launches stopped batch {stopped} times", stopped)
    if stopped:
        delay_ms = (last.delay_ns - first.delay_ns) / stopped / 1e6
        screen.figure("launch to offline stopped, mean", f"{delay_ms:.2f} ms", f"{stopped} stops, {requests} requests")
    screen.figure("most stops of one request", f"{last.max_preemptions_per_request}", "promise: 1")
    screen.command("valve status", stage.valve("status", run_dir=True))


def run_helm_test(stage: Stage) -> None:
    with stage.screen.waiting("helm test valve: rights and CRDs, from inside the cluster"):
        told = stage.helm.run("test", "valve", f"--namespace={NAMESPACE}", "--timeout=5m")
    stage.screen.check("helm test passes", "Succeeded" in told)


def measure_pod_starts(stage: Stage, pairs: int) -> None:
    """On the node's other GPU, with and without injection in turn."""
    with_ms: list[float] = []
    without_ms: list[float] = []
    with stage.screen.waiting(f"{pairs} pairs of pods start on the other GPU, one injected, one opted out"):
        _start_ms(stage, "warm", inject=True)
        for index in range(pairs):
            for inject in (True, False) if index % 2 else (False, True):
                took = _start_ms(stage, f"p{index}{'i' if inject else 'o'}", inject)
                (with_ms if inject else without_ms).append(took)
    added = statistics.median(one - other for one, other in zip(with_ms, without_ms, strict=True))
    note = f"medians {statistics.median(without_ms):.0f} ms without, {statistics.median(with_ms):.0f} ms with"
    stage.screen.figure("added to a pod's start by injection", f"{added:.0f} ms", f"target < 50 ms; {note}")
    stage.screen.say(
        f"added by injection, the median over {pairs} pairs: {added:.0f} ms ({note}; a busy machine moves all three)"
    )


def _start_ms(stage: Stage, name: str, inject: bool) -> float:
    """Again, if the webhook did not answer within its 2 s: that pod runs without the shim."""
    for attempt in itertools.count():
        try:
            return start(stage.node, f"{name}-{attempt}", inject).whole
        except RuntimeError as problem:
            stage.screen.say(f"[dim]{problem}: again[/]")
            stage.node.pods.delete(f"{name}-{attempt}")
    raise AssertionError("unreachable")
