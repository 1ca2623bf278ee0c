"""The manual's manifests for Kueue, held against its CRDs; Kueue's own manager, which lets offline Jobs go by them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from cluster_kueue import NAME, start_kueue, stop_kueue
from cluster_pods import PODS, held_gpus
from valve_kube import names
from valve_tools.cluster.api import ApiRefused
from valve_tools.cluster.controlplane import ControlPlane, wait_for
from valve_tools.cluster.fleet import bound_pods, delete_pods, offline_pod

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

Json = dict[str, Any]
PAGE = Path(__file__).resolve().parents[2] / "docs/kueue.md"
KUEUE = "/apis/kueue.x-k8s.io/v1beta2"
CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
JOBS = "/apis/batch/v1/namespaces/default/jobs"
TEAM = "team-a"
OTHER = "team-b"
QUOTA = 2
KINDS = {"ResourceFlavor": "resourceflavors", "ClusterQueue": "clusterqueues", "LocalQueue": "localqueues"}


def served(crd: Json) -> str:
    """The path of a kind's objects."""
    spec = crd["spec"]
    (stored,) = (one["name"] for one in spec["versions"] if one["storage"])
    return f"/apis/{spec['group']}/{stored}/{spec['names']['plural']}"


def left_of(api: Any, crds: list[Json]) -> list[Json]:
    """Those that are there still, and their objects lose their finalizers: once Kueue's manager is gone nobody honours
    those, and a kind that has objects never goes."""
    present = {one["metadata"]["name"] for one in api.get(CRDS)["items"]}
    left = [crd for crd in crds if crd["metadata"]["name"] in present]
    for path in map(served, left):
        for one in api.get(path)["items"]:
            if one["metadata"].get("finalizers"):
                group, _, kind = path.rpartition("/")
                room = f"namespaces/{one['metadata']['namespace']}/" if "namespace" in one["metadata"] else ""
                api.patch(f"{group}/{room}{kind}/{one['metadata']['name']}", {"metadata": {"finalizers": None}})
    return left


@pytest.fixture(scope="module")
def kueue(control_plane: ControlPlane) -> Iterator[ControlPlane]:
    """Its API, without its controller."""
    folder = control_plane.programs / "kueue-crds"
    if not folder.is_dir():
        pytest.skip("no CRDs of Kueue: bring them once with `make cluster-tools`")
    crds = [yaml.safe_load(path.read_text()) for path in sorted(folder.glob("*.yaml"))]
    for crd in crds:
        control_plane.api.post(CRDS, crd)
    for path in map(served, crds):  # each is served at a moment of its own
        wait_for(path, lambda path=path: control_plane.api.get(path))
    yield control_plane
    for crd in crds:
        control_plane.api.delete(f"{CRDS}/{crd['metadata']['name']}")
    wait_for("Kueue's kinds to go", lambda: not left_of(control_plane.api, crds))


def manifests() -> list[Json]:
    blocks = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL)
    return [one for block in blocks for one in yaml.safe_load_all(block)]


def path_of(one: Json) -> str:
    room = "namespaces/default/" if one["kind"] == "LocalQueue" else ""
    return f"{KUEUE}/{room}{KINDS[one['kind']]}?dryRun=All&fieldValidation=Strict"


def test_every_manifest_of_the_manual_is_one_that_kueue_takes_to_the_letter(kueue: ControlPlane) -> None:
    shown = manifests()

    assert {one["kind"] for one in shown} == set(KINDS)
    for one in shown:
        one["metadata"].pop("namespace", None)
        one["metadata"]["name"] += "-tried"  # the tests of the manager have made those of the manual for good
        kueue.api.post(path_of(one), one)


def test_a_field_that_kueue_does_not_know_is_refused(kueue: ControlPlane) -> None:
    """Or the test above would prove nothing."""
    queue = next(one for one in manifests() if one["kind"] == "ClusterQueue")
    queue["spec"]["cohortNme"] = "research"

    with pytest.raises(ApiRefused, match="cohortNme"):
        kueue.api.post(path_of(queue), queue)


