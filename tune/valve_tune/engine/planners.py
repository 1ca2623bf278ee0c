"""Which planners run inside an engine, and what they are told of the machine before it has measured.

They are the lab's (`valve_hook.cotrain`), unchanged. Those that need rows in the engine's batch, or bounds on the
engine's own processors, are refused by name: there is no such lane here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from valve_hook.cotrain.idle import Idle
from valve_hook.cotrain.interface import Goal, Lane, Planner
from valve_hook.cotrain.laws import Laws
from valve_hook.cotrain.llmstation import LlmStation
from valve_hook.cotrain.ours import Ours
from valve_hook.cotrain.predictor import PlanPredictor

from valve_tune.tiles.decoder import DecoderShape
from valve_tune.tiles.memory import layer_bytes

LANES = frozenset({Lane.ALONE, Lane.PAUSE, Lane.STREAM})
MAKES: dict[str, Callable[[Goal, PlanPredictor], Planner]] = {
    "idle": lambda goal, predictor: Idle(),
    "ours": lambda goal, predictor: Ours(goal, predictor, lanes=frozenset({Lane.STREAM})),
    "ours_pauses": lambda goal, predictor: Ours(goal, predictor, lanes=frozenset()),
    "llmstation": lambda goal, predictor: LlmStation(goal, predictor, fuses=False),
}
CARD_LANES = LANES | {Lane.PARTITION}
ON_CARD: dict[str, Callable[[Goal, PlanPredictor], Planner]] = MAKES | {
    "ours": Ours,
}
"""The engine's processors are not bounded there: its share of a plan is what the trainer leaves."""
NO_LANE = {
    "fused rows": ("flexllm_greedy", "chunked"),
    "bounds on the engine's own processors": ("harli_closest", "harli_most_sm", "race", "static_share", "lithos"),
    "a process of its own": ("granted", "gpreempt_paced", "separate", "temporal"),
}


class NoPlanner(ValueError):
    """Why this planner does not run here."""


def planner_of(
    name: str,
    goal: Goal,
    predictor: PlanPredictor,
    makes: Mapping[str, Callable[[Goal, PlanPredictor], Planner]] = MAKES,
) -> Planner:
    if name in makes:
        return makes[name](goal, predictor)
    for what, names in NO_LANE.items():
        if name in names:
            raise NoPlanner(f"planner: {name} needs {what}, and there is no such lane here; {_known()}")
    raise NoPlanner(f"planner: {name!r} is not known; {_known()}")


def _known() -> str:
    return f"known here are {', '.join(MAKES)}"


def laws_of(shape: DecoderShape, bits: int, bandwidth: float, speed: float) -> Laws:
    of_layer = layer_bytes(shape, bits)
    return Laws(
        layers=shape.layers,
        layer_bytes=of_layer,
        layer_work=2.0 * of_layer * 8 / bits,
        bandwidth=bandwidth,
        speed=speed,
        kv_bytes=2.0 * shape.layers * shape.kv_width * bits / 8,
        hidden=shape.hidden,
    )


def machine(device: str = "cpu", dtype: str = "float32", hidden: int = 1024, rows: int = 64) -> tuple[float, float]:
    """(bytes/s, FLOP/s) of one thread or one card, in a few tens of ms: a start for what each step then corrects."""
    import torch

    kind = {"device": device, "dtype": getattr(torch, dtype)}
    large = torch.ones(16 * hidden, hidden, **kind)
    one, many = torch.ones(hidden, 1, **kind), torch.ones(hidden, rows, **kind)

    def seconds(other: torch.Tensor) -> float:
        found = []
        for _ in range(3):
            began = time.perf_counter()
            (large @ other)[0, 0].item()  # so that a card has done it
            found.append(time.perf_counter() - began)
        return min(found)

    return large.nbytes / seconds(one), 2.0 * large.numel() * rows / seconds(many)
