"""The real trainer under the command and under the service: killed and shared, it makes the adapter of a calm run."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import openai
import pytest
import tiny
from command import Command, until
from valve_tune.serve import metrics
from valve_tune.serve.folder import JobFolder

ADAPTER = "adapter_model.safetensors"
STEPS = 12
# The service's ways to say what the command says below.
FIELDS = {"max_length": 64, "lora_r": 4, "lora_alpha": 8, "learning_rate": 1e-2, "save_steps": 3, "max_steps": STEPS}


class Whole:
    """A tiny base, conversations, and a calm run's adapter to compare with."""

    def __init__(self, folder):
        self.command = Command(folder, fake=False)
        self.base = tiny.base(folder / "base")
        self.data = tiny.conversations(folder / "train.jsonl")
        self.folder = folder
        self.calm = self.run("calm")

    def arguments(self, name, *more):
        said = [f"--{field.replace('_', '-')}={value}" for field, value in FIELDS.items()]
        return ["run", "--model", self.base, "--data", self.data, "--out", self.folder / name, *said, *more]

    def run(self, name, *more, code=0):
        self.said = self.command.run(*self.arguments(name, *more), code=code)
        return JobFolder(self.folder / name)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    pytest.importorskip("valve_tune.train.job")
    return Whole(tmp_path_factory.mktemp("whole"))


def adapter(folder) -> bytes:
    return (folder.path / ADAPTER).read_bytes()


def test_the_loss_falls_and_peft_reads_the_adapter(whole):
    losses = [line["loss"] for line in metrics.steps(whole.calm.metrics)]
    assert len(losses) == STEPS
    assert sum(losses[-3:]) < sum(losses[:3])
    from peft import PeftConfig

    config = PeftConfig.from_pretrained(str(whole.calm.path))
    assert (config.r, config.lora_alpha) == (4, 8)


@pytest.mark.parametrize("moment", [0, 2, 7])
def test_a_job_killed_at_any_moment_makes_the_same_adapter(whole, moment):
    name = f"killed-{moment}"
    process = whole.command.start(*whole.arguments(name))
    folder = JobFolder(whole.folder / name)
    until(lambda: len(metrics.steps(folder.metrics)) >= moment and folder.exists(), f"step {moment}")
    process.kill()
    process.communicate()
    whole.run(name)
    assert adapter(folder) == adapter(whole.calm)


def test_a_loss_that_is_no_number_ends_the_job_with_its_step_and_loses_nothing(whole):
    folder = whole.run("nan", "--learning-rate=10", "--max-grad-norm=0", "--max-steps=400", code=1)
    assert re.search(r"failed at step \d+: .*(nan|inf)", whole.said, re.I)
    assert folder.status().state == "failed"
    assert (folder.path / "job.json").exists()


def test_jobs_that_share_a_base_make_the_adapters_they_make_alone(whole):
    process = whole.command.start(
        "serve", "--model", f"tiny={whole.base}", "--folder", whole.folder / "service", "--port", "0"
    )
    try:
        url = re.search(r"http://\S+", process.stdout.readline())[0]
        client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
        file = client.files.create(file=whole.data.open("rb"), purpose="fine-tune").id
        jobs = [
            client.fine_tuning.jobs.create(model="tiny", training_file=file, extra_body={"valve": FIELDS}).id
            for _ in range(3)
        ]
        until(lambda: client.fine_tuning.jobs.retrieve(jobs[0]).trained_tokens, "a step")
        children = f"/proc/{process.pid}/task/{process.pid}/children"
        (worker,) = map(int, Path(children).read_text().split())
        os.kill(worker, signal.SIGKILL)
        for job in jobs:
            until(lambda job=job: client.fine_tuning.jobs.retrieve(job).status == "succeeded", "the end")
            assert adapter(JobFolder(whole.folder / "service" / "jobs" / job)) == adapter(whole.calm)
            events = client.fine_tuning.jobs.list_events(job, limit=100)
            assert sum(each.type == "metrics" for each in events) == STEPS
    finally:
        process.kill()
        process.communicate()


def test_the_job_file_is_what_was_submitted(whole):
    spec = json.loads((whole.calm.path / "job.json").read_text())
    assert {name: spec[name] for name in FIELDS} == FIELDS
