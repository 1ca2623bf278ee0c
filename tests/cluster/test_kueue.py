"""The manual's manifests for Kueue, held against its CRDs; and what Valve sees of a Job that Kueue holds: nothing."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from cluster_pods import PODS
from valve_kube import names
from valve_tools.cluster.api import Refused
from valve_tools.cluster.controlplane import ControlPlane, wait_for
from valve_tools.cluster.fleet import offline_pod

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

Json = dict[str, Any]
PAGE = Path(__file__).resolve().parents[2] / "docs/kueue.md"
KUEUE = "/apis/kueue.x-k8s.io/v1beta2"
CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
JOBS = "/apis/batch/v1/namespaces/default/jobs"
KINDS = {"ResourceFlavor": "resourceflavors", "ClusterQueue": "clusterqueues", "LocalQueue": "localqueues"}


@pytest.fixture(scope="module")
def kueue(control_plane: ControlPlane) -> Iterator[ControlPlane]:
    """Its API, without its controller."""
    folder = control_plane.programs / "kueue-crds"
    if not folder.is_dir():
        pytest.skip("no CRDs of Kueue: bring them once with `make cluster-tools`")
    crds = [yaml.safe_load(path.read_text()) for path in sorted(folder.glob("*.yaml"))]
    for crd in crds:
        control_plane.api.post(CRDS, crd)
    wait_for("Kueue's API", lambda: control_plane.api.get(f"{KUEUE}/clusterqueues"))
    yield control_plane
    for crd in crds:
        control_plane.api.delete(f"{CRDS}/{crd['metadata']['name']}")


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
        kueue.api.post(path_of(one), one)


def test_a_field_that_kueue_does_not_know_is_refused(kueue: ControlPlane) -> None:
    """Or the test above would prove nothing."""
    queue = next(one for one in manifests() if one["kind"] == "ClusterQueue")
    queue["spec"]["cohortNme"] = "research"

    with pytest.raises(Refused, match="cohortNme"):
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
