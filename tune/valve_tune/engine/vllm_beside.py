"""A vLLM worker with a job beside it, whatever its device: which job, by `--additional-config '{"valve_tune": {"job":
"job.json", "tpot_ms": 100}}'`. Without a job, or where one is refused, it is vLLM's own worker.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from valve_hook.cotrain.card.shares import CardShare

from valve_tune.engine.card import open_card
from valve_tune.engine.lane import TrainingLane
from valve_tune.engine.refusals import why_not
from valve_tune.engine.turns import TileTurns

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_worker import Worker as VllmWorker
else:
    VllmWorker = object  # so that this file needs no vLLM

log = logging.getLogger("valve")


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneWish:
    """What `additional_config` says under `valve_tune`."""

    job: dict[str, Any] | str
    """The fields of `valve tune run`, or a JSON file of them."""
    planner: str = "ours"
    tpot_ms: float = 100.0
    gap_ms: float = 200.0
    ttft_ms: float = float("inf")
    quiet_ms: float = 20.0
    """So long without a step is idleness."""
    stuck_s: float = 60.0
    """A tile that takes longer parks the job, or ends it."""
    untried: bool = False
    """On a card: its lane was never run on one."""
    reserve_mib: int = 2048
    """Of a card: below it no tile begins."""


class TrainsBeside(VllmWorker):  # type: ignore[misc]
    """In front of a worker class of vLLM."""

    valve_lane: TrainingLane | None = None

    def __init__(self, *arguments: Any, **named: Any) -> None:
        self._valve_cores = os.sched_getaffinity(0)  # before vLLM binds its threads
        super().__init__(*arguments, **named)

    def compile_or_warm_up_model(self) -> Any:
        done = super().compile_or_warm_up_model()
        try:
            self.valve_lane = lane_of(self.vllm_config, self._valve_cores)
        except Exception:
            log.exception("valve: this engine trains no job; it goes on serving")
        return done

    def execute_model(self, scheduler_output: Any) -> Any:
        lane = self.valve_lane
        if lane is None:
            return super().execute_model(scheduler_output)
        lane.before(scheduler_output)
        try:
            output = super().execute_model(scheduler_output)
        except BaseException:
            lane.tenant.park("a step of the engine failed")
            raise
        if output is not None:
            lane.after()
        return output

    def sample_tokens(self, grammar_output: Any) -> Any:
        output = super().sample_tokens(grammar_output)
        if self.valve_lane is not None:
            self.valve_lane.after()
        return output

    def shutdown(self) -> None:
        if self.valve_lane is not None and not self.valve_lane.tenant.close():
            log.error("valve: the trainer's thread hangs; its job goes on from its last checkpoint")
        super().shutdown()


def lane_of(config: Any, cores: set[int]) -> TrainingLane | None:
    """None where no job was named."""
    values = (config.additional_config or {}).get("valve_tune")
    if not values:
        return None
    wish = LaneWish(**values)
    if why := why_not(config, untried=wish.untried):
        raise ValueError(f"training inside the engine is refused: {why}")
    return started(wish, cores, config.device_config.device_type)


def started(wish: LaneWish, cores: set[int], device: str = "cpu") -> TrainingLane:
    from transformers import AutoConfig
    from valve_hook.cotrain.interface import Goal
    from valve_hook.cotrain.predictor import PlanPredictor

    from valve_tune.engine import planners
    from valve_tune.engine.fitted import FittedPredictor
    from valve_tune.engine.tenant import Tenant
    from valve_tune.model.family import shape_of
    from valve_tune.serve.folder import JobFolder

    job = json.loads(Path(wish.job).read_text()) if isinstance(wish.job, str) else wish.job
    shape = shape_of(AutoConfig.from_pretrained(job["model"], local_files_only=True))
    goal = Goal(step_ms=wish.tpot_ms, ttft_ms=wish.ttft_ms, gap_ms=wish.gap_ms)
    if device == "cpu":
        fitted = FittedPredictor(planners.laws_of(shape, 32, *planners.machine()))
        planner, lanes = planners.planner_of(wish.planner, goal, fitted), planners.LANES
    else:
        told = PlanPredictor(planners.laws_of(shape, 16, *planners.machine(device, "bfloat16")))
        planner, lanes = planners.planner_of(wish.planner, goal, told, planners.ON_CARD), planners.CARD_LANES
    turns, inside = turns_of(wish, device)
    tenant = Tenant(wish.job, turns=turns, stuck_s=wish.stuck_s, cores=cores, inside=inside)
    tenant.start()
    log.warning("valve: trains %s beside its requests, planner %s", JobFolder(job["out"]).path, wish.planner)
    return TrainingLane(tenant, planner, lanes=lanes)


def turns_of(wish: LaneWish, device: str) -> tuple[TileTurns, Callable[[], AbstractContextManager[object]]]:
    """And what is around all that the job's thread does."""
    if device == "cpu":
        return TileTurns(quiet_s=wish.quiet_ms / 1e3), nullcontext
    import torch

    def on_stream(share: CardShare) -> AbstractContextManager[object]:
        chosen: AbstractContextManager[object] = torch.cuda.stream(torch.cuda.ExternalStream(share.stream))
        return chosen

    return open_card(
        on_stream,
        quiet_s=wish.quiet_ms / 1e3,
        stuck_s=wish.stuck_s,
        reserve_mib=wish.reserve_mib,
        device=torch.cuda.current_device(),
        settle=lambda: torch.cuda.current_stream().synchronize(),
    )
