"""A job gives the very bytes of an undisturbed run, whatever happens to it; what cannot go on ends clearly."""

from __future__ import annotations

import errno
import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import jobs
import oracle
import pytest
import torch
from valve_tune.base.memory import StashLost, TorchMemory
from valve_tune.model.stash import Stash
from valve_tune.train import checkpoint
from valve_tune.train.build import open_model
from valve_tune.train.job import Trainer
from valve_tune.train.report import Answer, End, TrainEvent
from valve_tune.train.spec import JobSpec


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before, torch_threads = torch.are_deterministic_algorithms_enabled(), torch.get_num_threads()
    yield
    torch.use_deterministic_algorithms(before)
    torch.set_num_threads(torch_threads)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return jobs.model_folder(tmp_path_factory.mktemp("base") / "llama")


@pytest.fixture(scope="module")
def undisturbed(model: Path, tmp_path_factory) -> tuple[bytes, int]:
    """(adapter bytes, tiles asked about)"""
    spec, control = jobs.job(model, tmp_path_factory.mktemp("whole")), jobs.At()
    return jobs.finished(spec, control=control), control.asked


def test_a_job_learns_and_writes_what_peft_reads(model: Path, tmp_path: Path) -> None:
    more = {"lora_dropout": 0.0, "warmup_steps": 0, "learning_rate": 2e-2, "target_modules": ("all-linear",)}
    spec, events = jobs.job(model, tmp_path, max_steps=25, **more), []

    class Same(jobs.Counting):
        def step(self, step: int):
            return super().step(0)

    assert Trainer(spec, Same(spec), events=events.append).run().end is End.DONE
    losses = [event.loss for event in events if event.kind == "step"]
    assert len(losses) == 25
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])
    from peft import PeftModel

    base = oracle.make("llama", torch.float32)
    tuned = PeftModel.from_pretrained(base, tmp_path)
    batch = jobs.Counting(spec).step(99)[0]
    oracle.Segments.now = torch.from_numpy(batch.segments)
    labels = torch.from_numpy(batch.labels)
    with torch.no_grad():
        theirs = float(tuned(input_ids=torch.from_numpy(batch.input_ids), labels=labels).loss)
    made = open_model(spec)
    made.adapter.load((tmp_path / jobs.ADAPTER).read_bytes())
    from valve_tune.model.dropout import Draw
    from valve_tune.tiles.grid import Grid
    from valve_tune.tiles.orders import whole

    grid = Grid(layers=3, tokens=batch.input_ids.shape[1])
    work = made.start(batch, scale=1 / batch.label_count, draw=Draw(seed=0, step=0, sequence=0), grid=grid)
    for tile in whole(grid):
        work.run(tile)
    assert work.gradients()[0] == pytest.approx(theirs, rel=1e-5)