def test_a_job_that_is_held_has_no_pod_until_it_is_let_go(control_plane: ControlPlane) -> None:
    pod = offline_pod("held")
    template = {"metadata": {key: pod["metadata"][key] for key in ("labels", "annotations")}, "spec": pod["spec"]}
    spec = {"suspend": True, "backoffLimit": 0, "template": template}
    metadata = {"name": "held", "labels": {"kueue.x-k8s.io/queue-name": "batch"}}
    api = control_plane.api
    api.post(JOBS, {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": spec})
    try:
        conditions = wait_for("the controller's word", lambda: api.get(f"{JOBS}/held")["status"].get("conditions"))
        assert [one["type"] for one in conditions] == ["Suspended"]
        assert api.get(PODS)["items"] == []

        api.patch(f"{JOBS}/held", {"spec": {"suspend": False}})

        (made,) = wait_for("its pod", lambda: api.get(PODS)["items"])
        assert made["metadata"]["labels"][names.ROLE] == names.OFFLINE
        assert made["spec"]["containers"][0]["resources"]["limits"] == {names.RESOURCE: "1"}
    finally:
        api.delete(f"{JOBS}/held", {"propagationPolicy": "Background"})


def queue_of(quota: int) -> list[Json]:
    """The manual's manifests, with a quota that two Jobs can fill."""
    shown = manifests()
    (queue,) = (one for one in shown if one["kind"] == "ClusterQueue")
    queue["spec"]["resourceGroups"][0]["flavors"][0]["resources"][0]["nominalQuota"] = quota
    return shown


def of_the_other(one: Json) -> Json:
    """The same for another team of the cohort."""
    return dict(yaml.safe_load(yaml.safe_dump(one).replace(TEAM, OTHER).replace("team: a", "team: b")))


@pytest.fixture(scope="module")
def team(kueue: ControlPlane, scheduling: ControlPlane) -> Iterator[ControlPlane]:
    """Kueue's manager with its webhooks, Valve's scheduler, and two teams of a cohort with two harvested GPUs each."""
    if not (kueue.programs / NAME).exists():
        pytest.skip("no Kueue: build it once with `make cluster-tools`")
    if os.geteuid():
        pytest.skip("Kueue's manager looks for a file of /etc: an /etc of its own needs root")
    api = kueue.api
    for name in (TEAM, OTHER):
        api.post("/api/v1/namespaces", {"metadata": {"name": name, "labels": {"team": name[-1]}}})
        account = f"/api/v1/namespaces/{name}/serviceaccounts/default"
        wait_for("its account", lambda account=account: api.get(account))
    start_kueue(kueue)
    shown = queue_of(QUOTA)
    made = [(path_of(one).partition("?")[0].replace("default", TEAM), one) for one in shown]
    others = [of_the_other(one) for one in shown if one["kind"] != "ResourceFlavor"]
    made += [(path_of(one).partition("?")[0].replace("default", OTHER), one) for one in others]
    for path, one in made:
        api.post(path, one)
    urgent = {"apiVersion": "kueue.x-k8s.io/v1beta2", "kind": "WorkloadPriorityClass", "metadata": {"name": "urgent"}}
    api.post(f"{KUEUE}/workloadpriorityclasses", {**urgent, "value": 1000, "description": "before others"})
    try:
        yield scheduling
        api.delete(f"{KUEUE}/workloadpriorityclasses/urgent")
        for path, one in reversed(made):
            api.delete(f"{path}/{one['metadata']['name']}")
        wait_for("the queue to go", lambda: not api.get(f"{KUEUE}/clusterqueues")["items"])
    finally:
        stop_kueue(kueue)


@pytest.fixture
def jobs(team: ControlPlane) -> Iterator[ControlPlane]:
    yield team
    for name in (TEAM, OTHER):
        path = jobs_of(name)
        team.api.delete(path, {"propagationPolicy": "Background"})
        wait_for("the Jobs to go", lambda path=path: not team.api.get(path)["items"])
        delete_pods(team.api, name)


@pytest.fixture
def alone(jobs: ControlPlane) -> ControlPlane:
    """The other team needs what it has: nothing is lent."""
    submit_job(jobs.api, "theirs", team=OTHER)
    wait_placed(jobs.api, "theirs", team=OTHER)
    return jobs


def jobs_of(team: str) -> str:
    return JOBS.replace("default", team)


def pods_of(team: str) -> str:
    return PODS.replace("default", team)


def submit_job(
    api: Any, name: str, *, pods: int = QUOTA, labels: Json | None = None, team: str = TEAM, suspend: bool = False
) -> Json:
    """Not suspended: it is for Kueue's webhook to hold it."""
    pod = offline_pod(name)
    template = {"metadata": {key: pod["metadata"][key] for key in ("labels", "annotations")}, "spec": pod["spec"]}
    spec = {"suspend": suspend, "parallelism": pods, "completions": pods, "backoffLimit": 0, "template": template}
    metadata = {"name": name, "labels": {"kueue.x-k8s.io/queue-name": "batch", **(labels or {})}}
    body = {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": spec}
    return dict(api.post(jobs_of(team), body))


def placed(api: Any, job: str, team: str = TEAM) -> list[Json]:
    """Pods of a Job that hold GPUs. No kubelet runs: what is being deleted goes at once."""
    found = []
    for pod in bound_pods(api, team):
        if "deletionTimestamp" in pod["metadata"]:
            api.delete(f"{pods_of(team)}/{pod['metadata']['name']}", {"gracePeriodSeconds": 0})
        elif pod["metadata"]["labels"]["job-name"] == job:
            found.append(pod)
    return found


def wait_placed(api: Any, job: str, *, pods: int = QUOTA, team: str = TEAM) -> list[Json]:
    def all_placed() -> list[Json]:
        found = placed(api, job, team)
        return found if len(found) == pods else []

    return list(wait_for(f"the pods of {job}", all_placed, 120))


def why_waiting(api: Any, job: str) -> str:
    """What Kueue says of a Job's workload."""
    for one in api.get(f"{KUEUE}/namespaces/{TEAM}/workloads")["items"]:
        if any(owner["name"] == job for owner in one["metadata"].get("ownerReferences", [])):
            conditions = (one.get("status") or {}).get("conditions") or []
            return next(
                (c["message"] for c in conditions if c["type"] == "QuotaReserved" and c["status"] == "False"), ""
            )
    return ""


def test_a_job_of_a_queue_never_starts_before_kueue_has_let_it_go(jobs: ControlPlane) -> None:
    """Its webhook holds what its author did not suspend."""
    made = submit_job(jobs.api, "eager", pods=3 * QUOTA)  # more than the cohort has

    assert made["spec"]["suspend"] is True
    assert "insufficient quota" in wait_for("Kueue's word", lambda: why_waiting(jobs.api, "eager"))
    assert jobs.api.get(pods_of(TEAM))["items"] == []


def test_a_queue_that_kueue_finds_wrong_is_refused(jobs: ControlPlane) -> None:
    queue = next(one for one in manifests() if one["kind"] == "ClusterQueue")
    queue["spec"]["preemption"] = {"reclaimWithinCohort": "Never", "borrowWithinCohort": {"policy": "LowerPriority"}}

    with pytest.raises(ApiRefused, match="reclaimWithinCohort"):
        jobs.api.post(path_of(queue | {"metadata": {"name": "wrong"}}), queue | {"metadata": {"name": "wrong"}})


def test_a_lent_gpu_never_stays_with_who_borrowed_it(jobs: ControlPlane) -> None:
    """One team borrows what the other of its cohort does not use, and gives it back when that has work."""
    api = jobs.api
    submit_job(api, "large", pods=2 * QUOTA)
    assert set(held_gpus(wait_placed(api, "large", pods=2 * QUOTA)).values()) == {1}

    submit_job(api, "own", team=OTHER)

    assert set(held_gpus(wait_placed(api, "own", team=OTHER)).values()) == {1}
    assert placed(api, "large") == []
    assert api.get(f"{jobs_of(TEAM)}/large")["spec"]["suspend"] is True
    api.delete(f"{jobs_of(OTHER)}/own", {"propagationPolicy": "Background"})
    wait_for("the GPUs of the other", lambda: placed(api, "own", OTHER) == [], 120)
    assert set(held_gpus(wait_placed(api, "large", pods=2 * QUOTA)).values()) == {1}


def test_no_more_offline_jobs_ever_run_than_kueues_quota_allows(alone: ControlPlane) -> None:
    submit_job(alone.api, "first")
    assert set(held_gpus(wait_placed(alone.api, "first")).values()) == {1}

    submit_job(alone.api, "second")

    assert "insufficient unused quota" in wait_for("Kueue's word", lambda: why_waiting(alone.api, "second"))
    assert alone.api.get(f"{jobs_of(TEAM)}/second")["spec"]["suspend"] is True
    assert len(alone.api.get(pods_of(TEAM))["items"]) == QUOTA
    alone.api.delete(f"{jobs_of(TEAM)}/first", {"propagationPolicy": "Background"})
    assert set(held_gpus(wait_placed(alone.api, "second")).values()) == {1}


def test_a_job_that_kueue_takes_its_quota_from_never_keeps_a_gpu(alone: ControlPlane) -> None:
    submit_job(alone.api, "patient")
    wait_placed(alone.api, "patient")

    submit_job(alone.api, "urgent", labels={"kueue.x-k8s.io/priority-class": "urgent"})

    assert set(held_gpus(wait_placed(alone.api, "urgent")).values()) == {1}
    assert placed(alone.api, "patient") == []
    assert alone.api.get(f"{jobs_of(TEAM)}/patient")["spec"]["suspend"] is True
