"""The trainer inside an engine's process: turns, refusals, and whatever the job does, the engine's thread goes on."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hook
import jobs
import pytest
import tiny
import torch

hook.lay_in()

from valve_hook.cotrain.idle import Idle  # noqa: E402
from valve_hook.cotrain.interface import ALONE, Direction, Goal, Lane, Plan, Planner  # noqa: E402
from valve_hook.cotrain.predictor import PlanPredictor  # noqa: E402
from valve_tune.engine import planners, refusals  # noqa: E402
from valve_tune.engine.lane import StepView, TrainingLane  # noqa: E402
from valve_tune.engine.tenant import Tenant  # noqa: E402
from valve_tune.engine.turns import TileTurns  # noqa: E402
from valve_tune.engine.watched import TileProgress, WatchedPass  # noqa: E402
from valve_tune.serve.folder import PAUSE, JobFolder  # noqa: E402
from valve_tune.serve.runner import rows_of  # noqa: E402
from valve_tune.tiles.decoder import DecoderShape  # noqa: E402
from valve_tune.tiles.grid import Grid, Phase, Tile  # noqa: E402
from valve_tune.train.build import open_model  # noqa: E402
from valve_tune.train.job import Trainer  # noqa: E402

ENOUGH_S = 60.0
NEVER_S = 3600.0  # of quiet, so that nothing but the test gives a turn


def until(holds: Any) -> None:
    deadline = time.monotonic() + ENOUGH_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.005)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


# ---- turns ----


def test_no_tile_begins_while_the_engine_steps_without_a_ticket() -> None:
    turns = TileTurns(quiet_s=0.0)
    turns.step(tickets=1)
    turns.begin(Phase.FORWARD, lambda: None)
    turns.end(Phase.FORWARD)

    class Asked(Exception):
        pass

    def ask() -> None:
        raise Asked

    with pytest.raises(Asked):
        turns.begin(Phase.FORWARD, ask)
    turns.stepped()
    turns.begin(Phase.FORWARD, ask)  # quiet_s 0: the engine is idle
    assert (turns.count.beside, turns.count.idle) == (1, 1)


def test_a_pause_ends_as_soon_as_no_tile_fits_and_never_waits_for_one_that_is_late() -> None:
    clock = Clock()
    turns = TileTurns(quiet_s=NEVER_S, clock=clock)
    ran, late, over = [], threading.Event(), threading.Event()

    def trainer() -> None:
        for number in range(4):
            turns.begin(Phase.FORWARD, lambda: None)
            ran.append(number)
            if number == 3:
                clock.now += 5.0  # longer than any before it
                late.set()
                over.wait(ENOUGH_S)
            else:
                clock.now += 1.0
            turns.end(Phase.FORWARD)

    thread = threading.Thread(target=trainer)
    thread.start()
    assert turns.pause(3.5) == pytest.approx(3.0)  # a fourth of 1 s does not fit into half a second
    assert ran == [0, 1, 2]
    assert turns.pause(2.0) == pytest.approx(5.0)  # by this clock the tile itself let the time pass
    assert late.is_set()
    assert turns.count.late == 1
    assert turns.running_s() > 0
    over.set()
    thread.join(ENOUGH_S)
    assert turns.running_s() == 0


def test_one_slow_tile_never_keeps_all_later_ones_out_of_short_pauses() -> None:
    shift = [0.0]
    turns = TileTurns(quiet_s=NEVER_S, clock=lambda: time.monotonic() + shift[0])

    def trainer() -> None:
        for seconds in (100.0, 0.0, 0.0):
            turns.begin(Phase.FORWARD, lambda: None)
            shift[0] += seconds
            turns.end(Phase.FORWARD)

    thread = threading.Thread(target=trainer)
    thread.start()
    until(lambda: not thread.is_alive() or turns.pause(0.05) < 0)
    assert turns.count.in_pauses == 3


def test_a_question_inside_a_tile_is_never_taken_for_a_tile_that_hangs() -> None:
    clock = Clock()
    turns = TileTurns(quiet_s=0.0, clock=clock)
    turns.begin(Phase.BACKWARD, lambda: None)
    clock.now += 1.0

    def paused_by_its_user() -> None:
        clock.now += 500.0
        assert turns.running_s() == 0

    turns.inside(paused_by_its_user)
    clock.now += 1.0
    assert turns.running_s() == pytest.approx(2.0)


# ---- what the planner is told ----


def scheduled(new: dict[str, tuple[int, int]], old: dict[str, int], tokens: dict[str, int], done: tuple[str, ...] = ()):
    return SimpleNamespace(
        finished_req_ids=set(done),
        scheduled_new_reqs=[
            SimpleNamespace(req_id=name, prompt_token_ids=[1] * prompt, num_computed_tokens=there)
            for name, (prompt, there) in new.items()
        ],
        scheduled_cached_reqs=SimpleNamespace(req_ids=list(old), num_computed_tokens=list(old.values())),
        num_scheduled_tokens=tokens,
        total_num_scheduled_tokens=sum(tokens.values()),
    )


class Heard(Planner):
    def __init__(self, plan: Plan = ALONE) -> None:
        self.said: list[tuple[Any, ...]] = []
        self.answer = plan

    def plan(self, state: Any) -> Plan:
        self.said.append(("plan", state.running, state.context, state.prompt_tokens))
        return self.answer

    def arrived(self, request: int, now_ms: float) -> None:
        self.said.append(("arrived", request))

    def first_token(self, request: int, now_ms: float) -> None:
        self.said.append(("first", request))

    def delivered(self, now_ms: float) -> None:
        self.said.append(("delivered",))

    def finished(self, request: int, now_ms: float) -> None:
        self.said.append(("finished", request))


def test_a_planner_never_counts_a_prompt_in_pieces_as_a_reader_nor_its_first_token_twice() -> None:
    view, planner = StepView(), Heard()
    view.scheduled(scheduled({"a": (10, 0)}, {}, {"a": 6}), 0.0, planner)
    assert (view.state.running, view.state.prompt_tokens, view.state.prompt_pairs) == (0, 6, 18.0)
    view.delivered(1.0, planner)
    view.scheduled(scheduled({"b": (5, 4)}, {"a": 6}, {"a": 4, "b": 1}), 2.0, planner)
    assert (view.state.running, view.state.prompt_tokens) == (0, 5)  # b's one token is the last of its prompt
    view.delivered(3.0, planner)
    view.scheduled(scheduled({}, {"a": 10, "b": 5}, {"a": 1, "b": 1}), 4.0, planner)
    assert (view.state.running, view.state.context, view.state.prompt_tokens) == (2, 15, 0)
    view.delivered(5.0, planner)
    view.scheduled(scheduled({}, {"b": 6}, {"b": 1}, done=("a",)), 6.0, planner)
    assert planner.said == [
        *(("arrived", 0), ("arrived", 1), ("first", 0), ("first", 1), ("delivered",), ("finished", 0)),
    ]


def test_progress_counts_down_the_units_of_each_phase() -> None:
    grid = Grid(layers=2, tokens=8)
    progress = TileProgress()
    progress.started(grid, rows=3)
    assert (progress.direction, progress.left, progress.tokens) == (Direction.FORWARD, 48.0, 24)
    progress.done(Tile(Phase.FORWARD, 0, 1, 0, 8), grid)
    assert progress.left == 24.0
    progress.done(Tile(Phase.FORWARD, 1, 2, 0, 8), grid)
    assert (progress.direction, progress.left) == (Direction.BACKWARD, 48.0)


# ---- refusals ----


def engine(**more: Any) -> SimpleNamespace:
    made = SimpleNamespace(
        parallel_config=SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1, data_parallel_size=1),
        scheduler_config=SimpleNamespace(async_scheduling=False),
        compilation_config=SimpleNamespace(mode=SimpleNamespace(name="NONE")),
        device_config=SimpleNamespace(device_type="cpu"),
        model_config=SimpleNamespace(enforce_eager=True, runner_type="generate"),
        speculative_config=None,
        lora_config=None,
        kv_transfer_config=None,
    )
    for path, value in more.items():
        owner, _, name = path.rpartition("__")
        setattr(getattr(made, owner) if owner else made, name, value)
    return made


@pytest.mark.parametrize(
    ("field", "value", "word"),
    [
        ("device_config__device_type", "cuda", "card"),
        ("parallel_config__tensor_parallel_size", 2, "tensor parallelism"),
        ("parallel_config__pipeline_parallel_size", 2, "pipeline parallelism"),
        ("parallel_config__data_parallel_size", 2, "data parallelism"),
        ("model_config__enforce_eager", False, "CUDA graphs"),
        ("compilation_config__mode", SimpleNamespace(name="DYNAMO_TRACE_ONCE"), "compiled"),
        ("speculative_config", object(), "speculative"),
        ("lora_config", object(), "--enable-lora"),
        ("kv_transfer_config", object(), "KV connector"),
        ("model_config__runner_type", "pooling", "answers without tokens"),
        ("scheduler_config__async_scheduling", True, "scheduled ahead"),
    ],
)
def test_an_engine_that_was_never_tried_never_trains(field: str, value: object, word: str) -> None:
    assert refusals.why_not(engine()) == ""
    assert word in refusals.why_not(engine(**{field: value}))


def test_a_job_that_needs_a_card_or_other_threads_is_refused_by_its_field() -> None:
    assert refusals.why_not_job({"model": "x"}) == ""
    for name in ("share_weights", "stash_mib", "resident_layers"):
        assert refusals.why_not_job({name: 1}).startswith(name)
    assert refusals.why_not_threads(0, 4) == refusals.why_not_threads(4, 4) == ""
    assert refusals.why_not_threads(1, 4).startswith("threads: ")


SHAPE = DecoderShape(layers=2, hidden=64, heads=4, kv_heads=2, head_size=16, mlp=96, vocabulary=97)


def test_a_planner_whose_lane_is_not_here_is_refused_by_name() -> None:
    goal, predictor = Goal(step_ms=100.0), PlanPredictor(planners.laws_of(SHAPE, 32, 1e10, 1e11))
    for name in planners.MAKES:
        assert planners.planner_of(name, goal, predictor).plan(StepView().state).lane in planners.LANES
    every = {path.stem for path in (hook.HOOK / "cotrain").glob("*.py")}
    for name in (each for names in planners.NO_LANE.values() for each in names):
        assert name in every
        with pytest.raises(planners.NoPlanner, match=name):
            planners.planner_of(name, goal, predictor)
    with pytest.raises(planners.NoPlanner, match="not known"):
        planners.planner_of("best", goal, predictor)


# ---- a job in its place ----


class Scene:
    """A job that gets a turn only where the test gives one."""

    def __init__(self, folder: Path, name: str, *, stuck_s: float = NEVER_S, planner: Planner | None = None) -> None:
        self.base = folder / "base"
        if not self.base.exists():
            tiny.base(self.base)
            tiny.conversations(folder / "train.jsonl")
        values = {
            "model": str(self.base),
            "data": str(folder / "train.jsonl"),
            "max_steps": 3,
            "max_length": 32,
            "lora_r": 4,
            "lora_dropout": 0.1,
            "span": 16,
            "threads": torch.get_num_threads(),
        }
        self.values = values | {"out": str(folder / name)}
        self.folder = JobFolder(folder / name)
        self.turns = TileTurns(quiet_s=NEVER_S)
        self.tenant = Tenant(self.values, turns=self.turns, stuck_s=stuck_s)
        self.lane = TrainingLane(self.tenant, planner or Heard(Plan(Lane.PAUSE, pause_ms=20.0)))
        self.tenant.start()

    def step(self) -> None:
        """Of the engine: one reader, and no work."""
        self.lane.before(scheduled({}, {}, {}) if self.tenant.is_over else one_reader())
        self.lane.after()

    def end(self) -> str:
        until(lambda: self.tenant.is_over or self.step())
        assert self.tenant.wait(ENOUGH_S)
        return f"{self.folder.status().state}: {self.folder.status().message}"


def one_reader():
    return scheduled({"reader": (4, 0)}, {}, {"reader": 4})


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path


def in_a_tile(monkeypatch: pytest.MonkeyPatch, act: Any, at: int = 5) -> None:
    run, seen = WatchedPass.run, [0]

    class Broken:
        def __init__(self, work: Any) -> None:
            self.work = work

        def run(self, *_: Any) -> None:
            act()

        def __getattr__(self, name: str) -> Any:
            return getattr(self.work, name)

    def faulty(self: WatchedPass, *more: Any) -> None:
        seen[0] += 1
        if seen[0] == at:
            self._work = Broken(self._work)
        run(self, *more)

    monkeypatch.setattr(WatchedPass, "run", faulty)


def assert_same_bytes_alone(scene: Any, folder: Path) -> None:
    """The trainer on its own gives the adapter that the job `beside` an engine gave."""
    spec, rows = rows_of(scene.values | {"out": str(folder / "alone")})
    deterministic = torch.are_deterministic_algorithms_enabled()
    try:
        assert Trainer(spec, rows, make_model=open_model).run().adapter
    finally:
        torch.use_deterministic_algorithms(deterministic)
    assert (folder / "alone" / jobs.ADAPTER).read_bytes() == (folder / "beside" / jobs.ADAPTER).read_bytes()


def test_tiles_in_pauses_give_the_bytes_of_the_trainer_on_its_own(folder: Path) -> None:
    scene = Scene(folder, "beside")
    assert scene.end() == "succeeded: "
    assert scene.turns.count.in_pauses == scene.turns.count.tiles > 20
    assert_same_bytes_alone(scene, folder)


def test_no_setting_of_the_whole_process_is_touched(folder: Path) -> None:
    before = torch.are_deterministic_algorithms_enabled(), torch.get_num_threads(), torch.get_rng_state()
    assert Scene(folder, "quiet").end() == "succeeded: "
    assert before[:2] == (torch.are_deterministic_algorithms_enabled(), torch.get_num_threads())
    assert torch.equal(before[2], torch.get_rng_state())


def fails() -> None:
    raise RuntimeError("a tile failed")


def runs_out_of_memory() -> None:
    raise MemoryError


def leaves() -> None:
    raise SystemExit(3)


@pytest.mark.parametrize(
    ("act", "said"),
    [(fails, "a tile failed"), (runs_out_of_memory, "out of memory"), (leaves, "SystemExit: 3")],
)
def test_an_error_of_the_trainer_ends_the_job_and_never_the_engine(
    folder: Path, monkeypatch: pytest.MonkeyPatch, act: Any, said: str
) -> None:
    in_a_tile(monkeypatch, act)
    scene = Scene(folder, "fails")
    end = scene.end()
    assert end.startswith("failed")
    assert said in end
    scene.step()
    assert scene.turns.pause(NEVER_S) < ENOUGH_S  # an engine is never paused for a job that is gone


def test_a_tile_that_hangs_costs_the_job_its_place_and_the_engine_the_planned_pause_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hangs = threading.Event()
    in_a_tile(monkeypatch, lambda: hangs.wait(ENOUGH_S))
    scene = Scene(folder, "hangs", stuck_s=0.2)
    until(lambda: scene.tenant.parked or scene.step())
    assert "longer than" in scene.tenant.parked
    until(lambda: scene.folder.status().state == "failed")
    assert scene.folder.status().message.startswith("parked: one tile")
    before = scene.turns.count.tiles
    for _ in range(5):
        scene.step()
    assert scene.turns.count.tiles == before
    hangs.set()
    assert scene.tenant.close()
    assert scene.folder.status().message.startswith("parked: one tile")


@pytest.mark.parametrize("answer", [ZeroDivisionError, Plan(Lane.FUSED, layers=1, tokens=1)])
def test_a_planner_that_fails_or_wants_a_lane_that_is_not_here_parks_the_job(folder: Path, answer: Any) -> None:
    class Odd(Heard):
        def plan(self, state: Any) -> Plan:
            if isinstance(answer, Plan):
                return answer
            raise answer

    scene = Scene(folder, "odd", planner=Odd())
    end = scene.end()
    assert end.startswith("failed: parked: the lane failed")


def test_a_job_that_its_user_pauses_takes_no_turn_and_goes_on_later(folder: Path) -> None:
    scene = Scene(folder, "paused")
    until(lambda: scene.turns.count.tiles > 2 or scene.step())
    scene.folder.want(PAUSE)
    until(lambda: scene.folder.status().state == "paused" or scene.step())
    before = scene.turns.count.tiles
    for _ in range(5):
        scene.step()
    assert scene.turns.count.tiles == before
    assert scene.turns.pause(NEVER_S) < ENOUGH_S  # an engine is never paused for a job that is paused
    scene.folder.want(b"g")
    assert scene.end() == "succeeded: "


def test_an_engine_that_ends_leaves_a_job_that_goes_on_from_its_checkpoint(folder: Path) -> None:
    scene = Scene(folder, "ended")
    until(lambda: scene.turns.count.tiles > 2 or scene.step())
    assert scene.tenant.close()
    assert scene.folder.status().state == "stopped"
    scene = Scene(folder, "ended")
    assert scene.end() == "succeeded: "
    whole = Scene(folder, "whole")
    assert whole.end() == "succeeded: "
    assert (folder / "ended" / jobs.ADAPTER).read_bytes() == (folder / "whole" / jobs.ADAPTER).read_bytes()


def test_a_job_file_that_cannot_be_read_ends_the_job_and_never_the_engine(folder: Path) -> None:
    tenant = Tenant(str(folder / "none.json"), turns=TileTurns(quiet_s=NEVER_S), stuck_s=NEVER_S)
    tenant.start()
    assert tenant.wait(ENOUGH_S)
    (folder / "bad.json").write_text(json.dumps({"model": "x", "share_weights": "chat"}))
    tenant = Tenant(str(folder / "bad.json"), turns=TileTurns(quiet_s=NEVER_S), stuck_s=NEVER_S)
    tenant.start()
    assert tenant.wait(ENOUGH_S)
    assert TrainingLane(tenant, Idle()).tenant.is_over
