"""FlexLLM's claims: a share of the batch for training tokens, within a target for the step; light to heavy load.

Machines are its published step tables, and for the models of the paper a layer table or rooflines. Gaps and lengths
are those of a service with short answers, scaled to each rate; every policy gets the margin or knob that suits it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from valve_hook.cotrain.flexllm_greedy import FlexllmGreedy
from valve_hook.cotrain.interface import ALONE, Goal, Lane, Plan, Planner, State
from valve_hook.cotrain.llmstation import LlmStation
from valve_hook.cotrain.ours import Ours
from valve_hook.cotrain.predictor import PlanPredictor
from valve_tools.lab.cotrain.cells import MAKERS, MARGINS, Cell, Maker, drawn, nearest, read, run
from valve_tools.lab.cotrain.engine import Setting
from valve_tools.lab.cotrain.machines import A100, A100_40, Base, Machine, Table, from_table, roofline
from valve_tools.lab.cotrain.steptables import LLAMA70B, LLAMA70B_STEPS, YI34B, YI34B_STEPS, Measured, measured
from valve_tools.lab.granted.engine import Load
from valve_tools.sim.metrics import Claim, at_least, at_most
from valve_tools.sim.traces import Trace

TRACE = "inst06_msmall_c31_t432000"
SECONDS, SEEDS = 120.0, 5
TTFT_MS = 5000.0
GAP_MS = 400.0
SETTING = Setting(micro_tokens=1024, prompt_budget=256)
NARROW_MS = 25.0
OPT13B = Base(
    name="OPT-13B",
    layers=40,
    hidden=5120,
    layer_params=314.6e6,
    kv_bytes=819200,
    other_bytes=1.03e9,
    kept_bytes=92160,
)
LLAMA30B = Base(
    name="LLaMA-30B",
    layers=60,
    hidden=6656,
    layer_params=535.0e6,
    kv_bytes=1597440,
    other_bytes=0.85e9,
    kept_bytes=138240,
)
LLAMA2_70B = Table(gpu="a100", model="Llama-2-70b-hf", params=855.6e6)


class Alternating(Planner):
    """Temporal sharing as FlexLLM runs it: a whole training step after so many of the engine's."""

    name = "temporal"
    needs_engine = True
    same_base = True
    copies = 1

    def __init__(self, machine: Machine, setting: Setting, every: int) -> None:
        whole_ms = 2 * machine.trained.layers * machine.unit_ms(setting.micro_tokens) + setting.update_ms
        self._step = Plan(Lane.PAUSE, pause_ms=whole_ms)
        self._every, self._count = every, 0

    def plan(self, state: State) -> Plan:
        self._count += 1
        return ALONE if self._count % self._every else self._step


def _flexllm(goal: Goal, machine: Machine, setting: Setting, margin: float) -> Planner:
    told = machine.without_depth() if isinstance(machine, Measured) else machine.assumed()
    return FlexllmGreedy(goal, PlanPredictor(told), margin)


def _spatial(goal: Goal, machine: Machine, setting: Setting, margin: float) -> Planner:
    """A second stream without a budget: training beside all of decode."""
    planner = LlmStation(Goal(step_ms=1e6), PlanPredictor(machine.assumed()), fuses=False)
    planner.name = "spatial"
    return planner


def _ours(*lanes: Lane) -> Maker:
    def make(goal: Goal, machine: Machine, setting: Setting, margin: float) -> Planner:
        return Ours(goal, PlanPredictor(machine.assumed()), lanes=frozenset(lanes), same_base=True)

    return make


def _temporal(every: int) -> Maker:
    def make(goal: Goal, machine: Machine, setting: Setting, margin: float) -> Planner:
        return Alternating(machine, setting, every)

    return make


def _known(name: str) -> Maker:
    return MAKERS[name]


