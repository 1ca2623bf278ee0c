"""The verdict of `make demo-granted-vllm`, on figures that are made up."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest
from valve_tools.demo.endings import Interrupted
from valve_tools.engines.demo import EngineDemo
from valve_tools.engines.figures import RuleResult
from valve_tools.engines.granted_demo import (
    PROMPTS,
    OpenClients,
    StreamedAnswer,
    VllmGrantDemo,
    VllmGrantOutcome,
    VllmGrantPlan,
    VllmRound,
)

PLAN = VllmGrantPlan()
ANSWERS = [StreamedAnswer(prompt=number % 11, text=f"text {number % 11}", tpot_ms=60.0) for number in range(110)]
WITHOUT = VllmRound(
    consents=False, answers=ANSWERS, grants=0, broken=0, granted_s=0.0, batch_tokens_s=20.0, outlived=True
)
WITH = replace(WITHOUT, consents=True, grants=70, granted_s=5.0, batch_tokens_s=90.0)
BATCH = {"c0": ["a"], "c1": ["b"]}


def outcome(without=WITHOUT, with_it=WITH, batch=BATCH):
    return VllmGrantOutcome(pairs=[(WITHOUT, WITH), (without, with_it)], batches=[BATCH, batch], undisturbed=BATCH)


def late(count):
    return [replace(each, tpot_ms=200.0) if number < count else each for number, each in enumerate(ANSWERS)]


def test_two_rounds_in_which_all_is_as_promised_are_kept():
    assert outcome().verdict(PLAN) is RuleResult.KEPT


@pytest.mark.parametrize(
    "broken",
    [
        {"without": replace(WITHOUT, grants=1)},
        {"with_it": replace(WITH, answers=[replace(ANSWERS[0], text="another"), *ANSWERS[1:]])},
        {"batch": {"c0": ["a"], "c1": ["another"]}},
        {"batch": {"c0": ["a"]}},
    ],
    ids=["time without consent", "another answer", "another answer of the batch", "an answer is missing"],
)
def test_no_noise_excuses_a_grant_without_consent_or_another_answer(broken):
    noisy = replace(broken.pop("without", WITHOUT), answers=late(50))
    assert outcome(without=noisy, **broken).verdict(PLAN) is RuleResult.BROKEN


@pytest.mark.parametrize(
    "missed",
    [replace(WITH, grants=0), replace(WITH, answers=late(4)), replace(WITH, batch_tokens_s=20.0)],
    ids=["nothing granted", "late", "no gain"],
)
def test_a_promise_that_is_missed_is_void_only_where_the_service_alone_misses_too(missed):
    assert outcome(with_it=missed).verdict(PLAN) is RuleResult.BROKEN
    assert outcome(without=replace(WITHOUT, answers=late(4)), with_it=missed).verdict(PLAN) is RuleResult.VOID


def test_a_batch_that_was_over_too_soon_is_never_a_pass():
    assert outcome(with_it=replace(WITH, outlived=False)).verdict(PLAN) is RuleResult.VOID


class Streaming(BaseHTTPRequestHandler):
    """Answers as vLLM's completions do: an event for each token, then one without a choice."""

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.end_headers()
        for number in range(body["max_tokens"]):
            event = {"choices": [{"text": f" {body['prompt'][0]}.{number}"}]}
            self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
        self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, *_):
        pass


class Server(ThreadingHTTPServer):
    request_queue_size = 64  # all clients come at once; the usual five would turn some away


def test_each_client_reads_its_whole_answer_and_the_same_come_to_every_server():
    with Server(("127.0.0.1", 0), Streaming) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        plan = replace(PLAN, rate=1e6, tokens=3)
        first, second = (OpenClients(port=server.server_port, plan=plan).send(22) for _ in range(2))
        server.shutdown()

    assert {(each.prompt, each.text) for each in first} == {(each.prompt, each.text) for each in second}
    assert len({each.text for each in first}) == PROMPTS
    assert all(each.text.count(".") == 3 and each.tpot_ms >= 0 for each in first)


DEAF = """
import signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("deaf", flush=True)
signal.pause()
"""


def interrupted(*_):
    raise Interrupted(signal.SIGINT)


@pytest.fixture
def deaf():
    """A server that starts: vLLM puts its own handlers in place, and a signal that came before is lost."""
    with subprocess.Popen([sys.executable, "-c", DEAF], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "deaf\n"
        yield process
        process.kill()


def test_a_demo_that_is_interrupted_never_waits_for_a_server_to_end_by_itself(deaf):
    sides = SimpleNamespace(
        command=lambda *_: [], engine_flags=list, environment=dict, port=0, prepare=lambda: None,
        write_requests=lambda *_: [Path(), Path()], node=SimpleNamespace(run=lambda *_, **__: deaf),
        wait_for_server=interrupted,
    )  # fmt: skip
    with pytest.raises(Interrupted):
        VllmGrantDemo(sides=sides, plan=PLAN, say=str).serve(Path(), consents=True)
    assert deaf.wait() == -signal.SIGKILL


def test_a_demo_on_both_sides_that_is_interrupted_never_waits_either(deaf, monkeypatch):
    monkeypatch.setattr(EngineDemo, "warm_up", lambda _: deaf)
    monkeypatch.setattr(EngineDemo, "rounds_of", interrupted)
    sides = SimpleNamespace(prepare=lambda: None, write_requests=lambda *_: [Path(), Path()])
    with pytest.raises(Interrupted):
        EngineDemo(sides=sides, rounds=1, requests=1, prompts=1, rate=1.0, say=str).perform()
    assert deaf.wait() == -signal.SIGKILL


def test_clients_that_wait_for_an_answer_never_keep_the_demo_from_ending(monkeypatch):
    """A thread that is no daemon is waited for at the end, and an answer has ten minutes."""
    threads = []

    def answer(_, prompt, answers):
        threads.append(threading.current_thread())
        answers.append(prompt)

    monkeypatch.setattr(OpenClients, "_ask", answer)
    OpenClients(port=0, plan=replace(PLAN, rate=1e6)).send(3)
    assert [thread.daemon for thread in threads] == [True, True, True]
