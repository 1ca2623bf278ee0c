"""Pods are read field by field: what Valve decides by is all there, what it does not read is not kept."""

import json
import tracemalloc
from typing import Any

import msgspec
import numpy as np
import pytest
from reports import NOW_S, harvest_node, pod, uuids
from valve_kube import names
from valve_kube.devices import denied_devices
from valve_kube.errors import InvalidObject
from valve_kube.node_wish import node_wish
from valve_kube.objects import (
    NodeReport,
    annotation,
    created_at_s,
    followed,
    node_report,
    offline_pod,
    pod_place,
    started_at_s,
)
from valve_kube.owners import owner_name, owner_uid
from valve_kube.shapes import NodeShape, PodShape, ReportShape, Shape
from valve_scheduler.controller.conditions import Told, event
from valve_scheduler.controller.given import memory_given
from valve_scheduler.controller.workloads import new_workload

Json = dict[str, Any]


def realistic(name: str = "p1") -> Json:
    """About eleven kilobytes, as an API server sends a running pod of a Job."""
    asked = {names.SLA: "0.3", names.PROFILE: "m", "kubectl.kubernetes.io/last-applied": "x" * 3_000}
    found = pod(name, gpus=2, annotations=asked, node="n1", held=uuids("n1")[0], phase="Running", owner="job-1")
    found["metadata"] |= {
        "creationTimestamp": "2026-01-01T00:00:00Z",
        "managedFields": [{"manager": f"m{n}", "fieldsV1": {f"f:{key}": {} for key in range(60)}} for n in range(3)],
    }
    found["metadata"]["labels"] |= {"pod-template-hash": "abc", "batch.kubernetes.io/job-name": "batch"}
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": "batch-abc", "blockOwnerDeletion": True}
    found["metadata"]["ownerReferences"][0] |= owner
    found["spec"] |= {
        "volumes": [{"name": f"v{n}", "projected": {"sources": ["s" * 50] * 4}} for n in range(4)],
        "initContainers": [{"name": "init", "image": "i" * 80, "resources": {}}],
        "tolerations": [{"key": f"k{n}", "operator": "Exists"} for n in range(10)],
    }
    environment = [{"name": f"NAME_{n}", "value": "v" * 40} for n in range(30)]
    found["spec"]["containers"][0] |= {"image": "i" * 80, "env": environment}
    found["spec"]["containers"][0]["resources"]["limits"] |= {"memory": "64Gi", "cpu": 8}
    found["status"] |= {
        "startTime": "2026-01-01T00:01:00Z",
        "conditions": [
            {"type": "Ready", "status": "True", "lastTransitionTime": "2026-01-01T00:01:00Z", "message": "m"}
        ],
        "containerStatuses": [
            {"name": "work", "imageID": "i" * 100, "state": {"running": {"startedAt": "2026-01-01T00:07:00Z"}}}
        ],
    }
    return found


def started_last_with(message: str, name: str = "work") -> Json:
    """Its container has been tried again and again."""
    one = realistic()
    ended = {"terminated": {"reason": "StartError", "message": message, "exitCode": 128}}
    one["status"]["initContainerStatuses"] = [{"name": "init", "state": {"terminated": {"reason": "Completed"}}}]
    back_off = {"waiting": {"reason": "CrashLoopBackOff"}}
    one["status"]["containerStatuses"] = [{"name": name, "state": back_off, "lastState": ended}]
    return one


def without_its_first() -> Json:
    """Its init container asks for the GPU and does not get it."""
    one = started_last_with("CDI")
    one["spec"]["initContainers"][0] = {**one["spec"].pop("containers")[0], "name": "init"}
    waiting = {"reason": "CreateContainerError", "message": "unresolvable CDI devices"}
    one["status"]["initContainerStatuses"] = [{"name": "init", "state": {"waiting": waiting}}]
    return one


VARIANTS = {
    "running": realistic(),
    "bound": {**realistic(), "spec": {**realistic()["spec"], "nodeSelector": {"pool": "a"}}},
    "bare": {"metadata": {"name": "a", "namespace": "b", "uid": "u", "labels": None}, "spec": {}, "status": {}},
    "small": pod(),
    "refused": {**pod(), "status": {"conditions": [{"type": "PodScheduled", "status": "False", "reason": "x"}]}},
    "without its devices": started_last_with(f"OCI: {'unresolvable CDI devices ' * 90}"),
    "its sidecar without devices": started_last_with("unresolvable CDI devices", "side"),
    "its init container without devices": without_its_first(),
    "without its command": started_last_with("executable file not found"),
    "deleted": {**pod(), "metadata": {**pod()["metadata"], "deletionTimestamp": "2026-01-01T00:00:00Z"}},
}


def slim(raw: Json) -> Json:
    return PodShape().page(json.dumps({"metadata": {"resourceVersion": "7"}, "items": [raw]}).encode()).items[0]


def answer(read: Any, one: Json) -> Any:
    try:
        return read(one)
    except Exception as error:
        return type(error), str(error)


