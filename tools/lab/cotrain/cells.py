"""One planner, one machine, one load: what is trained and what the service's clients see."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from valve_hook.cotrain.chunked import Chunked
from valve_hook.cotrain.flexllm_greedy import FlexllmGreedy
from valve_hook.cotrain.gpreempt_paced import GpreemptPaced
from valve_hook.cotrain.granted import Granted
from valve_hook.cotrain.harli import PAIRS, SHARES
from valve_hook.cotrain.harli_closest import HarliClosest
from valve_hook.cotrain.harli_most_sm import HarliMostSm
from valve_hook.cotrain.idle import Idle
from valve_hook.cotrain.interface import Goal, Lane, Plan, Planner, State
from valve_hook.cotrain.lithos import Lithos
from valve_hook.cotrain.llmstation import LlmStation
from valve_hook.cotrain.ours import Ours
from valve_hook.cotrain.predictor import PlanPredictor
from valve_hook.cotrain.race import Race
from valve_hook.cotrain.separate import Separate
from valve_hook.cotrain.static_share import StaticShare
from valve_hook.cotrain.temporal import Temporal
from valve_hook.policy.granting import EngineFacts, GrantCost, GrantPolicy, GrantSettings, Target
from valve_hook.policy.step_model import StepModel
from valve_tools.lab.cotrain.engine import NOISE, STOP_MS, WAKE_MS, Engine, Memory, Outcome, Setting
from valve_tools.lab.cotrain.machines import Machine
from valve_tools.lab.granted.engine import Load
from valve_tools.sim.traces import NS, Trace, TraceError, read_file

COST = GrantCost(stop_ms=STOP_MS, wake_ms=WAKE_MS, bubble_ms=0.25, damage_ms=0.25)
MARGINS = (0.0, 0.1, 0.25)
"""Rivals have no rule for requests; each gets the margin under its step target that suits it best, in hindsight."""
WATCHED = ("granted", "ours", "ours_shared", "ours, same tiles", "ours, split processors")
"""They learn from missed targets, as a service does for hours: these see all windows once before they are counted."""
PROFILED = (4, 16, 64)
PROFILED_CONTEXT = (64, 128, 256, 512)


def profiled(machine: Machine, micro_tokens: int, seed: int = 1) -> StepModel:
    """HARLI's profile: batches 4, 16, 64 up to 512 tokens, alone at ten shares and in all 45 pairs."""
    rng = np.random.default_rng(seed)
    model = StepModel()
    state = State(tokens=micro_tokens, left=1e9)
    for own, other in [*((share, 0.0) for share in SHARES), *PAIRS]:
        plan = Plan(Lane.PARTITION, own=own, other=other)
        for batch in PROFILED:
            for length in PROFILED_CONTEXT:
                state.running, state.context = batch, batch * length
                ms, _ = machine.step(state, plan)
                model.observe(batch, batch * length, ms * (1 + NOISE * rng.standard_normal()), own, other)
    return model


Maker = Callable[[Goal, Machine, Setting, float], Planner]


def _predictor(machine: Machine) -> PlanPredictor:
    return PlanPredictor(machine.assumed())


def _granted(goal: Goal, machine: Machine, setting: Setting) -> Planner:
    pool = int(Memory(machine, Idle(), setting).pool)
    facts = EngineFacts(kv_pool=pool, kv_mapped=pool, max_num_seqs=setting.max_seqs)
    policy = GrantPolicy(
        Target(tpot_ms=goal.step_ms, gap_ms=goal.gap_ms), COST, settings=GrantSettings(grants_per_s=float("inf"))
    )
    return Granted(policy, facts)


def _shared(planner: Planner) -> Planner:
    """The same planner over one copy of the weights."""
    planner.copies, planner.same_base = 1, True
    return planner


