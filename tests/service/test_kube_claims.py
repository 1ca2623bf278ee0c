"""Online pods that hold their GPUs by claims (DRA), or by a resource of another name: each is known by its card."""

from __future__ import annotations

import pytest
from fakeapi import until
from kube_node import ONLINE_UID, WHOLE, group, kube_node, pod, registered, scenario, uuid_of

from valved.kube.claims import Allocation, DraDevice, allocated, read_slice
from valved.kube.pods import read_pod
from valved.model.ids import Role

DRIVER = "gpu.nvidia.com"


def resource_slice(world, name="slice-1", generation=1, gpus=(0, 1)):
    devices = [
        {"name": f"gpu-{gpu}", "attributes": {"uuid": {"string": uuid_of(world, gpu)}, "type": {"string": "gpu"}}}
        for gpu in gpus
    ]
    pool = {"name": "node-1", "generation": generation, "resourceSliceCount": 1}
    return {
        "metadata": {"name": name, "resourceVersion": "1"},
        "spec": {"driver": DRIVER, "nodeName": "node-1", "pool": pool, "devices": devices},
    }


def claim(*devices, driver=DRIVER, **more):
    results = [{"request": "gpu", "driver": driver, "pool": "node-1", "device": name, **more} for name in devices]
    return {"metadata": {"name": "c"}, "status": {"allocation": {"devices": {"results": results}}}}


def claiming_pod(name="chat-0", uid=ONLINE_UID, role="online", **more):
    """It has no limit at all: its claim is all that it says."""
    item = pod(name, uid, role=role, phase="Running", **more)
    item["spec"]["resourceClaims"] = [{"name": "gpu", "resourceClaimTemplateName": "one-gpu"}]
    item["spec"]["containers"][0]["resources"] = {"claims": [{"name": "gpu"}]}
    item["spec"]["containers"].append({"name": "log"})
    item["status"]["resourceClaimStatuses"] = [{"name": "gpu", "resourceClaimName": f"{name}-gpu"}]
    return item


def verdicts(node):
    return {verdict.gpu: verdict for verdict in node.room.known.verdicts}


def played(*, claims, slices=True):
    """A node whose DRA driver and scheduler have done their part."""

    def prepare(node):
        node.api.slices = [resource_slice(node.world)] if slices else []
        node.api.claims = claims

    return prepare


@scenario
async def test_a_claimed_gpu_never_guards_the_other_gpus_of_its_node(tmp_path):
    async with kube_node(tmp_path, prepare=played(claims={"chat-0-gpu": claim("gpu-1")})) as node:
        await registered(node)
        node.put(claiming_pod())

        await until(lambda: node.guarded() == [1])

        await until(lambda: verdicts(node)[1].online == ("default/chat-0",))
        assert verdicts(node)[0].online == ()


@scenario
async def test_a_claimed_gpu_is_harvested_once_its_pod_is_heard(tmp_path):
    async with kube_node(tmp_path, prepare=played(claims={"chat-0-gpu": claim("gpu-1")})) as node:
        await registered(node)
        node.put(claiming_pod(injection="ok"))
        node.kubelet.claimed.append(("default", "chat-0", "work", DRIVER, "gpu-1"))
        await until(lambda: node.guarded() == [1])
        node.world.processes.add(200, cgroup=group(ONLINE_UID))
        node.world.hello(200, wanted=Role.NONE)

        await until(lambda: node.guarded() == [])

        assert verdicts(node)[1].is_harvestable
        assert verdicts(node)[0].reason == "no online pod holds it"


@scenario
async def test_a_claim_that_cannot_be_told_yet_never_leaves_a_gpu_open(tmp_path):
    """Neither without its allocation, nor without the slices that say what a device is."""
    async with kube_node(tmp_path, prepare=played(claims={"chat-0-gpu": {"metadata": {}, "status": {}}})) as node:
        await registered(node)
        node.put(claiming_pod())
        await until(lambda: node.guarded() == [0, 1])

        node.room.claims._drop(resource_slice(node.world))
        node.api.claims["chat-0-gpu"] = claim("gpu-1")
        await until(lambda: node.room.claims._results)
        assert node.guarded() == [0, 1]

        node.room.claims._put(resource_slice(node.world))
        await until(lambda: node.guarded() == [1])


@scenario
async def test_a_claim_of_something_else_guards_nothing(tmp_path):
    claims = {"chat-0-gpu": claim("nic-0", driver="dra.net"), "look-gpu": claim("gpu-0", adminAccess=True)}
    async with kube_node(tmp_path, prepare=played(claims=claims)) as node:
        await registered(node)
        node.put(claiming_pod())
        node.put(claiming_pod("look", "90000000-0000-4000-8000-000000000000", role=""))

        await until(lambda: len(node.room.claims._results) == 2)
        node.room._wake.set()
        await until(lambda: node.guarded() == [])


