"""docs/results/fleet/README.md: claims, what is missed and why, tables and charts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from valve_tools.lab.cotrain.page import claims_table, row, table
from valve_tools.lab.fleet.cells import LEAST, SEEDS, Cell, by_setting, ratio
from valve_tools.lab.fleet.claims import LIGHT, claims, missed, worst_of
from valve_tools.lab.fleet.freed import GPUS, MODES, Freed
from valve_tools.lab.fleet.freed import claims as freed_claims
from valve_tools.lab.fleet.load import STOP_S
from valve_tools.lab.fleet.policies import OURS, POLICIES
from valve_tools.lab.fleet.run import AGE_LIMIT_S, SLEEPS_AFTER_S
from valve_tools.replay.provenance import LINE, made_with
from valve_tools.replay.svg import grouped_bars
from valve_tools.sim.metrics import Claim

COMMAND = "cd build && python -m valve_tools.lab.fleet --traces DIR --out ../docs/results/fleet"
"""In the root the folder `valved` would shadow the installed package."""
HEAD = f"""\
# A fleet of replicas: requests and training, planned together

`{COMMAND}` makes this page; `--from` makes it of figures that are there already, `--quick` asks the same over a few
cells. Replicas are modelled: stages as in LeMix (table II of its paper), not engines; nothing here ran on a card.
The planner is the router's own (`valve_router.plan`). A forward takes 0.55 of its printed time however short a
prompt is, and the rest by the token, so a usual prompt of 150 tokens takes what is printed.

- Attainment: requests whose first token comes within five times an idle replica's.
- Wall throughput: tasks that end in the last three quarters of the arrivals, by the wall.
- Node-seconds: from a node's first task to its last, as the paper counts. Awake: without pauses of more than
  {SLEEPS_AFTER_S:g} s.
- Deferral: age limit {AGE_LIMIT_S:g} s. Training that a gate stops costs a request {1e3 * STOP_S:g} ms a stage.
- {SEEDS} seeds for each cell; all policies of a cell see the same tasks. Differences are judged by the worse end of
  their 95 % interval (for attainment, which ends at 1, not below the worst seed).
- Bursts: times of a shared request trace, stretched to the rate; its prompt lengths, scaled to the usual mean.

Rates are tasks a second for four nodes of two stages where nothing else is said; shares are those of training tasks.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    cells: Sequence[Cell]
    proofs: Sequence[Claim]
    freed: Sequence[Freed]

    def claims(self) -> list[Claim]:
        freed = freed_claims(list(self.freed)) if self.freed else []
        return [*self.proofs, *(claims(self.cells) if self.cells else []), *freed]


def page(found: Found, reading: str, wanted: Sequence[tuple[str, str]] = ()) -> dict[str, str]:
    """`wanted`: table and name of every cell of the whole grid."""
    parts = [
        HEAD,
        _left_out(found.cells, wanted),
        claims_table(found.claims()),
        ELSEWHERE if found.freed else ELSEWHERE + NOT_FREED,
        reading,
        _missed(found.cells),
        *(_summary(found.cells, name, title) for name, title in SUMMARIES),
        CHARTS,
        _all(found.cells, "sizes", "Sizes: nodes x stages, a request or micro-batch a second and node"),
        _all(found.cells, "bursts", "Bursts"),
        _all(found.cells, "wrong profiles", "Profiles that are off"),
        _all(found.cells, "ablations", "Ablations: Llama-70B, 16 nodes, half of the tasks training"),
        _freed(found.freed),
        LINE.format(made_with("routing")),
    ]
    return {"README.md": "\n".join(part for part in parts if part), **_charts(found.cells)}


SUMMARIES = (
    ("gate", "With the gate: the paper's grid by policy"),
    ("no gate", "Without a gate: the paper's own rule, a forward waits for a whole backward"),
)
ELSEWHERE = """\
U7 is `valve bench plan`. U8 and U9 need torch: tests/tune/test_fleet.py, figures in docs/finetuning.md.
"""
NOT_FREED = """\
GPUs freed on the shared traces were not run for this page.
"""
CHARTS = """\
## Charts

Llama-8B, half of the tasks training, with the gate.

![attainment by rate](attainment.svg)

![node-seconds by rate, of round robin's](nodes.svg)
"""


def _left_out(cells: Sequence[Cell], wanted: Sequence[tuple[str, str]]) -> str:
    """A page of a part of the grid says so."""
    ran = {(cell.table, cell.name) for cell in cells}
    lack = [one for one in wanted if one not in ran]
    if not lack:
        return ""
    counts = {name: sum(table == name for table, _ in lack) for name in dict.fromkeys(table for table, _ in lack)}
    said = ", ".join(f"{count} of `{name}`" for name, count in counts.items())
    return f"**Not run for this page:** {len(lack)} of {len(wanted)} cells: {said}. The command runs them.\n"


