"""From control groups to pods: both layouts of the kubelet, and what a container might make up."""

from __future__ import annotations

import pytest

from valved.kube.cgroup import pod_of

UID = "3c1f0a52-9d0e-4f0b-8a51-b1f4a2f6c9aa"
UNDER = UID.replace("-", "_")


@pytest.mark.parametrize(
    ("path", "pod"),
    [
        (f"/kubepods/burstable/pod{UID}/8d1e", f"/kubepods/burstable/pod{UID}"),
        (f"/kubepods/pod{UID}", f"/kubepods/pod{UID}"),
        (
            f"/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{UNDER}.slice/cri-containerd-8d1e.scope",
            f"/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{UNDER}.slice",
        ),
        (f"/../../kubepods-pod{UNDER}.slice/cri-containerd-8d1e.scope", f"/../../kubepods-pod{UNDER}.slice"),
    ],
)
def test_a_container_belongs_to_the_pod_its_group_lies_in(path: str, pod: str) -> None:
    found = pod_of(path)

    assert found is not None
    assert (found.uid, found.path) == (UID, pod)


def test_a_static_pod_is_named_by_the_hash_of_its_manifest() -> None:
    found = pod_of("/kubepods/burstable/pod0f1e2d3c4b5a69788796a5b4c3d2e1f0/8d1e")

    assert found is not None
    assert found.uid == "0f1e2d3c4b5a69788796a5b4c3d2e1f0"


@pytest.mark.parametrize(
    "path", ["/", "", "/user.slice/session-1.scope", "/kubepods/burstable", f"/x{UID}/y", "/podium"]
)
def test_what_is_no_pod_is_none(path: str) -> None:
    assert pod_of(path) is None


def test_a_group_that_a_container_makes_inside_its_own_names_nobody_else() -> None:
    other = "00000000-0000-0000-0000-000000000000"

    found = pod_of(f"/kubepods/pod{UID}/8d1e/pod{other}/x")

    assert found is not None
    assert found.uid == UID
