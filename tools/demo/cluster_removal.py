"""The end of the cluster demo: helm uninstall under running pods, and a look for whatever stayed."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from valve_kube import names
from valve_tools.cluster import quiet
from valve_tools.cluster.api import ApiRefused, ClusterApi
from valve_tools.cluster.controlplane import wait_for
from valve_tools.cluster.fleet import CRDS
from valve_tools.cluster.helm import NAMESPACE
from valve_tools.cluster.network import BRIDGE
from valve_tools.cluster.node import CGROUPS, DEVICE_PLUGINS, the_only_node
from valve_tools.demo.cluster_node import PATIENCE_S, BatchPod, Chat, Stage

from valved.cli.client import is_running

Json = dict[str, Any]
LABEL = "labelSelector=app.kubernetes.io%2Fname%3Dvalve"


def show_quiet(stage: Stage) -> None:
    """A container that ends is started again, and all that follows may look well."""
    pods = stage.plane.api.get(f"/api/v1/namespaces/{NAMESPACE}/pods")["items"]
    logs = (stage.node.folder / "logs").glob(f"{NAMESPACE}_*/*/*.log")
    found = [*quiet.why_restarted(pods), *(line for log in logs for line in quiet.of_file(log))]
    stage.screen.say("\n".join(found[:20]))
    stage.screen.check("no container of Valve ended or told of an error since the install", not found)


def uninstall(stage: Stage, chat: Chat, batch: BatchPod) -> None:
    """What is checked here is what the manual says of a removal."""
    screen, api = stage.screen, stage.plane.api
    answered, starts = chat.answered, _restarts(stage, chat)
    begun = time.monotonic()
    with screen.waiting(
        "helm uninstall valve: the drain hook takes webhooks, modes and offline pods away, then the chart goes"
    ):
        stage.helm.uninstall("--timeout=5m")
        wait_for("Valve's pods to go", lambda: not api.get(f"/api/v1/namespaces/{NAMESPACE}/pods")["items"], PATIENCE_S)
    screen.figure("helm uninstall under running pods", f"{time.monotonic() - begun:.1f} s")
    wait_for("chat answers on", lambda: chat.answered > answered, PATIENCE_S)
    screen.check("chat ran on: it answers, and its container never restarted", _restarts(stage, chat) == starts == 0)
    # A pod that must leave is stopped until it ends: it finishes no unit on its way out, beside a service.
    is_right = batch.summary is None or batch.summary["ok"]
    screen.check(f"batch was stopped, then evicted after {batch.units} units", batch.units > 0 and is_right)
    running = [pod["metadata"]["name"] for pod in api.get("/api/v1/pods")["items"] if _is_offline(pod) and _runs(pod)]
    screen.check("no offline pod runs anywhere", not running)
    left = [name for name in labelled(api) if not name.startswith("customresourcedefinitions/")]
    screen.check(f"no object of the chart is left but its 5 CRDs{_listed(left)}", not left and len(_crds(api)) == 5)
    screen.check("no webhook is left", not api.get(names.WEBHOOKS_PATH)["items"])
    wait_for("the slots to go", lambda: stage.node.allocatable(names.RESOURCE) == 0, PATIENCE_S)
    sockets = [path.name for path in DEVICE_PLUGINS.glob("*valve*")]
    gone = not is_running(stage.node.run_dir) and not sockets
    screen.check(f"the node offers no slots; valved and its sockets are gone{_listed(sockets)}", gone)
    marks = list(_marks(api))
    screen.check(f"no mark of Valve on any node{_listed(marks)}", not marks)


def purge(stage: Stage, chat: Chat) -> None:
    """What stays on purpose, and how it goes: the manual's last two commands, and the node's folders."""
    screen, api = stage.screen, stage.plane.api
    kept = f"{len(_crds(api))} CRDs with what was measured, the webhook's certificate, the shim that chat still maps"
    screen.say(f"Stays on purpose: {kept}.")
    stage.node.pods.delete(chat.name)
    with screen.waiting("kubectl delete crd -l app.kubernetes.io/name=valve; kubectl delete namespace valve-system"):
        api.delete(f"{CRDS}?{LABEL}")
        api.delete(f"/api/v1/namespaces/{NAMESPACE}")
        wait_for("both to go", lambda: not _crds(api) and not _has_namespace(api), PATIENCE_S)
    screen.check("no object of Valve is left in the cluster", not labelled(api))


def labelled(api: ClusterApi) -> list[str]:
    """Every object with the chart's label, of every kind that the server knows."""
    found = []
    for root, resource in _listable(api):
        with contextlib.suppress(ApiRefused):  # kinds that go while we look
            found += [
                f"{resource}/{item['metadata']['name']}" for item in api.get(f"{root}/{resource}?{LABEL}")["items"]
            ]
    return found


def _listable(api: ClusterApi) -> Iterator[tuple[str, str]]:
    roots = ["/api/v1"]
    roots += [f"/apis/{group['preferredVersion']['groupVersion']}" for group in api.get("/apis")["groups"]]
    for root in roots:
        with contextlib.suppress(ApiRefused):
            for resource in api.get(root)["resources"]:
                if "list" in resource["verbs"] and "/" not in resource["name"]:
                    yield root, resource["name"]


def _crds(api: ClusterApi) -> list[str]:
    return [crd["metadata"]["name"] for crd in api.get(CRDS)["items"] if crd["spec"]["group"] == names.DOMAIN]


def _has_namespace(api: ClusterApi) -> bool:
    return any(one["metadata"]["name"] == NAMESPACE for one in api.get("/api/v1/namespaces")["items"])


def _marks(api: ClusterApi) -> Iterator[str]:
    """Labels and annotations of Valve's on nodes."""
    for node in api.get("/api/v1/nodes")["items"]:
        keys = {**node["metadata"].get("labels", {}), **node["metadata"].get("annotations", {})}
        yield from (f"{node['metadata']['name']} {key}" for key in keys if names.DOMAIN in key)


def _is_offline(pod: Json) -> bool:
    return bool((pod["metadata"].get("labels") or {}).get(names.ROLE) == names.OFFLINE)


def _runs(pod: Json) -> bool:
    return bool(pod["spec"].get("nodeName")) and pod["status"].get("phase") not in ("Succeeded", "Failed")


def _restarts(stage: Stage, chat: Chat) -> int:
    return sum(one["restartCount"] for one in stage.node.pods.get(chat.name)["status"]["containerStatuses"])


def _listed(names_left: list[str]) -> str:
    return f" (left: {', '.join(names_left[:5])})" if names_left else ""


def left_on_machine(folders: list[Path]) -> list[str]:
    """Processes, mounts, control groups, devices and folders of a run that is over."""
    found = [str(folder) for folder in folders if folder.exists()]
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
            found += [f"process {path.parent.name}: {line[:80]}" for folder in folders if f"{folder}/" in line]
    mounts = Path("/proc/mounts").read_text(encoding="utf-8").splitlines()
    found += [f"mount {line.split()[1]}" for line in mounts for folder in folders if f"{folder}/" in line]
    with contextlib.suppress(BlockingIOError), the_only_node(wait=False):  # else these are the next run's
        found += [f"device {BRIDGE}"] if Path("/sys/class/net", BRIDGE).exists() else []
        found += [str(path) for path in (*CGROUPS.glob("*/kubepods"), *CGROUPS.glob("kubepods"))]
        found += [str(path) for path in DEVICE_PLUGINS.glob("*")]
    return found
