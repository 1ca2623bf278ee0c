"""HARLI's claims H1 to H9: two cards, decode alone on them, a LoRA job in what decode leaves; target 40 ms a step.

Prompts are made elsewhere. Separate: one card decodes everything, one trains. The others: each card has half of the
requests and a trainer. HARLI-TP: both models over both cards.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import numpy as np
from valve_hook.cotrain.harli import PAIRS, SHARES
from valve_hook.cotrain.interface import Goal, Lane, Plan, State
from valve_tools.lab.cotrain.cells import PROFILED, Cell, drawn, profiled, read, run, windows
from valve_tools.lab.cotrain.engine import Setting
from valve_tools.lab.cotrain.machines import (
    A100_40,
    ADA,
    LLAMA8B,
    LLAMA8B_A100_40,
    QWEN7B,
    Base,
    Machine,
    from_table,
    roofline,
)
from valve_tools.lab.granted.engine import Load
from valve_tools.sim.metrics import Claim, at_least, at_most

TRACE = "azure2023_conv_first2100s"
WINDOWS, SECONDS = 5, 40.0
TARGET = Goal(step_ms=40.0, gap_ms=40.0)
"""The paper promises each step, so no reader waits longer than a step may take: planners that use credits are told."""
SETTING = Setting(micro_tokens=2048, prompts_elsewhere=True)
POLICIES = ("static_share", "harli_closest", "harli_most_sm", "idle", "granted", "race", "ours")
SHARED = ("harli_closest_shared", "ours_shared")
RIVALS = ("static_share", "harli_closest", "harli_most_sm", "idle", "granted")
MEASURES: dict[str, Callable[[Cell], float]] = {
    "TPOT": lambda cell: cell.tpot99_ms,
    "step": lambda cell: cell.step99_ms,
}
"""By which a cell keeps the target: what readers see, or HARLI's own. One and the same for ours and for its rivals."""
CONTENTION = {"bandwidth": 0.0, "linear": 0.4}
"""Laws of interference: bandwidth alone, or 40 % at all processors beside it (HARLI's own measurement, H5)."""
SATURATIONS = (0.40, 0.45, 0.50)


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One cell to run."""

    policy: str
    machine: Machine
    loads: tuple[Load, ...]
    note: str


def pairs(folder: Path | None, card: str) -> list[Machine]:
    """The four pairs served-trained on one card."""
    made: Callable[[Base], Machine]
    if card == "Ada":
        made = lambda base: roofline(ADA, base)  # noqa: E731
    else:
        assert folder is not None
        made = lambda base: from_table(folder, A100_40, base, LLAMA8B_A100_40)  # noqa: E731
    found = []
    for served, trained in product((LLAMA8B, QWEN7B), repeat=2):
        machine = made(served)
        found.append(machine if served is trained else replace(machine, job=made(trained)))
    return found


def tasks(folder: Path, cards: Sequence[str] = ("Ada", "A100")) -> list[Task]:
    """All runs of the page."""
    trace = read(folder, TRACE)
    whole, half = (tuple(windows(trace, thin, SECONDS, WINDOWS)) for thin in (1, 2))
    found = []
    for card, (law, contention) in product(cards, CONTENTION.items()):
        for machine in pairs(folder, card):
            changed = replace(machine, contention=contention)
            found.append(Task(policy="separate", machine=changed, loads=whole, note=law))
            shared = SHARED if machine.job is None else ()
            found += [Task(policy=name, machine=changed, loads=half, note=law) for name in (*POLICIES, *shared)]
    for card in cards:
        single = pairs(folder, card)[0]
        double = (
            roofline(ADA, LLAMA8B, 2) if card == "Ada" else from_table(folder, A100_40, LLAMA8B, LLAMA8B_A100_40, 2)
        )
        found += [Task(policy=name, machine=double, loads=whole, note="TP") for name in ("harli_closest", "ours")]
        for saturation in SATURATIONS:
            changed = replace(single, saturation=saturation)
            for name in ("harli_closest", "harli_most_sm", "ours"):
                found.append(Task(policy=name, machine=changed, loads=half[:1], note=f"saturation {saturation:g}"))
    return found


def work(task: Task) -> Cell:
    return run(task.policy, task.machine, task.loads, TARGET, SETTING, note=task.note)


def of(cells: Sequence[Cell], policy: str, note: str, card: str = "") -> dict[str, Cell]:
    """Cells by machine."""
    return {
        cell.machine: cell
        for cell in cells
        if cell.policy == policy and cell.note == note and cell.machine.startswith(card)
    }


def ratios(cells: Sequence[Cell], policy: str, over: str, note: str, card: str = "") -> list[float]:
    """Tokens a second and card of one policy over those of another, by pair of models."""
    mine, theirs = of(cells, policy, note, card), of(cells, over, note, card)
    return [mine[name].trained / theirs[name].trained for name in mine if name in theirs and theirs[name].trained]


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def by_hand() -> float:
    """H4: the most that one layer after another gains on two cards, over all batches, with the best split."""
    best, machine = 0.0, roofline(ADA, LLAMA8B)
    for batch in (1, 4, 8, 16, 32, 64):
        state = State(running=batch, context=batch * 512, tokens=2048, left=1e9)
        for own, other in PAIRS:
            ms, units = machine.step(state, Plan(Lane.PARTITION, own=own, other=other))
            if ms <= TARGET.step_ms:
                best = max(best, 2 * units / ms / (2048 / machine.unit_ms(2048)))
    return best


@dataclass(frozen=True, slots=True, kw_only=True)
class Accuracy:
    """Relative errors of a profile on what it has not seen, and the profile's length."""

    solo_mean: float
    solo_most: float
    beside_mean: float
    beside_most: float
    predict_us: float
    minutes: float


