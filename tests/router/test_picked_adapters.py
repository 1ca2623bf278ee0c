"""Published adapters behind the endpoint picker: none is picked for what it has not, and a loss is never a client's."""

from __future__ import annotations

import asyncio
import contextlib
import json

import aiohttp
import pytest
from envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingRequest
from played_engines import PATIENT, Engines
from ports import free_ports
from valve_router.command import parser, settings_of
from valve_router.counts import Counts
from valve_router.exchange import CHOSEN, endpoint_of
from valve_router.picker import Picker
from valve_router.server import known
from valve_router.settings import RouterSettings


class Pool:
    def __init__(self, engines, replicas, picker):
        self.engines, self.replicas, self.picker = engines, replicas, picker

    async def pick(self, model, status="200"):
        """Whom the picker names first, or the status by which it refuses; and what it makes of the answer."""
        said = []

        async def messages():
            yield ProcessingRequest(request_headers={})
            body = json.dumps({"model": model, "prompt": "p"}).encode()
            yield ProcessingRequest(request_body={"body": body, "end_of_stream": True})
            head = ProcessingRequest(response_headers={"end_of_stream": True})
            head.response_headers.headers.headers.add(key=":status", raw_value=status.encode())
            yield head

        async for one in self.picker.Process(messages(), None):
            said.append(one)
        refused = [one.immediate_response.status.code for one in said if one.HasField("immediate_response")]
        named = [
            each.header.raw_value.decode()
            for one in said
            for each in one.request_headers.response.header_mutation.set_headers
            if each.header.key == CHOSEN
        ]
        return (named[0] if named else ""), (refused[0] if refused else 0)

    async def post(self, index, path, name):
        asked = {"lora_name": name, "lora_path": f"/adapters/{name}"}
        async with (
            aiohttp.ClientSession() as client,
            client.post(f"{self.engines.urls[index]}{path}", json=asked) as one,
        ):
            assert one.status == 200


@contextlib.asynccontextmanager
async def pooled(count=2, **more):
    engines = Engines(free_ports(count), 0.0, "--strict")
    settings = RouterSettings(replicas=engines.urls, **{**PATIENT, **more})
    try:
        async with aiohttp.ClientSession() as client:
            await engines.until_well(client)
        async with known(settings) as (_, replicas, _, looks):
            yield Pool(engines, replicas, Picker(settings, replicas, Counts(), looks))
    finally:
        engines.end()


async def nothing():
    pass


async def until(condition, what, meanwhile=nothing):
    for _ in range(10_000):
        if condition():
            return
        await meanwhile()
        await asyncio.sleep(0.02)
    raise AssertionError(f"never: {what}")


def test_an_adapter_is_never_picked_for_from_who_has_it_not_and_its_second_neither():
    async def run():
        async with pooled(3) as pool:
            await pool.post(2, "/v1/load_lora_adapter", "chat-v1")
            await pool.picker._looks.everybody()
            for _ in range(6):
                assert await pool.pick("chat-v1") == (endpoint_of(pool.replicas.all[2]), 0)
            assert len((await pool.pick("base"))[0].split(",")) == 2

    asyncio.run(run())


@pytest.mark.parametrize("is_lost", [True, False])
def test_a_lost_adapter_is_never_the_clients_fault_and_one_that_was_unloaded_is(is_lost):
    async def run():
        async with pooled(1, health_s=3600.0) as pool:
            await pool.post(0, "/v1/load_lora_adapter", "chat-v1")
            await pool.picker._looks.everybody()
            assert (await pool.pick("chat-v1", "400"))[1] == 0
            await pool.post(0, "/v1/unload_lora_adapter", "chat-v1")
            if is_lost:  # the engine had restarted
                pool.replicas.all[0].adapters.away()
            assert (await pool.pick("chat-v1", "404"))[1] == (503 if is_lost else 0)
            assert not sum(one.under_way for one in pool.replicas.all)

    asyncio.run(run())


def test_a_picker_gives_a_lost_adapter_again():
    async def run():
        async with pooled(1) as pool:
            await pool.post(0, "/v1/load_lora_adapter", "chat-v1")
            await pool.picker._looks.everybody()
            (replica,) = pool.replicas.all
            pool.engines.end()
            await until(lambda: not replica.is_alive, "the engine is seen to be away")
            pool.engines.processes = [pool.engines.start(pool.engines.ports[0])]
            refused = set()

            def is_back():
                return replica.is_alive and not replica.adapters.lost

            async def seen():
                refused.add((await pool.pick("chat-v1"))[1])

            await until(is_back, "the adapter is given again", seen)
            assert refused <= {503, 0}
            assert (await pool.pick("chat-v1")) == (endpoint_of(replica), 0)

    asyncio.run(run())


def test_a_picker_is_told_what_its_replicas_want_as_token(tmp_path):
    (tmp_path / "token").write_text("s3cret\n")
    arguments = parser().parse_args(
        ["pick", "--replica", "http://a:1", "--replica-token-file", str(tmp_path / "token")]
    )
    assert settings_of(arguments).replica_token == "s3cret"
