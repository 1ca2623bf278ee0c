"""Valve's extender behind a stock kube-scheduler and a real API server."""

import itertools
import json
import re
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from cluster_pods import PODS, held_gpus, submit, wait_bound
from valve_kube import names
from valve_scheduler.placement.holdings import RESERVED_FOR_S
from valve_scheduler.placement.rank import REASON_TEXT, Reason
from valve_tools.cluster.api import ApiRefused
from valve_tools.cluster.controlplane import ControlPlane, wait_for
from valve_tools.cluster.fleet import bound_pods, create_nodes, delete_pods, node_name, offline_pod, report

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

Json = dict[str, Any]
BINDING = {"apiVersion": "v1", "kind": "Binding", "target": {"apiVersion": "v1", "kind": "Node"}}


def test_node_and_annotation_appear_together_in_one_version(control_plane: ControlPlane) -> None:
    """The Binding of a pod is atomic: no watcher ever sees a node without GPUs."""
    api = control_plane.api
    for index in range(100):
        api.post(PODS, left_to_us(f"p{index}"))
    versions = api.watch_lines(f"{PODS}?watch=1&resourceVersion=0&timeoutSeconds=120")

    def bind(index: int) -> None:
        target = BINDING["target"] | {"name": "anywhere"}
        annotations = {names.GPUS: f"GPU-{index}"}
        api.post(f"{PODS}/p{index}/binding", BINDING | {"target": target} | meta(index, annotations))

    def meta(index: int, annotations: dict[str, str]) -> dict[str, object]:
        return {"metadata": {"name": f"p{index}", "annotations": annotations}}

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(bind, range(100)))
    with_node: dict[str, Json] = {}
    for line in versions:
        pod = json.loads(line)["object"]
        if pod["spec"].get("nodeName"):
            with_node.setdefault(pod["metadata"]["name"], pod)  # the first version that has one
        if len(with_node) == 100:
            break

    assert len(with_node) == 100
    assert all(names.GPUS in pod["metadata"]["annotations"] for pod in with_node.values())


def left_to_us(name: str, *, gpus: int = 1) -> Json:
    """A pod that no scheduler of the session takes."""
    pod = offline_pod(name, gpus=gpus)
    pod["spec"]["schedulerName"] = "nobody"

    return pod


def test_a_second_binding_is_a_conflict_and_changes_nothing(control_plane: ControlPlane) -> None:
    api = control_plane.api
    api.post(PODS, left_to_us("p0"))
    first = {"metadata": {"name": "p0", "annotations": {names.GPUS: "GPU-a"}}}
    second = {"metadata": {"name": "p0", "annotations": {names.GPUS: "GPU-b"}}}
    api.post(f"{PODS}/p0/binding", BINDING | first | {"target": BINDING["target"] | {"name": "one"}})

    with pytest.raises(ApiRefused) as refused:
        api.post(f"{PODS}/p0/binding", BINDING | second | {"target": BINDING["target"] | {"name": "two"}})

    pod = api.get(f"{PODS}/p0")
    assert refused.value.status == 409
    assert (pod["spec"]["nodeName"], pod["metadata"]["annotations"][names.GPUS]) == ("one", "GPU-a")


def test_a_binding_for_a_pod_that_was_replaced_is_refused_by_its_uid(control_plane: ControlPlane) -> None:
    api = control_plane.api
    api.post(PODS, left_to_us("p0"))
    stale = {"metadata": {"name": "p0", "uid": "11111111-2222-3333-4444-555555555555"}}

    with pytest.raises(ApiRefused) as refused:
        api.post(f"{PODS}/p0/binding", BINDING | stale | {"target": BINDING["target"] | {"name": "n"}})

    assert refused.value.status == 409


def test_every_gpu_of_the_fleet_is_given_exactly_once(scheduling: ControlPlane, nodes: int) -> None:
    submit(scheduling.api, nodes * 8)

    pods = wait_bound(scheduling.api, nodes * 8)

    assert set(held_gpus(pods).values()) == {1}
    assert len(held_gpus(pods)) == nodes * 8


