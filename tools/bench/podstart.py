"""What injection costs a pod's start, on a real kubelet and containerd: from its creation to its program's first word.

Pods with the shim and pods that opted out alternate, so that whatever else the machine does meets both alike. A start
takes most of a second and spreads by more than injection costs: the median of the differences of neighbours is judged.
"""

from __future__ import annotations

import os
import select
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

from valve_scheduler import names
from valve_tools.bench.row import Row, row_of
from valve_tools.cluster.controlplane import ControlPlane, NotBuilt, binaries
from valve_tools.cluster.fleet import install_crds
from valve_tools.cluster.node import RealNode, missing

PAIRS = 15
BUDGET_MS = 50.0
PATIENCE_S = 60.0


def start_ms(node: RealNode, name: str, inject: bool) -> float:
    shared = node.folder / name
    shared.mkdir()
    os.mkfifo(shared / "word")
    wish = {} if inject else {names.INJECT: "false"}
    pod = node.pod(
        name,
        ["/bin/sh", "-c", f"echo ${{LD_PRELOAD:-none}} > {shared}/word"],
        limit=names.ONLINE_RESOURCE,
        annotations={names.ROLE: names.ONLINE, **wish},
        folders=[str(shared)],
    )
    word = os.open(shared / "word", os.O_RDWR)
    try:
        begun = time.monotonic()
        node.create(pod)
        readable, _, _ = select.select([word], [], [], PATIENCE_S)
        took_ms = (time.monotonic() - begun) * 1e3
        said = os.read(word, 4096).decode() if readable else ""
    finally:
        os.close(word)
    if (str(node.shim_folder) in said) is not inject:
        raise RuntimeError(f"{name} should {'' if inject else 'not '}have been injected and says {said!r}")
    node.delete(name)
    return took_ms


def measure(plane: ControlPlane) -> Row:
    plane.start()
    install_crds(plane.api, Path.cwd() / "helm/valve")
    with RealNode(plane) as node:
        node.start_valved()
        start_ms(node, "warm", inject=True)
        with_ms: list[float] = []
        without_ms: list[float] = []
        for index in range(PAIRS):
            for inject in (True, False) if index % 2 else (False, True):
                took = start_ms(node, f"p{index}{'i' if inject else 'o'}", inject)
                (with_ms if inject else without_ms).append(took)
    differences = [one - other for one, other in zip(with_ms, without_ms, strict=True)]
    plain, injected = statistics.median(without_ms), statistics.median(with_ms)
    low, _, high = statistics.quantiles(differences, n=4)
    note = (
        f"NRI, kubelet 1.36, containerd 2.4; medians {plain:.0f} ms without, {injected:.0f} ms with; "
        f"half of the differences lie between {low:.0f} and {high:.0f} ms"
    )
    return row_of("pod-start", "added by injection", "ms", differences, BUDGET_MS, judged="p50", note=note)


def bench() -> Iterable[Row]:
    try:
        programs = binaries(Path.cwd())
        problem = missing(programs)
    except NotBuilt as reason:
        problem = str(reason)
    if problem:
        print(f"pod-start: skipped, {problem}", file=sys.stderr)
        return []
    with tempfile.TemporaryDirectory(prefix="valve-bench-") as folder:
        plane = ControlPlane(Path(folder), programs)
        try:
            return [measure(plane)]
        finally:
            plane.stop()


BENCHES = {"pod-start": bench}
