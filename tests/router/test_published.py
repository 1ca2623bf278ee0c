"""Published adapters before engines that restart without them: none is asked of who lost it, and each answer's name is
that of the version that it came from."""

from __future__ import annotations

import asyncio
import contextlib
import json

import aiohttp
import pytest
from played_engines import PATIENT, Engines
from ports import free_ports, serving
from valve_router import checkups, prompt
from valve_router.checkups import MODELS_BYTES
from valve_router.listing import listing_of
from valve_router.prompt import READ_BYTES
from valve_router.settings import RouterSettings


class Published:
    def __init__(self, client, url, engines):
        self.client, self.url, self.engines = client, url, engines

    async def ask(self, model, **more):
        """Status, and the model that the answer names."""
        asked = {"model": model, "prompt": "p", **more}
        async with self.client.post(f"{self.url}/v1/completions", json=asked) as answer:
            said = await answer.json(content_type=None)
            self.headers = answer.headers
            return answer.status, said.get("model")

    async def of(self, index, path, body=None):
        url = f"{self.engines.urls[index]}/{path}"
        async with (
            aiohttp.ClientSession() as client,
            client.request("POST" if body else "GET", url, json=body) as answer,
        ):
            assert answer.status == 200
            return await answer.text()

    async def load(self, index, name):
        before = "" if "sglang" in self.engines.flags else "v1/"
        await self.of(index, f"{before}load_lora_adapter", {"lora_name": name, "lora_path": f"/adapters/{name}"})

    async def unload(self, index, name):
        await self.of(index, "v1/unload_lora_adapter", {"lora_name": name})

    async def played(self, index):
        return json.loads(await self.of(index, "played"))

    async def until_asked(self, model, version):
        for _ in range(10_000):
            if await self.ask(model) == (200, version):
                return
            await asyncio.sleep(0.02)
        raise AssertionError(f"{model} never is {version}")

    async def until(self, condition, what):
        for _ in range(10_000):
            if await condition():
                return
            await asyncio.sleep(0.02)
        raise AssertionError(f"never: {what}")

    async def until_looked(self, index):
        """A look has begun since, and one after it: the first one is taken."""
        before = (await self.played(index))["looks"]

        async def has_looked():
            return (await self.played(index))["looks"] >= before + 2

        await self.until(has_looked, f"engine {index} is looked at")

    async def until_first_looks(self):
        """The router looks at each engine as it starts."""

        async def were_looked_at():
            return all([(await self.played(index))["looks"] for index in range(len(self.engines.ports))])

        await self.until(were_looked_at, "every engine is looked at")

    async def until_state(self, index, state):
        async def is_so():
            async with self.client.get(f"{self.url}/route/status") as answer:
                return (await answer.json())["replicas"][index]["state"] == state

        await self.until(is_so, f"replica {index} is {state}")

    def kill(self, index):
        self.engines.processes[index].kill()
        self.engines.processes[index].wait()

    async def start(self, index):
        self.engines.processes[index] = self.engines.start(self.engines.ports[index])
        await self.engines.until_well(self.client)


@contextlib.asynccontextmanager
async def routed(*flags, count=2, **more):
    own, *ports = free_ports(1 + count)
    engines = Engines(ports, 0.0, *flags)
    settings = RouterSettings(replicas=engines.urls, port=own, **{**PATIENT, **more})
    try:
        async with aiohttp.ClientSession() as client:
            await engines.until_well(client)
            async with serving(settings):
                yield Published(client, f"http://127.0.0.1:{own}", engines)
    finally:
        engines.end()


def test_a_published_version_is_never_behind_the_name_for_the_newest():
    async def run():
        async with routed(newest=("chat",)) as there:
            assert await there.ask("chat") == (200, "chat")  # there is none
            for version in ("chat-v9", "chat-v10"):
                for index in range(2):
                    await there.load(index, version)
                await there.until_asked("chat", version)
            assert await there.ask("chat-v9") == (200, "chat-v9")
            assert await there.ask("base") == (200, "base")

    asyncio.run(run())


