"""Real engines whose owners consent to pauses. vLLM: under a real valved on the emulated card, beside offline work."""

from __future__ import annotations

import json
import random
import shutil
import socket
import threading
import time
import urllib.request
from pathlib import Path

import pytest
from node_rig import Offline, service
from sglang_plugin import mounted, run_with_plugin
from valve_tools.demo.node import VALVE, EmulatedNode
from valve_tools.emulator import device
from valve_tools.engines.sides import Sides

HERE = Path(__file__).resolve().parent
pytestmark = [pytest.mark.engine, pytest.mark.timeout(1200)]
REQUESTS, RATE, TOKENS, PROMPTS = 110, 8.0, 12, 11
SLICES = '[granted]\nrung = "timeslice"\nprobed_driver = "580.159.04"\n'
WORDS = ["--slo", "tpot=150ms,gap=400ms"]


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def ask(port: int, prompt: list[int], answers: dict[int, str], number: int) -> None:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": TOKENS, "temperature": 0.0, "ignore_eos": True}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=600) as answer:
        answers[number] = json.load(answer)["choices"][0]["text"]


def serve(sides: Sides, port: int) -> dict[int, str]:
    """Clients that come when they will, and the answer to each."""
    chance, answers = random.Random(5), {}
    prompts = [[chance.randrange(10, 900) for _ in range(24)] for _ in range(PROMPTS)]
    threads = []
    for number in range(REQUESTS):
        time.sleep(chance.expovariate(RATE))
        threads.append(threading.Thread(target=ask, args=(port, prompts[number % PROMPTS], answers, number)))
        threads[-1].start()
    for thread in threads:
        thread.join()
    return answers


@pytest.mark.parametrize(
    ("mode", "config"),
    [("--no-async-scheduling", ""), ("--async-scheduling", ""), ("--async-scheduling", SLICES)],
    ids=["sync", "async", "async, timeslice"],
)
def test_a_real_vllm_grants_pauses_and_answers_what_it_answers_without(engines, tmp_path, mode, config):
    with EmulatedNode(tmp_path, config=config) as node:
        node.start_valved()
        sides = Sides(node=node, folder=tmp_path, python=engines.python, port=free_port(), step_us="20000,200")
        sides.prepare()
        offline = Offline(node, "batch")
        offline.wait_running()
        command = sides.command("serve", *sides.engine_flags(), "--port", str(sides.port), mode)
        server = node.run(
            "",
            [str(VALVE), "run", "--online", "--name", "server", *WORDS, "--grant", "--", *command],
            name="server",
            env=sides.environment(),
        )
        sides.wait_for_server(server)
        answers = serve(sides, sides.port)
        granted = service(node, "server").granted
        print(f"\n{mode}, {granted.rung}: {granted.words}; refused {dict(granted.refused)}")

    assert granted.grants > 0
    assert granted.broken <= granted.grants // 2
    assert len(answers) == REQUESTS
    for prompt in range(PROMPTS):
        assert len({answers[number] for number in range(prompt, REQUESTS, PROMPTS)}) == 1


@pytest.mark.parametrize("overlap", [False, True], ids=["no overlap", "overlap"])
def test_a_real_sglang_grants_pauses_under_a_real_valved(engines, tmp_path, overlap):
    paths, variables = mounted(engines, tmp_path / "mount", "sglang_node")
    card = tmp_path / "mount" / "valve_emulated"
    card.mkdir()
    (card / "__init__.py").touch()
    shutil.copy(device.__file__, card / "device.py")
    out = tmp_path / "server.out"
    with EmulatedNode(tmp_path) as node:
        node.start_valved()
        offline = Offline(node, "batch")
        offline.wait_running()
        script = [str(engines.python), str(HERE / "sglang_node.py"), str(engines.model), str(node.run_dir)]
        consents = [str(VALVE), "run", "--online", "--name", "server", *WORDS, "--grant", "--"]
        server = node.run(
            "",
            [*consents, *script, json.dumps({"overlap": overlap})],
            name="server",
            env={"PYTHONPATH": ":".join(map(str, paths)), "HF_HUB_OFFLINE": "1", **variables},
            out=out,
        )
        answered = lambda: next((line for line in out.read_text().splitlines() if line.startswith("[[")), "")  # noqa: E731
        node.wait_for(lambda: answered() or server.poll() is not None, "the answers", 900.0)
        assert answered(), out.read_text()[-4000:]
        granted = service(node, "server").granted
        print(f"\noverlap {overlap}: {granted.words}; refused {dict(granted.refused)}")
    answers = json.loads(answered())

    assert granted.grants > 0
    assert granted.broken <= granted.grants // 2
    assert len(answers) == REQUESTS
    for prompt in range(PROMPTS):
        assert len({tuple(each) for each in answers[prompt::PROMPTS]}) == 1


@pytest.mark.parametrize("overlap", [False, True], ids=["no overlap", "overlap"])
def test_a_real_sglang_pauses_with_nothing_in_flight_and_answers_the_same(engines, tmp_path, overlap):
    (told,) = run_with_plugin(engines, tmp_path, "sglang_granted", json.dumps({"overlap": overlap}))

    assert told["why_not"] == ""
    assert told["given"] > 0  # few: without a trial the policy does not know this target for a far one
    assert told["flown"] == 0
    assert told["is_same"]
