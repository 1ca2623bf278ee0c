"""The router before engines that die, hang, refuse and stream: no request is lost that had not begun."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
from dataclasses import replace

import aiohttp
import pytest
from played_engines import PATIENT, AskedRouter, Engines
from ports import free_ports, serving
from valve_router.command import main
from valve_router.prompt import AskedBody
from valve_router.settings import RouterSettings
from yarl import URL


class Routed(AskedRouter):
    """A running router, its engines, and a client."""

    async def played(self, index):
        async with self.client.get(f"{self.engines.urls[index]}/played") as answer:
            return json.loads(await answer.text())

    async def until(self, condition, what):
        for _ in range(10_000):
            if await condition():
                return
            await asyncio.sleep(0.02)
        raise AssertionError(f"never: {what}")

    async def until_asked(self):
        """Nobody is away, and the first questions after their health are answered."""
        for index in range(len(self.engines.ports)):
            await self.until_state(index, "serving")

            async def is_asked(index=index):
                return (await self.played(index))["asked"] > 1

            await self.until(is_asked, f"replica {index} was asked")

    async def until_engine(self, index):
        async def answers():
            with contextlib.suppress(aiohttp.ClientError):
                async with aiohttp.ClientSession() as fresh, fresh.get(f"{self.engines.urls[index]}/played"):
                    return True
            return False

        await self.until(answers, f"engine {index} answers")

    async def until_state(self, index, state):
        async def is_so():
            return (await self.status())["replicas"][index]["state"] == state

        await self.until(is_so, f"replica {index} is {state}")


@contextlib.asynccontextmanager
async def routed(count=2, piece_s=0.0, headers=None, **more):
    own, *ports = free_ports(1 + count)
    engines = Engines(ports, piece_s)
    settings = RouterSettings(replicas=engines.urls, port=own, **{**PATIENT, **more})
    try:
        async with aiohttp.ClientSession(headers=headers) as client:
            await engines.until_well(client)
            async with serving(settings):
                yield Routed(f"http://127.0.0.1:{own}", engines, settings, client)
    finally:
        engines.end()


def test_an_answer_comes_whole_and_as_it_was_sent():
    async def run():
        async with routed() as router:
            async with router.post({"prompt": "a", "max_tokens": 40, "stream": True}) as answer:
                text = await answer.text()
                assert answer.headers["Content-Type"] == "text/event-stream"
            name = router.engines.ports[int(answer.headers["x-valve-replica"])]
            assert text == "".join(f"data: {name}:a:{i}\n\n" for i in range(40)) + "data: [DONE]\n\n"
            async with router.post({"prompt": "b"}) as answer:
                assert (await answer.json())["text"] == "b"
            async with router.post({"prompt": "c", "status": 422}) as answer:
                assert answer.status == 422
                assert await answer.json() == {"error": "played"}
            status = await router.status()
            assert status["requests"] == {"200": 2, "422": 1}
            assert sum(one["under_way"] for one in status["replicas"]) == 0

    asyncio.run(run())


def test_pieces_never_wait_for_the_end_of_the_answer():
    async def run():
        async with routed(1) as router:
            body = {"prompt": "a", "max_tokens": 2, "stream": True, "piece_s": 30}
            async with router.post(body) as answer:
                assert await answer.content.readany() == f"data: {router.engines.ports[0]}:a:0\n\n".encode()

    asyncio.run(run())


def test_a_request_that_had_not_begun_is_never_lost_when_its_replica_is_dead():
    async def run():
        async with routed(2, health_s=3600) as router:
            await router.until_asked()
            router.engines.processes[0].kill()
            router.engines.processes[0].wait()
            for number in range(20):
                assert (await router.whole({"prompt": str(number)})).status == 200
            status = await router.status()
            assert status["retries"] == 1  # it is known to be away from then on
            assert status["replicas"][0]["state"] == "away"

    asyncio.run(run())


def test_a_request_that_kills_its_reader_never_reaches_more_than_two_replicas():
    async def run():
        async with routed(4) as router:
            assert (await router.whole({"prompt": "a", "die": "before"})).status == 502

            def dead():
                return sum(process.poll() is not None for process in router.engines.processes)

            await router.until(lambda: has(dead()), "its first reader is dead")
            assert (await router.whole({"prompt": "b"})).status == 200
            assert dead() <= 2

    asyncio.run(run())


def test_a_request_that_replicas_refuse_never_makes_them_look_dead():
    async def run():
        async with routed(3, health_s=3600) as router:
            await router.until_asked()
            assert (await router.whole({"prompt": "a", "status": 503})).status == 503
            status = await router.status()
            assert [one["state"] for one in status["replicas"]] == ["serving"] * 3

    asyncio.run(run())


def test_a_single_replica_that_closed_an_old_connection_is_asked_again():
    async def run():
        async with routed(1, health_s=3600) as router:
            await router.until_asked()
            for _ in range(3):
                assert (await router.whole({"prompt": "a"})).status == 200
                router.engines.processes[0].kill()
                router.engines.processes[0].wait()
                router.engines.processes = [router.engines.start(router.engines.ports[0])]
                await router.until_engine(0)

    asyncio.run(run())


def test_kills_under_load_lose_no_request_and_break_only_answers_that_had_begun():
    async def run():
        async with routed(3, piece_s=0.005) as router:
            outcomes = []
            pause = asyncio.Semaphore(12)

            async def one(number):
                async with pause:
                    body = {"prompt": f"n{number}", "max_tokens": 5, "stream": True}
                    text = ""
                    try:
                        async with router.post(body) as answer:
                            status = answer.status
                            async for piece in answer.content.iter_any():
                                text += piece.decode()
                    except aiohttp.ClientError:
                        status = "broken"
                    outcomes.append((number, status, text))

            tasks = [asyncio.create_task(one(i)) for i in range(300)]
            for victim in (0, 1):
                await router.until(lambda v=victim: has(len(outcomes) >= 60 * (v + 1)), "enough are through")
                router.engines.processes[victim].send_signal(signal.SIGKILL)
            await asyncio.gather(*tasks)

            assert len(outcomes) == 300
            for number, status, text in outcomes:
                if status == 200:
                    assert text.endswith("[DONE]\n\n")
                    assert [line.split(":")[2] for line in text.split("\n\n")[:5]] == [f"n{number}"] * 5
                else:  # it had begun: the client was told by the end of the connection, not by a shorter answer
                    assert status == "broken"
                    assert not text.endswith("[DONE]\n\n")
            assert sum(status == 200 for _, status, _ in outcomes) >= 300 - 24
            assert sum(one["under_way"] for one in (await router.status())["replicas"]) == 0

    asyncio.run(run())


async def has(value):
    return value


def test_an_answer_that_its_replica_broke_off_never_looks_whole():
    async def run():
        async with routed(1) as router:
            async with router.post({"prompt": "a", "max_tokens": 9, "stream": True, "die": 3}) as answer:
                with pytest.raises(aiohttp.ClientError):
                    await answer.read()
            status = await router.status()
            assert status["broken"] == 1
            assert status["replicas"][0]["under_way"] == 0

    asyncio.run(run())


def test_a_client_that_hangs_up_ends_its_request_in_the_replica():
    async def run():
        async with routed(1) as router:
            answer = await router.post({"prompt": "a", "max_tokens": 5, "stream": True, "piece_s": 60})
            await answer.content.readany()
            answer.close()

            async def is_given_up():
                return (await router.played(0))["given_up"] == 1

            await router.until(is_given_up, "the engine sees it given up")

            async def is_free():
                return (await router.status())["replicas"][0]["under_way"] == 0

            await router.until(is_free, "its place is free")
            assert (await router.status())["replicas"][0]["failed"] == 0  # the replica did nothing wrong

    asyncio.run(run())


def test_overload_is_refused_at_once_with_a_time_to_come_back():
    async def run():
        async with routed(1, open_per_replica=1) as router:
            body = {"prompt": "a", "max_tokens": 1, "stream": True, "piece_s": 60}
            held = await router.post(body)
            await held.content.readany()
            async with router.post({"prompt": "b"}) as answer:
                assert answer.status == 429
                assert answer.headers["Retry-After"] == "1"
                assert (await answer.json())["error"]["code"] == "overloaded"
            held.close()

    asyncio.run(run())


def test_a_drained_replica_gets_nothing_more_and_ends_what_it_has():
    async def run():
        async with routed(2) as router:
            body = {"prompt": "a", "max_tokens": 1, "stream": True, "piece_s": 0.5}
            held = await router.post(body)
            index = int(held.headers["x-valve-replica"])
            drain = {"replica": str(index), "is_drained": True}
            async with router.client.post(f"{router.url}/route/drain", json=drain) as answer:
                assert answer.status == 200
            for _ in range(10):
                assert (await router.whole({"prompt": "a"})).headers["x-valve-replica"] != str(index)
            assert (await held.text()).endswith("[DONE]\n\n")
            for wrong in ({}, {"replica": "9", "is_drained": True}, [], {"replica": "0", "is_drained": "x"}):
                async with router.client.post(f"{router.url}/route/drain", json=wrong) as answer:
                    assert answer.status in (400, 404)

    asyncio.run(run())


def test_nobody_alive_is_said_and_a_replica_that_comes_back_serves_again():
    async def run():
        async with routed(1) as router:
            router.engines.end()
            await router.until_state(0, "away")
            assert (await router.whole({"prompt": "a"})).status == 503
            async with router.client.get(f"{router.url}/health") as answer:
                assert answer.status == 503
            router.engines.processes = [router.engines.start(router.engines.ports[0])]
            await router.until_state(0, "serving")
            assert (await router.whole({"prompt": "a"})).status == 200

    asyncio.run(run())


def test_without_the_token_nobody_gets_anything_and_no_replica_sees_it():
    async def run():
        async with routed(1, token="secret", replica_token="inner") as router:
            for path in ("v1/models", "route/status", "metrics"):
                async with router.client.get(f"{router.url}/{path}") as answer:
                    assert answer.status == 401
            wrong = {"Authorization": "Bearer secret2"}
            assert (await router.whole({"prompt": "a"}, headers=wrong)).status == 401
            right = {"Authorization": "Bearer secret"}
            assert (await router.whole({"prompt": "a"}, headers=right)).status == 200
            assert (await router.played(0))["headers"]["Authorization"] == "Bearer inner"
            drain = {"replica": "0", "is_drained": True}
            async with router.client.post(f"{router.url}/route/drain", json=drain, headers=right) as answer:
                assert answer.status == 403

    asyncio.run(run())


def test_a_client_never_acts_as_the_operator():
    async def run():
        async with routed(1, token="secret", operator_token="mine") as router:
            client, operator = ({"Authorization": f"Bearer {word}"} for word in ("secret", "mine"))
            drain = {"replica": "0", "is_drained": True}
            for headers, status in ((client, 401), (operator, 200)):
                async with router.client.post(f"{router.url}/route/drain", json=drain, headers=headers) as answer:
                    assert answer.status == status
            for headers, status in ((client, 401), (operator, 200)):
                async with router.client.get(f"{router.url}/metrics", headers=headers) as answer:
                    assert answer.status == status

    asyncio.run(run())


def test_a_page_in_a_browser_never_drains_a_replica():
    """It may post text to this machine, and no JSON."""

    async def run():
        async with routed(1) as router:
            words = '{"replica": "0", "is_drained": true}'
            async with router.client.post(f"{router.url}/route/drain", data=words) as answer:
                assert answer.status == 415

    asyncio.run(run())


def test_no_client_reaches_what_an_engine_offers_to_its_operator():
    async def run():
        async with routed(1) as router:
            for path in ("abort_request", "v1/../abort_request", "v1/load_lora_adapter", "played"):
                url = URL(f"{router.url}/{path}", encoded=True)
                async with router.client.post(url, json={"prompt": "a"}) as answer:
                    assert answer.status == 404
            assert (await router.played(0))["begun"] == 0

    asyncio.run(run())


def test_an_absolute_target_never_becomes_another_host():
    async def run():
        async with routed(1) as router:
            reader, writer = await asyncio.open_connection("127.0.0.1", router.settings.port)
            writer.write(b"GET http://elsewhere/v1/models HTTP/1.1\r\nHost: elsewhere\r\nConnection: close\r\n\r\n")
            assert b" 404 " in (await reader.read()).split(b"\r\n")[0]
            writer.close()
            status = await router.status()
            assert (status["retries"], status["replicas"][0]["state"]) == (0, "serving")

    asyncio.run(run())


def test_a_cookie_of_one_client_never_reaches_another_and_no_header_is_made_up():
    async def run():
        async with routed(1) as router:
            for name in ("first", "second"):
                async with aiohttp.ClientSession(skip_auto_headers=("Accept-Encoding", "User-Agent")) as client:
                    body = {"prompt": name}
                    async with client.post(f"{router.url}/v1/completions", json=body) as answer:
                        assert answer.cookies["session"].value == name
            seen = (await router.played(0))["headers"]
            assert not {"Cookie", "Accept-Encoding", "User-Agent"} & set(seen)

    asyncio.run(run())


def test_only_streamed_answers_teach_how_long_a_first_token_takes():
    async def run():
        async with routed(1) as router:
            for _ in range(3):
                assert (await router.whole({"prompt": "a"})).status == 200
            await router.whole({"prompt": "a", "status": 400})
            assert (await router.status())["replicas"][0]["prediction_error"] == 0
            await router.whole({"prompt": "a", "stream": True})
            assert (await router.status())["replicas"][0]["prediction_error"] > 0

    asyncio.run(run())


def test_prompts_with_the_same_beginning_meet_in_one_replica():
    async def run():
        async with routed(3) as router:
            long = "You are a helpful assistant of a bank. " * 300
            homes = set()
            for number in range(12):
                homes.add((await router.whole({"prompt": f"{long}{number}"})).headers["x-valve-replica"])
            assert len(homes) == 1

    asyncio.run(run())


def test_figures_are_there_for_prometheus():
    async def run():
        async with routed(1) as router:
            await router.whole({"prompt": "a"})
            async with router.client.get(f"{router.url}/metrics") as answer:
                text = await answer.text()
            assert 'valve_router_requests_total{status="200"} 1.0' in text
            assert f'valve_router_replica_alive{{replica="{router.engines.urls[0]}"}} 1.0' in text

    asyncio.run(run())


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt": ' + b"[" * 5000 + b"]" * 5000 + b"}",
        b'{"prompt": [' + b"1," * 400_000 + b"1]}",
        b'{"prompt": "' + b"a" * (2 << 20) + b'"}',
        b"",
        b"{",
        b"null",
        b"[]",
        b'{"prompt": {"a": 1}}',
        b'{"messages": 3}',
        b"\xff\xfe",
        b'{"prompt": "\\ud800"}',
    ],
)
def test_no_body_ever_breaks_the_router(body):
    assert len(AskedBody(body).prompt) < 100_000


def test_what_is_read_of_a_prompt_is_its_text():
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "hello"}, {"type": "image_url", "image_url": "x"}]},
    ]
    assert AskedBody(json.dumps({"messages": messages}).encode()).prompt == "system\nbe brief\nuser\nhello"
    assert AskedBody(b'{"prompt": ["a", "b"]}').prompt == "a\nb"
    assert len(AskedBody(json.dumps({"prompt": [1] * 1000}).encode()).prompt) >= 1000


def test_settings_that_make_no_sense_are_refused_by_name(tmp_path, capsys):
    good = RouterSettings(replicas=("http://a:1",))
    for more, word in [
        ({"replicas": ()}, "--replica"),
        ({"replicas": ("a:1",)}, "--replica a:1"),
        ({"replicas": ("http://a", "http://a")}, "twice"),
        ({"host": "0.0.0.0"}, "--token-file"),
        ({"port": 0}, "port 0"),
        ({"open_per_replica": 0}, "--open-per-replica"),
    ]:
        with pytest.raises(ValueError, match=word):
            replace(good, **more)
    assert main(["serve", "--replica", "http://a:1", "--listen", "0.0.0.0:80"]) == 2
    assert "--token-file" in capsys.readouterr().err
    empty = tmp_path / "token"
    empty.write_text("\n")
    assert main(["serve", "--replica", "http://a:1", "--token-file", str(empty)]) == 2
    assert main(["status", "--router", f"http://127.0.0.1:{free_ports(1)[0]}"]) == 1
    assert "no router answers" in capsys.readouterr().err
