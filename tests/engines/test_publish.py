"""An adapter that `valve tune` has trained is published to a real vLLM and a real SGLang on CPU while they decode."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
import subprocess
import time
import urllib.request
from pathlib import Path

import aiohttp
import pytest
from ports import free_ports, serving
from valve_router.settings import RouterSettings

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1200)]
HERE = Path(__file__).resolve().parent
LEARNT = 200  # words that the data count through
PROMPTS, TOKENS = [[10, 11, 12, 13], [40, 41], [150, 151, 152]], 12


class Tune:
    """`valve tune` in the engines' own environment, which has torch and transformers."""

    def __init__(self, engines, folder):
        self.engines, self.folder = engines, folder

    def __call__(self, *arguments):
        env = self.engines.environment(self.engines.tune, XDG_STATE_HOME=str(self.folder / "state"), VALVE_ROLE="")
        argv = [str(self.engines.python), "-m", "valve_tune.serve", *map(str, arguments)]
        done = subprocess.run(argv, env=env, cwd=self.folder, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr


@pytest.fixture(scope="module")
def tune(engines, tmp_path_factory):
    return Tune(engines, tmp_path_factory.mktemp("tune"))


@pytest.fixture(scope="module")
def adapter(engines, tune):
    """Trained to count, so that its answers are another's than the base's."""
    draw = random.Random(3)
    starts = [draw.randrange(3, LEARNT) for _ in range(40)]
    rows = [{"text": " ".join(f"t{3 + (start + place) % LEARNT}" for place in range(24))} for start in starts]
    (tune.folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = ["--max-steps", 30, "--max-length", 128, "--lora-r", 8, "--learning-rate", 1e-2]
    tune("run", "--model", engines.model, "--data", tune.folder / "train.jsonl", "--out", "mine", *arguments)
    return tune.folder / "mine"


def ask(url, path, body=None):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url + path, data=data, headers={"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.loads(answer.read() or b"{}")


def vllm(engines, port):
    env = engines.environment(
        VLLM_CPU_KVCACHE_SPACE="1", OMP_NUM_THREADS="1", VALVE_ROLE="", VLLM_ALLOW_RUNTIME_LORA_UPDATING="1"
    )
    argv = ["-m", "vllm.entrypoints.openai.api_server", "--model", engines.model, "--enforce-eager"]
    return env, [*argv, "--max-model-len", "512", "--max-loras", "4", "--port", port]


def sglang(engines, port):
    if not (engines.folder / "stubs").is_dir():
        pytest.skip("SGLang is not installed: make test-engines")
    paths = (engines.folder / "stubs", HERE / "sglang_lora")
    env = engines.environment(*paths, OMP_NUM_THREADS="1", VALVE_ROLE="", SGLANG_PLUGINS="none")
    argv = ["-m", "sglang.launch_server", "--model-path", engines.model, "--device", "cpu", "--disable-cuda-graph"]
    argv += ["--attention-backend", "torch_native", "--sampling-backend", "pytorch", "--max-total-tokens", "4096"]
    argv += ["--lora-backend", "torch_native", "--lora-target-modules", "all", "--max-loras-per-batch", "4"]
    return env, [*argv, "--port", port]


class Service:
    """An engine under one port; started again it has none of the adapters that it had."""

    def __init__(self, engines, tune, engine):
        (self.port,) = free_ports(1)
        self.url = f"http://127.0.0.1:{self.port}"
        self._env, argv = engine(engines, self.port)
        argv += ["--served-model-name", "tiny", "--dtype", "float32", "--enable-lora", "--max-lora-rank", "16"]
        self._argv = [str(each) for each in (engines.python, *argv, "--host", "127.0.0.1")]
        self._log = tune.folder / f"{engine.__name__}-{self.port}.log"
        self.start()

    def start(self):
        with self._log.open("ab") as out:
            self.process = subprocess.Popen(self._argv, env=self._env, stdout=out, stderr=out, start_new_session=True)
        while True:
            assert self.process.poll() is None, self._log.read_text()[-3000:]
            try:
                return answers(self.url, "tiny")
            except OSError:
                time.sleep(0.5)

    def kill(self):
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture(scope="module", params=[vllm, sglang], ids=lambda each: each.__name__)
def service(request, engines, tune):
    started = Service(engines, tune, request.param)
    try:
        yield started.url
    finally:
        started.kill()


def loaded(url):
    return {each["id"] for each in ask(url, "/v1/models")["data"]}


def answers(url, model):
    """The words of each answer; the tokenizer has one for each id, and none for the first three."""
    body = {"model": model, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    return [ask(url, "/v1/completions", body | {"prompt": prompt})["choices"][0]["text"].split() for prompt in PROMPTS]


def published(tune, adapter, service):
    """The model that clients ask for; the gap that it caused is printed."""
    said = tune("publish", adapter, "--to", service)
    (name,) = re.findall(rf"(?:vllm|sglang) at {service} answers as ((?:tiny:)?mine-v\d+);", said)
    (gaps,) = re.findall(r"longest gap in decoding: (.*)", said)
    print(f"longest gap in decoding: {gaps}")
    return name


def test_each_version_answers_as_the_merged_model_and_old_ones_are_never_left(engines, tune, adapter, service):
    before = answers(service, "tiny")
    names = [published(tune, adapter, service) for _ in range(3)]
    assert loaded(service) == {"tiny", *(each.removeprefix("tiny:") for each in names[1:])}
    arguments = [engines.model, adapter, json.dumps(PROMPTS), TOKENS]
    ids = json.loads(engines.run("lora_answers.py", *map(str, arguments)))
    right = [[f"t{each}" for each in answer if each > 2] for answer in ids]
    assert answers(service, names[2]) == right
    assert answers(service, "tiny") == before != right


def test_an_adapter_the_engine_cannot_load_never_costs_the_version_that_answers(tune, adapter, service):
    name = published(tune, adapter, service)
    known, before = loaded(service), answers(service, name)
    source = adapter / "adapter_model.safetensors"
    whole = source.read_bytes()
    source.write_bytes(whole[: len(whole) // 2])
    try:
        with pytest.raises(AssertionError, match="valve tune: http"):
            tune("publish", adapter, "--to", service)
    finally:
        source.write_bytes(whole)
    assert loaded(service) == known
    assert answers(service, name) == before


CLIENTS = 4
NEGATED = """
import sys
from safetensors.torch import load_file, save_file
found = load_file(sys.argv[1])
save_file({name: -one if "lora_B" in name else one for name, one in found.items()}, sys.argv[1])
"""


class Asking:
    """Clients of the router, who ask once more where it says that they may."""

    def __init__(self, client, url, models):
        self.client, self.url, self.models = client, url, models
        self.answered, self.begun_and_lost, self.told_to_wait = [], 0, 0
        self.is_over = False

    async def until_answered(self, model, prompt):
        body = {"model": model, "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
        while True:
            async with self.client.post(f"{self.url}/v1/completions", json=body) as answer:
                said = await answer.json()
                if answer.status == 200:
                    self.answered.append(
                        (model, said["model"], PROMPTS.index(prompt), said["choices"][0]["text"].split())
                    )
                    return
                assert answer.status in (502, 503), (model, answer.status, said)
                assert answer.headers["Retry-After"]
                self.told_to_wait += answer.status == 503
                self.begun_and_lost += answer.status == 502
            await asyncio.sleep(0.2)

    async def run(self, draw):
        while not self.is_over:
            await self.until_answered(draw.choice(self.models), draw.choice(PROMPTS))


@pytest.fixture
def restarting(engines, tune):
    started = Service(engines, tune, vllm)
    yield started
    started.kill()


def test_an_engine_killed_and_restarted_behind_the_router_never_answers_as_a_version_that_it_was_not(
    engines, tune, adapter, restarting
):
    source = adapter / "adapter_model.safetensors"
    whole = source.read_bytes()
    first = published(tune, adapter, restarting.url)
    try:
        done = subprocess.run([str(engines.python), "-c", NEGATED, str(source)], capture_output=True, check=False)
        assert done.returncode == 0, done.stderr
        publish = ("publish", adapter, "--to", restarting.url, "--no-probe")
        right = {"tiny": answers(restarting.url, "tiny"), first: answers(restarting.url, first)}

        async def run():
            (own,) = free_ports(1)
            settings = RouterSettings(replicas=(restarting.url,), port=own, health_s=0.2, newest=("mine",))
            url = f"http://127.0.0.1:{own}"
            async with aiohttp.ClientSession() as client, serving(settings):
                asking = Asking(client, url, ["mine", first, "tiny"])
                await asking.until_answered("mine", PROMPTS[0])
                tasks = [asyncio.create_task(asking.run(random.Random(each))) for each in range(CLIENTS)]

                async def until(condition):
                    while not condition():
                        ended = [task for task in tasks if task.done()]
                        assert not ended, ended[0].result()
                        await asyncio.sleep(0.1)

                said = await asyncio.to_thread(tune, *publish)  # the second version, while they ask
                (second,) = re.findall(r"answers as (mine-v\d+);", said)
                right[second] = await asyncio.to_thread(answers, restarting.url, second)
                asking.models.append(second)
                await until(lambda: ("mine", second) in [each[:2] for each in asking.answered])
                before = len(asking.answered)
                await until(lambda: len(asking.answered) >= before + 20)
                await asyncio.to_thread(restarting.kill)
                before = len(asking.answered)
                await until(lambda: asking.told_to_wait)
                await asyncio.to_thread(restarting.start)
                await until(
                    lambda: {("mine", second), (first, first)} <= {each[:2] for each in asking.answered[before:]}
                )
                await until(lambda: len(asking.answered) >= before + 40)
                asking.is_over = True
                await asyncio.gather(*tasks)
            return asking, second

        asking, second = asyncio.run(run())
    finally:
        source.write_bytes(whole)
    after = loaded(restarting.url)
    print(
        f"\n{len(asking.answered)} answers, {asking.told_to_wait} told to wait, {asking.begun_and_lost} begun and lost"
    )
    assert after == {"tiny", first, second}
    assert len({json.dumps(each) for each in right.values()}) == 3
    for asked, said, prompt, text in asking.answered:
        assert said in ({first, second} if asked == "mine" else {asked})
        assert text == right[said][prompt]
    assert asking.begun_and_lost <= CLIENTS
