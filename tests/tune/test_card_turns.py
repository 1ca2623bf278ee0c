"""A job whose tiles go to a card, in an engine's process: on a driver of our own, with the arithmetic on the CPU."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hook
import pytest
import tiny
import torch
from test_in_engine import (
    ENOUGH_S,
    NEVER_S,
    SHAPE,
    Heard,
    Scene,
    assert_same_bytes_alone,
    engine,
    folder,
    one_reader,
    scheduled,
    until,
)

hook.lay_in()

from fake_card import FakeDriver  # noqa: E402
from valve_hook.cotrain.card.driver import CardDriver, CardRefused  # noqa: E402
from valve_hook.cotrain.card.flight import open_flight  # noqa: E402
from valve_hook.cotrain.card.shares import CardShare  # noqa: E402
from valve_hook.cotrain.interface import Goal, Lane, Plan  # noqa: E402
from valve_hook.cotrain.predictor import PlanPredictor  # noqa: E402
from valve_tune.engine import planners, refusals, vllm_beside  # noqa: E402
from valve_tune.engine.card import CardTurns  # noqa: E402
from valve_tune.engine.lane import StepView, TrainingLane  # noqa: E402
from valve_tune.engine.tenant import Tenant  # noqa: E402
from valve_tune.engine.turns import TileTurns  # noqa: E402
from valve_tune.engine.watched import TileProgress, WatchedModel  # noqa: E402
from valve_tune.serve.folder import JobFolder  # noqa: E402
from valve_tune.tiles.grid import Phase  # noqa: E402

__all__ = ["folder"]  # a fixture
HALF = Plan(Lane.PARTITION, own=0.5, other=0.5)


class OnCard:
    """A job beside an engine that only steps."""

    def __init__(self, folder: Path, name: str, *, fails_in: int = 0, error: type[BaseException] = MemoryError) -> None:
        self.fake, self.sms, self.settled = FakeDriver(), [], 0
        self._fails_in, self._error = fails_in, error
        if not (folder / "base").exists():
            tiny.base(folder / "base")
            tiny.conversations(folder / "train.jsonl")
        self.values = {
            **{"model": str(folder / "base"), "data": str(folder / "train.jsonl"), "out": str(folder / name)},
            **{"max_steps": 3, "max_length": 32, "lora_r": 4, "span": 16, "threads": torch.get_num_threads()},
        }
        self.folder = JobFolder(folder / name)
        self.flight = open_flight(CardDriver(self.fake), stuck_s=0.2)
        self.turns = CardTurns(self.flight, self._on, quiet_s=NEVER_S, settle=self._settle)
        self.tenant = Tenant(self.values, turns=self.turns, stuck_s=NEVER_S)
        self.lane = TrainingLane(self.tenant, Heard(HALF), lanes=planners.CARD_LANES)
        self.tenant.start()

    @contextmanager
    def _on(self, share: CardShare) -> Iterator[None]:
        self.sms.append(share.sms)
        if len(self.sms) == self._fails_in:
            raise self._error("CUDA out of memory")
        yield

    def _settle(self) -> None:
        assert len(self.flight) == 0
        self.settled += 1

    def step(self) -> None:
        self.lane.before(scheduled({}, {}, {}) if self.tenant.is_over else one_reader())
        time.sleep(0.001)  # the step itself
        self.lane.after()

    end = Scene.end


def test_a_job_on_a_card_gives_the_bytes_of_the_trainer_on_its_own_and_leaves_nothing_on_the_card(folder: Path) -> None:
    scene = OnCard(folder, "beside")
    assert scene.end() == "succeeded: "
    until(lambda: not any(scene.fake.alive.values()))
    assert set(scene.sms) == {64}  # of 130 processors, half
    assert scene.turns.count.beside == scene.turns.count.tiles == len(scene.sms) > 20
    assert scene.settled == 12  # of three micro-batches: before and after the start, before the gradients and the end
    assert scene.turns.tile_s(Phase.FORWARD) == pytest.approx(0.003)  # what the card says a tile took
    assert_same_bytes_alone(scene, folder)


@pytest.mark.parametrize("error", [MemoryError, RuntimeError])
def test_an_error_or_no_memory_in_a_tile_ends_the_job_frees_the_card_and_never_ends_the_engine(
    folder: Path, error: type[BaseException]
) -> None:
    scene = OnCard(folder, "fails", fails_in=7, error=error)
    assert scene.end().startswith("failed")
    until(lambda: not any(scene.fake.alive.values()))
    for _ in range(5):
        scene.step()
    assert len(scene.sms) == 7


def test_a_tile_that_does_not_end_ends_the_job_and_frees_nothing_under_it(folder: Path) -> None:
    scene = OnCard(folder, "stuck")
    until(lambda: len(scene.sms) >= 5 or scene.step())
    scene.fake.done = 0
    assert "longer than 0.2 s on the card" in scene.end()
    alive = dict(scene.fake.alive)
    scene.tenant._thread.join(ENOUGH_S)
    assert scene.fake.alive == alive
    assert alive["cuGreenCtxCreate"] == 4
    before = len(scene.sms)
    for _ in range(5):
        scene.step()
    assert len(scene.sms) == before


def test_a_card_that_fails_ends_the_job_by_the_calls_name(folder: Path) -> None:
    scene = OnCard(folder, "refused")
    until(lambda: len(scene.sms) >= 5 or scene.step())
    scene.fake.at, scene.fake.code, scene.fake.fails = scene.fake.said.count("cuEventQuery") + 3, 719, "cuEventQuery"
    assert "cuEventQuery: CUDA_ERROR_UNKNOWN (719)" in scene.end()


def test_a_pass_never_runs_tiles_on_what_is_still_being_made_nor_frees_what_they_still_use() -> None:
    said: list[str] = []
    turns = TileTurns(quiet_s=NEVER_S)
    turns.settle = lambda: said.append("settle")  # type: ignore[method-assign]
    work = SimpleNamespace(close=lambda: said.append("close"))
    model: Any = SimpleNamespace(start=lambda *_, **__: said.append("start") or work)
    batch: Any = SimpleNamespace(input_ids=[[1]])
    grid: Any = SimpleNamespace(tokens=1, layers=1, forward=SimpleNamespace(layers=1, span=1))
    draw: Any = None
    WatchedModel(model, turns, TileProgress()).start(batch, scale=1.0, draw=draw, grid=grid).close()

    assert said == ["settle", "start", "settle", "settle", "close"]


def test_tiles_that_are_on_their_way_count_against_a_pause() -> None:
    now = [100.0]
    turns = TileTurns(quiet_s=NEVER_S, clock=lambda: now[0])
    turns.end(Phase.FORWARD, [(Phase.FORWARD, 1.0)])
    turns._until = 102.5
    assert turns._may(Phase.FORWARD, 1)
    assert turns._may(Phase.FORWARD, 2)
    assert not turns._may(Phase.FORWARD, 3)


def test_a_share_is_of_the_step_alone_and_a_pause_gives_the_whole_card() -> None:
    turns = TileTurns(quiet_s=NEVER_S)
    turns.step(1, 0.25)
    assert turns.begin(Phase.FORWARD, lambda: None) == 0.25
    turns.end(Phase.FORWARD)
    turns.stepped()
    has_had = threading.Event()

    def pauses() -> None:
        while not has_had.is_set():  # one that nobody wants a tile in is over soon
            turns.pause(ENOUGH_S)

    engine_thread = threading.Thread(target=pauses, daemon=True)
    engine_thread.start()
    assert turns.begin(Phase.FORWARD, lambda: None) == 1.0
    has_had.set()
    turns.end(Phase.FORWARD)
    turns.stop()
    engine_thread.join(ENOUGH_S)


# ---- who may ----

ON_CUDA = {"device_config__device_type": "cuda"}


def test_a_card_never_trains_beside_an_engine_unless_its_owner_says_untried() -> None:
    assert '"untried": true' in refusals.why_not(engine(**ON_CUDA))
    assert "never run on one" in refusals.why_not(engine(**ON_CUDA))
    assert refusals.why_not(engine(**ON_CUDA), untried=True) == ""
    assert "tpu" in refusals.why_not(engine(device_config__device_type="tpu"), untried=True)
    for field, value in (("parallel_config__tensor_parallel_size", 2), ("model_config__enforce_eager", False)):
        assert refusals.why_not(engine(**ON_CUDA, **{field: value}), untried=True)


def test_the_settings_of_a_job_say_untried_and_nothing_else_opens_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []
    monkeypatch.setattr(vllm_beside, "started", lambda wish, cores, device: started.append(device))

    def config(**more: Any) -> Any:
        made = engine(**ON_CUDA)
        made.additional_config = {"valve_tune": {"job": {}, **more}}
        return made

    with pytest.raises(ValueError, match="untried"):
        vllm_beside.lane_of(config(), set())
    vllm_beside.lane_of(config(untried=True), set())
    assert started == ["cuda"]


def test_a_card_without_green_contexts_trains_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ctypes.CDLL", lambda name: FakeDriver(absent="cuGreenCtxStreamCreate"))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    wish = vllm_beside.LaneWish(job={}, untried=True)
    with pytest.raises(CardRefused, match="cuGreenCtxStreamCreate is missing"):
        vllm_beside.turns_of(wish, "cuda")


def test_on_a_card_ours_splits_and_what_bounds_the_engine_is_refused_by_name() -> None:
    goal, predictor = Goal(step_ms=100.0), PlanPredictor(planners.laws_of(SHAPE, 16, 1e10, 1e11))
    for name in planners.ON_CARD:
        made = planners.planner_of(name, goal, predictor, planners.ON_CARD)
        assert made.plan(StepView().state).lane in planners.CARD_LANES
    with pytest.raises(planners.NoPlanner, match="bounds on the engine's own processors"):
        planners.planner_of("harli_closest", goal, predictor, planners.ON_CARD)
