"""`valve demo cluster`: a whole cluster on this machine, the chart installed with helm, used, and uninstalled.

The control plane, kubelet, containerd, runc and helm are the real ones; one node is real and has an emulated GPU, a
fleet of others is made up. The exit code is 0 if and only if every check held; times are shown, not judged.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

from rich.console import Console
from valve_kube.options import option, seconds, whole
from valve_tools.cluster import network
from valve_tools.cluster.api import ApiRefused
from valve_tools.cluster.controlplane import ControlPlane, NotBuilt, binaries
from valve_tools.cluster.helm import Helm, HelmError
from valve_tools.cluster.node import RealNode, missing
from valve_tools.demo import cluster_fleet, cluster_node, cluster_removal
from valve_tools.demo.cluster_node import Stage
from valve_tools.demo.cluster_screen import Screen
from valve_tools.emulator.run import ENDS

Entered = TypeVar("Entered")
BROKEN = (AssertionError, HelmError, OSError, ApiRefused, RuntimeError, http.client.HTTPException)
SAID_OF_A_FAILURE = ("kubelet", "containerd", "kube-apiserver", "default-scheduler")


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="valve demo cluster", description=__doc__)
    option(parser, "--nodes", 20, "The number of simulated nodes of eight GPUs.", type=whole(1))
    option(parser, "--seconds", 12.0, "Show gating for this many seconds.", type=seconds)
    option(parser, "--pairs", 8, "The number of pod starts, each with and without injection.")
    options = parser.parse_args(argv)
    problem, programs = programs_or_why_not(Path.cwd())
    if programs is None:
        print(f"valve demo cluster: {problem}", file=sys.stderr)
        return 2
    screen = Screen(Console(width=None if sys.stdout.isatty() else 140))
    with tempfile.TemporaryDirectory(prefix="vd-") as scratch:
        folders = [Path(scratch)]
        perform(options, screen, programs, folders)
        screen.step("Nothing is left on this machine")
        left = cluster_removal.left_on_machine(folders[1:])
        screen.check("no process, mount, control group, network device or file", not left)
        screen.say("\n".join(left))
        return 0 if screen.verdict() else 1


def programs_or_why_not(root: Path) -> tuple[str, Path | None]:
    if not (root / "tests/cluster/build_tools.sh").exists():
        return "run it in a checkout of Valve: make demo-cluster", None
    try:
        programs = binaries(root)
    except NotBuilt as reason:
        return str(reason), None
    problem = missing(programs) or network.missing()
    if not (programs / "helm").exists():
        problem = "no helm: build it once with `make cluster-tools`"
    return problem, None if problem else programs


def perform(options: argparse.Namespace, screen: Screen, programs: Path, folders: list[Path]) -> None:
    """Every step; a step that cannot go on ends the play and is a failure. All is taken down again in any case."""
    plane = ControlPlane(folders[0], programs)
    with _undisturbed(contextlib.ExitStack()) as last:
        last.callback(plane.stop)
        screen.step("A control plane: etcd, kube-apiserver, kube-controller-manager, kube-scheduler 1.36")
        with screen.waiting("up"):
            plane.start()
            plane.start_default_scheduler()
        screen.step("A real node: kubelet, containerd and runc; two emulated H100")
        real = RealNode(plane, gpus=2, pod_network=True)
        folders.append(real.folder)
        begun = time.monotonic()
        with _undisturbed(real) as node:
            screen.say(f"Ready  [dim]{time.monotonic() - begun:.1f} s[/]")
            try:
                play(options, Stage(screen=screen, plane=plane, node=node, helm=Helm(plane, Path.cwd() / "helm/valve")))
            except BROKEN as problem:
                _tell(screen, plane, node, problem)
            finally:
                plane.kill("kube-controller-manager")  # or the chart's pods, if they still are, would come back


@contextlib.contextmanager
def _undisturbed(manager: contextlib.AbstractContextManager[Entered]) -> Iterator[Entered]:
    """Enters and leaves it; a second Ctrl-C does not stop the leaving half-way."""
    former = {}
    try:
        with manager as entered:
            try:
                yield entered
            finally:
                former = {one: signal.signal(one, signal.SIG_IGN) for one in ENDS}
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def play(options: argparse.Namespace, stage: Stage) -> None:
    screen = stage.screen
    cluster_node.load_images(stage)
    screen.step("Install the chart with helm")
    began = cluster_node.install(stage)
    screen.step("An online pod, injected with the shim")
    chat = cluster_node.start_online(stage)
    screen.step("An offline pod beside it, on the same GPU")
    batch = cluster_node.start_offline(stage, began)
    screen.step("Offline work is stopped while the online pod has requests")
    cluster_node.show_gating(stage, chat, batch, options.seconds)
    screen.step("helm test, and what injection costs a pod's start")
    cluster_node.run_helm_test(stage)
    cluster_node.measure_pod_starts(stage, options.pairs)
    screen.step(f"A fleet: {options.nodes} simulated nodes of 8 GPUs join")
    fleet = cluster_fleet.PlayedFleet(stage, options.nodes)
    with fleet.playing():
        cluster_fleet.show_nodes(stage, options.nodes)
        screen.step("Placement, with reasons")
        first = cluster_fleet.show_placement(stage)
        screen.step("A missed SLA: eviction, and placement elsewhere")
        cluster_fleet.show_move(stage, fleet, first)
        screen.step("Uninstall, with everything running")
        cluster_removal.show_quiet(stage)
        cluster_removal.uninstall(stage, chat, batch)
        cluster_removal.purge(stage, chat)


def _tell(screen: Screen, plane: ControlPlane, node: RealNode, problem: BaseException) -> None:
    """What went wrong, and the last log lines of the processes that may know why."""
    screen.check(f"{type(problem).__name__}: {problem}", False)
    logs = [plane.folder / f"{name}.log" for name in SAID_OF_A_FAILURE]
    logs += sorted((node.folder / "logs").glob("*/*/*.log"))
    for log in (log for log in logs if log.exists()):
        tail = subprocess.run(["tail", "-n", "5", str(log)], capture_output=True, text=True, check=False).stdout
        screen.command(
            f"tail {log.relative_to(log.parents[2] if log.suffix and node.folder in log.parents else log.parent)}", tail
        )