OURS, SPLIT, GREEDY = "ours, same tiles", "ours, split processors", "flexllm_greedy"
POLICIES: Mapping[str, Sequence[tuple[Maker, float]]] = {
    "separate": [(_known("separate"), 0.0)],
    "idle": [(_known("idle"), 0.0)],
    "temporal": [(_temporal(every), 0.0) for every in (64, 128, 512)],
    "spatial": [(_spatial, 0.0)],
    GREEDY: [(_flexllm, margin) for margin in MARGINS],
    OURS: [(_ours(Lane.FUSED, Lane.STREAM), 0.0)],
    SPLIT: [(_ours(Lane.PARTITION), 0.0)],
}
"""Makers, each with a margin; the first that keeps the target counts, temporal's by what it trains."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """All policies on one machine at one rate under one target."""

    machine: Machine
    rate: float
    goal_ms: float
    loads: tuple[Load, ...]
    is_paper: bool
    """The paper states this target for this model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """A machine with its targets and rates; `paper_ms` is the target that the paper states for its model, or 0."""

    make: Callable[[Path], Machine]
    goals: tuple[float, ...]
    paper_ms: float
    rates: tuple[float, ...]


BENCHES = (
    Bench(
        make=lambda _: measured(LLAMA70B, LLAMA70B_STEPS, 4),
        goals=(71.0, 110.0),
        paper_ms=0.0,
        rates=(0.25, 0.5, 1.0),
    ),
    Bench(
        make=lambda _: measured(YI34B, YI34B_STEPS, 2),
        goals=(62.0, 80.0),
        paper_ms=0.0,
        rates=(0.25, 0.5, 1.0),
    ),
    Bench(make=lambda _: roofline(A100_40, OPT13B, 4), goals=(50.0,), paper_ms=50.0, rates=(1.0, 4.0, 10.0)),
    Bench(make=lambda _: roofline(A100_40, LLAMA30B, 4), goals=(80.0,), paper_ms=80.0, rates=(1.0, 4.0, 10.0)),
    Bench(
        make=lambda folder: from_table(folder, A100, LLAMA70B, LLAMA2_70B, 4),
        goals=(110.0,),
        paper_ms=110.0,
        rates=(1.0, 4.0, 10.0),
    ),
)


def scaled(trace: Trace, rate: float) -> tuple[Load, ...]:
    """Five parts of a trace, its gaps scaled so that each has `rate` requests a second."""
    count = max(int(rate * SECONDS), 2)
    found = []
    for seed in range(SEEDS):
        start = seed * (trace.arrive_ns.size - count - 1) // max(SEEDS - 1, 1)
        rows = slice(start, start + count)
        gaps = np.diff(trace.arrive_ns[start : start + count + 1]).astype(float)
        at = np.concatenate([[0.0], np.cumsum(gaps)[:-1]]) / max(gaps.sum(), 1.0) * SECONDS * 1e3
        found.append(
            Load(
                name=f"{rate:g}/s",
                arrive_ms=tuple(at.tolist()),
                prompt=tuple(trace.in_tok[rows].tolist()),
                answer=tuple(trace.out_tok[rows].tolist()),
                duration_ms=SECONDS * 1e3,
            )
        )
    return tuple(found)


def tasks(folder: Path) -> list[Task]:
    """All runs of the page."""
    trace = read(folder, TRACE)
    return [
        Task(
            machine=bench.make(folder),
            rate=rate,
            goal_ms=goal_ms,
            loads=scaled(trace, rate),
            is_paper=goal_ms == bench.paper_ms,
        )
        for bench in BENCHES
        for goal_ms in bench.goals
        for rate in bench.rates
    ]


def quick() -> list[Task]:
    """The 70B of the step table over requests that are drawn."""
    machine = measured(LLAMA70B, LLAMA70B_STEPS, 4)
    loads = [(rate, (drawn(rate, 60.0),)) for rate in (0.05, 0.2)]
    return [Task(machine=machine, rate=rate, goal_ms=71.0, loads=load, is_paper=True) for rate, load in loads]


