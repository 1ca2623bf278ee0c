"""What valved is told of a job's progress: each token counted once."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import jobs
import pytest
from valve_tune.serve.folder import JobFolder
from valve_tune.serve.receipt import TrainedTokens, process_link
from valve_tune.serve.recorder import Recorder
from valve_tune.train.report import TrainEvent


class Lifecycle:
    """The hook's: a new connection begins with what was told last."""

    def __init__(self) -> None:
        self.told: list[tuple[int, ...]] = []

    def tell(self, *numbers: int) -> None:
        self.told.append(numbers)


def step(number: int) -> TrainEvent:
    return TrainEvent(kind="step", step=number, loss=1.0, tokens=10)


def test_steps_that_a_resumed_job_does_again_are_never_counted_twice(tmp_path: Path) -> None:
    spec, counted = jobs.job(tmp_path, tmp_path / "out"), []
    Path(spec.out).mkdir()
    for first, last in ((1, 7), (5, 9)):  # killed after step 7; the last checkpoint was of step 4
        recorder = Recorder(JobFolder(spec.out), spec, trained=counted.append)
        for number in range(first, last + 1):
            recorder(step(number))
    assert counted == [10] * 9


def test_all_of_it_is_told_each_time_for_a_valved_that_comes_back_and_without_a_hook_it_costs_nothing() -> None:
    lifecycle = Lifecycle()
    trained = TrainedTokens(types.SimpleNamespace(lifecycle=lifecycle))
    for tokens in (10, 20, 5):
        trained.add(tokens)
    assert lifecycle.told == [(1, 1, 10), (1, 2, 30), (1, 3, 35)]
    TrainedTokens(None).add(3)


@pytest.mark.parametrize("role", ["offline", "online", ""])
def test_a_process_that_is_no_offline_work_never_tells_of_open_requests(
    role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    hook = types.ModuleType("valve_hook")
    hook.link = types.SimpleNamespace(process_link=lambda: asked.append(role))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "valve_hook", hook)
    monkeypatch.setenv("VALVE_ROLE", role)
    process_link()
    assert asked == (["offline"] if role == "offline" else [])
