"""What a tenant writes into its own objects never fills the memory of a process that serves all tenants."""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import tracemalloc
from typing import Any

import pytest
from fakeapi import FakeApi, item
from reports import pod
from valve_kube import client, names, shapes
from valve_kube.client import KubeClient, Unreachable
from valve_kube.errors import InvalidObject
from valve_kube.node_wish import node_wish
from valve_kube.objects import offline_pod
from valve_kube.owners import is_bare, owner_name, owner_uid
from valve_kube.shapes import PodShape
from valve_scheduler.placement.served import ServedBases
from valve_scheduler.placement.views import ProfileShape

Json = dict[str, Any]
MEGABYTE = 1 << 20
ANNOTATION = 1 << 18  # as much as the API server takes
TEXTS = ("x" * ANNOTATION, "\N{UNICORN FACE}" * (ANNOTATION // 4), "-1", "1e308", "nan", "0" * ANNOTATION, "../" * 90)
KEYS = (names.SLA, names.PROFILE, names.KIND, names.BASE, names.GPUS_REQUIRED)


def annotated(key: str, text: str) -> Json:
    return pod(annotations={key: text})


def owned(**texts: Any) -> Json:
    one = pod()
    owner = {"uid": "u", "name": "j", "kind": "Job", "apiVersion": "batch/v1", "controller": True}
    one["metadata"]["ownerReferences"] = [owner | texts]
    return one


def wishing(text: str) -> Json:
    one = pod()
    expression = {"key": "pool", "operator": "In", "values": [text]}
    terms = {"nodeSelectorTerms": [{"matchExpressions": [expression]}]}
    one["spec"]["affinity"] = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}}
    return one


def crowded(kind: str, limit: str) -> Json:
    """Four thousand containers, as many as fit into one object."""
    one = pod()
    work = one["spec"]["containers"]
    more = [{"name": f"c{n}", "resources": {"limits": {names.RESOURCE: limit}}} for n in range(4_000)]
    one["spec"][kind] = [*(work if kind == "containers" else []), *more]
    return one


HUGE = {
    **{f"{key} {text[:4]}": annotated(key, text) for key in KEYS for text in TEXTS},
    "foreign annotations": pod(annotations={f"{names.DOMAIN}/x{n}": "y" * 250 for n in range(1_000)}),
    "foreign labels": {
        **pod(),
        "metadata": {**pod()["metadata"], "labels": {f"{names.DOMAIN}/x{n}": "y" * 60 for n in range(9_000)}},
    },
    **{f"owner {key}": owned(**{key: "x" * MEGABYTE}) for key in ("uid", "name", "kind", "apiVersion")},
    "owners": {
        **pod(),
        "metadata": {
            **pod()["metadata"],
            "ownerReferences": [{"uid": f"u{n}", "name": "x" * 99} for n in range(5_000)],
        },
    },
    "wish": wishing("x" * MEGABYTE),
    **{f"{kind} of {limit}": crowded(kind, limit) for kind in ("containers", "initContainers") for limit in "01"},
}


def slim(raw: Json) -> Json:
    return PodShape().page(json.dumps({"metadata": {"resourceVersion": "7"}, "items": [raw]}).encode()).items[0]


def judged(one: Json) -> Any:
    try:
        return offline_pod(one)
    except InvalidObject as error:
        return error


def is_alike(one: Any, other: Any) -> bool:
    return one == other or type(one) is type(other) is InvalidObject


@pytest.mark.parametrize("name", HUGE)
def test_a_pod_of_any_size_is_never_kept_and_never_judged_otherwise_than_as_it_came(name: str) -> None:
    raw, sent = HUGE[name], json.dumps({"metadata": {"resourceVersion": "7"}, "items": [HUGE[name]]}).encode()
    shape = PodShape()
    shape.page(sent)  # what the decoder keeps of any page
    tracemalloc.start()
    try:
        kept = [shape.page(sent).items[0] for _ in range(3)]
        judgements = list(map(judged, kept))
        gc.collect()
        size, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert size < 3 * (16 << 10)
    assert all(is_alike(one, judged(raw)) for one in judgements)


@pytest.mark.parametrize("name", HUGE)
def test_what_the_extender_remembers_of_a_pod_is_never_large_nor_what_it_says_of_it(name: str) -> None:
    found = judged(HUGE[name])

    assert len(repr(found)) < (400 if isinstance(found, InvalidObject) else 20_000)


@pytest.mark.parametrize("key", ["uid", "name", "kind", "apiVersion"])
def test_an_owner_that_cannot_exist_is_never_taken_for_one(key: str) -> None:
    """Names and UIDs of owners have no limit at the API server, and no object of Valve could be made for such a one."""
    raw = owned(**{key: "x" * 400})
    for one in (raw, slim(raw)):
        assert (is_bare(one), owner_uid(one), owner_name(one)) == (True, "uid-p1", "p1")
        assert not is_bare(owned())


