"""A name for the newest version: asked by that name, a replica answers as the newest version that it has."""

from __future__ import annotations

import asyncio
import contextlib
import json
from types import SimpleNamespace

import aiohttp
import pytest
from played_engines import Engines
from ports import free_ports, serving
from valve_router.newest import named, newest_of
from valve_router.server import look
from valve_router.settings import RouterSettings


@contextlib.asynccontextmanager
async def routed(**more):
    own, *ports = free_ports(3)
    engines = Engines(ports, 0.0)
    settings = RouterSettings(replicas=engines.urls, port=own, health_s=0.05, **more)
    try:
        async with aiohttp.ClientSession() as client:
            await engines.until_well(client)
            async with serving(settings):
                yield client, f"http://127.0.0.1:{own}", engines
    finally:
        engines.end()


async def answered(client, url, model):
    async with client.post(f"{url}/v1/completions", json={"model": model, "prompt": "p"}) as answer:
        return (await answer.json())["model"]


async def until_answered(client, url, model, version):
    for _ in range(2000):
        if await answered(client, url, model) == version:
            return
        await asyncio.sleep(0.02)
    raise AssertionError(f"{model} never is {version}")


async def load(client, engines, name):
    for url in engines.urls:
        async with client.post(f"{url}/v1/load_lora_adapter", json={"lora_name": name}) as answer:
            assert answer.status == 200


def test_a_published_version_is_never_behind_the_name_for_the_newest():
    async def run():
        async with routed(newest=("chat",)) as (client, url, engines):
            assert await answered(client, url, "chat") == "chat"  # there is none
            for version in ("chat-v9", "chat-v10"):
                await load(client, engines, version)
                await until_answered(client, url, "chat", version)
            assert await answered(client, url, "chat-v9") == "chat-v9"
            assert await answered(client, url, "base") == "base"

    asyncio.run(run())


def test_a_name_that_the_operator_did_not_give_is_never_changed():
    async def run():
        async with routed() as (client, url, engines):
            await load(client, engines, "chat-v1")
            assert [await answered(client, url, "chat") for _ in range(4)] == ["chat"] * 4

    asyncio.run(run())


def told(*names, owner="vllm", base="base"):
    loaded = [{"id": name, "parent": base} for name in names]
    return json.dumps({"data": [{"id": base, "owned_by": owner, "parent": None}, *loaded]}).encode()


@pytest.mark.parametrize(
    ("answer", "newest"),
    [
        (told(), {}),
        (told("chat-v2", "chat-v10", "chat-v9"), {"chat": "chat-v10"}),
        (told("chat-v2", owner="sglang"), {"chat": "base:chat-v2"}),
        (told("chat-v2", base="chat-v3"), {"chat": "chat-v2"}),
        (told("other-v3", "chat", "chat-v", "chat-v01", "a-chat-v4", "chat-v1-v2"), {}),
    ],
)
def test_the_newest_version_is_by_number_and_of_that_name_alone(answer, newest):
    assert newest_of(answer, ("chat",)) == newest


@pytest.mark.parametrize("answer", [b'{"data": [{"id": "a\xff"}]}', b"[" * 100_000, b"{}", b""])
def test_a_replica_that_says_nonsense_of_its_models_is_still_looked_after(answer):
    """And keeps the versions that it had."""

    class Answers:
        status = 200

        async def __aenter__(self):
            return self

        async def __aexit__(self, *_):
            return None

        async def read(self):
            return answer

    replica = SimpleNamespace(url="http://127.0.0.1:9", newest={"chat": "chat-v1"})
    client = SimpleNamespace(get=lambda *_, **__: Answers())
    asyncio.run(look(client, RouterSettings(replicas=(replica.url,), newest=("chat",)), replica, None))
    assert replica.newest == {"chat": "chat-v1"}


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b'{"model": 1}', b'{"prompt": "chat"}', b'{"model": "Chat"}', b"\xff", b"[" * 100_000]
)
def test_a_request_that_does_not_ask_for_it_goes_on_byte_by_byte(body):
    assert named(body, {"chat": "chat-v2"}) is body


def test_of_a_request_that_asks_for_it_nothing_else_is_changed():
    rest = b'"seed":12345678901234567890123,"temperature":1.10,"text":"\\u00e9 chat"'
    assert named(b'{"model": "chat",' + rest + b"}", {"chat": "chat-v2"}) == b'{"model":"chat-v2",' + rest + b"}"
