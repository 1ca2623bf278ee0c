"""The endpoint picker behind a real Envoy: no request goes anywhere else than was chosen, none is lost, none is cut."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace

import aiohttp
import gateway
import grpc
import pytest
from envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingRequest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from played_engines import PATIENT, AskedRouter, Engines
from ports import free_ports, serving
from valve_router import picker
from valve_router.command import main
from valve_router.counts import Counts
from valve_router.picker import SERVICE, GatewayDoor, Health, Picker
from valve_router.prompt import READ_BYTES
from valve_router.replicas import Replicas
from valve_router.settings import RouterSettings, Service

needs_envoy = pytest.mark.skipif(gateway.envoy() is None, reason="no Envoy; make foreign installs one")


class Picked(AskedRouter):
    """A gateway, the picker it asks, the engines, and a client."""

    async def until(self, condition, what):
        for _ in range(10_000):
            status = await self.status()
            if condition(status):
                return status
            await asyncio.sleep(0.02)
        raise AssertionError(f"never: {what}: {status}")

    async def until_quiet(self):
        return await self.until(lambda found: not sum(one["under_way"] for one in found["replicas"]), "nothing runs")

    def by(self, answer):
        """The port of the replica that the picker says it was."""
        return str(self.engines.ports[int(answer.headers["x-valve-replica"])])


@contextlib.asynccontextmanager
async def picked(folder, count=2, door=None, gate=lambda ports: {}, **more):
    """`gate`: how the gateway is set up, by the ports of the engines."""
    own, door_port, *ports = free_ports(2 + count)
    engines = Engines(ports, 0.0)
    settings = RouterSettings(replicas=engines.urls, port=own, **{**PATIENT, **more})
    door = replace(door or GatewayDoor(), port=door_port)
    try:
        async with aiohttp.ClientSession() as client:
            await engines.until_well(client)
            async with serving(settings, picker.serve, door=door):
                started = gateway.gateway(folder, door_port, ports, **gate(ports))
                url = await asyncio.to_thread(started.__enter__)
                try:
                    yield Picked(url, engines, settings, client)
                finally:
                    started.__exit__(None, None, None)
    finally:
        engines.end()


BODY_MODES = pytest.mark.parametrize(
    ("asked", "answered"),
    [
        ("FULL_DUPLEX_STREAMED", "FULL_DUPLEX_STREAMED"),
        ("BUFFERED", "STREAMED"),
        ("STREAMED", "STREAMED"),
        ("NONE", "NONE"),
    ],
)


def streamed(port, prompt, count):
    return "".join(f"data: {port}:{prompt}:{i}\n\n" for i in range(count)) + "data: [DONE]\n\n"


@needs_envoy
@BODY_MODES
def test_an_answer_never_comes_from_another_replica_than_was_chosen(tmp_path, asked, answered):
    async def run():
        async with picked(tmp_path, count=3, gate=lambda ports: {"asked": asked, "answered": answered}) as there:
            wrong = {"x-gateway-destination-endpoint": "127.0.0.1:1"}  # a client's own word counts for nothing
            for index in range(12):
                body = {"prompt": f"p{index}", "max_tokens": 20, "stream": True}
                async with there.post(body, headers=wrong) as answer:
                    assert answer.status == 200
                    assert await answer.text() == streamed(there.by(answer), f"p{index}", 20)
            async with there.client.get(f"{there.url}/v1/models") as answer:
                assert answer.status == 200
                await answer.read()
            status = await there.until_quiet()
            assert status["requests"] == {"200": 13}
            assert sum(one["served"] for one in status["replicas"]) == 13

    asyncio.run(run())


@needs_envoy
def test_a_dead_replica_never_loses_a_request_that_had_not_begun(tmp_path):
    async def run():
        async with picked(tmp_path, health_s=60.0) as there:  # the picker does not hear of it
            there.engines.processes[0].kill()
            there.engines.processes[0].wait()
            for _ in range(6):
                async with there.post({"prompt": "a", "max_tokens": 3, "stream": True}) as answer:
                    assert answer.status == 200
                    assert await answer.text() == streamed(there.engines.ports[1], "a", 3)
                    assert there.by(answer) == str(there.engines.ports[1])
            status = await there.until_quiet()
            assert [one["served"] for one in status["replicas"]] == [0, 6]
            assert status["retries"] == status["replicas"][0]["failed"] > 0

    asyncio.run(run())


@needs_envoy
def test_a_full_fleet_never_queues_in_the_picker(tmp_path):
    async def run():
        async with picked(tmp_path, open_per_replica=1) as there:
            slow = {"prompt": "a", "max_tokens": 2, "stream": True, "piece_s": 3600}
            async with contextlib.AsyncExitStack() as open_ones:
                for _ in range(2):
                    assert (await open_ones.enter_async_context(there.post(slow))).status == 200
                async with there.post({"prompt": "b"}) as answer:
                    assert answer.status == 429
                    assert answer.headers["Retry-After"] == "1"
                    assert (await answer.json())["error"]["message"] == "every replica is full"
            await there.until_quiet()  # their clients hung up
            assert (await there.whole({"prompt": "b"})).status == 200
            status = await there.until_quiet()
            assert status["requests"] == {"200": 1, "429": 1, "499": 2}

    asyncio.run(run())


@needs_envoy
def test_a_request_that_nobody_can_take_never_waits(tmp_path):
    async def run():
        async with picked(tmp_path) as there:
            for process in there.engines.processes:
                process.kill()
            await there.until(lambda found: all(one["state"] == "away" for one in found["replicas"]), "both are away")
            async with there.post({"prompt": "b"}) as answer:
                assert answer.status == 503
                assert (await answer.json())["error"]["message"] == "no replica answers"

    asyncio.run(run())


@needs_envoy
@pytest.mark.parametrize("index", [0, 1])
def test_the_gateways_subset_is_never_left(tmp_path, index):
    async def run():
        def only(ports):
            return {"subset": [f"127.0.0.1:{ports[index]}"]}

        async with picked(tmp_path, gate=only) as there:
            for _ in range(4):
                async with there.post({"prompt": "b"}) as answer:
                    assert (await answer.json())["from"] == str(there.engines.ports[index])
            there.engines.processes[index].kill()
            await there.until(lambda found: found["replicas"][index]["state"] == "away", "it is away")
            assert (await there.whole({"prompt": "b"})).status == 503  # the other one lives, and is not allowed

    asyncio.run(run())


@needs_envoy
def test_a_body_too_long_to_read_is_never_cut(tmp_path):
    async def run():
        async with picked(tmp_path) as there:
            prompt = "long " * (READ_BYTES // 2)
            async with there.post({"prompt": prompt}) as answer:
                assert (await answer.json())["text"] == prompt

    asyncio.run(run())


@needs_envoy
@pytest.mark.parametrize(("mode", "status"), [("BUFFERED", 200), ("STREAMED", 200), ("FULL_DUPLEX_STREAMED", 500)])
def test_a_dead_picker_never_stops_requests_where_the_gateway_can_go_on(tmp_path, mode, status):
    """Envoy 1.40 cannot go on in the mode that gateways use, whatever `failure_mode_allow` says (docs/router.md)."""

    def gate(ports):
        return {"allow": True, "picker": free_ports(1)[0], "asked": mode, "answered": mode}

    async def run():
        async with picked(tmp_path, gate=gate) as there:
            assert (await there.whole({"prompt": "b"})).status == status

    asyncio.run(run())


@needs_envoy
@pytest.mark.parametrize("tls", [True, False])
def test_a_picker_with_tls_never_answers_a_gateway_without(tmp_path, tls):
    def gate(ports):
        return {"tls": tls}

    async def run():
        door = GatewayDoor(is_self_signed=True)
        async with picked(tmp_path, door=door, gate=gate) as there:
            assert ((await there.whole({"prompt": "b"})).status == 200) == tls

    asyncio.run(run())


@needs_envoy
@BODY_MODES
def test_an_answer_whose_place_was_freed_is_never_cut(tmp_path, asked, answered):
    """The picker ends its stream with the gateway after so long a silence; the request goes on without it."""

    async def run():
        modes = {"asked": asked, "answered": answered}
        async with (
            picked(tmp_path, count=1, silent_s=0.2, gate=lambda ports: modes) as there,
            contextlib.AsyncExitStack() as open_ones,
        ):
            body = {"prompt": "a", "held": True}
            asking = asyncio.create_task(open_ones.enter_async_context(there.post(body)))
            status = await there.until(lambda found: found["requests"] == {"499": 1}, "the place is free")
            assert status["replicas"][0]["under_way"] == 0
            assert not asking.done()
            async with there.client.post(f"{there.engines.urls[0]}/release"):
                answer = await asking
            assert answer.status == 200
            assert (await answer.json())["text"] == "a"

    asyncio.run(run())


HEADERS = ProcessingRequest(request_headers={})
WHOLE = ProcessingRequest(request_headers={"end_of_stream": True})


@pytest.mark.parametrize(
    ("said", "limit", "answers", "counted"),
    [
        ([], {"stuck_s": 0.05}, 0, {}),
        ([HEADERS], {"stuck_s": 0.05}, 1, {"408": 1}),
        ([WHOLE], {"silent_s": 0.05}, 1, {"499": 1}),
        ([WHOLE, ProcessingRequest(response_headers={})], {"silent_s": 0.05}, 2, {"499": 1}),
    ],
    ids=["nothing", "a request without its end", "no answer", "an answer that stops"],
)
def test_a_stream_that_says_nothing_more_never_keeps_its_place(said, limit, answers, counted):
    """It counted against the streams and the replica's requests for as long as whoever opened it liked."""

    settings = RouterSettings(replicas=("http://127.0.0.1:9",), **limit)
    replicas, counts = Replicas(settings, lambda: 0.0), Counts()

    async def asking():
        for one in said:  # without a pause, so that no machine is too slow for what is to come in time
            yield one
        await asyncio.Event().wait()  # and never ends

    async def run():
        return [one async for one in Picker(settings, replicas, counts, None).Process(asking(), None)]

    assert len(asyncio.run(run())) == answers
    assert {str(status): count for status, count in counts.requests.items()} == counted
    assert replicas.all[0].under_way == 0


