"""`valve tune serve` through the official Python client, over a trainer that only counts; killed at many moments."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import sqlite3
import urllib.error
import urllib.request
from pathlib import Path

import openai
import pytest
import tiny
from command import Command, until
from valve_tune.serve import api, server, shape, worker
from valve_tune.serve.folder import JobFolder
from valve_tune.serve.store import TuneStore


class Service:
    """One that can be killed and started again on the same folder."""

    def __init__(self, tmp_path: Path) -> None:
        self.folder, self.home = tmp_path / "service", tmp_path
        base = tmp_path / "base"
        base.mkdir()
        (base / "config.json").write_text('{"vocab_size": 64}')
        (base / "tokenizer.json").write_text("{}")
        self.data = tiny.conversations(tmp_path / "train.jsonl")
        self.process = None

    def start(self, *more: str, **variables: str) -> openai.OpenAI:
        models = ["--model", f"tiny={self.home / 'base'}", "--model", f"other={self.home / 'base'}"]
        command, said = Command(self.home), self.home / "service.err"
        with said.open("a") as errors:  # a pipe that nobody reads would stop a service that says much
            self.process = command.start(
                *("serve", *models, "--folder", self.folder, "--port", "0", *more),
                **{"PYTHONUNBUFFERED": "1", **variables},
                errors=errors,
            )
        line = self.process.stdout.readline()
        found = re.search(r"(http://\S+)", line)
        assert found, said.read_text()
        self.url = found[1]
        return openai.OpenAI(base_url=self.url, api_key="none", max_retries=0)

    def workers(self) -> list[int]:
        path = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return [int(each) for each in path.read_text().split()] if path.exists() else []

    def kill(self) -> None:
        if self.process is not None and self.process.poll() is None:
            workers = self.workers()
            self.process.kill()
            self.process.communicate()
            until(lambda: not any(alive(worker) for worker in workers), "the workers' end")


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.fixture
def service(tmp_path):
    made = Service(tmp_path)
    yield made
    made.kill()


def submit(client, service, base="tiny", **fields):
    file = client.files.create(file=service.data.open("rb"), purpose="fine-tune")
    valve = {"max_length": 32, "max_steps": 12, "save_steps": 4, **fields.pop("valve", {})}
    return client.fine_tuning.jobs.create(model=base, training_file=file.id, extra_body={"valve": valve}, **fields).id


def ended(client, job):
    def look():
        found = client.fine_tuning.jobs.retrieve(job)
        return found if found.status in ("succeeded", "failed", "cancelled") else None

    return until(look, f"the end of {job}")


def steps_of(client, job) -> list[tuple[int, float]]:
    events = list(client.fine_tuning.jobs.list_events(job, limit=100))
    return sorted((each.data["step"], each.data["train_loss"]) for each in events if each.type == "metrics")


def test_the_official_client_sees_a_whole_job(service):
    client = service.start()
    job = submit(client, service, suffix="mine", seed=3, metadata={"who": "me"})
    done = ended(client, job)
    assert done.status == "succeeded"
    assert done.fine_tuned_model.startswith("ft:tiny:mine:")
    assert (done.seed, done.metadata, done.trained_tokens > 0) == (3, {"who": "me"}, True)
    assert [step for step, _ in steps_of(client, job)] == list(range(1, 13))
    saved = list(client.fine_tuning.jobs.checkpoints.list(job))
    assert [each.step_number for each in saved] == [12, 8, 4]
    assert saved[0].metrics.train_loss == steps_of(client, job)[-1][1]
    metrics = client.files.content(done.result_files[0]).text
    assert len([line for line in metrics.splitlines() if json.loads(line)["kind"] == "step"]) == 12
    assert [each.id for each in client.fine_tuning.jobs.list()] == [job]
    assert [each.id for each in client.models.list()] == ["tiny", "other"]


def test_a_validation_file_is_judged_by_and_never_deleted_before_the_job_ends(service):
    client = service.start()
    held_out = client.files.create(file=service.data.open("rb"), purpose="fine-tune")
    job = submit(client, service, validation_file=held_out.id, valve={"eval_steps": 4})
    try:
        client.files.delete(held_out.id)
    except openai.ConflictError:
        pass
    else:
        assert client.fine_tuning.jobs.retrieve(job).status == "succeeded"
    done = ended(client, job)
    assert (done.status, done.validation_file) == ("succeeded", held_out.id)
    saved = list(client.fine_tuning.jobs.checkpoints.list(job))
    assert [each.metrics.full_valid_loss for each in saved] == [12.0, 8.0, 4.0]  # the counting trainer's
    said = [each.message for each in client.fine_tuning.jobs.list_events(job, limit=100)]
    assert len([each for each in said if "validation" in each]) == 3


def test_lists_are_paged_and_every_entry_is_seen_once(service):
    client = service.start()
    job = submit(client, service)
    ended(client, job)
    whole = [each.id for each in client.fine_tuning.jobs.list_events(job, limit=100)]
    assert [each.id for each in client.fine_tuning.jobs.list_events(job, limit=3)] == whole  # asks page by page
    assert len(set(whole)) == len(whole) > 12


def test_pause_resume_and_cancel(service):
    client = service.start(FAKE_TILE_S="0.01")
    job = submit(client, service, valve={"max_steps": 1000})
    until(lambda: steps_of(client, job), "a step")
    client.fine_tuning.jobs.pause(job)
    until(lambda: client.fine_tuning.jobs.retrieve(job).status == "paused", "paused")
    before = steps_of(client, job)
    service.kill()  # a paused job stays paused, whoever dies
    client = service.start(FAKE_TILE_S="0.01")
    assert client.fine_tuning.jobs.retrieve(job).status == "paused"
    assert steps_of(client, job) == before
    client.fine_tuning.jobs.resume(job)
    until(lambda: len(steps_of(client, job)) > len(before), "a further step")
    client.fine_tuning.jobs.cancel(job)
    assert ended(client, job).status == "cancelled"
    with pytest.raises(openai.BadRequestError, match="the job is cancelled"):
        client.fine_tuning.jobs.resume(job)


def test_a_killed_service_and_killed_workers_lose_no_job_and_change_no_loss(service):
    client = service.start()
    calm = submit(client, service, valve={"max_steps": 24})
    ended(client, calm)
    expected = steps_of(client, calm)
    slow = {"FAKE_TILE_S": "0.01"}
    service.kill()
    client = service.start(**slow)
    jobs = [submit(client, service, base, valve={"max_steps": 24}) for base in ("tiny", "other", "tiny")]
    for round_, moment in enumerate((0, 1, 3, 6, 10, 15)):
        until(lambda moment=moment, client=client: sum(len(steps_of(client, job)) for job in jobs) >= moment, "steps")
        if round_ % 2:
            for worker in service.workers():
                os.kill(worker, signal.SIGKILL)
        else:
            service.kill()
            client = service.start(**slow)
    for job in jobs:
        assert ended(client, job).status == "succeeded"
        assert steps_of(client, job) == expected
        folder = JobFolder(service.folder / "jobs" / job)
        assert (folder.path / "adapter_model.safetensors").exists()


def test_jobs_of_one_base_take_turns_by_weight_in_one_process(service):
    client = service.start(FAKE_TILE_S="0.002")
    light = submit(client, service, valve={"max_steps": 2000, "weight": 1})
    heavy = submit(client, service, valve={"max_steps": 2000, "weight": 3})
    until(lambda: steps_of(client, heavy) and steps_of(client, light), "both")
    until(lambda: len(service.workers()) == 1, "one worker")

    def counts():
        store = TuneStore(service.folder)
        both = store.job(light)["step"], store.job(heavy)["step"]
        store.close()
        return both

    # Turns are shared by time. A first step that loaded much is paid back before the light one moves again.
    first = counts()[0]
    until(lambda: counts()[0] - first >= 5, "the light one moves")
    begin = counts()
    until(lambda: counts()[0] - begin[0] >= 40, "40 steps of the light one")
    now = counts()
    share = (now[1] - begin[1]) / (now[0] - begin[0])
    assert 1.5 < share < 6  # 3 by weight


def test_a_job_that_kills_its_worker_fails_in_the_end_and_the_others_go_on(service):
    client = service.start(FAKE_DIES_AT="0")
    job = submit(client, service)
    done = ended(client, job)
    assert (done.status, done.error.message) == ("failed", "the worker died 5 times at step 0")


def test_a_workers_death_is_never_charged_to_a_job_that_waited(tmp_path):
    store = TuneStore(tmp_path)
    held, waits = (store.add_job("tiny", "file-1", {}, 1.0)["id"] for _ in range(2))
    for _ in range(5):
        store.hold("tiny", waits)
        store.hold("tiny", held)
        assert store.died("tiny")
        assert not store.died("tiny")  # nobody held the turn since
    assert [store.job(job)["deaths"] for job in (held, waits)] == [5, 0]
    store.hold("tiny", waits)
    store.let_go("tiny", held)  # late: another has the turn
    assert store.died("tiny")
    store.close()


def test_one_job_that_kills_its_workers_never_fails_the_others_of_its_base(service):
    client = service.start(FAKE_DIES_WITH="7", FAKE_TILE_S="0.002")
    jobs = [submit(client, service, seed=seed) for seed in (1, 7, 2)]
    assert [ended(client, job).status for job in jobs] == ["succeeded", "failed", "succeeded"]


def workers_of(tmp_path, monkeypatch):
    store = TuneStore(tmp_path)
    job = store.add_job("tiny", "file-1", {}, 1.0)["id"]
    monkeypatch.setattr(server, "AGAIN_S", 0.0)
    return store, job, server.JobWorkers(store, {"tiny": "/nowhere"})


def test_a_worker_that_never_starts_is_never_started_for_ever(tmp_path, monkeypatch):
    store, job, workers = workers_of(tmp_path, monkeypatch)
    monkeypatch.setattr(server.sys, "executable", "/bin/false")

    async def all_of_them():
        for _ in range(server.BARREN):
            await workers._look()
            await workers._running["tiny"].wait()
        await workers._look()

    asyncio.run(all_of_them())
    assert store.job(job)["status"] == "failed"
    assert "before it looked at its jobs" in store.job(job)["error"]
    assert not workers._running
    store.close()


def test_a_database_that_cannot_be_written_never_ends_the_service(tmp_path, monkeypatch):
    store, _, workers = workers_of(tmp_path, monkeypatch)
    looks = []

    async def look():
        looks.append(1)
        workers.changed()
        if len(looks) == 3:
            raise asyncio.CancelledError
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(workers, "_look", look)
    with contextlib.suppress(asyncio.CancelledError):
        asyncio.run(asyncio.wait_for(workers.keep(), 60))
    assert len(looks) == 3
    store.close()


def test_a_job_whose_thread_lost_the_database_is_begun_again_and_never_failed(tmp_path, monkeypatch):
    store = TuneStore(tmp_path)
    job = store.add_job("tiny", "file-1", {}, 1.0)["id"]
    monkeypatch.setattr(worker, "DATABASE_S", 0.0)
    made = worker.BaseWorker(store, "tiny", "/nowhere", make=lambda *_, **__: None)
    tried = []

    def train(row, control):
        tried.append(row["id"])
        raise sqlite3.OperationalError("database is locked")

    monkeypatch.setattr(made, "_train", train)
    until(lambda: made._look() and len(tried) >= 3, "three tries")
    assert store.job(job)["status"] == "validating_files"
    for thread in list(made._threads.values()):
        thread.join()
    store.close()


def test_a_failure_says_why(service):
    client = service.start(FAKE_FAILS_AT="5")
    done = ended(client, submit(client, service))
    assert done.status == "failed"
    assert "loss is NaN at step 5" in done.error.message
    service.data.write_text('{"messages": []}\n')
    done = ended(client, submit(client, service))
    assert "line 1, messages" in done.error.message


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"method": {"type": "dpo"}}, "method"),
        ({"method": [1]}, "method"),
        ({"method": {"type": ["supervised"]}}, "method"),
        ({"method": {"supervised": [1]}}, "method.supervised"),
        ({"method": {"supervised": {"hyperparameters": 3}}}, "hyperparameters"),
        ({"suffix": ["x"]}, "suffix"),
        ({"metadata": [1]}, "metadata"),
        ({"seed": [1]}, "seed"),
        ({"valve": [1]}, "valve"),
        ({"valve": {"weight": []}}, "valve.weight"),
        ({"valve": {"deterministic": "no"}}, "valve.deterministic"),
        ({"integrations": [{"type": "wandb"}]}, "integrations"),
        ({"suffix": "a b/../c"}, "suffix"),
        ({"hyperparameters": {"batch_size": 0}}, "hyperparameters.batch_size"),
        ({"hyperparameters": {"n_epochs": -1}}, "hyperparameters.n_epochs"),
        ({"seed": -1}, "seed"),
        ({"valve": {"out": "/etc"}}, "valve.out"),
        ({"valve": {"model": "/etc"}}, "valve.model"),
        ({"valve": {"eval_data": "/etc/passwd"}}, "valve.eval_data"),
        ({"valve": {"early_stopping_patience": 2}}, "valve.early_stopping_patience"),
        ({"valve": {"lora_r": 100000}}, "valve.lora_r"),
        ({"valve": {"use_dora": True}}, "valve.use_dora"),
        ({"valve": {"weight": float("1e9")}}, "valve.weight"),
        ({"nonsense": 1}, "nonsense"),
    ],
)
def test_what_makes_no_sense_is_refused_with_the_parameters_name(service_once, fields, param):
    client, file = service_once
    with pytest.raises(openai.BadRequestError) as error:
        client.post("/fine_tuning/jobs", body={"model": "tiny", "training_file": file, **fields}, cast_to=object)
    assert error.value.param == param


def test_unknown_names_are_not_found(service_once):
    client, file = service_once
    for call in (
        lambda: client.fine_tuning.jobs.create(model="gpt", training_file=file),
        lambda: client.fine_tuning.jobs.create(model="tiny", training_file="../../etc/passwd"),
        lambda: client.fine_tuning.jobs.retrieve("ftjob-0"),
        lambda: client.files.content("..%2ftune.sqlite3"),
    ):
        with pytest.raises(openai.NotFoundError):
            call()


def test_a_page_of_another_host_name_is_never_answered_without_a_token(service_once):
    client, _ = service_once
    request = urllib.request.Request(f"{client.base_url}models", headers={"Host": "evil.example:80"})
    with pytest.raises(urllib.error.HTTPError) as error:
        urllib.request.urlopen(request)
    assert error.value.code == 403


@pytest.mark.parametrize("header", [("Origin", "http://localhost"), ("Sec-Fetch-Site", "cross-site")])
def test_a_page_of_a_browser_is_never_answered_without_a_token(service_once, header):
    client, _ = service_once
    request = urllib.request.Request(f"{client.base_url}models", headers=dict([header]))
    with pytest.raises(urllib.error.HTTPError) as error:
        urllib.request.urlopen(request)
    assert error.value.code == 403


@pytest.mark.parametrize("parts", [("file", "file", "purpose"), ("file",), ("file", "wrong")])
def test_an_upload_that_is_refused_never_leaves_a_file(service_once, parts):
    client, _ = service_once
    values = {"purpose": ("purpose", "fine-tune"), "wrong": ("purpose", "other"), "file": ("file", "x")}
    body = ""
    for part in parts:
        name, value = values[part]
        more = '; filename="a"' if name == "file" else ""
        body += f'--b\r\nContent-Disposition: form-data; name="{name}"{more}\r\n\r\n{value}\r\n'
    headers = {"Content-Type": "multipart/form-data; boundary=b"}
    request = urllib.request.Request(f"{client.base_url}files", f"{body}--b--\r\n".encode(), headers)
    with pytest.raises(urllib.error.HTTPError) as error:
        urllib.request.urlopen(request)
    assert error.value.code == 400
    home = Path(client.files_home)
    assert not [path.name for path in home.iterdir() if path.stat().st_size == 1]


def test_a_method_without_a_type_is_supervised_and_never_an_error_of_the_service():
    body = {"method": {"supervised": {"hyperparameters": {"batch_size": 2}}}}
    assert shape.wish_of(body)["spec"]["gradient_accumulation_steps"] == 2
    assert shape.wish_of({"method": {"supervised": {}}})["method"] == "supervised"


def test_all_files_together_never_pass_the_quota(service, monkeypatch):
    store = TuneStore(service.folder)
    monkeypatch.setattr(api, "LARGEST_TOTAL", 10)
    tune = api.TuneApi(store, {}, changed=lambda: None)

    class Part:
        def __init__(self):
            self.pieces = [b"12345678", b""]

        async def read_chunk(self, size):
            return self.pieces.pop(0)

    store.file_path("file-1").write_bytes(b"123")
    with pytest.raises(shape.BadRequest, match="delete some"):
        asyncio.run(tune._receive(Part(), store.file_path("file-2")))
    store.close()


def test_deterministic_and_other_jobs_never_share_a_process(service):
    client = service.start(FAKE_TILE_S="0.01")
    submit(client, service, valve={"max_steps": 1000})
    with pytest.raises(openai.ConflictError, match="has another value"):
        submit(client, service, valve={"deterministic": False})
    submit(client, service, "other", valve={"deterministic": False})


@pytest.fixture(scope="module")
def service_once(tmp_path_factory):
    made = Service(tmp_path_factory.mktemp("once"))
    client = made.start()
    client.files_home = str(made.folder / "files")
    file = client.files.create(file=made.data.open("rb"), purpose="fine-tune")
    yield client, file.id
    made.kill()


def test_beyond_loopback_nobody_is_answered_without_the_token(service, tmp_path):
    command = Command(tmp_path)
    said = ["serve", "--model", f"tiny={tmp_path / 'base'}", "--folder", tmp_path / "service", "--port", "0"]
    assert "is not loopback: name a --token-file" in command.run(*said, "--host", "0.0.0.0", code=2)
    token = tmp_path / "token"
    token.write_text("short")
    assert "at least 16" in command.run(*said, "--token-file", token, code=2)
    token.write_text("0123456789abcdef\n")
    client = service.start("--host", "0.0.0.0", "--token-file", str(token))
    with pytest.raises(openai.AuthenticationError):
        client.models.list()
    assert client.with_options(api_key="0123456789abcdef").models.list().data


def test_a_file_that_a_job_needs_is_never_deleted(service):
    client = service.start(FAKE_TILE_S="0.01")
    job = submit(client, service, valve={"max_steps": 1000})
    file = client.fine_tuning.jobs.retrieve(job).training_file
    with pytest.raises(openai.ConflictError):
        client.files.delete(file)
    client.fine_tuning.jobs.cancel(job)
    ended(client, job)
    assert client.files.delete(file).deleted


def test_what_a_killed_upload_left_is_swept_and_two_services_never_share_a_folder(service):
    service.start()
    stray = service.folder / "files" / "file-stray"
    stray.write_text("half")
    said = Command(service.home).run(
        "serve", "--model", f"tiny={service.home / 'base'}", "--folder", service.folder, "--port", "0", code=2
    )
    assert "another service works here" in said
    assert stray.exists()
    service.kill()
    service.start()
    assert not stray.exists()