@pytest.fixture
def asked_by_hand(control_plane: ControlPlane) -> Iterator[int]:
    """The port of an extender without a scheduler, beside two nodes of its own."""
    create_nodes(control_plane.api, 2, first=980)
    port, probes = control_plane.start_extender(name="extender-played")
    wait_for("the extender", lambda: urllib.request.urlopen(f"http://127.0.0.1:{probes}/readyz"))
    yield port
    control_plane.kill("extender-played")
    for index in (980, 981):
        for path in ("/api/v1/nodes", f"{names.API_PATH}/gpuharvestnodes"):
            control_plane.api.delete(f"{path}/{node_name(index)}")


def test_two_pods_in_flight_are_never_led_to_the_same_gpus(control_plane: ControlPlane, asked_by_hand: int) -> None:
    """All are filtered and scored before any is bound, as kube-scheduler does while its binds are under way."""
    api, two = control_plane.api, [node_name(980), node_name(981)]

    def asked(verb: str, arguments: Json) -> Any:
        request = urllib.request.Request(
            f"http://127.0.0.1:{asked_by_hand}/scheduler/{verb}", json.dumps(arguments).encode()
        )
        with urllib.request.urlopen(request) as answer:
            return json.load(answer)

    def chosen(pod: Json) -> str:
        passed = asked("filter", {"Pod": pod, "NodeNames": two})["NodeNames"]
        scores = asked("prioritize", {"Pod": pod, "NodeNames": passed})
        return str(max(scores, key=lambda one: one["Score"])["Host"])

    def bound(pod: Json, node: str) -> str:
        name = {"PodName": pod["metadata"]["name"], "PodNamespace": "default", "PodUID": pod["metadata"]["uid"]}
        return str(asked("bind", {**name, "Node": node})["Error"])

    for attempt in itertools.count():  # until none of them took longer than a place is kept for
        pods = [api.post(PODS, left_to_us(f"flies-{attempt}-{number}", gpus=4)) for number in range(4)]
        begin_s = time.monotonic()
        nodes_chosen = [chosen(pod) for pod in pods]
        with ThreadPoolExecutor(4) as pool:
            errors = list(pool.map(bound, pods, nodes_chosen))
        if time.monotonic() - begin_s < RESERVED_FOR_S:
            break
        delete_pods(api)

    assert errors == [""] * 4
    assert sorted(nodes_chosen) == sorted(two * 2)
    assert set(held_gpus(list(bound_pods(api))).values()) == {1}


def test_gang_sized_pods_get_aligned_sets_of_one_node(scheduling: ControlPlane) -> None:
    for size in (1, 2, 4, 8):
        scheduling.api.post(PODS, offline_pod(f"size-{size}", gpus=size))

    pods = wait_bound(scheduling.api, 4)

    sizes = sorted(len(str(pod["metadata"]["annotations"][names.GPUS]).split(",")) for pod in pods)
    assert sizes == [1, 2, 4, 8]
    assert set(held_gpus(pods).values()) == {1}


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"sla": "1.7"}, "must be a number in (0, 1]"),
        ({"sla": "0.5", "profile": "nobody-has-it"}, REASON_TEXT[Reason.PROFILE]),
    ],
)
def test_a_pod_that_cannot_be_placed_says_why_in_its_condition(
    scheduling: ControlPlane, options: dict[str, str], text: str
) -> None:
    [name] = submit(scheduling.api, 1, **options)

    def explained() -> bool:
        conditions = scheduling.api.get(f"{PODS}/{name}")["status"].get("conditions") or []
        return any(text in condition.get("message", "") for condition in conditions)

    wait_for("the explanation", explained, 30)


