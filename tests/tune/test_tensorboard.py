"""TensorBoard's files, where its package is installed; a job needs none of it."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import jobs
import pytest
from valve_tune.serve.folder import JobFolder
from valve_tune.serve.recorder import Recorder
from valve_tune.train.report import TrainEvent

EVENTS = (
    TrainEvent(kind="step", step=1, loss=2.5, tokens=10, lr=1e-3, grad_norm=0.5),
    TrainEvent(kind="evaluated", step=1, loss=2.25),
    TrainEvent(kind="step", step=2, loss=2.0, tokens=10, lr=5e-4, grad_norm=0.25),
)


def record(out: Path) -> None:
    recorder = Recorder(JobFolder(out), jobs.job(out, out))
    for event in EVENTS:
        recorder(event)


def test_each_step_and_evaluation_is_a_point_of_its_curve(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    record(tmp_path)
    read = EventAccumulator(str(tmp_path / "runs"))
    read.Reload()
    curves = {name: [(point.step, point.value) for point in read.Scalars(name)] for name in read.Tags()["scalars"]}
    assert curves["train/loss"] == [(1, 2.5), (2, 2.0)]
    assert curves["train/grad_norm"] == [(1, 0.5), (2, 0.25)]
    assert [step for step, _ in curves["train/learning_rate"]] == [1, 2]
    assert curves["eval/loss"] == [(1, 2.25)]


def test_without_the_package_a_job_writes_none_of_it_and_all_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    record(tmp_path)
    assert not (tmp_path / "runs").exists()
    assert len(JobFolder(tmp_path).metrics.read_text().splitlines()) == len(EVENTS)