MAKERS: dict[str, Maker] = {
    "separate": lambda goal, machine, setting, margin: Separate(),
    "idle": lambda goal, machine, setting, margin: Idle(),
    "granted": lambda goal, machine, setting, margin: _granted(goal, machine, setting),
    "gpreempt_paced": lambda goal, machine, setting, margin: GpreemptPaced(goal, _predictor(machine), margin),
    "lithos": lambda goal, machine, setting, margin: Lithos(_predictor(machine)),
    "temporal": lambda goal, machine, setting, margin: Temporal(),
    "static_share": lambda goal, machine, setting, margin: StaticShare(),
    "chunked": lambda goal, machine, setting, margin: Chunked(goal, _predictor(machine), margin=margin),
    "llmstation": lambda goal, machine, setting, margin: LlmStation(goal, _predictor(machine), margin),
    "flexllm_greedy": lambda goal, machine, setting, margin: FlexllmGreedy(goal, _predictor(machine), margin),
    "harli_closest": lambda goal, machine, setting, margin: HarliClosest(
        goal, profiled(machine, setting.micro_tokens), margin
    ),
    "harli_most_sm": lambda goal, machine, setting, margin: HarliMostSm(
        goal, profiled(machine, setting.micro_tokens), margin
    ),
    "harli_closest_shared": lambda goal, machine, setting, margin: _shared(
        HarliClosest(goal, profiled(machine, setting.micro_tokens), margin)
    ),
    "race": lambda goal, machine, setting, margin: Race(goal, _predictor(machine), margin=margin),
    "ours": lambda goal, machine, setting, margin: Ours(goal, _predictor(machine)),
    "ours_shared": lambda goal, machine, setting, margin: Ours(goal, _predictor(machine), same_base=True),
}
TUNED = (
    "gpreempt_paced",
    "chunked",
    "llmstation",
    "flexllm_greedy",
    "harli_closest",
    "harli_most_sm",
    "harli_closest_shared",
    "race",
)
"""Those with a margin."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One planner on one machine under one goal; requests of all windows are judged together."""

    policy: str
    machine: str
    load: str
    goal_ms: float
    ttft_goal_ms: float
    margin: float
    tokens_s: tuple[float, ...]
    """Trained, by window; on all cards that were used."""
    cards: int
    step50_ms: float
    step99_ms: float
    tpot99_ms: float
    ttft99_ms: float
    misses: float
    """Share of requests over the target for a token."""
    busy: float
    refused: int
    requests: int
    least_resident: float
    memory_gb: float
    """What training holds on the service's cards; a window may hand back the layers."""
    needs_engine: bool
    note: str = ""

    @property
    def trained(self) -> float:
        """Tokens a second and card."""
        return sum(self.tokens_s) / len(self.tokens_s) / self.cards

    @property
    def keeps(self) -> bool:
        return self.tpot99_ms <= self.goal_ms and self.ttft99_ms <= self.ttft_goal_ms

    @property
    def kept_tokens(self) -> float:
        """Nothing counts where the goal is missed."""
        return self.trained if self.keeps else 0.0


def dedicated(machine: Machine, setting: Setting) -> float:
    """Tokens a second on a card (or group) of the trainer's own."""
    whole_ms = 2 * machine.trained.layers * machine.unit_ms(setting.micro_tokens) + setting.update_ms
    return setting.micro_tokens / whole_ms * 1e3


def tpot(load: Load, outcome: Outcome) -> np.ndarray:
    tokens = np.array(load.answer, dtype=float) - 1
    several = (tokens > 0) & ~np.isnan(outcome.end_ms)
    return np.asarray((outcome.end_ms - outcome.first_ms)[several] / tokens[several])


def quantile(values: np.ndarray, percent: float) -> float:
    kept = values[~np.isnan(values)]
    return float(np.percentile(kept, percent)) if kept.size else 0.0


def held_gb(machine: Machine, planner: Planner, setting: Setting) -> float:
    """Of the trainer on the service's cards."""
    if planner.gpus > 1:
        return 0.0
    copy = machine.job_base.weights if planner.copies > 1 else 0.0
    return (machine.training_bytes(setting.micro_tokens) + copy) / 1e9


