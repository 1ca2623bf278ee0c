"""The marks, judged by the worse end of each interval, and which cells miss them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from valve_tools.lab.fleet.cells import LEAST, Cell, apart, by_setting, ratio
from valve_tools.lab.fleet.policies import OURS, POLICIES
from valve_tools.lab.fleet.run import AGE_LIMIT_S
from valve_tools.sim.metrics import Claim, at_least, at_most

POINT = 0.01
KEPT = 0.95
LIGHT = 0.15  # of what the fleet can do
WALL = 0.98
NODES = 0.7
LOST = 0.03
STEP_S = 1.0  # how often parked training is looked at when no task comes
RIVALS = tuple(name for name in POLICIES if name != OURS)
Group = Mapping[str, Cell]


@dataclass(frozen=True, slots=True, kw_only=True)
class Missed:
    """A cell in which pack is more than a point behind a rival."""

    table: str
    name: str
    rival: str
    behind: float  # points, by the worse end
    ours: float
    theirs: float
    busy: float


def missed(cells: Sequence[Cell], table: str, rivals: Sequence[str] = RIVALS) -> list[Missed]:
    found = []
    for name, group in by_setting(cells, table).items():
        for rival in rivals:
            if rival not in group:
                continue
            low = apart(group[OURS], group[rival], "attainment").low
            if low < -POINT - 1e-9:
                ours, theirs = group[OURS].mean("attainment"), group[rival].mean("attainment")
                found.append(
                    Missed(
                        table=table,
                        name=name,
                        rival=rival,
                        behind=-100 * low,
                        ours=ours,
                        theirs=theirs,
                        busy=group[OURS].busy,
                    )
                )
    return found


def claims(cells: Sequence[Cell]) -> list[Claim]:
    """U5 to U6 and the starvation part of U3, over all tables that were run."""
    found: list[Claim] = []
    for table in ("gate", "no gate", "sizes", "bursts"):
        groups = by_setting(cells, table)
        if groups:
            found += _of_table(cells, table, groups)
    found += _of_wrong(by_setting(cells, "wrong profiles"))
    oldest = max((one for cell in cells for one in cell.of("oldest_s")), default=0.0)
    unserved = sum(one for cell in cells for one in cell.of("unserved"))
    slowest = 1 / 4.0 * 20  # the longest pause between two arrivals at the lowest rate, by far
    found.append(at_most("U3: the oldest training task when it is sent", "s", oldest, AGE_LIMIT_S + slowest))
    found.append(at_most("U3: tasks that never ran", "tasks", unserved, 0.0))
    return found


def _of_table(cells: Sequence[Cell], table: str, groups: Mapping[str, Group]) -> list[Claim]:
    behind = {(one.name) for one in missed(cells, table)}
    kept = [group for group in groups.values() if group[LEAST].mean("attainment") >= KEPT]
    found = [
        at_least(
            "U5: cells in which pack is within a point of every rival",
            table,
            1 - len(behind) / len(groups),
            1.0,
        ),
        at_least(
            "U5: least attainment of pack where least response reaches 95 %",
            table,
            min((group[OURS].mean("attainment") for group in kept), default=1.0),
            KEPT,
        ),
    ]
    light = [group for group in groups.values() if group[OURS].busy <= LIGHT and "round robin" in group]
    if light:
        most = max(ratio(group[OURS], group["round robin"], "node_seconds").high for group in light)
        found.append(
            at_most(f"U5: node-seconds over round robin, load up to {LIGHT:g}, worst cell", table, most, NODES)
        )
    return [*found, at_least("U5: wall throughput over the best rival, worst cell", table, _wall(groups), WALL)]


def _wall(groups: Mapping[str, Group]) -> float:
    """Over rivals that keep the target as pack does: who gives requests up computes more of the rest."""
    worst = float("inf")
    for group in groups.values():
        floor = group[OURS].mean("attainment") - POINT
        for name in RIVALS:
            if name in group and group[name].mean("attainment") >= floor:
                worst = min(worst, ratio(group[OURS], group[name], "tasks_per_s").low)
    return worst


def _of_wrong(groups: Mapping[str, Group]) -> list[Claim]:
    lost = {"measured": 0.0, "not measured": 0.0}
    for name, group in groups.items():
        rate, _, said = name.split(", ")
        right = groups[f"{rate}, profile x 1, {said}"]
        lost[said] = max(lost[said], -apart(group[OURS], right[OURS], "attainment").low)
    if not groups:
        return []
    return [
        at_most("U6: attainment lost by a profile off by 0.5 to 2, measured", "points", 100 * lost["measured"], 3.0)
    ]


def tables_of(cells: Iterable[Cell]) -> list[str]:
    return list(dict.fromkeys(cell.table for cell in cells))
