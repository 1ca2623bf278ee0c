"""The marks, judged by the worse end of each interval, and which cells miss them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from valve_tools.lab.fleet.cells import LEAST, Cell, apart, by_setting, ratio
from valve_tools.lab.fleet.policies import OURS, POLICIES
from valve_tools.lab.fleet.run import AGE_LIMIT_S
from valve_tools.sim.metrics import Claim, Interval, at_least, at_most

POINT = 0.01
KEPT = 0.95
LIGHT = 0.15  # of what the fleet can do
WALL = 0.98
NODES = 0.7
RIVALS = tuple(name for name in POLICIES if name != OURS)
Group = Mapping[str, Cell]


@dataclass(frozen=True, slots=True)
class Missed:
    """A cell in which pack is more than a point behind a rival."""

    table: str
    name: str
    rival: str
    behind: float  # points, by the worse end
    ours: float
    theirs: float
    busy: float


def missed(cells: Sequence[Cell], table: str, ours: str = OURS) -> list[Missed]:
    found = []
    for name, group in by_setting(cells, table).items():
        for rival in RIVALS:
            if rival not in group:
                continue
            low = apart(group[ours], group[rival], "attainment").low
            if low < -POINT - 1e-9:
                mine, theirs = group[ours].mean("attainment"), group[rival].mean("attainment")
                found.append(Missed(table, name, rival, -100 * low, mine, theirs, group[ours].busy))
    return found


def worst_of(found: Iterable[Missed]) -> list[Missed]:
    """One a cell: against the rival that is furthest ahead."""
    worst: dict[str, Missed] = {}
    for one in found:
        if one.name not in worst or one.behind > worst[one.name].behind:
            worst[one.name] = one
    return list(worst.values())


def claims(cells: Sequence[Cell]) -> list[Claim]:
    """U5 to U6 and the starvation part of U3, over all tables that were run."""
    found: list[Claim] = []
    for table in ("gate", "no gate", "sizes", "bursts"):
        groups = by_setting(cells, table)
        if groups:
            found += _of_table(cells, table, groups)
    found += _of_wrong(by_setting(cells, "wrong profiles"))
    oldest = [one for cell in cells for one in cell.of("oldest_s")]
    unserved = [one for cell in cells for one in cell.of("unserved")]
    slowest = 1 / 4.0 * 20  # the longest pause between two arrivals at the lowest rate, by far
    found.append(at_most("U3: the oldest training task when it is sent", "s", oldest, AGE_LIMIT_S + slowest))
    found.append(at_most("U3: tasks that never ran", "tasks", unserved, 0.0))
    return found


def _of_table(cells: Sequence[Cell], table: str, groups: Mapping[str, Group]) -> list[Claim]:
    behind = worst_of(missed(cells, table))
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
            [group[OURS].mean("attainment") for group in kept],
            KEPT,
        ),
    ]
    most = worst_nodes(groups)
    if most is not None:
        found.append(
            at_most(f"U5: node-seconds over round robin, load up to {LIGHT:g}, worst cell", table, most.high, NODES)
        )
    wall = worst_wall(groups)
    return [
        *found,
        at_least("U5: wall throughput over the best rival, worst cell, mean", table, wall.ratio.mean, WALL),
        at_least(
            "U5: the same, worse end of the interval, worst cell", table, worst_wall(groups, by="low").ratio.low, WALL
        ),
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wall:
    """Wall throughput over that of a rival."""

    name: str
    rival: str
    ratio: Interval


def worst_wall(groups: Mapping[str, Group], ours: str = OURS, by: str = "mean") -> Wall:
    """Over rivals that keep the target as pack does: a rival that gives requests up computes more of the rest."""
    found = [
        Wall(name=name, rival=rival, ratio=ratio(group[ours], group[rival], "tasks_per_s"))
        for name, group in groups.items()
        for rival in RIVALS
        if rival in group and group[rival].mean("attainment") >= group[ours].mean("attainment") - POINT
    ]
    nobody = Wall(name="", rival="", ratio=Interval(mean=math.nan, low=math.nan, high=math.nan, n=0))
    return min(found, key=lambda one: float(getattr(one.ratio, by)), default=nobody)


def worst_nodes(groups: Mapping[str, Group], ours: str = OURS) -> Interval | None:
    """Node-seconds over round robin's, of cells of little load; None: there is none."""
    light = [group for group in groups.values() if group[OURS].busy <= LIGHT and "round robin" in group]
    found = [ratio(group[ours], group["round robin"], "node_seconds") for group in light]
    return max(found, key=lambda one: one.high, default=None)


def _of_wrong(groups: Mapping[str, Group]) -> list[Claim]:
    lost: dict[str, list[float]] = {"measured": [], "not measured": []}
    for name, group in groups.items():
        rate, _, said = name.split(", ")
        right = groups[f"{rate}, profile x 1, {said}"]
        lost[said].append(max(0.0, -apart(group[OURS], right[OURS], "attainment").low))
    if not groups:
        return []
    name = "U6: attainment lost by a profile off by 0.5 to 2, measured"
    return [at_most(name, "points", [100 * one for one in lost["measured"]], 3.0)]