def test_a_name_that_the_operator_did_not_give_is_never_changed():
    async def run():
        async with routed() as there:
            await there.load(0, "chat-v1")
            assert [await there.ask("chat") for _ in range(4)] == [(200, "chat")] * 4

    asyncio.run(run())


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_an_adapter_is_never_asked_of_a_replica_that_has_it_not(kind):
    async def run():
        async with routed("--strict", "--kind", kind, count=3, newest=("chat",)) as there:
            await there.load(1, "chat-v1")
            asked = "base:chat-v1" if kind == "sglang" else "chat-v1"
            await there.until_asked("chat", asked)
            for model in ("chat", "chat-v1", asked) * 4:
                assert await there.ask(model) == (200, asked)
            assert {each for index in (0, 2) for each in (await there.played(index))["models"]} <= {"chat"}

    asyncio.run(run())


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_an_engine_that_restarts_without_its_adapters_never_answers_that_there_is_none(kind):
    async def run():
        async with routed("--strict", "--kind", kind, count=1, newest=("chat",)) as there:
            asked = "base:chat-v2" if kind == "sglang" else "chat-v2"
            await there.load(0, "chat-v1")
            await there.load(0, "chat-v2")
            await there.until_asked("chat", asked)
            there.kill(0)
            await there.until_state(0, "away")
            await there.start(0)
            seen = set()

            async def is_back():
                seen.add(await there.ask("chat"))
                assert seen <= {(503, None), (200, asked)}
                return (200, asked) in seen

            await there.until(is_back, "the adapter is given again")
            await there.until_asked("chat-v1", asked.replace("2", "1"))
            assert (await there.played(0))["loaded"] == ["chat-v2", "chat-v1"]  # the newest first

    asyncio.run(run())


def test_a_loss_that_nobody_has_seen_yet_costs_no_request_while_another_replica_has_it():
    async def run():
        async with routed("--strict", newest=("chat",), health_s=3600.0) as there:
            await there.until_first_looks()
            for index in range(2):
                await there.load(index, "chat-v1")
            await there.until_asked("chat", "chat-v1")
            for index in range(2):  # before the router looks again
                await there.unload(index, "chat-v1")
                assert await there.ask("chat") == ((200, "chat-v1") if index == 0 else (503, None))
            assert there.headers["Retry-After"] == "1"

    asyncio.run(run())


def test_a_version_that_somebody_unloaded_everywhere_is_never_said_to_come_back():
    async def run():
        async with routed("--strict", newest=("chat",), health_s=3600.0) as there:
            await there.until_first_looks()
            for index in range(2):
                await there.load(index, "chat-v1")
                await there.load(index, "chat-v2")
            await there.until_asked("chat", "chat-v2")  # now they are published
            for index in range(2):
                await there.unload(index, "chat-v1")
            assert (await there.ask("chat-v1"))[0] == 404
            assert await there.ask("chat") == (200, "chat-v2")

    asyncio.run(run())


def test_a_version_that_goes_between_the_choice_and_the_answer_is_never_an_error():
    async def run():
        async with routed("--strict", count=1, newest=("chat",), health_s=3600.0) as there:
            await there.load(0, "chat-v1")
            await there.until_asked("chat", "chat-v1")
            await there.load(0, "chat-v2")
            await there.unload(0, "chat-v1")
            assert await there.ask("chat") == (200, "chat-v2")
            played = await there.played(0)
            assert played["models"][-2:] == ["chat-v1", "chat-v2"]

    asyncio.run(run())


def test_what_was_published_just_now_is_never_unknown():
    async def run():
        async with routed("--strict", count=3, health_s=3600.0) as there:
            assert (await there.ask("chat-v1"))[0] == 404
            await there.load(2, "chat-v1")
            assert await there.ask("chat-v1") == (200, "chat-v1")

    asyncio.run(run())


