"""Which pod a process belongs to, by what tenants can and cannot write."""

from __future__ import annotations

from typing import Any

from valve_kube import names

from valved.clients.identity import Peer, PodClaim
from valved.kube.pods import COPY, STATIC_UID, PodBook
from valved.model.ids import ProcessId, Role

VICTIM, OTHER = "3c1f0a52-1111-2222-3333-444455556666", "9d0e0a52-1111-2222-3333-444455556666"


def pod(uid: str, role: str, namespace: str, **annotations: str) -> dict[str, Any]:
    metadata = {"uid": uid, "namespace": namespace, "name": "p", "annotations": {names.ROLE: role, **annotations}}
    return {"metadata": metadata, "spec": {"containers": [{"name": "work"}]}}


def claim(book: PodBook, uid: str) -> Any:
    return book.claim_of(
        Peer(process=ProcessId(1, 1), uid=0, chain=(), cgroup=f"/kubepods/burstable/pod{uid}/8d1e", comm="x")
    )


def test_a_pod_that_calls_itself_static_never_takes_the_place_of_another_tenant_s() -> None:
    """An online service would have been stopped as offline work, or offline work would have become online."""
    book = PodBook()
    book.put(pod(VICTIM, names.ONLINE, "victim"))
    forged = pod(OTHER, names.OFFLINE, "tenant", **{STATIC_UID: VICTIM})
    for change in (book.put, lambda one: book.replace([pod(VICTIM, names.ONLINE, "victim"), one]), book.drop):
        change(forged)

        found = claim(book, VICTIM)
        assert isinstance(found, PodClaim)
        assert (found.role, found.name) == (Role.ONLINE, "victim/p")


def test_a_static_pod_is_known_by_the_hash_that_its_control_group_has() -> None:
    book, manifest = PodBook(), "0123456789abcdef0123456789abcdef"
    book.put(pod(OTHER, names.ONLINE, "kube-system", **{STATIC_UID: manifest, COPY: manifest}))

    found = claim(book, manifest)
    assert isinstance(found, PodClaim)
    assert found.name == "kube-system/p"


def test_a_pod_that_runs_never_takes_the_place_of_a_static_one() -> None:
    """Hashes of static pods are no secret. A pod with the mark of a copy is run by no kubelet."""
    book, manifest = PodBook(), "0123456789abcdef0123456789abcdef"
    book.put(pod(OTHER, names.ONLINE, "kube-system", **{STATIC_UID: manifest, COPY: manifest}))
    book.put(pod(VICTIM, names.OFFLINE, "tenant", **{STATIC_UID: manifest}))

    found = claim(book, manifest)
    assert isinstance(found, PodClaim)
    assert (found.role, found.name) == (Role.ONLINE, "kube-system/p")
    assert claim(book, VICTIM).role is Role.OFFLINE
