"""`valve demo`: an online service and an offline job share one emulated GPU, with the product's real binaries."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from valve_kube.options import option, seconds, whole
from valve_tools.bench.row import percentile
from valve_tools.demo import cluster, endings, granted, memory, tune
from valve_tools.demo.figures import DemoRun, harvested_share, pooled, spread
from valve_tools.demo.node import EmulatedNode, demo_folder, progress
from valve_tools.demo.rounds import RoundsDemo, RoundsPlan
from valve_tools.emulator.node import Options

USUAL = RoundsPlan()
CONDITIONS = {"alone": "alone", "ungated": "ungated", "valve": "with Valve"}


def main(argv: list[str]) -> int:
    return endings.perform("valve demo", lambda: chosen(argv))


def chosen(argv: list[str]) -> int:
    if argv[:1] == ["memory"]:
        return memory.main(argv[1:])
    if argv[:1] == ["cluster"]:
        return cluster.main(argv[1:])
    if argv[:1] == ["tune"]:
        return tune.main(argv[1:])
    if argv[:1] == ["granted"]:
        return granted.main(argv[1:])
    others = "See also: valve demo memory, valve demo granted, valve demo cluster, valve demo tune"
    parser = argparse.ArgumentParser(prog="valve demo", description=__doc__, epilog=others)
    option(parser, "--seconds", USUAL.seconds, "Each run takes arrivals for this many seconds.", type=seconds)
    rounds = "The number of rounds. A round is one run alone and one with Valve."
    option(parser, "--rounds", USUAL.rounds, rounds, type=whole(1))
    parser.add_argument(
        "--trace", type=Path, help="A CSV file of arrivals: t_s,in_tok,out_tok. Default: arrivals drawn from --seed."
    )
    option(parser, "--seed", USUAL.seed, "The seed of the drawn arrivals.")
    parser.add_argument("--json", action="store_true", help="Print the runs as JSON.")
    parser.add_argument("--keep", type=Path, help="Leave logs, traces and outputs in this folder. Default: keep none.")
    options = parser.parse_args(argv)
    if options.trace and not options.trace.is_file():
        print(f"valve demo: {options.trace} is not a file", file=sys.stderr)
        return 2
    plan = RoundsPlan(seconds=options.seconds, rounds=options.rounds, trace=options.trace, seed=options.seed)
    with demo_folder(options.keep) as folder:
        runs, units_per_s = perform(plan, folder, quiet=options.json)
    if options.json:
        print(json.dumps({"units_per_s": units_per_s, "runs": [asdict(run) for run in runs]}))
    else:
        show(runs, units_per_s, plan)
    return 0 if all(run.offline_ok is not False for run in runs) else 1


def perform(plan: RoundsPlan, folder: Path, *, quiet: bool = False) -> tuple[list[DemoRun], float]:
    """Bring up a node, run every condition, take it down."""
    console = Console(quiet=quiet, stderr=True)
    with EmulatedNode(folder, options=Options()) as node, progress(console, "starting an emulated GPU") as say:
        demo = RoundsDemo(node, plan, say=say)
        units_per_s = demo.offline_rate()
        runs = []
        for condition in plan.conditions():
            runs.append(demo.run(condition))
            console.print(f"  {condition}: {len(runs[-1].requests)} requests answered")
    return runs, units_per_s


def show(runs: list[DemoRun], units_per_s: float, plan: RoundsPlan) -> None:
    console = Console()
    console.print(latency_table(runs))
    noise = spread(runs, "alone")
    if plan.rounds > 1:
        text = ", ".join(f"{name} {value:.1f} %" for name, value in noise.items())
        console.print(f"Two runs alone differ by: {text}.")
    valve = [run for run in runs if run.condition == "valve"]
    gates = [gate for run in valve for gate in run.gates]
    if gates:
        own = sorted(gate.own_us for gate in gates)
        total = sorted(gate.total_ms for gate in gates)
        console.print(
            f"\nOffline work was stopped {len(gates)} times for {sum(len(run.requests) for run in valve)} requests: "
            f"{percentile(total, 0.5):.2f} ms from launch to stopped in the median, "
            f"p99 {percentile(total, 0.99):.2f} ms;\n  of that our share (launch to driver call) is "
            f"{percentile(own, 0.5):.0f} us, p99 {percentile(own, 0.99):.0f} us."
        )
    most = [run.most_per_request for run in valve if run.most_per_request is not None]
    if most:
        console.print(f"Most preemptions of any one request: {max(most)}.")
    console.print(
        f"Offline work got {harvested_share(runs, units_per_s):.0%} of the idle time beyond the cooldown; "
        "its checksum says that nothing was lost or done twice."
        if all(run.offline_ok for run in valve)
        else "[red]The offline checksum is wrong.[/]"
    )


def latency_table(runs: list[DemoRun]) -> Table:
    table = Table(title="Latency of the online service", title_justify="left", box=box.SIMPLE_HEAD)
    for name in ("", "TTFT mean", "p99", "TPOT mean", "p99", "offline"):
        table.add_column(name, justify="left" if not name else "right")
    alone = pooled(runs, "alone")
    for condition, words in CONDITIONS.items():
        mine = [run for run in runs if run.condition == condition]
        if not mine:
            continue
        latency = pooled(runs, condition)
        over = latency.over(alone)
        cells = [
            f"{value:.1f} ms" + ("" if condition == "alone" else f"\n{over[name]:+.1f} %")
            for name, value in latency.values.items()
        ]
        rate = sum(run.units for run in mine) / sum(run.wall_s for run in mine)
        table.add_row(words, *cells, "-" if condition == "alone" else f"{rate:.0f}/s")
    return table