def test_a_capacity_epoch_on_a_node_brings_a_refused_pod_back(scheduling: ControlPlane, nodes: int) -> None:
    """The fleet was too busy; one node's report improves, which is no cluster event.

    The bump of its epoch is.
    """
    api = scheduling.api
    create_nodes(api, 1, first=900)  # a node nobody else uses, the only one with profile model L40S
    random = np.random.default_rng(5)
    busy = report(900, random, idle=0.05) | {"gpuModel": "L40S"}
    path = f"{names.API_PATH}/gpuharvestnodes/{node_name(900)}/status"
    api.patch(path, {"status": busy})
    profile = {
        "apiVersion": names.API_VERSION,
        "kind": "OfflineProfile",
        "metadata": {"name": "small"},
        "spec": {
            "workload": {"model": "small", "gpuModel": "L40S"},
            "standaloneTokensPerSecond": 100,
            "curve": [{"freeMiB": 0, "tokensPerSecond": 100}],
        },
    }
    profiles = f"/apis/{names.API_VERSION}/namespaces/default/offlineprofiles"
    api.post(profiles, profile)
    api.patch(f"{profiles}/small/status", {"status": {"phase": "Ready"}})
    [name] = submit(api, 1, sla="0.5", profile="small")
    wait_for("the refusal", lambda: REASON_TEXT[Reason.SLA] in json.dumps(api.get(f"{PODS}/{name}")["status"]))

    api.patch(path, {"status": report(900, random, idle=0.95) | {"gpuModel": "L40S"}})
    epochs = itertools.count(1)

    def bumped_and_bound() -> str:
        """Again, as the controller does: the first bump may reach the scheduler before the report its extender."""
        annotations = {names.EPOCH: str(next(epochs))}
        api.patch(f"/api/v1/nodes/{node_name(900)}", {"metadata": {"annotations": annotations}})
        return str(api.get(f"{PODS}/{name}")["spec"].get("nodeName") or "")

    assert wait_for("the bind", bumped_and_bound, 240) == node_name(900)
    api.delete(f"{profiles}/small")


@pytest.mark.parametrize("round_number", range(3))
def test_an_extender_killed_while_it_binds_loses_and_doubles_nothing(
    scheduling: ControlPlane, nodes: int, round_number: int
) -> None:
    submit(scheduling.api, nodes * 8)
    wait_for("binding to begin", lambda: len(list(bound_pods(scheduling.api))) > 20 * (1 + round_number))

    scheduling.kill("extender")
    scheduling.restart("extender")

    pods = wait_bound(scheduling.api, nodes * 8)
    assert set(held_gpus(pods).values()) == {1}


@pytest.mark.parametrize("prefers", [True, False])
def test_a_job_that_prefers_a_base_goes_where_it_is_served_if_nodes_are_alike(
    scheduling: ControlPlane, prefers: bool
) -> None:
    """By the annotations of docs/finetuning.md; without them the nodes share the pods."""
    api, first = scheduling.api, 950 if prefers else 960
    alike = [node_name(first), node_name(first + 1)]
    create_nodes(api, 2, first=first)
    for index, name in enumerate(alike):
        status = report(first + index, np.random.default_rng(5), idle=0.9)
        api.patch(f"{names.API_PATH}/gpuharvestnodes/{name}/status", {"status": status})
    labels = {names.BASE: "llama-8b"} if prefers else {}
    service = {"containers": [{"name": "serve", "image": "example.invalid/online:1"}], "nodeName": alike[1]}
    api.post(PODS, {"metadata": {"name": f"serve-{first}", "labels": labels}, "spec": service})
    manual = (Path(__file__).resolve().parents[2] / "docs/finetuning.md").read_text()
    objects = [yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", manual, re.DOTALL)]
    (job,) = [found for found in objects if found["kind"] == "Job"]
    here = {"matchExpressions": [{"key": "kubernetes.io/hostname", "operator": "In", "values": alike}]}
    only = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [here]}}
    jobs = [offline_pod(f"tune-{first}-{number}") for number in range(6)]
    for pod in jobs:
        pod["metadata"]["annotations"] = job["spec"]["template"]["metadata"]["annotations"]
        pod["spec"]["affinity"] = {"nodeAffinity": only}
        api.post(PODS, pod)

    def placed() -> list[str]:
        of = {pod["metadata"]["name"]: pod["spec"]["nodeName"] for pod in bound_pods(api)}
        found = [of[pod["metadata"]["name"]] for pod in jobs if pod["metadata"]["name"] in of]
        return found if len(found) == len(jobs) else []

    where = wait_for("all placed", placed, 120)
    assert set(where) == ({alike[1]} if prefers else set(alike))