@scenario
async def test_a_refused_claim_never_counts_as_one_of_nothing(tmp_path):
    async with kube_node(tmp_path, prepare=played(claims={})) as node:
        await registered(node)
        node.room.claims._again_s = 0.01
        node.put(claiming_pod())
        await until(lambda: len(node.api.claims_asked) > 2)
        await until(lambda: node.guarded() == [0, 1])

        node.api.claims["chat-0-gpu"] = claim("gpu-1")

        await until(lambda: node.guarded() == [1])


@scenario
async def test_a_claim_that_nobody_answers_for_never_delays_the_guard_of_the_node(tmp_path):
    async with kube_node(tmp_path, prepare=played(claims={"chat-0-gpu": claim("gpu-1")})) as node:
        await registered(node)
        node.room.claims._client._timeout_s = 1000.0
        node.api.is_silent = True
        node.put(claiming_pod())
        node.put(claiming_pod("chat-1", "90000000-0000-4000-8000-000000000000"))

        await until(lambda: len(node.api.claims_asked) == 2)  # at once, not one after another
        await until(lambda: node.guarded() == [0, 1])

        assert node.room.claims.unread()


@scenario
async def test_the_claim_of_a_pod_that_went_is_never_asked_for_again(tmp_path):
    async with kube_node(tmp_path, prepare=played(claims={})) as node:
        await registered(node)
        node.put(claiming_pod())
        await until(node.room.claims.unread)
        (task,) = node.room.claims._reads.values()

        node.room.book.drop(claiming_pod())

        await until(task.cancelled)
        await until(lambda: node.guarded() == [])


@scenario
async def test_a_gpu_that_a_pod_only_watches_never_counts_as_held_by_the_kubelets_word(tmp_path):
    claims = {"chat-0-gpu": claim("gpu-1", adminAccess=True)}
    async with kube_node(tmp_path, prepare=played(claims=claims)) as node:
        await registered(node)
        node.put(claiming_pod())
        node.kubelet.claimed.append(("default", "chat-0", "work", DRIVER, "gpu-1"))
        node.kubelet.held.append(("default", "chat-0", "two", WHOLE, [uuid_of(node.world, 0)]))

        await until(lambda: node.room.claims._results)
        node.room._wake.set()

        await until(lambda: node.guarded() == [0])


@scenario
async def test_a_part_of_a_shared_or_renamed_gpu_makes_a_holder(tmp_path):
    async with kube_node(tmp_path) as node:
        await registered(node)
        node.put(pod("chat-0", ONLINE_UID, role="online", phase="Running"))
        part = f"{uuid_of(node.world, 0)}::3"
        node.kubelet.held.append(("default", "chat-0", "work", "nvidia.com/gpu.shared", [part]))
        node.kubelet.held.append(("default", "chat-0", "two", "example.com/gpu-h100", [uuid_of(node.world, 1)]))
        node.kubelet.held.append(("default", "chat-0", "net", "example.com/nic", ["nic-7"]))
        node.room._wake.set()

        await until(lambda: node.guarded() == [0, 1])

        assert all(verdict.online == ("default/chat-0",) for verdict in verdicts(node).values())


def test_only_the_newest_generation_of_a_pool_counts():
    old = {"driver": DRIVER, "pool": {"name": "n", "generation": 1}, "devices": [named("gpu-0", "GPU-old")]}
    new = {"driver": DRIVER, "pool": {"name": "n", "generation": 2}, "devices": [named("gpu-0", "GPU-new")]}

    (_, first), (key, second) = read_slice(old), read_slice(new)

    device = DraDevice(driver=DRIVER, pool="n", name="gpu-0")
    assert (first[device], second[device], key) == ("GPU-old", "GPU-new", (DRIVER, "n", 2))


def named(name, uuid, key="uuid"):
    return {"name": name, "attributes": {key: {"string": uuid}}}


@pytest.mark.parametrize(
    ("device", "uuid"),
    [
        (named("gpu-0", "GPU-1"), "GPU-1"),
        (named("gpu-0", "GPU-1", f"{DRIVER}/uuid"), "GPU-1"),
        ({"name": "mig-0", "attributes": {"parentUUID": {"string": "GPU-2"}}}, "GPU-2"),
        (
            {"name": "mig-1", "attributes": {"uuid": {"string": "MIG-3"}, "parentUUID": {"string": "GPU-2"}}},
            "GPU-2",
        ),
    ],
)
def test_a_device_is_known_by_the_card_it_is_on(device, uuid):
    _, devices = read_slice({"driver": DRIVER, "pool": {"name": "n", "generation": 1}, "devices": [device]})

    assert list(devices.values()) == [uuid]


def test_a_claim_without_an_allocation_is_not_the_same_as_one_of_nothing():
    assert allocated({"status": {}}) is None
    assert allocated({"status": {"allocation": {}}}) == Allocation(held=frozenset(), watched=frozenset())


def test_an_extended_resource_that_a_device_class_answers_names_its_claim_in_the_status():
    item = pod("chat-0", ONLINE_UID, role="online", limit=WHOLE)
    mapping = [{"containerName": "work", "resourceName": WHOLE, "requestName": "r"}]
    item["status"]["extendedResourceClaimStatus"] = {"resourceClaimName": "made", "requestMappings": mapping}

    assert read_pod(item).claims == {"made": frozenset({"work"})}