def test_texts_of_pods_that_are_gone_are_never_kept_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPython 3.12.0 to 3.12.5 never free what is interned; the interpreter is played so here."""
    immortal: dict[str, str] = {}
    monkeypatch.setattr(sys, "intern", lambda text: immortal.setdefault(text, text))
    shape = PodShape()

    one = pod("pNUMBER", annotations={names.PROFILE: "profile-of-some-length-NUMBER"})
    one["metadata"]["namespace"] = one["spec"]["nodeName"] = "a-name-of-some-length-NUMBER"
    written = json.dumps(one)

    def churn(begin: int) -> int:
        for first in range(begin, begin + 20_000, 500):
            items = ",".join(written.replace("NUMBER", str(number)) for number in range(first, first + 500))
            shape.page(f'{{"metadata": {{"resourceVersion": "7"}}, "items": [{items}]}}'.encode())
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        before = churn(0)
        grown = churn(20_000) - before
    finally:
        tracemalloc.stop()
        for kept in (shapes._once, shapes._wish):
            kept.cache_clear()

    assert grown < MEGABYTE
    assert not immortal


def test_a_page_of_huge_objects_is_never_read_into_memory_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """500 pods of 1.5 MB ended the extender at each list, at its limit of 320 MiB."""
    monkeypatch.setattr(client, "PAGE_BYTES", 250)
    items = [item(f"p{number}", 1) for number in range(60)]

    found, sizes = listed(items)

    assert found == items
    assert sizes[:4] == [500, 50, 5, 1]
    assert max(sizes[3:]) <= 5


@pytest.mark.parametrize("first", [0, 700, 7_960])
def test_a_few_huge_pods_never_make_the_list_of_all_others_one_of_small_pages(
    monkeypatch: pytest.MonkeyPatch, first: int
) -> None:
    """40 pods of 1.5 MB among 8,000: 1,404 calls, as pages stayed at five pods to the end. Here a hundredth of it."""
    monkeypatch.setattr(client, "PAGE_BYTES", client.PAGE_BYTES // 100)
    items = [item(f"p{number}", 1) for number in range(8_000)]
    for huge in items[first : first + 40]:
        huge["metadata"]["annotations"] = {"a/b": "x" * 15_000}

    found, sizes = listed(items)

    assert found == items
    assert len(sizes) < 50, len(sizes)


def test_one_object_beyond_a_page_is_never_read_nor_asked_for_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "PAGE_BYTES", 5_000)
    items = [item(f"p{number}", 1) for number in range(60)]
    items[40]["metadata"]["annotations"] = {"a/b": "x" * 6_000}
    items[39]["metadata"]["namespace"] = "default"

    with pytest.raises(Unreachable, match=r"the object after default/p39 alone: body of .* at most 5000"):
        listed(items)
    with pytest.raises(Unreachable, match="the first object alone"):
        listed(items[40:])


def listed(items: list[Json]) -> tuple[list[Json], list[int]]:
    """What a list of them gave, and the sizes of page it asked for."""

    async def run() -> tuple[list[Json], list[int]]:
        api = FakeApi()
        api.is_obedient = True
        api.items = items
        async with api as access:
            found, _ = await KubeClient(access).list("/api/v1/pods")
            return found, [int(query["limit"]) for _, query in api.seen]

    return asyncio.run(run())


def test_of_a_profile_nothing_of_its_author_s_metadata_is_kept() -> None:
    metadata = {"name": "m", "namespace": "a", "resourceVersion": "7"}
    raw = {"metadata": {**metadata, "annotations": {"a/b": "x" * MEGABYTE}, "managedFields": [{}]}, "spec": {}}
    page = json.dumps({"metadata": {"resourceVersion": "7"}, "items": [raw]}).encode()

    assert ProfileShape().page(page).items == [{"metadata": metadata, "spec": {}}]
    assert ProfileShape().event(json.dumps({"type": "ADDED", "object": raw}).encode())["object"]["metadata"] == metadata


def test_bases_that_nobody_serves_any_more_are_never_counted() -> None:
    served = ServedBases()
    for number in range(100):
        one = pod(f"p{number}", node="n1")
        one["metadata"]["labels"] = {names.BASE: f"base-{number}"}
        served.put(one)
        served.drop(one)

    assert not served._pods


def test_a_wish_of_long_texts_is_held_against_no_node() -> None:
    assert node_wish(wishing("x" * MEGABYTE)["spec"]).is_bound
