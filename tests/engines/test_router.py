"""Two and four real vLLM servers on CPU behind the router, and killed: streams are whole, and no request is lost."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import json
import os
import random
import signal
import subprocess
import time

import aiohttp
import pytest
from ports import free_ports, serving
from valve_router.settings import RouterSettings

pytestmark = [pytest.mark.engine, pytest.mark.timeout(2400)]
REQUESTS, TOKENS, OPEN = 240, 24, 8
MINUTES = float(os.environ.get("ROUTER_MINUTES", "10"))
BURST, QUIET_S = 24, 6.0  # requests of one burst, and the mean pause after it


class Servers:
    """vLLM processes, each of which can be killed and started anew under its port."""

    def __init__(self, engines, folder, count):
        self.own, *self.ports = free_ports(1 + count)
        self._env = engines.environment(VLLM_CPU_KVCACHE_SPACE="1", OMP_NUM_THREADS="1", VALVE_ROLE="")
        argv = [str(engines.python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(engines.model)]
        self._argv = [*argv, "--served-model-name", "tiny", "--enforce-eager", "--dtype", "float32"]
        self._argv += ["--max-model-len", "512", "--host", "127.0.0.1"]
        self._folder = folder
        self.processes = [self.start(port) for port in self.ports]

    @property
    def urls(self):
        return tuple(f"http://127.0.0.1:{port}" for port in self.ports)

    def start(self, port):
        with (self._folder / f"vllm-{port}.log").open("ab") as log:
            argv = [*self._argv, "--port", str(port)]
            return subprocess.Popen(argv, env=self._env, stdout=log, stderr=log, start_new_session=True)

    def kill(self, index):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.processes[index].pid, signal.SIGKILL)  # its engine is a process of its own
        self.processes[index].wait()

    def start_again(self, index):
        self.processes[index] = self.start(self.ports[index])


@pytest.fixture
def start(engines, tmp_path):
    with contextlib.ExitStack() as stack:

        def started(count):
            servers = Servers(engines, tmp_path, count)
            for index in range(count):
                stack.callback(servers.kill, index)
            return servers

        yield started


async def until_up(client, servers, index):
    url = servers.urls[index]
    while True:
        assert servers.processes[index].poll() is None, "vLLM has ended"
        try:
            async with client.get(f"{url}/health") as answer:
                if answer.status == 200:
                    return
        except aiohttp.ClientError:
            pass
        await asyncio.sleep(0.5)


async def ask(client, url, prompt):
    """Text of a streamed greedy answer, and whether it ended as it should."""
    body = {
        "model": "tiny",
        "prompt": prompt,
        "max_tokens": TOKENS,
        "temperature": 0,
        "stream": True,
        "ignore_eos": True,
    }
    text, is_whole = "", False
    async with client.post(f"{url}/v1/completions", json=body) as answer:
        assert answer.status == 200, await answer.text()
        async for line in answer.content:
            data = line.decode().removeprefix("data: ").strip()
            if data == "[DONE]":
                is_whole = True
            elif data:
                text += json.loads(data)["choices"][0]["text"]
    return text, is_whole


def test_kills_behind_the_router_never_lose_a_request_or_shorten_an_answer(start):
    servers = start(2)
    urls = servers.urls
    draw = random.Random(11)
    prompts = [" ".join(f"t{draw.randrange(3, 90)}" for _ in range(draw.randrange(4, 60))) for _ in range(REQUESTS)]

    async def run():
        settings = RouterSettings(replicas=urls, port=servers.own, health_s=0.2)
        url = f"http://127.0.0.1:{settings.port}"
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as client:
            for index in range(2):
                await until_up(client, servers, index)
            expected = {prompt: (await ask(client, urls[0], prompt))[0] for prompt in prompts[:40]}
            async with serving(settings):
                outcomes, places = [], asyncio.Semaphore(OPEN)

                async def one(prompt):
                    async with places:
                        try:
                            outcomes.append((prompt, *await ask(client, url, prompt)))
                        except aiohttp.ClientError:
                            outcomes.append((prompt, "", None))  # it was cut: the client knows

                tasks = [asyncio.create_task(one(prompt)) for prompt in prompts]
                while len(outcomes) < REQUESTS // 3:
                    await asyncio.sleep(0.05)
                servers.kill(0)
                await asyncio.gather(*tasks)
                async with client.get(f"{url}/route/status") as answer:
                    status = await answer.json()
        return outcomes, status, expected

    outcomes, status, expected = asyncio.run(run())
    cut = [prompt for prompt, _, is_whole in outcomes if is_whole is None]
    print(f"\n{REQUESTS} requests, {len(cut)} cut by the kill, {status['retries']} tried again; {status['replicas']}")

    assert len(outcomes) == REQUESTS
    assert all(is_whole is not False for _, _, is_whole in outcomes)
    assert len(cut) <= OPEN
    assert all(text == expected.get(prompt, text) for prompt, text, is_whole in outcomes if is_whole)
    assert status["replicas"][0]["state"] == "away"
    assert status["broken"] == len(cut)


@pytest.mark.parametrize("count", [2, 4])
def test_minutes_of_bursts_and_kills_never_lose_a_request_or_shorten_an_answer(start, count):
    """One server at a time is killed, when something is under way there, and is back before the next."""
    servers = start(count)
    draw = random.Random(count)
    prompts = [" ".join(f"t{draw.randrange(3, 90)}" for _ in range(draw.randrange(4, 60))) for _ in range(60)]
    outcomes, kills = collections.Counter(), 0

    async def run():
        nonlocal kills
        url = f"http://127.0.0.1:{servers.own}"
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as client:
            for index in range(count):
                await until_up(client, servers, index)
            expected = {prompt: (await ask(client, servers.urls[0], prompt))[0] for prompt in prompts}
            async with serving(RouterSettings(replicas=servers.urls, port=servers.own, health_s=0.2)):

                async def one():
                    prompt = draw.choice(prompts)
                    try:
                        text, is_whole = await ask(client, url, prompt)
                    except aiohttp.ClientError:
                        outcomes["cut"] += 1  # the client knows
                    else:
                        outcomes["whole" if is_whole and text == expected[prompt] else "wrong"] += 1

                async def status():
                    async with client.get(f"{url}/route/status") as answer:
                        return await answer.json()

                async def kill():
                    nonlocal kills
                    while True:
                        busy = [one for one in (await status())["replicas"] if one["under_way"]]
                        if busy:
                            index = servers.urls.index(draw.choice(busy)["url"])
                            servers.kill(index)
                            kills += 1
                            servers.start_again(index)
                            await until_up(client, servers, index)
                            while (await status())["replicas"][index]["state"] != "serving":
                                await asyncio.sleep(0.2)
                        await asyncio.sleep(0.2)

                killing, tasks = asyncio.create_task(kill()), []
                until = time.monotonic() + MINUTES * 60
                while time.monotonic() < until and not killing.done():
                    tasks += [asyncio.create_task(one()) for _ in range(draw.randrange(1, BURST))]
                    await asyncio.sleep(draw.expovariate(1 / QUIET_S))
                killing.cancel()
                await asyncio.gather(killing, return_exceptions=True)
                if not killing.cancelled():
                    killing.result()
                await asyncio.gather(*tasks)
                return len(tasks), await status()

    asked, status = asyncio.run(run())
    print(f"\n{count} servers, {asked} requests, {kills} kills, {dict(outcomes)}, {status['retries']} tried again")

    assert sum(outcomes.values()) == asked
    assert not outcomes["wrong"]
    assert outcomes["cut"] == status["broken"]
    assert outcomes["whole"]
    assert kills