def test_killed_at_any_tile_it_ends_with_the_same_bytes(model: Path, tmp_path: Path, undisturbed) -> None:
    right, tiles = undisturbed
    chance = random.Random(7)
    for number in range(4):
        spec = jobs.job(model, tmp_path / str(number))
        for tile in sorted(chance.sample(range(1, tiles // 2), 2), reverse=True):
            status = jobs.in_child(lambda spec=spec, tile=tile: jobs.train(spec, jobs.At(tile, jobs.kill)))
            assert os.WIFSIGNALED(status)
            assert os.WTERMSIG(status) == signal.SIGKILL
        assert jobs.finished(spec) == right, f"round {number}"


SCRIPT = """
import sys
from pathlib import Path
import jobs
spec = jobs.job(Path(sys.argv[1]), Path(sys.argv[2]))
jobs.train(spec, jobs.At(int(sys.argv[3]), jobs.kill))
"""


def test_a_new_interpreter_takes_up_what_a_killed_one_left(model: Path, tmp_path: Path, undisturbed) -> None:
    right, tiles = undisturbed
    spec = jobs.job(model, tmp_path)
    for tile, code in ((tiles * 3 // 4, -signal.SIGKILL), (-1, 0)):
        argv = [sys.executable, "-c", SCRIPT, str(model), spec.out, str(tile)]
        done = subprocess.run(
            argv, check=False, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}, capture_output=True
        )
        assert done.returncode == code, done.stderr.decode()
    assert jobs.adapter_bytes(spec) == right


def test_stopped_after_every_few_tiles_it_ends_with_the_same_bytes(model: Path, tmp_path: Path, undisturbed) -> None:
    right, tiles = undisturbed
    spec, rounds = jobs.job(model, tmp_path), 0
    one_micro_batch = tiles // 8
    while True:
        outcome = jobs.train(spec, jobs.At(one_micro_batch + 1 + rounds % 5))
        rounds += 1
        if outcome.end is End.DONE:
            break
        assert outcome.end is End.STOPPED
        assert outcome.checkpoint is not None
        assert checkpoint.fault(outcome.checkpoint) == ""
    assert rounds > 4
    assert jobs.adapter_bytes(spec) == right


def test_pausing_between_tiles_changes_nothing_and_is_no_training_time(
    model: Path, tmp_path: Path, undisturbed
) -> None:
    right, tiles = undisturbed

    class Often(jobs.At):
        def answer(self) -> Answer:
            super().answer()
            return Answer.PAUSE if self.asked % 3 else Answer.GO

    control, events = Often(), []
    assert jobs.finished(jobs.job(model, tmp_path), control=control, events=events) == right
    assert control.waits > tiles / 3
    assert any(event.kind == "paused" for event in events)


def full_disk(after: int, monkeypatch: pytest.MonkeyPatch) -> None:
    real, written = checkpoint._forced, []

    def forced(path: Path, content: bytes) -> None:
        written.append(path)
        if len(written) > after:
            path.write_bytes(content[: len(content) // 2])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # as of a write, which names no file
        real(path, content)

    monkeypatch.setattr(checkpoint, "_forced", forced)


@pytest.mark.parametrize("after", [0, 3, 5, 8, 10])
def test_a_full_disk_is_a_clear_end_and_loses_nothing(
    model: Path, tmp_path: Path, undisturbed, after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = jobs.job(model, tmp_path)
    with monkeypatch.context() as disk:
        full_disk(after, disk)
        outcome = jobs.train(spec)
    assert outcome.end is End.FAILED
    assert "disk full" in outcome.message
    assert str(tmp_path) in outcome.message
    for _, folder in checkpoint.found(tmp_path):
        assert checkpoint.fault(folder) == ""
    assert not (tmp_path / "adapter_config.json").exists()
    assert jobs.finished(spec) == undisturbed[0]
    assert not list(tmp_path.glob(".writing*"))


def test_a_loss_that_is_no_number_ends_the_job_before_the_adapter_is_touched(model: Path, tmp_path: Path) -> None:
    spec = jobs.job(model, tmp_path, save_steps=100)

    def spoiled(spec: JobSpec) -> Any:
        made = open_model(spec)
        real, begun = made.start, []

        def start(*args: Any, **kwargs: Any) -> Any:
            begun.append(1)
            work = real(*args, **kwargs)
            if len(begun) == 6:
                work.scale = float("nan")
            return work

        made.start = start
        return made

    outcome = jobs.train(spec, make_model=spoiled)
    assert outcome.end is End.FAILED
    assert "nan" in outcome.message
    assert "step 3" in outcome.message
    assert outcome.checkpoint == tmp_path / "checkpoint-2"
    assert jobs.train(spec).end is End.DONE


def test_a_damaged_checkpoint_is_never_taken_up(model: Path, tmp_path: Path, undisturbed) -> None:
    spec, events = jobs.job(model, tmp_path, save_steps=1), []
    jobs.train(spec, jobs.At(undisturbed[1] - 2))
    (newest, folder), *older = checkpoint.found(tmp_path)
    assert older
    damaged = bytearray((folder / jobs.ADAPTER).read_bytes())
    damaged[-3] ^= 1
    (folder / jobs.ADAPTER).write_bytes(damaged)
    assert jobs.finished(spec, events=events) == undisturbed[0]
    assert [event.message for event in events if event.kind == "resumed"] == [f"checkpoint-{older[0][0]}"]
    assert any(f"checkpoint-{newest}" in event.message for event in events if event.kind == "lost")


def test_only_so_many_checkpoints_stay(model: Path, tmp_path: Path) -> None:
    jobs.finished(jobs.job(model, tmp_path, max_steps=6, save_steps=1, save_total_limit=2))
    assert [step for step, _ in checkpoint.found(tmp_path)] == [6, 5]


def test_a_save_never_deletes_itself_beside_a_damaged_newer_checkpoint(tmp_path: Path) -> None:
    for step in (8, 9, 2):
        (tmp_path / "checkpoint-9" / checkpoint.MANIFEST).unlink(missing_ok=True)
        assert checkpoint.save(tmp_path, step, {"a": b"x"}, 1).is_dir()
    (tmp_path / "checkpoint-9" / checkpoint.MANIFEST).write_text("{")
    checkpoint.put_damaged_aside(tmp_path)
    assert [step for step, _ in checkpoint.found(tmp_path)] == [2]
    assert (tmp_path / "damaged-checkpoint-9" / "a").read_bytes() == b"x"
    checkpoint.save(tmp_path, 3, {"a": b"y"}, 1)
    assert [step for step, _ in checkpoint.found(tmp_path)] == [3]


def test_a_reclaim_before_the_gpu_has_read_is_never_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Memory(TorchMemory):
        reclaimed = 0

        def generation(self) -> int:
            return self.reclaimed

    memory = Memory()
    stash = Stash(memory, 1, 1)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: setattr(memory, "reclaimed", 1))
    with pytest.raises(StashLost):
        stash.check(torch.device("cuda"))


def test_a_checkpoint_put_aside_while_it_was_replaced_is_taken_back(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, 3, {"a": b"first"}, 3)
    os.rename(tmp_path / "checkpoint-3", tmp_path / ".writing-old-checkpoint-3")
    assert checkpoint.newest(tmp_path) == (tmp_path / "checkpoint-3", [])
    checkpoint.save(tmp_path, 3, {"a": b"second"}, 3)
    assert (tmp_path / "checkpoint-3" / "a").read_bytes() == b"second"


@pytest.mark.parametrize("change", [{"seed": 5}, {"learning_rate": 1e-3}, {"span": 4}, {"lora_alpha": 8.0}])
def test_a_folder_of_another_job_is_refused_and_left_alone(model: Path, tmp_path: Path, change: dict[str, Any]) -> None:
    jobs.finished(jobs.job(model, tmp_path))
    before = jobs.adapter_bytes(jobs.job(model, tmp_path))
    outcome = jobs.train(jobs.job(model, tmp_path, **change))
    assert outcome.end is End.FAILED
    assert "other settings" in outcome.message
    assert jobs.adapter_bytes(jobs.job(model, tmp_path)) == before


def test_another_base_is_refused(model: Path, tmp_path: Path) -> None:
    jobs.finished(jobs.job(model, tmp_path / "out"))
    other = jobs.model_folder(tmp_path / "qwen", "smollm")
    outcome = jobs.train(jobs.job(other, tmp_path / "out"))
    assert (outcome.end, "other base weights" in outcome.message) == (End.FAILED, True)


def test_a_finished_job_run_again_does_nothing(model: Path, tmp_path: Path, undisturbed) -> None:
    spec = jobs.job(model, tmp_path)
    jobs.finished(spec)
    control = jobs.At()
    assert jobs.finished(spec, control=control) == undisturbed[0]
    assert control.asked == 0


def test_saving_more_often_changes_no_byte(model: Path, tmp_path: Path, undisturbed) -> None:
    assert jobs.finished(jobs.job(model, tmp_path, save_steps=1)) == undisturbed[0]


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors"])
def test_a_base_that_is_not_there_is_named(model: Path, tmp_path: Path, missing: str) -> None:
    import shutil

    shutil.copytree(model, tmp_path / "base")
    (tmp_path / "base" / missing).unlink()
    outcome = jobs.train(jobs.job(tmp_path / "base", tmp_path / "out"))
    assert outcome.end is End.FAILED
    assert missing in outcome.message


def test_a_target_the_model_has_not_is_named(model: Path, tmp_path: Path) -> None:
    outcome = jobs.train(jobs.job(model, tmp_path, target_modules=("q_proj", "lm_head")))
    assert (outcome.end, "lm_head" in outcome.message) == (End.FAILED, True)


@pytest.mark.parametrize("name", ["constant", "constant_with_warmup", "linear", "cosine"])
def test_schedules_are_those_of_transformers(name: str) -> None:
    from transformers import get_scheduler
    from valve_tune.train.optimizer import rate_at

    warm = 0 if name == "constant" else 7
    spec = jobs.job(Path("m"), Path("o"), lr_scheduler_type=name, warmup_steps=warm, max_steps=50)
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=spec.learning_rate)
    schedule = get_scheduler(name, optimizer, num_warmup_steps=warm, num_training_steps=50)
    for step in range(50):
        assert rate_at(spec, step) == pytest.approx(schedule.get_last_lr()[0], rel=1e-12)
        optimizer.step()
        schedule.step()


def test_micro_batches_weigh_by_their_labels(model: Path, tmp_path: Path) -> None:
    """Accumulated 4 x 1 rows of unequal labels = 1 x 4 rows."""

    class Uneven(jobs.Counting):
        def step(self, step: int):
            batches = super().step(step)
            for batch in batches:
                for row, ids in zip(batch.labels, batch.input_ids, strict=True):
                    row[: int(ids[0]) % 9] = -100
            return batches

    found = []
    for rows, times in ((1, 4), (4, 1)):
        spec = jobs.job(
            model,
            tmp_path / str(rows),
            per_device_train_batch_size=rows,
            gradient_accumulation_steps=times,
            lora_dropout=0.0,
        )
        events: list[TrainEvent] = []
        assert Trainer(spec, Uneven(spec), events=events.append).run().end is End.DONE
        found.append([event.loss for event in events if event.kind == "step"])
    assert found[0] == pytest.approx(found[1], rel=1e-5)


def test_the_adapter_config_says_only_what_both_engines_read_alike(model: Path, tmp_path: Path) -> None:
    jobs.finished(jobs.job(model, tmp_path))
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["bias"] == "none"
    assert not config["use_dora"]
    assert not config["use_rslora"]
    assert config["base_model_name_or_path"] == str(model)
    assert not {"rank_pattern", "alpha_pattern"} & config.keys()
