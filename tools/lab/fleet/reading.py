"""What the figures say, in words. Every number is worked out from the cells; a sentence stands only where it holds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import isnan
from textwrap import fill

from valve_tools.lab.fleet.cells import LEAST, Cell, by_setting, ratio
from valve_tools.lab.fleet.claims import (
    KEPT,
    LIGHT,
    NODES,
    POINT,
    RIVALS,
    WALL,
    Group,
    Missed,
    missed,
    worst_nodes,
    worst_of,
    worst_wall,
)
from valve_tools.lab.fleet.freed import OURS as PACKED
from valve_tools.lab.fleet.freed import best_other
from valve_tools.lab.fleet.page import Found
from valve_tools.lab.fleet.policies import FILLS, OURS

WIDTH = 120
FULL = 0.95  # of what the fleet can do: from here on a queue grows under every policy
STRICT = "no gate"
Groups = Mapping[str, Group]


def reading(found: Found) -> str:
    parts = [
        "## What the runs say",
        *(_of_table(found.cells, name) for name in ("gate", "sizes")),
        *_bursts(found.cells),
        *_no_gate(found.cells),
        _printed(found.cells),
        _freed(found),
    ]
    return "\n\n".join(fill(part, WIDTH, break_on_hyphens=False) for part in parts if part) + "\n"


def _of_table(cells: Sequence[Cell], table: str) -> str:
    groups = by_setting(cells, table)
    if not groups:
        return ""
    behind = worst_of(missed(cells, table))
    text = (
        f"**{'With the gate' if table == 'gate' else 'Sizes'}.** Of {len(groups)} cells `pack` is within a point of "
        f"every rival in {len(groups) - len(behind)}."
    )
    if behind:
        text += f" It is behind in {_names(behind)}."
        full = [one for one in behind if one.busy >= FULL]
        if full:
            few = "All of these" if len(full) == len(behind) else f"{len(full)} of these"
            text += (
                f" {few} offer at least {100 * FULL:.0f} % of what the fleet can do: there every policy queues, and "
                f"which requests are late is decided by the order.{_why(groups, full)}"
            )
    nodes = [
        ratio(group[OURS], group["round robin"], "node_seconds").mean
        for group in groups.values()
        if group[OURS].busy <= LIGHT and "round robin" in group
    ]
    if nodes:
        text += (
            f" Where the load is up to {LIGHT:g}, it takes {min(nodes):.2f} to {max(nodes):.2f} of round robin's "
            "node-seconds."
        )
    text += _throughput(groups)
    if table == "sizes" and worst_wall(groups).ratio.mean < WALL:
        text += (
            " Training is sent to the replicas that have most requests, and waits there while they leave no room; "
            "other replicas would have done it. What is sent is not moved, and the plan knows no request that is still "
            "to come."
        )
    return text


def _why(groups: Groups, full: Sequence[Missed]) -> str:
    """Least response never leaves a free replica aside. Where it places training makes no difference: DECISIONS.md."""
    ahead = [100 * (groups[one.name][LEAST].mean("attainment") - one.ours) for one in full]
    more, text = [points for points in ahead if points > 100 * POINT], ""
    if more:
        text += (
            f" In {len(more)} least response gets {_span(more, 1, 1)} points more in the mean: with `pack` a request "
            "waits at a filled replica while another one is free, and at such a load that time does not come back."
        )
    if len(more) < len(full):
        text += (
            f" In {len(full) - len(more)} it gets no more than a point more, and the worse end of the interval alone "
            "is behind the mark."
        )
    return text


def _throughput(groups: Groups) -> str:
    wall = worst_wall(groups)
    if wall.ratio.mean >= WALL:
        low = worst_wall(groups, by="low")
        if low.ratio.low >= WALL:
            return ""
        return (
            f" Its wall throughput is at least {wall.ratio.mean:.3f} of every rival's in the mean. The worse end of "
            f"the interval is {low.ratio.low:.3f} ({low.name}, against {low.rival}, where the mean is "
            f"{low.ratio.mean:.3f}): runs of one cell differ by more than the mark."
        )
    few = sum(worst_wall({name: group}).ratio.mean < WALL for name, group in groups.items())
    return (
        f" Its wall throughput misses the mark in {few} of {len(groups)} cells; the least is {wall.ratio.mean:.3f} "
        f"({wall.name}, against {wall.rival})."
    )


def _bursts(cells: Sequence[Cell]) -> list[str]:
    groups = by_setting(cells, "bursts")
    if not groups:
        return []
    behind = worst_of(missed(cells, "bursts"))
    traces = {name.split(", ")[0] for name in groups}
    text = f"**Bursts.** `pack` is more than a point behind in {len(behind)} of {len(groups)} cells."
    if behind:
        ours = {one.name.split(", ")[0] for one in behind}
        best = [max(groups[one.name][rival].mean("attainment") for rival in RIVALS) for one in behind]
        text += (
            f" They are of {_and(f'`{one}`' for one in sorted(ours))}; the best rival gets {_span(best, 100, 0)} % "
            f"there, `pack` in the mean {_span([b - one.ours for b, one in zip(best, behind, strict=True)], 100, 1)} "
            f"points less. In the busiest tenth of the time come {_densest(groups, ours)} of the tasks"
        )
        rest = traces - ours
        text += f", in the other traces {_densest(groups, rest)}." if rest else "."
    kept = [one for one in groups.values() if one[LEAST].mean("attainment") >= KEPT]
    if kept and all(one[OURS].mean("attainment") >= KEPT for one in kept):
        text += f" Where least response reaches {100 * KEPT:.0f} %, `pack` does as well ({len(kept)} cells)."
    return [text + _throughput(groups), _fills(groups, cells)]


def _fills(groups: Groups, cells: Sequence[Cell]) -> str:
    """What the fill has to do with it. The router's own is half of the target."""
    names = [name for name in (OURS, *FILLS) if all(name in group for group in groups.values())]
    rows, keep = [], []
    for name in names:
        wall, nodes = worst_wall(groups, name).ratio.mean, worst_nodes(groups, name)
        most = nodes.high if nodes is not None else 0.0
        rows.append(
            f"`{name}`: {wall:.3f} of the best rival's throughput, {most:.2f} of round robin's node-seconds, "
            f"{len(worst_of(missed(cells, 'bursts', name)))} cells behind"
        )
        if wall >= WALL and most <= NODES:
            keep.append(name)
    if len(rows) < 2 or OURS in keep:
        return ""
    said = "No fill keeps both marks" if not keep else f"{_and(f'`{one}`' for one in keep)} would keep both marks"
    return (
        "The cause of both misses is the same. When a burst begins, `pack` fills one replica before it uses the next, "
        "and meanwhile the others stand idle. A replica that two bursts needed counts from the first to the last. The "
        f"worst cell of each fill: {'; '.join(rows)}. {said} ({WALL:g} and {NODES:g}). Who knew that a burst begins "
        "would spread at once; the first requests of a burst look like any others."
    )


