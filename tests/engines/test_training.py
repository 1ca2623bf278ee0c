"""A real vLLM on CPU trains beside its requests: its tokens are those of an undisturbed run, the adapter that of the
standalone trainer, and no fault of the job ends it.
"""

from __future__ import annotations

import functools
import json
import random

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1800)]
LEARNT = 200  # words that the data count through
TARGET_MS = 300.0
REQUESTS = 500
FEW = 80
STEPS = 60


class Training:
    """Programs in the engines' environment, on one model and one data file."""

    def __init__(self, engines, folder):
        self.engines, self.folder = engines, folder
        draw = random.Random(3)
        starts = [draw.randrange(3, LEARNT) for _ in range(40)]
        rows = [{"text": " ".join(f"t{3 + (start + place) % LEARNT}" for place in range(24))} for start in starts]
        (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def job(self, out, **more):
        return {
            "model": str(self.engines.model),
            "data": str(self.folder / "train.jsonl"),
            "out": str(self.folder / out),
            "max_length": 128,
            "lora_r": 8,
            "learning_rate": 1e-2,
            "span": 32,
            **more,
        }

    def serve(self, requests, **plan):
        variables = {"XDG_STATE_HOME": str(self.folder / "state"), "VALVE_ROLE": "", "PYTHONWARNINGS": "ignore"}
        arguments = [str(self.engines.model), json.dumps({"requests": requests, **plan})]
        out = self.engines.run("vllm_training.py", *arguments, paths=(self.engines.tune,), **variables)
        return json.loads(out.splitlines()[-1])

    def beside(self, out, requests, planner="ours", fault="", **job):
        lane = {"job": self.job(out, **job), "planner": planner, "tpot_ms": TARGET_MS, "gap_ms": 500.0, "stuck_s": 5.0}
        return self.serve(requests, lane=lane, fault=fault)

    def alone(self, out, **job):
        """The standalone trainer, as a program of its own."""
        said = [f"--{name.replace('_', '-')}={value}" for name, value in self.job(out, **job).items()]
        done = self.engines.run_module("valve_tune.serve", "run", *said, XDG_STATE_HOME=str(self.folder / "state"))
        assert "done" in done
        return self.adapter(out)

    def adapter(self, out):
        return (self.folder / out / "adapter_model.safetensors").read_bytes()

    def status(self, out):
        return json.loads((self.folder / out / "status.json").read_text())


@pytest.fixture(scope="module")
def training(engines, tmp_path_factory):
    return Training(engines, tmp_path_factory.mktemp("training"))


@pytest.fixture(scope="module")
def undisturbed(training):
    """What it answers to so many requests with vLLM's own worker."""
    return functools.cache(training.serve)


@pytest.mark.parametrize(("planner", "lane"), [("ours", "in_pauses"), ("llmstation", "beside")])
def test_no_token_of_500_requests_differs_with_training_on_and_the_adapter_is_the_trainers(
    training, undisturbed, planner, lane
):
    out = f"campaign-{planner}"
    found = training.beside(out, REQUESTS, planner, max_steps=STEPS)
    assert found["trains"]
    assert found["beside_requests"][lane] > 50
    assert len(found["tokens"]) == REQUESTS
    assert found["tokens"] == undisturbed(REQUESTS)["tokens"]
    assert found["parked"] == ""
    assert training.status(out)["state"] == "succeeded"
    assert training.adapter(out) == training.alone(f"alone-{planner}", max_steps=STEPS)
    for name, each in (("alone", undisturbed(REQUESTS)), (planner, found)):
        late = sum(pace > TARGET_MS for pace in each["tpot_ms"])
        print(f"{name}: {late} of {REQUESTS} over {TARGET_MS:g} ms a token, {each['seconds']:.1f} s")
    print(f"{planner}: {found['beside_requests']} while requests ran")


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("error", "a tile failed"),
        ("exit", "SystemExit: 3"),
        ("memory", "can't allocate memory"),
        ("hangs", "parked: one tile has taken longer"),
        ("planner", "parked: the lane failed: ZeroDivisionError"),
        ("strange_lane", "parked: the lane failed: ValueError: there is no lane fused here"),
    ],
)
def test_no_fault_of_a_job_or_of_its_lane_ends_the_engine_or_changes_a_token(training, undisturbed, fault, said):
    found = training.beside(f"fault-{fault}", FEW, fault=fault, max_steps=10_000)
    assert found["trains"]
    assert found["over"]
    assert found["tokens"] == undisturbed(FEW)["tokens"]
    status = training.status(f"fault-{fault}")
    assert status["state"] == "failed"
    assert said in status["message"]


def test_an_engine_that_may_not_train_serves_on(training):
    lane = {"job": training.job("refused", max_steps=1)}
    found = training.serve(FEW, lane=lane, engine={"enable_lora": True})
    assert not found["trains"]
    assert len(found["tokens"]) == FEW
