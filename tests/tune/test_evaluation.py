"""Evaluations on held-out data: they change no byte, survive every kill, and end a job that learns no more."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jobs
import oracle
import pytest
import test_autograd
import torch
from valve_tune.train.batch import MicroBatch
from valve_tune.train.data import load
from valve_tune.train.job import Trainer
from valve_tune.train.lines import DataError
from valve_tune.train.report import End, Outcome, TrainEvent
from valve_tune.train.spec import JobSpec, SpecError


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before, threads = torch.are_deterministic_algorithms_enabled(), torch.get_num_threads()
    yield
    torch.use_deterministic_algorithms(before)
    torch.set_num_threads(threads)


@pytest.fixture(scope="module", params=["llama", "olmo2"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = Path(tmp_path_factory.mktemp("base") / request.param)
    if request.param == "llama":
        return jobs.model_folder(folder)
    test_autograd.loaded(request.param).save_pretrained(folder)
    return folder


class HeldOut:
    """Batches of the same kind; `stray` gives rows that the training data contradicts ever more."""

    def __init__(self, spec: JobSpec, stray: bool = False) -> None:
        self.digest = f"held out {stray}"
        more = jobs.Counting(spec)
        self.batches: list[MicroBatch] = [each for step in (90, 91) for each in more.step(step)]
        if stray:
            for batch in self.batches:
                batch.labels[:, 4:] = (batch.labels[:, 4:] + 31) % oracle.WIDTHS["vocab_size"]

    def once(self) -> Iterator[MicroBatch]:
        yield from self.batches


class Judging(jobs.Counting):
    def __init__(self, spec: JobSpec, stray: bool = False) -> None:
        super().__init__(spec)
        self.held_out = HeldOut(spec, stray)


def job(model: Path, out: Path, **more: Any) -> JobSpec:
    grid = {} if model.name == "llama" else {"span": 0}
    return jobs.job(model, out, **{"eval_data": "held out", "eval_steps": 1, **grid, **more})


def train(spec: JobSpec, control: Any = None, stray: bool = False) -> tuple[Outcome, list[TrainEvent]]:
    events: list[TrainEvent] = []
    return Trainer(spec, Judging(spec, stray), events=events.append, control=control).run(), events


def losses(events: list[TrainEvent]) -> dict[int, float | None]:
    return {event.step: event.loss for event in events if event.kind == "evaluated"}


def test_the_loss_of_held_out_data_is_that_of_peft_and_training_is_never_changed_by_it(
    model: Path, tmp_path: Path
) -> None:
    spec = job(model, tmp_path / "judged", eval_steps=3)
    outcome, events = train(spec)
    assert outcome.end is End.DONE, outcome.message
    assert list(losses(events)) == [3, 4]  # the last step is always judged
    plain = jobs.job(model, tmp_path / "plain", span=spec.span)
    assert jobs.adapter_bytes(spec) == jobs.finished(plain)
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    tuned = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), spec.out)
    total, labels = 0.0, 0
    for batch in HeldOut(spec).once():
        with torch.no_grad():
            said = tuned(input_ids=torch.from_numpy(batch.input_ids), labels=torch.from_numpy(batch.labels)).loss
        total += float(said) * batch.label_count
        labels += batch.label_count
    assert losses(events)[4] == pytest.approx(total / labels, rel=1e-4)


def test_a_job_killed_at_any_tile_or_in_an_evaluation_ends_with_the_same_bytes_and_losses(
    model: Path, tmp_path: Path
) -> None:
    right, control = job(model, tmp_path / "whole"), jobs.At()
    outcome, events = train(right, control)
    assert outcome.end is End.DONE, outcome.message
    for tile in random.Random(5).sample(range(1, control.asked), 4):
        spec = job(model, tmp_path / str(tile))
        status = jobs.in_child(lambda spec=spec, tile=tile: train(spec, jobs.At(tile, jobs.kill)))
        assert os.WIFSIGNALED(status)
        assert train(spec)[0].end is End.DONE
        assert jobs.adapter_bytes(spec) == jobs.adapter_bytes(right), tile
    stopped = job(model, tmp_path / "stopped")
    seen: dict[int, float | None] = {}
    for _ in range(200):
        outcome, events_now = train(stopped, jobs.At(control.asked // 7))
        seen |= losses(events_now)
        if outcome.end is End.DONE:
            break
    assert outcome.end is End.DONE
    assert seen == losses(events)
    assert jobs.adapter_bytes(stopped) == jobs.adapter_bytes(right)


def test_a_job_that_learns_no_more_ends_with_its_best_adapter_and_never_goes_on(model: Path, tmp_path: Path) -> None:
    more = {"early_stopping_patience": 2, "learning_rate": 3e-2, "warmup_steps": 0, "max_steps": 30}
    spec = job(model, tmp_path / "mine", **more)
    outcome, events = train(spec, stray=True)
    assert outcome.end is End.DONE, outcome.message
    said = losses(events)
    best = min(said, key=lambda step: said[step] or 0.0)
    assert outcome.step == best + 2 < 30
    assert "the job ends" in [event.message for event in events if event.kind == "evaluated"][-1]
    untilthen = job(model, tmp_path / "best", save_steps=1, save_total_limit=40, **more)
    train(untilthen, stray=True)
    assert jobs.adapter_bytes(spec) == (Path(untilthen.out) / f"checkpoint-{best}" / jobs.ADAPTER).read_bytes()
    again, events = train(spec, stray=True)
    assert (again.end, again.step, losses(events)) == (End.DONE, outcome.step, {})
    killed = job(model, tmp_path / "killed", **more)
    status = jobs.in_child(lambda: train(killed, jobs.At(40, jobs.kill), stray=True))
    assert os.WIFSIGNALED(status)
    train(killed, stray=True)
    assert jobs.adapter_bytes(killed) == jobs.adapter_bytes(spec)


def test_an_early_stop_by_other_held_out_data_is_another_job(model: Path, tmp_path: Path) -> None:
    spec = job(model, tmp_path, early_stopping_patience=3)
    assert train(spec, jobs.At(20))[0].end is End.STOPPED
    outcome, _ = train(spec, stray=True)
    assert outcome.end is End.FAILED
    assert "data" in outcome.message


def test_patience_without_held_out_data_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="early_stopping_patience: needs eval_data"):
        jobs.job(tmp_path, tmp_path, early_stopping_patience=1)


def test_a_bad_line_of_held_out_data_is_named_with_its_file_before_anything_runs(tmp_path: Path) -> None:
    import tiny

    base = tiny.base(tmp_path / "base")
    (tmp_path / "held.jsonl").write_text('{"text": "w1 w2"}\n{"text": 7}\n')
    spec = JobSpec(
        model=str(base),
        data=str(tiny.conversations(tmp_path / "train.jsonl")),
        out=str(tmp_path / "out"),
        max_steps=2,
        eval_data=str(tmp_path / "held.jsonl"),
    )
    with pytest.raises(DataError, match=r"held\.jsonl: line 2, text"):
        load(spec, tiny.tokenizer())
    (tmp_path / "held.jsonl").write_text('{"text": "w1 w2"}\n{"text": "w3 w4 w5"}\n')
    rows = load(spec, tiny.tokenizer())
    assert rows.held_out is not None
    assert sum(batch.tokens for batch in rows.held_out.once()) == rows.held_out.tokens == 7
