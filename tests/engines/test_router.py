"""Two real vLLM servers on CPU behind the router, one of which is killed: streams are whole, and no request is lost."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import subprocess

import aiohttp
import pytest
from ports import free_ports, serving
from valve_router.settings import Settings

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1200)]
REQUESTS, TOKENS, OPEN = 240, 24, 8


@pytest.fixture
def servers(engines, tmp_path):
    own, *ports = free_ports(3)
    env = engines.environment(VLLM_CPU_KVCACHE_SPACE="1", OMP_NUM_THREADS="1", VALVE_ROLE="")
    argv = [str(engines.python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(engines.model)]
    argv += ["--served-model-name", "tiny", "--enforce-eager", "--dtype", "float32", "--max-model-len", "512"]
    processes = []
    for port in ports:
        log = (tmp_path / f"vllm-{port}.log").open("wb")
        more = ["--host", "127.0.0.1", "--port", str(port)]
        processes.append(subprocess.Popen([*argv, *more], env=env, stdout=log, stderr=log, start_new_session=True))
    yield own, ports, processes
    for process in processes:
        process.kill()
        process.wait()


async def until_up(client, url, process):
    while True:
        assert process.poll() is None, "vLLM has ended"
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


def test_kills_behind_the_router_never_lose_a_request_or_shorten_an_answer(servers):
    own, ports, processes = servers
    urls = tuple(f"http://127.0.0.1:{port}" for port in ports)
    draw = random.Random(11)
    prompts = [" ".join(f"t{draw.randrange(3, 90)}" for _ in range(draw.randrange(4, 60))) for _ in range(REQUESTS)]

    async def run():
        settings = Settings(replicas=urls, port=own, health_s=0.2)
        url = f"http://127.0.0.1:{settings.port}"
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as client:
            for one, process in zip(urls, processes, strict=True):
                await until_up(client, one, process)
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
                processes[0].send_signal(signal.SIGKILL)
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