def accuracy(contention: float) -> Accuracy:
    """H6, H7, H9: without any refit, on batches and lengths between and beyond those profiled."""
    machine = replace(roofline(ADA, LLAMA8B), contention=contention)
    model, state = profiled(machine, 2048), State(tokens=2048, left=1e9)
    errors: dict[bool, list[float]] = {True: [], False: []}
    took, count = 0.0, 0
    for own, other in [*((share, 0.0) for share in SHARES), *PAIRS]:
        for batch in (2, 8, 12, 24, 48, 96):
            for length in (96, 300, 700, 1500, 3000):
                state.running, state.context = batch, batch * length
                before = time.perf_counter()
                said = model.predict(batch, batch * length, own, other).ms
                took, count = took + time.perf_counter() - before, count + 1
                ms, _ = machine.step(state, Plan(Lane.PARTITION, own=own, other=other))
                errors[other > 0].append(abs(said / ms - 1))
    profile_ms = 0.0
    for own, other in PAIRS:
        for batch in PROFILED:
            state.running, state.context = batch, batch * 256
            profile_ms += 512 * machine.step(state, Plan(Lane.PARTITION, own=own, other=other))[0]
    return Accuracy(
        solo_mean=float(np.mean(errors[False])),
        solo_most=float(np.max(errors[False])),
        beside_mean=float(np.mean(errors[True])),
        beside_most=float(np.max(errors[True])),
        predict_us=took / count * 1e6,
        minutes=profile_ms / 60e3,
    )


def worst_lead(cells: Sequence[Cell], law: str, measure: Callable[[Cell], float]) -> float:
    """Ours over each rival that keeps the target by this measure; 0 where ours itself does not keep it."""
    leads = [
        (mine.trained if measure(mine) <= TARGET.step_ms else 0.0) / theirs.trained
        for name, mine in of(cells, "ours", law).items()
        for rival in RIVALS
        if (theirs := of(cells, rival, law).get(name)) and measure(theirs) <= TARGET.step_ms and theirs.trained
    ]
    return min(leads, default=0.0)


def claims(cells: Sequence[Cell], exact: dict[str, Accuracy]) -> list[Claim]:
    """Each with a bound that can be missed; the paper's figure is in the note."""
    found: list[Claim] = []
    for law in CONTENTION:
        for policy in ("harli_closest", "harli_most_sm"):
            ada = ratios(cells, policy, "separate", law, ADA.name)
            found.append(
                at_least(f"H1 {policy} over Separate, Ada, mean", law, mean(ada), 1.2, "paper 1.46; mark 1.2 to 2.0")
            )
            static = ratios(cells, policy, "static_share", law)
            found.append(
                at_least(f"H2 {policy} over Static, worst pair", law, min(static, default=0.0), 1.0, "paper 1.75 mean")
            )
            steps = [cell.step99_ms for cell in of(cells, policy, law).values()]
            found.append(
                at_most(f"H3 {policy} P99 step", law, max(steps, default=99.0), TARGET.step_ms, "paper: within target")
            )
        one = exact[law]
        found.append(at_most("H6 step alone, mean error", law, one.solo_mean, 0.03, "paper 3 %, max 6 %"))
        found.append(at_most("H7 step beside training, mean error", law, one.beside_mean, 0.05, "paper 5 %"))
        for measure, of_cell in MEASURES.items():
            name = f"ours over each rival, kept by P99 {measure}, worst"
            found.append(at_least(name, law, worst_lead(cells, law, of_cell), 1.0))
    found.append(at_least("H4 best split by hand over Separate", "bandwidth", by_hand(), 1.8, "paper up to 2.01"))
    tensor = [
        mine.trained / theirs.trained
        for mine in of(cells, "harli_closest", "TP").values()
        for theirs in of(cells, "harli_closest", "bandwidth").values()
        if mine.machine.removeprefix("2 x ").split(",")[0] == theirs.machine.split(",")[0]
        and "trains" not in theirs.machine
    ]
    found.append(at_least("H8 tensor parallel over one card each, mean", "bandwidth", mean(tensor), 1.0, "paper 1.10"))
    found.append(at_most("H9 profile of pairs, minutes", "bandwidth", exact["bandwidth"].minutes, 1.5 * 58, "paper 58"))
    return found


def quick() -> list[Task]:
    """Two pairs over requests that are drawn: what a test can wait for."""
    whole, half = drawn(5.5, 40.0), drawn(2.75, 40.0)
    found = []
    for law, contention in CONTENTION.items():
        machine = replace(roofline(ADA, LLAMA8B), contention=contention)
        found.append(Task(policy="separate", machine=machine, loads=(whole,), note=law))
        found += [Task(policy=name, machine=machine, loads=(half,), note=law) for name in (*POLICIES, *SHARED)]
    double = roofline(ADA, LLAMA8B, 2)
    return [*found, Task(policy="harli_closest", machine=double, loads=(whole,), note="TP")]