def _missed(cells: Sequence[Cell]) -> str:
    rows: list[str] = []
    for name in ("gate", "no gate", "sizes", "bursts"):
        rows += [
            row(
                one.table,
                one.name,
                f"{one.busy:.2f}",
                one.rival,
                f"{100 * one.ours:.1f}",
                f"{100 * one.theirs:.1f}",
                f"{one.behind:.1f}",
            )
            for one in worst_of(missed(cells, name))
        ]
    if not rows:
        return ""
    head = ("table", "cell", "load", "ahead of pack", "pack %", "rival %", "behind, worse end")
    return table("Cells in which pack is more than a point behind", head, rows)


def _summary(cells: Sequence[Cell], name: str, title: str) -> str:
    groups = by_setting(cells, name)
    rows = []
    for policy in dict.fromkeys(cell.policy for cell in cells if cell.table == name):
        mine = [group for group in groups.values() if policy in group]
        light = [group for group in mine if group[policy].busy <= LIGHT]
        fit = [group for group in mine if group[policy].busy <= 1.0]
        rows.append(
            row(
                policy,
                len(mine),
                f"{_mean(group[policy].mean('attainment') for group in mine) * 100:.1f}",
                f"{_mean(group[policy].mean('attainment') for group in fit) * 100:.1f}",
                f"{min(group[policy].mean('attainment') for group in fit) * 100:.1f}",
                f"{_mean(ratio(group[policy], group['round robin'], 'tasks_per_s').mean for group in mine):.2f}",
                f"{_mean(ratio(group[policy], group['round robin'], 'node_seconds').mean for group in light):.2f}",
                f"{_mean(ratio(group[policy], group['round robin'], 'awake_seconds').mean for group in light):.2f}",
                f"{max(max(group[policy].of('oldest_s')) for group in mine):.1f}",
            )
        )
    head = (
        "policy",
        "cells",
        "attainment %, mean",
        "same, load up to 1",
        "worst cell, load up to 1",
        "wall throughput, of round robin",
        f"node-seconds, load up to {LIGHT:g}",
        "awake, same",
        "oldest training s",
    )
    return table(title, head, rows).replace(" nan |", " - |") if rows else ""


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found) if found else float("nan")


def _all(cells: Sequence[Cell], name: str, title: str) -> str:
    groups = by_setting(cells, name)
    if not groups:
        return ""
    policies = list(dict.fromkeys(cell.policy for cell in cells if cell.table == name))
    rows = [
        row(setting, f"{next(iter(group.values())).busy:.2f}", *(_said(group, policy) for policy in policies))
        for setting, group in groups.items()
    ]
    said = "Attainment in %, then wall throughput in tasks a second, then node-seconds.\n"
    return table(title, ("cell", "load", *policies), rows).replace("\n\n", f"\n\n{said}\n", 1)


def _said(group: Mapping[str, Cell], policy: str) -> str:
    if policy not in group:
        return ""
    one = group[policy]
    return f"{100 * one.mean('attainment'):.1f}, {one.mean('tasks_per_s'):.1f}, {one.mean('node_seconds'):.0f}"


def _freed(found: Sequence[Freed]) -> str:
    rows = [
        row(
            one.load,
            one.seed,
            one.most_open,
            *(f"{one.gpus[mode]:.2f} ({100 * one.late[mode]:.1f})" for mode in MODES),
        )
        for one in found
    ]
    head = ("load", "seed", "full at", *MODES)
    return table(f"GPUs freed of {GPUS} (in brackets: requests over twice solo TPOT, %)", head, rows) if rows else ""


def _charts(cells: Sequence[Cell]) -> dict[str, str]:
    groups = {
        name: group
        for name, group in by_setting(cells, "gate").items()
        if name.startswith("Llama-8B") and "50 %" in name
    }
    shown = [name for name in (OURS, "cost", LEAST, "printed", "round robin", "separate") if name in POLICIES]
    if not groups:
        return {}
    shown = [name for name in shown if all(name in group for group in groups.values())]
    rates = [name.split(", ")[1] for name in groups]
    attainment: dict[str, list[float | None]] = {
        policy: [100 * group[policy].mean("attainment") for group in groups.values()] for policy in shown
    }
    nodes: dict[str, list[float | None]] = {
        policy: [ratio(group[policy], group["round robin"], "node_seconds").mean for group in groups.values()]
        for policy in shown
    }
    found = {
        "attainment.svg": grouped_bars(rates, attainment, unit="% of requests in time", bound=95.0),
        "nodes.svg": grouped_bars(rates, nodes, unit="of round robin", bound=0.7),
    }
    return {
        name: svg.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1) + "\n" for name, svg in found.items()
    }
