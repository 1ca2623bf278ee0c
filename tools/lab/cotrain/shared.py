"""All planners under one target on the same requests: what each trains where both targets are kept, and nothing else.

Prompts and decode on one engine. The target for a token is a multiple of the machine's own step; that for the first
token is 1.25 times what the service alone needs at P99.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from valve_hook.cotrain.interface import Goal
from valve_tools.lab.cotrain.cells import MAKERS, Cell, best, drawn, read, run, windows
from valve_tools.lab.cotrain.engine import Setting
from valve_tools.lab.cotrain.machines import (
    A100,
    ADA,
    H100,
    LLAMA7B_H100,
    LLAMA8B,
    LLAMA8B_A100,
    Machine,
    from_table,
    roofline,
)
from valve_tools.lab.granted.engine import Load
from valve_tools.sim.metrics import Claim, at_least, at_most

MULTIPLES = (2.0, 4.0)
FIRST = 1.25
WINDOWS = 5
GAP_MS = 200.0
SETTING = Setting(micro_tokens=1024, prompt_budget=1024)
POLICIES = tuple(name for name in MAKERS if name != "harli_closest_shared")
OURS = ("ours", "ours_shared")
TWO_COPIES = ("separate", "static_share", "harli_closest", "harli_most_sm", "race", "idle", "granted")


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """So much of a trace, five times."""

    trace: str
    thin: int
    seconds: float


PARTS = (
    Part(trace="azure2023_conv_first2100s", thin=16, seconds=60),
    Part(trace="azure2023_conv_first2100s", thin=6, seconds=30),
    Part(trace="inst02_deepseekr1_c65_t0", thin=2, seconds=60),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """All planners of one machine on one load under one target."""

    machine: Machine
    loads: tuple[Load, ...]
    multiple: float
    policies: tuple[str, ...] = POLICIES


def machines(folder: Path) -> list[Machine]:
    """Two with layer tables and a roofline."""
    return [
        from_table(folder, A100, LLAMA8B, LLAMA8B_A100),
        from_table(folder, H100, LLAMA8B, LLAMA7B_H100),
        roofline(ADA, LLAMA8B),
    ]


def tasks(folder: Path) -> list[Task]:
    """All runs of the page."""
    loads = [tuple(windows(read(folder, part.trace), part.thin, part.seconds, WINDOWS)) for part in PARTS]
    return [
        Task(machine=machine, loads=load, multiple=multiple)
        for machine in machines(folder)
        for load in loads
        for multiple in MULTIPLES
    ]


def work(task: Task) -> list[Cell]:
    """The first target is what the service alone needs."""
    machine = task.machine
    step_ms = task.multiple * machine.alone_ms(1, 1000)
    free = Goal(step_ms=step_ms, gap_ms=GAP_MS)
    alone = run("separate", machine, task.loads, free, SETTING)
    goal = Goal(step_ms=step_ms, ttft_ms=FIRST * alone.ttft99_ms, gap_ms=GAP_MS)
    note = f"{task.multiple:g}x"
    return [best(name, machine, task.loads, goal, SETTING, note) for name in task.policies]


def groups(cells: Sequence[Cell]) -> dict[tuple[str, str, str], dict[str, Cell]]:
    """Cells by machine, load and target, then by policy."""
    found: dict[tuple[str, str, str], dict[str, Cell]] = {}
    for cell in cells:
        found.setdefault((cell.machine, cell.load, cell.note), {})[cell.policy] = cell
    return found


def judged(cells: Sequence[Cell]) -> list[dict[str, Cell]]:
    """Groups in which the service alone keeps the target."""
    return [group for group in groups(cells).values() if group["separate"].keeps]


def share(group: dict[str, Cell], policy: str) -> float:
    """What is trained on each card that is used, of what a card of the trainer's own does."""
    own = group["separate"].tokens_s[0] / group["idle"].cards
    return group[policy].kept_tokens / own


def lead(group: dict[str, Cell], mine: str, rivals: Sequence[str]) -> float:
    """Ours over the best rival; infinity where no rival trains anything."""
    most = max(group[name].kept_tokens for name in rivals if name in group)
    return group[mine].kept_tokens / most if most else float("inf")


def claims(cells: Sequence[Cell]) -> list[Claim]:
    """Ours against every rival in every cell where the service alone keeps the target."""
    kept = judged(cells)
    rivals = [name for name in POLICIES if name not in OURS]
    any_copies = min((lead(group, "ours", TWO_COPIES) for group in kept), default=0.0)
    one_copy = min((lead(group, "ours_shared", rivals) for group in kept), default=0.0)
    ours = [group[name] for group in kept for name in OURS]
    granted = [group["granted"] for group in kept]
    idle = [
        group["granted"].kept_tokens / max(group["idle"].kept_tokens, 1e-9)
        for group in kept
        if group["idle"].kept_tokens
    ]
    return [
        at_least("groups in which the service alone keeps the target", "all", float(len(kept)), 1.0),
        at_least("ours over the best rival with two copies, worst group", "all", any_copies, 1.0),
        at_least("ours over one copy, over the best of all rivals, worst group", "all", one_copy, 1.0),
        at_least("groups in which ours keeps the target", "share", _share(ours), 1.0),
        at_least("groups in which granted time keeps the target", "share", _share(granted), 1.0),
        at_least("granted time over idle time, worst group", "all", min(idle, default=0.0), 1.0),
        at_most("requests over the target, ours, most", "share", max((one.misses for one in ours), default=1.0), 0.01),
    ]


def _share(cells: Sequence[Cell]) -> float:
    return sum(cell.keeps for cell in cells) / max(len(cells), 1)


def quick() -> list[Task]:
    """One machine and one load that is drawn."""
    return [Task(machine=roofline(ADA, LLAMA8B), loads=(drawn(0.6, 120.0),), multiple=3.0)]