@pytest.mark.parametrize("listing", [200, 500])
def test_a_clients_own_mistake_is_never_called_the_fleets(listing):
    async def run():
        async with routed("--strict", count=1, newest=("chat",)) as there:
            await there.load(0, "chat-v1")
            await there.until_asked("chat", "chat-v1")
            await there.of(0, "play", {"listing": listing})
            begun = (await there.played(0))["begun"]
            assert (await there.ask("chat", status=400))[0] == 400
            assert (await there.ask("nothing"))[0] == 404
            assert (await there.played(0))["begun"] == begun + 2  # nothing was tried twice

    asyncio.run(run())


def test_an_adapter_is_never_given_to_another_base():
    async def run():
        async with routed("--strict", newest=("chat",)) as there:
            for index in range(2):
                await there.load(index, "chat-v1")
            await there.until_asked("chat", "chat-v1")
            there.kill(0)
            await there.until_state(0, "away")
            there.engines.flags += ("--base", "other")
            await there.start(0)
            await there.until_state(0, "serving")
            await there.until_looked(0)
            assert (await there.played(0))["loaded"] == []
            assert await there.ask("chat") == (200, "chat-v1")

    asyncio.run(run())


def test_an_engine_that_cannot_load_is_asked_again_and_not_without_end(monkeypatch):
    monkeypatch.setattr(checkups, "AGAIN_S", (0.05, 60.0))

    async def run():
        async with routed("--strict", "--loading", "500", count=1, newest=("chat",)) as there:
            await there.of(0, "play", {"loading": 200})
            await there.load(0, "chat-v1")
            await there.until_asked("chat", "chat-v1")
            there.kill(0)
            await there.until_state(0, "away")
            await there.start(0)

            async def is_refused_thrice():
                return (await there.played(0))["refused"] >= 3

            await there.until(is_refused_thrice, "it is asked again")
            assert await there.ask("chat") == (503, None)
            await there.of(0, "play", {"loading": 200})
            await there.until_asked("chat", "chat-v1")
            assert (await there.played(0))["refused"] < 12

    asyncio.run(run())


def test_a_long_body_is_never_read_for_its_model_where_nothing_is_published(monkeypatch):
    read = []
    model_of = prompt.model_of
    monkeypatch.setattr(prompt, "model_of", lambda body: read.append(len(body)) or model_of(body))
    long = "p" * (READ_BYTES + 1)

    async def run():
        async with routed(count=1, health_s=0.05) as there:
            assert await there.ask("chat", prompt=long) == (200, "chat")
            assert not read
            assert (await there.ask("chat", prompt=long, status=400))[0] == 400
            before = len(read)
            assert (await there.ask("chat", prompt=long, status=404))[0] == 404
            assert len(read) == before + 1
            await there.load(0, "chat-v1")
            assert (await there.ask("chat-v1", prompt=long, status=404))[0] == 404  # now it is known
            read.clear()
            assert await there.ask("chat-v1", prompt=long) == (200, "chat-v1")
            assert len(read) == 1

    asyncio.run(run())


@pytest.mark.parametrize(
    "answer", [b'{"data": [{"id": "a\xff"}]}', b"[" * 100_000, b"{}", b"", b" " * MODELS_BYTES + b'{"data": []}']
)
def test_a_replica_that_says_nonsense_of_its_models_keeps_those_it_had(answer):
    """And an answer without end is not read to its end."""

    class Content:
        def __init__(self):
            self.rest = answer

        async def read(self, count):
            piece, self.rest = self.rest[:count], self.rest[count:]
            return piece

    class Answers:
        status, content = 200, Content()

        async def __aenter__(self):
            return self

        async def __aexit__(self, *_):
            return None

    class Client:
        def get(self, url, **more):
            assert more["allow_redirects"] is False
            return Answers()

    settings = RouterSettings(replicas=("http://127.0.0.1:9",))
    replicas = checkups.Replicas(settings, lambda: 0.0)
    (replica,) = replicas.all
    replicas.listed(replica, listing_of(b'{"data": [{"id": "m"}, {"id": "a", "parent": "m"}]}', ()))
    assert asyncio.run(checkups.ModelLooks(Client(), settings, replicas).look(replica)) is False
    assert replica.adapters.asks("a") == "a"
