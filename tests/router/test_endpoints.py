"""The replicas of a Service: which addresses count, and what a request sees of pods that come and go."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
from unittest import mock

import aiohttp
import pytest
from fakeapi import FakeApi
from fakeapi import until as until_true
from played_engines import PATIENT, Engines
from ports import free_ports, serving
from valve_kube.client import KubeClient
from valve_router import endpoints
from valve_router.command import main
from valve_router.endpoints import Endpoints, urls_of
from valve_router.replicas import KEPT_S, NobodyAlive, Replicas
from valve_router.settings import RouterSettings, Service, service_of


def endpoint(address, pod="", **conditions):
    found = {"addresses": [address], "conditions": conditions}
    return found | ({"targetRef": {"kind": "Pod", "uid": pod}} if pod else {})


def slice_of(name, *endpoints, ports=((None, 8000),), family="IPv4", version=1):
    """As an API server sends it."""
    return {
        "metadata": {"name": name, "namespace": "serving", "resourceVersion": str(version)},
        "addressType": family,
        "endpoints": list(endpoints) or None,
        "ports": [{"name": key, "port": number, "protocol": "TCP"} for key, number in ports],
    }


CASES = {
    "ready": (
        [slice_of("a", endpoint("10.0.0.1", ready=True), endpoint("10.0.0.2", ready=False))],
        "",
        ["10.0.0.1:8000"],
    ),
    "says nothing": ([slice_of("a", endpoint("10.0.0.1"))], "", ["10.0.0.1:8000"]),
    "none": ([slice_of("a")], "", []),
    "ends": ([slice_of("a", endpoint("10.0.0.1", ready=False, serving=True, terminating=True))], "", []),
    "two slices": (
        [slice_of("b", endpoint("10.0.0.2")), slice_of("a", endpoint("10.0.0.1"), endpoint("10.0.0.2"))],
        "",
        ["10.0.0.1:8000", "10.0.0.2:8000"],
    ),
    "dual stack": (
        [slice_of("b", endpoint("fd00::1", "p"), family="IPv6"), slice_of("a", endpoint("10.0.0.1", "p"))],
        "",
        ["10.0.0.1:8000"],
    ),
    "IPv6": ([slice_of("b", endpoint("fd00::1", "p"), family="IPv6")], "", ["[fd00::1]:8000"]),
    "names": ([slice_of("b", endpoint("a.example"), family="FQDN")], "", []),
    "by name": ([slice_of("a", endpoint("10.0.0.1"), ports=(("http", 1), ("metrics", 2)))], "http", ["10.0.0.1:1"]),
    "by number": ([slice_of("a", endpoint("10.0.0.1"), ports=(("http", 1), ("metrics", 2)))], "2", ["10.0.0.1:2"]),
    "unclear": ([slice_of("a", endpoint("10.0.0.1"), ports=(("http", 1), ("metrics", 2)))], "", []),
    "two versions": (
        [
            slice_of("a", endpoint("10.0.0.1"), ports=(("http", 1),)),
            slice_of("b", endpoint("10.0.0.2"), ports=(("http", 2),)),
        ],
        "http",
        ["10.0.0.1:1", "10.0.0.2:2"],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_request_never_goes_to_an_address_that_is_not_ready_or_twice_the_same_pod(case):
    slices, port, wanted = CASES[case]

    assert list(urls_of(slices, port)) == [f"http://{one}" for one in wanted]


def alone(test):
    @functools.wraps(test)
    def run():
        asyncio.run(test())

    return run


def event(kind, item):
    return {"type": kind, "object": item}


@alone
async def test_pods_that_come_and_go_are_heard_of_and_a_stream_that_breaks_loses_none():
    api = FakeApi()
    first = slice_of("a", endpoint("10.0.0.1"))
    api.items = [first]
    api.watches = [
        [event("ADDED", slice_of("b", endpoint("10.0.0.2"), version=2)), "hang up"],
        [
            event("MODIFIED", slice_of("a", endpoint("10.0.0.3"), version=3)),
            event("DELETED", slice_of("b", version=4)),
            None,
        ],
    ]
    told = []
    async with api as access:
        with contextlib.closing(KubeClient(access)) as client:
            task = asyncio.create_task(Endpoints(client, Service(namespace="serving", name="chat"), told.append).run())
            await until_true(lambda: len(told) == 4)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    numbers = [[url[len("http://10.0.0.") : -len(":8000")] for url in urls] for urls in told]
    assert numbers == [["1"], ["1", "2"], ["2", "3"], ["3"]]
    path, query = api.seen[0]
    assert path == "GET /apis/discovery.k8s.io/v1/namespaces/serving/endpointslices"
    assert query["labelSelector"] == "kubernetes.io/service-name=chat"


def test_a_request_under_way_never_hurts_when_its_pod_leaves_and_who_stays_is_known():
    known = Replicas(RouterSettings(service=Service(namespace="a", name="b")), lambda: 1.0)
    with pytest.raises(NobodyAlive):
        known.send("")
    known.follow({"http://a:1": "a", "http://b:1": "b"})
    sent = [known.send("") for _ in range(4)]
    stays = known.find("http://b:1")
    before = stays.under_way

    known.follow({"http://b:1": "b", "http://c:1": "c"})

    assert known.find("http://b:1") is stays
    assert stays.under_way == before
    for one in sent:
        known.ended(one, is_served=True, has_failed=False)
    assert sum(one.served for one in known.all) == before
    known.follow({"http://a:1": "another"})
    (back,) = known.all
    assert (back.served, back.name) == (0, "3")  # another process under an old address


def test_a_pod_that_was_not_ready_for_a_while_never_comes_back_as_an_empty_one_that_takes_requests():
    now = [1.0]
    known = Replicas(RouterSettings(service=Service(namespace="a", name="b")), lambda: now[0])
    pods = {"http://a:1": "a", "http://b:1": "b"}
    known.follow(pods)
    a, b = known.all
    a.is_drained = True
    sent = [known.send("") for _ in range(50)]
    assert b.under_way == 50

    known.follow({})
    now[0] += 3600.0
    known.follow({})
    known.follow(pods)

    assert (known.all[0] is a, known.all[1] is b, a.is_drained, b.under_way) == (True, True, True, 50)
    for one in sent:
        known.ended(one, is_served=True, has_failed=False)
    a.is_drained = False
    known.follow({})
    now[0] += KEPT_S
    known.follow({})
    assert known._left == []  # nothing is kept for good


@alone
async def test_a_service_that_is_not_there_is_never_waited_for_in_silence():
    api = FakeApi()
    api.items = []
    api.watches = [[None]]
    with mock.patch.object(endpoints.log, "warning") as warned:
        async with api as access:
            with contextlib.closing(KubeClient(access)) as client:
                service = Service(namespace="serving", name="chta")
                task = asyncio.create_task(Endpoints(client, service, lambda urls: None).run())
                await until_true(lambda: warned.called)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    assert warned.call_args.args[1:] == ("serving", "chta")


@alone
async def test_the_router_answers_from_the_pods_that_are_ready_now():
    own, *ports = free_ports(3)
    engines = Engines(ports, 0.0)
    api = FakeApi()
    gone, stays = ports
    api.items = [slice_of("a", endpoint("127.0.0.1", "a"), ports=((None, gone),))]
    api.watches = [
        [
            event("ADDED", slice_of("b", endpoint("127.0.0.1", "b"), ports=((None, stays),), version=2)),
            event("MODIFIED", slice_of("a", endpoint("127.0.0.1", "a", ready=False), ports=((None, gone),), version=3)),
            None,
        ]
    ]
    settings = RouterSettings(service=service_of("serving/chat"), port=own, **PATIENT)
    url = f"http://127.0.0.1:{settings.port}"
    try:
        async with api as access, aiohttp.ClientSession() as client, serving(settings, access=access):
            for _ in range(10_000):  # the engine may be slow to start
                async with client.get(f"{url}/route/status") as answer:
                    seen = {one["url"]: one["state"] for one in (await answer.json())["replicas"]}
                if seen == {f"http://127.0.0.1:{stays}": "serving"}:
                    async with client.post(f"{url}/v1/completions", json={"model": "m", "prompt": "hi"}) as answer:
                        if answer.status == 200:
                            break
                await asyncio.sleep(0.02)
            assert (answer.status, answer.headers["x-valve-replica"]) == (200, "1")
    finally:
        engines.end()


def test_a_router_whose_port_is_taken_says_so_and_nobody_waits_for_it():
    async def run():
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            with pytest.raises(OSError, match="address"):
                async with serving(RouterSettings(replicas=("http://a:1",), port=taken.getsockname()[1])):
                    pass

    asyncio.run(run())


@pytest.mark.parametrize("text", ["chat", "a/b/c", "A/b", "a/b:", "a/b:x y", "/b", "a/-b"])
def test_a_service_that_cannot_be_is_refused_by_name(text, capsys):
    assert main(["serve", "--service", text]) == 2
    assert f"--service {text}" in capsys.readouterr().err


def test_replicas_and_a_service_are_never_mixed(capsys):
    assert main(["serve", "--service", "a/b", "--replica", "http://a:1"]) == 2
    assert "not both" in capsys.readouterr().err