def work(task: Task) -> list[Cell]:
    """Each policy by the best of its knob's values that keeps both targets."""
    goal = Goal(step_ms=task.goal_ms, ttft_ms=TTFT_MS, gap_ms=GAP_MS)
    note = f"{task.rate:g}{' paper' if task.is_paper else ''}"
    found = []
    for name, makers in POLICIES.items():
        tried = [run(name, task.machine, task.loads, goal, SETTING, margin, note, maker) for maker, margin in makers]
        found.append(max(tried, key=lambda one: one.kept_tokens) if any(one.keeps for one in tried) else nearest(tried))
    return found


def rate_of(cell: Cell) -> float:
    return float(cell.note.split()[0])


def groups(cells: Sequence[Cell]) -> dict[tuple[str, float, float], dict[str, Cell]]:
    """Cells by machine, target and rate, then by policy."""
    found: dict[tuple[str, float, float], dict[str, Cell]] = {}
    for cell in cells:
        found.setdefault((cell.machine, cell.goal_ms, rate_of(cell)), {})[cell.policy] = cell
    return found


def judged(cells: Sequence[Cell]) -> list[dict[str, Cell]]:
    """Groups in which the service alone keeps both targets."""
    return [group for group in groups(cells).values() if group["separate"].keeps]


def narrow(group: Mapping[str, Cell]) -> bool:
    """The target leaves a step less than 25 ms."""
    alone = group["separate"]
    return alone.goal_ms - alone.step50_ms < NARROW_MS


def loss(cells: Sequence[Cell], policy: str, machine: str, goal_ms: float) -> float:
    """From the lightest to the heaviest load at which the service alone keeps the target, as a share. What keeps
    nothing at the lightest has nothing to lose: that is no number."""
    kept = [g for g in judged(cells) if g["separate"].machine == machine and g["separate"].goal_ms == goal_ms]
    if not kept or not kept[0][policy].kept_tokens:
        return math.nan
    return 1.0 - kept[-1][policy].kept_tokens / kept[0][policy].kept_tokens


def lead(group: Mapping[str, Cell], mine: str, other: str) -> float:
    most = group[other].kept_tokens
    return group[mine].kept_tokens / most if most else float("inf")


def claims(cells: Sequence[Cell]) -> list[Claim]:
    """The sheet's table and our marks; each can be missed."""
    kept = judged(cells)
    found = []
    for machine, goal_ms in dict.fromkeys((one["separate"].machine, one["separate"].goal_ms) for one in kept):
        where = f"{machine}, {goal_ms:g} ms"
        lost = loss(cells, GREEDY, machine, goal_ms)
        found.append(at_most("F12 FlexLLM, loss from light to heavy load", where, lost, 0.2, "paper: keeps over 80 %"))
        for rival in ("temporal", "spatial"):
            more = loss(cells, rival, machine, goal_ms) - lost
            found.append(at_least(f"F15 {rival} loses more than FlexLLM, by", where, more, 0.1, "paper: far more"))
    over = max((lead(group, GREEDY, "separate") for group in kept), default=0.0)
    found.append(at_least("F12 FlexLLM over Separate a card, most", "all", over, 1.3, "paper up to 1.6"))
    for mine in (OURS, SPLIT):
        worst = min((lead(group, mine, GREEDY) for group in kept), default=0.0)
        tight = min((lead(group, mine, GREEDY) for group in kept if narrow(group)), default=0.0)
        keeps = sum(group[mine].keeps for group in kept) / max(len(kept), 1)
        found.append(at_least(f"{mine}: over FlexLLM, worst group", "all", worst, 1.0))
        found.append(at_least(f"{mine}: over FlexLLM where the target leaves under 25 ms", "worst", tight, 1.15))
        found.append(at_least(f"{mine}: groups in which it keeps the target", "share", keeps, 1.0))
    return found
