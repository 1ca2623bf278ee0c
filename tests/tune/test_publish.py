"""Publishing: new path and name each time, old versions retired, the gap in decoding seen, refusals lose nothing."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from command import LONG_S, Command
from fake_engine import FakeEngine
from valve_tune.serve.cli import main
from valve_tune.serve.engines import RunningEngine
from valve_tune.serve.folder import JobFolder
from valve_tune.serve.gap import GapProbe
from valve_tune.serve.publish import copied, new_version
from valve_tune.train import checkpoint
from valve_tune.train.spec import JobSpec


@pytest.fixture
def engine(request):
    made = FakeEngine(**getattr(request, "param", {}))
    yield made
    made.close()


@pytest.fixture
def job(tmp_path):
    """A finished job with one checkpoint."""
    folder = JobFolder(tmp_path / "mine")
    for place in (folder.path, folder.path / "checkpoint-5"):
        place.mkdir(parents=True, exist_ok=True)
        (place / "adapter_model.safetensors").write_bytes(place.name.encode())
        (place / "adapter_config.json").write_text(json.dumps({"r": 8, "lora_alpha": 16, "bias": "none"}))
    checkpoint = folder.path / "checkpoint-5"
    sums = {each.name: hashlib.sha256(each.read_bytes()).hexdigest() for each in checkpoint.iterdir()}
    (checkpoint / "manifest.json").write_text(json.dumps(sums))
    (folder.path / "job.json").write_text(JobSpec(model="m", data="d", out=str(folder.path), max_steps=5).to_json())
    return Command(tmp_path), folder


@pytest.mark.parametrize("engine", [{"kind": "vllm"}, {"kind": "sglang"}], ids=lambda each: each["kind"], indirect=True)
def test_each_version_has_a_new_path_and_name_and_old_ones_are_retired(engine, job):
    command, folder = job
    for number in range(1, 5):
        said = command.run("publish", folder.path, "--to", engine.url, "--keep", "2")
        model = f"base:mine-v{number}" if engine.kind == "sglang" else f"mine-v{number}"
        assert f"{engine.kind} at {engine.url} answers as {model};" in said
        assert f"mine-v{number}" in engine.answered, "the base answered under its name"
        assert "longest gap in decoding" in said
    assert sorted(engine.adapters) == ["mine-v3", "mine-v4"]
    assert len(set(engine.seen_paths)) == 4
    assert engine.adapters["mine-v4"] == str(folder.path / "published" / "mine-v4")


def test_what_was_published_never_changes_with_the_adapter(engine, job):
    command, folder = job
    command.run("publish", folder.path, "--to", engine.url, "--no-probe")
    (folder.path / "adapter_model.safetensors").write_bytes(b"other")
    command.run("publish", folder.path, "--checkpoint", "5")
    home = folder.path / "published"
    assert (home / "mine-v1" / "adapter_model.safetensors").read_bytes() == b"mine"
    assert (home / "mine-v2" / "adapter_model.safetensors").read_bytes() == b"checkpoint-5"


@pytest.mark.parametrize("engine", [{"load_s": 0.3}], indirect=True)
def test_a_gap_that_loading_causes_is_never_shown_as_calm(engine, monkeypatch):
    monkeypatch.setattr("valve_tune.serve.gap.TOKENS", 1_000_000)  # so that no answer ends while it loads
    running = RunningEngine(engine.url)
    with GapProbe(running) as gap:
        running.load("x-v1", "/x")
    gaps = gap.gaps()
    assert gaps.disturbed_ms >= 200  # of 300, which the server begins before the client sees the last piece
    assert gaps.calm_ms > 0


def test_calm_is_never_watched_for_less_than_what_it_is_compared_with(engine, monkeypatch):
    monkeypatch.setattr("valve_tune.serve.gap.TOKENS", 1_000_000)
    monkeypatch.setattr("valve_tune.serve.gap.PIECES", 1)
    with GapProbe(RunningEngine(engine.url)) as gap:
        gap._see(200)
    begin, end = gap._span
    pieces = [each for answer in gap._pieces for each in answer]
    assert sum(begin < each < end for each in pieces) >= 199
    assert sum(each >= end for each in pieces) >= 199


class Answering:
    """A service whose every answer has the same times."""

    def __init__(self, *times):
        self.times = times

    def stream(self, tokens):
        yield from self.times


@pytest.mark.parametrize("pieces", [0, 1])
def test_a_gap_that_nobody_could_measure_is_never_shown_as_none_at_all(pieces, monkeypatch):
    """An answer of one piece has no gap; nor is what falls between two answers one."""
    monkeypatch.setattr("valve_tune.serve.gap.PIECES", pieces)
    monkeypatch.setattr("valve_tune.serve.gap.WAIT_S", 0.05)
    with GapProbe(Answering(*[1.0] * pieces)) as gap:
        pass
    gaps = gap.gaps()
    assert (gaps.calm_ms, gaps.disturbed_ms) == (None, None)
    assert gaps.words() == "not measured while publishing, not measured before and after"


def test_the_gap_of_a_sliver_is_never_shown_as_that_of_publishing():
    """A real vLLM had 0.6 ms, as nearly all of the publishing fell between two answers."""
    gap = GapProbe(Answering())
    gap._span = (1.0, 2.0)
    gap._pieces = [[0.9, 0.95, 1.0006], [1.9, 2.1]]
    assert gap.gaps().disturbed_ms is None
    gap._pieces = [[0.9, 0.95, 1.0006], [1.4, 1.7, 2.1]]
    assert gap.gaps().disturbed_ms == pytest.approx(400)


def test_a_gap_of_no_length_is_measured(monkeypatch):
    monkeypatch.setattr("valve_tune.serve.gap.PIECES", 2)
    with GapProbe(Answering(1.0, 1.0)) as gap:
        pass
    assert gap.gaps().words() == "not measured while publishing, 0.0 ms before and after"


def test_a_name_that_another_jobs_folder_published_goes_on_counting(engine, job):
    command, folder = job
    engine.adapters["mine-v7"] = "/elsewhere"
    assert "answers as mine-v8" in command.run("publish", folder.path, "--to", engine.url, "--no-probe")


def test_versions_of_another_adapter_are_never_retired(engine, job):
    command, folder = job
    engine.adapters.update({"mine-v1x": "/a", "other-v1": "/b", "mine": "/c"})
    command.run("publish", folder.path, "--to", engine.url, "--keep", "1", "--no-probe")
    assert sorted(engine.adapters) == ["mine", "mine-v1", "mine-v1x", "other-v1"]


def test_a_version_of_another_job_with_the_same_name_is_never_retired(engine, job):
    command, folder = job
    engine.adapters["mine-v7"] = "/elsewhere"
    for _ in range(2):
        command.run("publish", folder.path, "--to", engine.url, "--keep", "1", "--no-probe")
    assert sorted(engine.adapters) == ["mine-v7", "mine-v9"]


@pytest.mark.parametrize("engine", [{"updating": False}], indirect=True)
def test_a_service_without_updating_says_how_to_start_it(engine, job):
    command, folder = job
    said = command.run("publish", folder.path, "--to", engine.url, "--no-probe", code=1)
    assert "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1" in said


def test_an_answer_under_another_name_is_a_failure_and_the_old_version_stays(engine, job):
    command, folder = job
    command.run("publish", folder.path, "--to", engine.url, "--no-probe")
    engine.lies = True
    assert "answered as base" in command.run(
        "publish", folder.path, "--to", engine.url, "--keep", "1", "--no-probe", code=1
    )
    assert sorted(engine.adapters) == ["mine-v1"]  # the one that answered wrongly is unloaded


def test_a_service_that_is_not_there_or_an_adapter_that_is_not_done_are_clear_ends(job):
    command, folder = job
    assert "127.0.0.1:1" in command.run("publish", folder.path, "--to", "http://127.0.0.1:1", code=1)
    assert not (folder.path / "published").exists()
    (folder.path / "adapter_model.safetensors").unlink()
    assert "--checkpoint 5 publishes" in command.run("publish", folder.path, code=2)


@pytest.mark.parametrize("name", ["use_dora", "modules_to_save", "rank_pattern"])
def test_what_the_engines_serve_unlike_is_refused_before_one_sees_it(job, name):
    command, folder = job
    (folder.path / "adapter_config.json").write_text(json.dumps({"r": 8, name: ["x"]}))
    assert name in command.run("publish", folder.path, code=2)


@pytest.mark.parametrize(
    "damage", ["adapter_model.safetensors", "adapter_config.json", "manifest.json", "empty manifest", "no manifest"]
)
def test_a_checkpoint_that_is_not_what_was_written_is_never_published(engine, job, damage, monkeypatch, capsys):
    command, folder = job
    monkeypatch.setenv("XDG_STATE_HOME", str(command.home / "state"))
    asked = ["publish", str(folder.path), "--checkpoint", "5"]
    assert main([*asked, "--name", "whole"]) == 0
    checkpoint = folder.path / "checkpoint-5"
    if damage == "no manifest":
        (checkpoint / "manifest.json").unlink()
    elif damage == "empty manifest":
        (checkpoint / "manifest.json").write_text("{}")
    else:
        with (checkpoint / damage).open("ab") as file:
            file.write(b"{" if damage == "manifest.json" else b" ")
    assert main([*asked, "--to", engine.url]) == 2
    assert "publish another checkpoint" in capsys.readouterr().err
    assert engine.adapters == {}
    assert [path.name for path in (folder.path / "published").iterdir()] == ["whole-v1"]


def test_the_name_of_a_jobs_folder_never_makes_a_checkpoint_of_it(job, monkeypatch):
    command, folder = job
    monkeypatch.setenv("XDG_STATE_HOME", str(command.home / "state"))
    path = folder.path.rename(folder.path.with_name("checkpoint-9"))
    assert main(["publish", str(path)]) == 0
    assert [each.name for each in (path / "published").iterdir()] == ["checkpoint-9-v1"]


def test_a_name_that_leaves_the_folder_is_refused(job):
    command, folder = job
    assert "a name has" in command.run("publish", folder.path, "--name", "../x", code=2)


@pytest.mark.parametrize("engine", [{"key": "s3cret"}], indirect=True)
def test_a_service_with_a_key_is_asked_with_it_and_never_shows_it(engine, job, tmp_path):
    command, folder = job
    refused = command.run("publish", folder.path, "--to", engine.url, code=1)
    assert "401" in refused
    assert "--token-file" in refused
    (tmp_path / "key").write_text("s3cret\n")
    said = command.run("publish", folder.path, "--to", engine.url, "--token-file", tmp_path / "key")
    assert "answers as mine-v1" in said
    assert "longest gap in decoding" in said
    assert "s3cret" not in said + refused
    for bad in ("", "two\nlines"):
        (tmp_path / "key").write_text(bad)
        said = command.run("publish", folder.path, "--to", engine.url, "--token-file", tmp_path / "key", code=2)
        assert "holds no key" in said
    assert list(engine.adapters) == ["mine-v1"]


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
@pytest.mark.parametrize("path", ["/v1/models", "/v1/load_lora_adapter", "/v1/completions"])
def test_the_key_is_never_sent_to_where_a_service_points(job, tmp_path, path, status):
    command, folder = job
    (tmp_path / "key").write_text("s3cret\n")
    other = FakeEngine()
    engine = FakeEngine(key="s3cret", away={path: (status, other.url)})
    try:
        said = command.run(
            "publish", folder.path, "--to", engine.url, "--token-file", tmp_path / "key", "--no-probe", code=1
        )
        assert f"points to {other.url}{path}; name that one" in said
        assert other.requests == []
    finally:
        engine.close()
        other.close()


def test_a_version_goes_to_every_service_and_one_that_refuses_keeps_it_from_no_other(engine, job):
    command, folder = job
    refuses, third = FakeEngine(updating=False), FakeEngine()
    third.adapters["mine-v4"] = "/elsewhere"
    try:
        to = ("--to", engine.url, "--to", refuses.url, "--to", third.url)
        said = command.run("publish", folder.path, *to, "--no-probe", code=1)
        assert f"{refuses.url}/v1/load_lora_adapter: 404" in said
        assert list(engine.adapters) == ["mine-v5"]  # one number for all, that none of them has
        assert list(third.adapters) == ["mine-v4", "mine-v5"]
    finally:
        refuses.close()
        third.close()


def leftover(home: Path, pid: int) -> Path:
    left = home / f".chat-v7.{pid}"
    left.mkdir(parents=True)
    (left / "adapter_config.json").write_text("{}")
    return left


def test_what_a_killed_publish_has_begun_is_never_left_and_a_living_ones_never_taken(job):
    """A process is killed within its copy; another one of a former Valve, which takes no lock, is still at it."""
    folder = job[1]
    home = folder.path / "published"
    dead = subprocess.Popen(["sleep", "600"])
    dead.kill()
    dead.wait()
    with subprocess.Popen(["sleep", "600"]) as living:
        mine, its = leftover(home, dead.pid), leftover(home, living.pid)
        own = leftover(home, os.getpid())  # a number comes again
        new_version(folder, "chat", folder.path)
        living.kill()
        assert (mine.exists(), own.exists(), its.exists()) == (False, False, True)
    copied(folder.path, home / "chat-v9")
    assert sorted(path.name for path in home.iterdir()) == ["chat-v1", "chat-v9"]


def test_two_that_publish_at_once_never_take_one_number_nor_each_others_work(job, monkeypatch):
    """The second begins while the first is within its copy."""
    folder = job[1]
    seconds, write = [], checkpoint.write_file

    def slow(path: Path, content: bytes) -> None:
        if not seconds:
            code = (
                "import sys; from pathlib import Path; from valve_tune.serve.folder import JobFolder; "
                "from valve_tune.serve.publish import new_version; "
                "f = JobFolder(sys.argv[1]); print('begins', flush=True); print(new_version(f, 'chat', f.path).name)"
            )
            argv = [sys.executable, "-c", code, str(folder.path)]
            seconds.append(subprocess.Popen(argv, stdout=subprocess.PIPE, text=True))
            assert seconds[0].stdout.readline() == "begins\n"
        write(path, content)

    monkeypatch.setattr(checkpoint, "write_file", slow)
    assert new_version(folder, "chat", folder.path).name == "chat-v1"
    assert seconds[0].communicate(timeout=LONG_S)[0] == "chat-v2\n"
    assert sorted(path.name for path in (folder.path / "published").iterdir()) == ["chat-v1", "chat-v2"]
