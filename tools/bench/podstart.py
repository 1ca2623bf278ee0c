"""What injection costs a pod's start, on a real kubelet and containerd: from its creation to its program's first word.

Pods with the shim and pods that opted out alternate, so that whatever else the machine does meets both alike; judged is
the median of the differences of neighbours. A start takes most of a second and spreads by more than injection can cost
(the kubelet looks for its volumes every 100 ms), so a second row times only what NRI's injection touches: from the
moment containerd is asked for the container. What the other route costs, the webhook, is in the third: creations of a
pod in a namespace that lets it inject, and in one that does not, nothing stored. `VALVE_PAIRS` says how many pairs.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import statistics
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from math import sqrt
from pathlib import Path

from valve_kube import names
from valve_tools.bench.row import Row, row_of
from valve_tools.cluster.api import ClusterApi
from valve_tools.cluster.controlplane import ControlPlane, NotBuilt, binaries, control_plane, wait_for
from valve_tools.cluster.fleet import install_crds
from valve_tools.cluster.helm import Helm
from valve_tools.cluster.node import RealNode, missing
from valve_tools.cluster.webhook import start_webhook

PAIRS = 30
BUDGET_MS = 50.0
PATIENCE_S = 60.0
ASKED = re.compile(r'time="(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(\.\d+)Z?[^"]*".*msg="CreateContainer within sandbox')


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Of one pod, in ms."""

    whole: float
    container: float  # from containerd's first word of the container


def start(node: RealNode, name: str, inject: bool) -> Start:
    shared = node.folder / name
    shared.mkdir()
    os.mkfifo(shared / "word")
    wish = {} if inject else {names.INJECT: "false"}
    pod = node.pods.make(
        name,
        ["/bin/sh", "-c", f"echo ${{LD_PRELOAD:-none}} > {shared}/word"],
        limit=names.ONLINE_RESOURCE,
        annotations={names.ROLE: names.ONLINE, **wish},
        folders=[str(shared)],
    )
    log = node.plane.folder / "containerd.log"
    read_from = log.stat().st_size
    word = os.open(shared / "word", os.O_RDWR)
    try:
        begun = time.time()
        node.pods.create(pod)
        readable, _, _ = select.select([word], [], [], PATIENCE_S)
        ended = time.time()
        said = os.read(word, 4096).decode() if readable else ""
    finally:
        os.close(word)
    if (str(node.shim_folder) in said) is not inject:
        raise RuntimeError(f"{name} should {'' if inject else 'not '}have been injected and says {said!r}")
    with log.open("rb") as lines:
        lines.seek(read_from)
        asked = _asked_at(lines.read().decode(errors="replace"))
    node.pods.delete(name)
    return Start(whole=(ended - begun) * 1e3, container=(ended - asked) * 1e3)


def _asked_at(log: str) -> float:
    """When containerd says that it was asked for the container: the first line that names one."""
    found = ASKED.search(log)
    if found is None:
        raise RuntimeError("containerd's log does not say when it was asked for the container")
    seconds = datetime.strptime(found[1], "%Y-%m-%dT%H:%M:%S").replace(tzinfo=timezone.utc).timestamp()
    return seconds + float(found[2])


def creation_ms(api: ClusterApi, namespace: str, inject: bool) -> float:
    """The API server's answer to an online pod's creation, as a dry run."""
    container = {"name": "work", "image": "i", "resources": {"limits": {names.ONLINE_RESOURCE: "1"}}}
    metadata = {"name": "asked", "labels": {names.ROLE: names.ONLINE}}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {"containers": [container]}}
    begun = time.monotonic()
    stored = api.post(f"/api/v1/namespaces/{namespace}/pods?dryRun=All", pod)
    took_ms = (time.monotonic() - begun) * 1e3
    if (names.INJECTION in stored["metadata"].get("annotations", {})) is not inject:
        raise RuntimeError(f"a pod in {namespace} should {'' if inject else 'not '}have been injected")
    return took_ms


def creations(plane: ControlPlane, pairs: int) -> list[tuple[float, float]]:
    api = plane.api
    Helm(plane, Path.cwd() / "helm/valve").install("--no-hooks", "--take-ownership")
    for name, word in (("with", "enabled"), ("without", "disabled")):
        api.post("/api/v1/namespaces", {"metadata": {"name": name, "labels": {names.INJECT: word}}})
        account = f"/api/v1/namespaces/{name}/serviceaccounts/default"
        wait_for("its account", lambda account=account: api.get(account))  # type: ignore[misc]
    start_webhook(plane)
    wait_for("the webhook", lambda: _answers(api))
    found = []
    for index in range(pairs):
        order = (True, False) if index % 2 else (False, True)
        one = {inject: creation_ms(api, "with" if inject else "without", inject) for inject in order}
        found.append((one[True], one[False]))
    return found


def _answers(api: ClusterApi) -> bool:
    with contextlib.suppress(RuntimeError):
        return creation_ms(api, "with", True) > 0
    return False


def interval(ordered: Sequence[float]) -> tuple[float, float]:
    """Of 95 % around the median, by ranks: it asks nothing of the distribution."""
    reach = 0.98 * sqrt(len(ordered))
    low, high = len(ordered) / 2 - reach, len(ordered) / 2 + reach
    return ordered[max(0, int(low))], ordered[min(len(ordered) - 1, int(high))]


def _row(metric: str, pairs: Sequence[tuple[float, float]], what: str) -> Row:
    differences = sorted(one - other for one, other in pairs)
    low, high = interval(differences)
    injected, plain = (statistics.median(side) for side in zip(*pairs, strict=True))
    note = f"{what}; medians {plain:.0f} ms without, {injected:.0f} ms with; 95 % of {low:.0f} to {high:.0f} ms"
    return row_of("pod-start", metric, "ms", differences, BUDGET_MS, judged="p50", note=note)


def measure(plane: ControlPlane, pairs: int) -> list[Row]:
    plane.start()
    install_crds(plane.api, Path.cwd() / "helm/valve")
    taken: list[tuple[Start, Start]] = []
    with RealNode(plane) as node:
        node.start_valved()
        start(node, "warm-o", inject=False)
        start(node, "warm-i", inject=True)
        for index in range(pairs):
            order = (True, False) if index % 2 else (False, True)
            one = {inject: start(node, f"p{index}{'i' if inject else 'o'}", inject) for inject in order}
            taken.append((one[True], one[False]))
    asked = creations(plane, 3 * pairs)
    return [
        _row("added by injection", [(a.whole, b.whole) for a, b in taken], "NRI, kubelet 1.36, containerd 2.4"),
        _row("added to the container", [(a.container, b.container) for a, b in taken], "from CreateContainer on"),
        _row("added by the webhook", asked, "to a pod's creation"),
    ]


def bench() -> Iterable[Row]:
    try:
        programs = binaries(Path.cwd())
        problem = missing(programs)
    except NotBuilt as reason:
        problem = str(reason)
    if problem:
        print(f"pod-start: skipped, {problem}", file=sys.stderr)
        return []
    with control_plane(programs) as plane:
        return measure(plane, int(os.environ.get("VALVE_PAIRS", PAIRS)))


BENCHES = {"pod-start": bench}