READ = [
    pod_place,
    offline_pod,
    followed,
    owner_uid,
    owner_name,
    started_at_s,
    created_at_s,
    lambda one: node_wish(one["spec"]),
    lambda one: annotation(one, names.PROFILE),
    lambda one: new_workload(one, 0.3),
    lambda one: event(one, Told.SLA_MISSED, "note", NOW_S),
    lambda one: one["metadata"].get("deletionTimestamp"),
    denied_devices,
    lambda one: [c["type"] for c in (one.get("status") or {}).get("conditions") or [] if c["status"] == "False"],
]


@pytest.mark.parametrize("variant", VARIANTS)
def test_no_judgement_of_a_pod_changes_by_what_is_left_out(variant: str) -> None:
    raw = VARIANTS[variant]

    for read in READ:
        if read is not followed:
            assert answer(read, slim(raw)) == answer(read, raw)
        else:
            assert isinstance(answer(read, slim(raw)), dict) == isinstance(answer(read, raw), dict)
    found = PodShape().event(json.dumps({"type": "MODIFIED", "object": raw}).encode())
    assert found == {"type": "MODIFIED", "object": slim(raw)}


def test_the_pull_of_an_image_or_a_new_start_of_the_container_never_counts_as_time_to_keep_an_sla() -> None:
    """Weights load again; the pod's own start was long ago. A sidecar's start is nobody's."""
    one = realistic()
    one["spec"]["containers"].append({"name": "sidecar"})
    later = {"running": {"startedAt": "2026-01-01T09:00:00Z"}}
    one["status"]["containerStatuses"].append({"name": "sidecar", "state": later})
    seven = started_at_s({"status": {"startTime": "2026-01-01T00:07:00Z"}})

    assert started_at_s(one) == started_at_s(slim(one)) == seven
    one["status"]["containerStatuses"][0]["state"] = later
    assert started_at_s(one) == started_at_s(slim(one)) == seven + 8 * 3600 + 53 * 60
    one["status"]["containerStatuses"][0]["state"] = {"waiting": {"reason": "CrashLoopBackOff"}}
    assert started_at_s(one) == started_at_s(slim(one)) == seven - 6 * 60


def listed(shape: Shape, items: list[Json]) -> tuple[list[Json], float, float]:
    """What is kept of a list; for each object, the bytes that were sent and those that stay in memory."""
    page = json.dumps({"metadata": {"resourceVersion": "7"}, "items": items}).encode()
    tracemalloc.start()
    try:
        kept = shape.page(page).items
        size, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    return kept, len(page) / len(items), size / len(items)


def test_a_listed_pod_never_takes_more_than_a_few_kilobytes() -> None:
    """It took 65, and 4,000 pods of short Jobs ended the extender at its limit of 320 MiB."""
    items = [realistic(f"p{n}") for n in range(200)]
    kept, sent, size = listed(PodShape(), items)

    assert (len(kept), sent > 9_000) == (200, True)
    assert size < 2_000


def test_pods_of_one_job_never_hold_what_they_share_twice() -> None:
    """Each had its own labels, owner, containers and conditions: 5,000 nodes took the controller beyond 320 MiB."""
    items = [realistic(f"p{n}") for n in range(2)]
    raw = json.dumps({"metadata": {"resourceVersion": "7"}, "items": items}).encode()

    one, other = PodShape().page(raw).items

    assert one["metadata"]["name"] != other["metadata"]["name"]
    for part in ("labels", "ownerReferences"):
        assert one["metadata"][part] is other["metadata"][part]
    assert one["spec"]["containers"] is other["spec"]["containers"]
    assert one["status"] is other["status"]


def test_a_limit_is_never_read_as_that_of_another_pod() -> None:
    """1, 1.0 and "1" are one key of a dict, but not one limit."""
    for limit in (1, 1.0, "1", 2):
        one = pod()
        one["spec"]["containers"][0]["resources"]["limits"] = {names.RESOURCE: limit}
        (container,) = slim(one)["spec"]["containers"]
        found = container["resources"]["limits"][names.RESOURCE]
        assert (type(found), found) == (type(limit), limit)


def reported(name: str) -> Json:
    """Ten kilobytes, as a node with eight offline pods writes it."""
    random = np.random.default_rng(1)
    found = harvest_node(name, offline=[{"podUID": f"uid-{n}", "demandSeconds": 1.5} for n in range(8)])
    for gpu in found["status"]["gpus"]:
        rows = random.random((3, 32)).round(4).tolist()
        gpu |= {"freeMemory": rows[0], "onlineMemory": {"1h": rows[1], "24h": rows[2]}}
    found["status"]["alignment"] = random.random(28).round(4).tolist()
    found["metadata"]["managedFields"] = [
        {"manager": "m", "fieldsV1": {f"f:{key}": {} for key in range(80)}},
        {"manager": "valved", "subresource": "status", "time": "2026-01-01T00:00:05Z", "fieldsV1": {"f:status": {}}},
    ]
    return found