def test_a_body_in_single_bytes_never_holds_a_place_for_longer():
    async def run():
        settings = RouterSettings(replicas=("http://127.0.0.1:9",), stuck_s=0.2)
        replicas = Replicas(settings, lambda: 0.0)

        async def dripping():
            yield HEADERS
            while True:
                yield ProcessingRequest(request_body={"body": b"x"})
                await asyncio.sleep(0.01)

        answers = [one async for one in Picker(settings, replicas, Counts(), None).Process(dripping(), None)]
        assert [one.immediate_response.status.code for one in answers] == [408]

    asyncio.run(run())


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--grpc", "0.0.0.0:9002"], "others can connect there"),
        (["--grpc", "9002"], "--grpc 9002: not HOST:PORT"),
        (["--grpc", "0.0.0.0:9002", "--tls-certificate", "c"], "needs --tls-key"),
        (["--tls-self-signed", "--tls-certificate", "c", "--tls-key", "k"], "not with"),
        (["--client-ca", "a"], "only with --tls-certificate"),
        (["--listen", "0.0.0.0:8100"], "others can connect there"),
    ],
)
def test_a_picker_is_never_open_to_others_by_accident(capsys, arguments, says):
    assert main(["pick", "--replica", "http://127.0.0.1:1", *arguments]) == 2
    assert says in capsys.readouterr().err


def test_a_picker_is_never_ready_before_it_knows_its_replicas():
    replicas = Replicas(RouterSettings(service=Service(namespace="serving", name="chat")), lambda: 0.0)

    async def asked(stub, name):
        answer = await stub.Check(health_pb2.HealthCheckRequest(service=name))
        return answer.status == health_pb2.HealthCheckResponse.SERVING

    async def run():
        server = grpc.aio.server()
        health_pb2_grpc.add_HealthServicer_to_server(Health(replicas), server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            assert [await asked(stub, name) for name in ("liveness", "readiness", SERVICE, "")] == [
                True,
                False,
                False,
                False,
            ]
            replicas.follow({})
            assert await asked(stub, "readiness")
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await asked(stub, "another")
            assert error.value.code() == grpc.StatusCode.NOT_FOUND
        await server.stop(None)

    asyncio.run(run())