def _no_gate(cells: Sequence[Cell]) -> list[str]:
    groups = by_setting(cells, STRICT)
    if not groups:
        return []
    behind = worst_of(missed(cells, STRICT))
    text = f"**Without a gate** `pack` is more than a point behind in {len(behind)} of {len(groups)} cells"
    apart = [one for one in behind if one.rival == "separate"]
    text += f", in {len(apart)} of them most behind separate nodes." if behind else "."
    if apart:
        text += (
            " A request waits there for whole backwards, on every node; separate nodes keep some free of them. That is "
            "LeMix's own rule, and why training belongs behind a gate."
        )
    return [text + _throughput(groups)]


def _printed(cells: Sequence[Cell]) -> str:
    groups = [group for group in by_setting(cells, "gate").values() if "printed" in group]
    if not groups:
        return ""
    share = sum(group["printed"].mean("largest_share") for group in groups) / len(groups)
    ours = sum(group[OURS].mean("largest_share") for group in groups) / len(groups)
    return (
        f"**`printed`** is the paper's formula: its sign prefers longer responses. With the gate its fullest node gets "
        f"{100 * share:.0f} % of the tasks in the mean of the cells, that of `pack` {100 * ours:.0f} %."
    )


def _freed(found: Found) -> str:
    if all(isnan(best_other(one)) for one in found.freed):
        return ""
    shares = [one.gpus[PACKED] / best for one in found.freed if not isnan(best := best_other(one))]
    spread = [one.gpus[PACKED] - one.gpus["spread, granted"] for one in found.freed]
    late = max(one.late[PACKED] for one in found.freed)
    return (
        f"**GPUs freed.** On {len(found.freed)} loads of the shared traces, packing and granting frees at least "
        f"{min(shares):.3f} of the best way that keeps the target, and {_span(spread, 1, 2)} GPUs more than spreading "
        f"and granting. At most {100 * late:.1f} % of the requests are over the target then."
    )


def _names(found: Sequence[Missed]) -> str:
    return _and(f"{one.name} ({one.behind:.1f} points, worse end, against {one.rival})" for one in found)


def _and(names: Iterable[str]) -> str:
    found = list(names)
    return found[0] if len(found) == 1 else f"{', '.join(found[:-1])} and {found[-1]}"


def _span(values: Sequence[float], factor: float, digits: int) -> str:
    low, high = (f"{factor * one:.{digits}f}" for one in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def _densest(groups: Groups, traces: Iterable[str]) -> str:
    values = [
        one for name, group in groups.items() if name.split(", ")[0] in traces for one in group[OURS].of("densest")
    ]
    return f"{_span(values, 100, 0)} %"
