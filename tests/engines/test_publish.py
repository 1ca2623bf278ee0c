"""An adapter that `valve tune` has trained is published to a real vLLM and a real SGLang on CPU while they decode."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import socket
import subprocess
import time
import urllib.request
from pathlib import Path

import pytest

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


@pytest.fixture(scope="module", params=[vllm, sglang], ids=lambda each: each.__name__)
def service(request, engines, tune):
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    env, argv = request.param(engines, port)
    argv += ["--served-model-name", "tiny", "--dtype", "float32", "--enable-lora", "--max-lora-rank", "16"]
    log = tune.folder / f"{request.param.__name__}.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [str(each) for each in (engines.python, *argv, "--host", "127.0.0.1")],
            env=env,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
    url = f"http://127.0.0.1:{port}"
    try:
        while True:
            assert process.poll() is None, log.read_text()[-3000:]
            try:
                answers(url, "tiny")
                break
            except OSError:
                time.sleep(0.5)
        yield url
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


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