def test_a_packed_report_is_never_read_as_another() -> None:
    one, shape = reported("n1"), ReportShape()
    read = node_report(one)

    (listed,) = shape.page(json.dumps({"metadata": {"resourceVersion": "7"}, "items": [one]}).encode()).items
    told = shape.event(json.dumps({"type": "MODIFIED", "object": one}).encode())["object"]

    for packed in map(node_report, (listed, told)):
        for name in NodeReport.__slots__:
            np.testing.assert_array_equal(getattr(packed, name), getattr(read, name), err_msg=name)
    assert memory_given(listed, uuids("n1")[:2]) == memory_given(one, uuids("n1")[:2]) < 1


@pytest.mark.parametrize("row", [["x"] * 32, [None] * 32, "x", {"a": 1}, [1.0, 2.0]])
def test_a_report_that_cannot_be_packed_is_refused_by_name_as_before(row: Any) -> None:
    one = reported("n1")
    one["status"]["gpus"][3]["freeMemory"] = row
    page = json.dumps({"metadata": {"resourceVersion": "7"}, "items": [one]}).encode()

    with pytest.raises(InvalidObject, match="GPUHarvestNode n1"):
        node_report(ReportShape().page(page).items[0])


def test_a_listed_report_never_takes_more_than_some_kilobytes() -> None:
    """It took 50, and the reports of 5,000 nodes alone ended controller and extender at their limit of 320 MiB."""
    items = [reported(f"n{n}") for n in range(100)]
    kept, sent, size = listed(ReportShape(), items)

    assert (len(kept), sent > 8_000) == (100, True)
    assert size < 14_000


SHAPES = (Shape, *Shape.__subclasses__())


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.__name__)
def test_a_bookmark_is_never_read_as_an_object_of_its_kind(shape: type[Shape]) -> None:
    """It has no name. The API server sends one a minute, and each ended the extender and the controller."""
    bookmark = b'{"type": "BOOKMARK", "object": {"kind": "K", "metadata": {"resourceVersion": "12"}}}'

    assert shape().event(bookmark)["object"]["metadata"]["resourceVersion"] == "12"


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.__name__)
def test_one_object_that_cannot_be_read_never_hides_the_others(shape: type[Shape]) -> None:
    """Of another kind than its schema says: a list that held it was refused as a whole, again and again."""
    good = {"metadata": {"name": "a", "resourceVersion": "3"}}
    odd = [{"metadata": {"name": 7, "labels": 7, "annotations": 7}, "spec": 7, "status": {"gpus": [7]}}, 7, None, []]
    page = shape().page(json.dumps({"metadata": {"resourceVersion": "9"}, "items": [*odd, good]}).encode())

    assert page.items[-1]["metadata"]["name"] == "a"
    for one in odd[:1]:
        one["metadata"]["resourceVersion"] = "12"
        told = shape().event(json.dumps({"type": "MODIFIED", "object": one}).encode())
        assert told["object"]["metadata"]["resourceVersion"] == "12"


def test_the_gpus_of_a_pod_that_cannot_be_read_never_seem_free() -> None:
    """A list leaves nothing out that holds a GPU: the next pod would be placed on it, too."""
    metadata = {"name": "p", "namespace": "n", "uid": "u", "annotations": {names.GPUS: "GPU-1,GPU-2"}}
    odd = {"metadata": metadata, "spec": {"nodeName": "gpu-1", "tolerations": 7}, "status": {"phase": "Running"}}
    raw = json.dumps({"metadata": {"resourceVersion": "9"}, "items": [odd]}).encode()
    told = json.dumps({"type": "MODIFIED", "object": odd}).encode()

    for kept in (*PodShape().page(raw).items, PodShape().event(told)["object"]):
        place = pod_place(kept)
        assert (place.uid, place.node, place.gpu_uuids) == ("u", "gpu-1", ("GPU-1", "GPU-2"))
        assert not place.finished
    assert PodShape().event(told)["type"] == "MODIFIED"


def test_pages_and_errors_are_read() -> None:
    shape = PodShape()
    page = shape.page(b'{"metadata": {"resourceVersion": "9", "continue": "t"}, "items": null}')

    assert (page.items, page.version, page.next_token) == ([], "9", "t")
    gone = b'{"type": "ERROR", "object": {"code": 410, "reason": "Expired", "message": "old", "metadata": {}}}'
    assert shape.event(gone)["object"]["code"] == 410
    with pytest.raises(msgspec.DecodeError):
        shape.page(b"<html>")


def test_a_listed_node_never_takes_more_than_some_kilobytes() -> None:
    """Sixty labels as texts of its own were most of what the controller kept of a node."""
    labels = {f"feature.node.kubernetes.io/cpu-{number}": "true" for number in range(60)}
    images = [{"names": [f"example.invalid/image:{number}"]} for number in range(50)]
    items = [
        {
            "metadata": {"name": f"n{n}", "labels": labels | {"kubernetes.io/hostname": f"n{n}"}},
            "status": {"images": images},
        }
        for n in range(200)
    ]
    kept, _, size = listed(NodeShape(), items)

    assert kept[7]["metadata"]["labels"] == items[7]["metadata"]["labels"]
    assert size < 5_000