def run(
    policy: str,
    machine: Machine,
    loads: Sequence[Load],
    goal: Goal,
    setting: Setting,
    margin: float = 0.0,
    note: str = "",
    maker: Maker | None = None,
) -> Cell:
    """One planner on the windows of a load, one after another; `separate` trains on cards of its own."""
    if policy == "static_share" and setting.memory_share == 1.0:
        setting = replace(setting, memory_share=0.6)
    outcomes, tpots, ttfts = [], [], []
    planner = (maker or MAKERS[policy])(goal, machine, setting, margin)
    start_ms = 0.0
    for load in loads if policy in WATCHED else ():
        start_ms += Engine(load, machine, planner, setting, start_ms=start_ms).run().duration_ms
    for seed, load in enumerate(loads, 1):
        outcome = Engine(load, machine, planner, setting, seed, start_ms).run()
        start_ms += outcome.duration_ms
        outcomes.append(outcome)
        tpots.append(tpot(load, outcome))
        ttfts.append(outcome.first_ms - np.array(load.arrive_ms))
    reached, steps = np.concatenate(tpots), np.concatenate([one.steps_ms or [0.0] for one in outcomes])
    alone = dedicated(machine, setting)
    return Cell(
        policy=policy,
        machine=machine.name,
        load=loads[0].name,
        goal_ms=goal.step_ms,
        ttft_goal_ms=goal.ttft_ms,
        margin=margin,
        tokens_s=tuple(alone if planner.gpus > 1 else one.tokens_s for one in outcomes),
        cards=planner.gpus * machine.cards,
        step50_ms=quantile(steps, 50),
        step99_ms=quantile(steps, 99),
        tpot99_ms=quantile(reached, 99),
        ttft99_ms=quantile(np.concatenate(ttfts), 99),
        misses=float((reached > goal.step_ms).mean()) if reached.size else 0.0,
        busy=sum(one.busy_ms for one in outcomes) / sum(one.duration_ms for one in outcomes),
        refused=sum(one.refused for one in outcomes),
        requests=int(reached.size),
        least_resident=min(one.least_resident for one in outcomes),
        memory_gb=held_gb(machine, planner, setting),
        needs_engine=planner.needs_engine,
        note=note,
    )


def best(policy: str, machine: Machine, loads: Sequence[Load], goal: Goal, setting: Setting, note: str = "") -> Cell:
    """The least margin under which the goal is kept; where none keeps it, the run that is nearest to it."""
    cells = []
    for margin in MARGINS if policy in TUNED else (0.0,):
        cells.append(run(policy, machine, loads, goal, setting, margin, note))
        if cells[-1].keeps:
            return cells[-1]
    return nearest(cells)


def nearest(cells: Sequence[Cell]) -> Cell:
    """To keeping its goal."""
    return min(cells, key=lambda cell: max(cell.tpot99_ms / cell.goal_ms, cell.ttft99_ms / cell.ttft_goal_ms))


def windows(trace: Trace, thin: int, seconds: float, count: int) -> list[Load]:
    """Parts of a trace, spread evenly over it; each is a seed of its own."""
    thinned = trace.thinned(thin)
    apart = (thinned.duration_s - seconds) / max(count - 1, 1)
    found = []
    for place in range(count):
        start = int(place * apart * NS)
        keep = (thinned.arrive_ns >= start) & (thinned.arrive_ns < start + int(seconds * NS))
        part = replace(
            thinned,
            arrive_ns=thinned.arrive_ns[keep] - start,
            in_tok=thinned.in_tok[keep],
            out_tok=thinned.out_tok[keep],
        )
        found.append(replace(Load.of(part), duration_ms=seconds * 1e3))
    return found


def read(folder: Path, name: str) -> Trace:
    """A request trace by its name without an ending."""
    for end in (".csv.gz", ".csv"):
        if (folder / f"{name}{end}").is_file():
            found = read_file(folder / f"{name}{end}")
            if isinstance(found, Trace):
                return found
    raise TraceError(f"{folder} holds no request trace {name}")


def drawn(requests_s: float, seconds: float, seed: int = 1) -> Load:
    """Requests that come at random with lengths like a chat's, for tests."""
    rng = np.random.default_rng(seed)
    count = int(rng.poisson(requests_s * seconds))
    arrive = np.sort(rng.uniform(0.0, seconds * 1e3, count))
    prompt = np.clip(rng.lognormal(6.2, 0.8, count), 16, 3000).astype(int)
    answer = np.clip(rng.lognormal(4.8, 0.7, count), 2, 600).astype(int)
    return Load(
        name="drawn",
        arrive_ms=tuple(arrive.tolist()),
        prompt=tuple(prompt.tolist()),
        answer=tuple(answer.tolist()),
        duration_ms=seconds * 1e3,
    )
