"""`valve bench [NAME...] [--json]`: one JSON line per figure or a table; exit 0 when all rows are ok."""

from __future__ import annotations

import argparse
import importlib
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterable

from rich.console import Console
from rich.padding import Padding
from valve_tools.bench.row import Row
from valve_tools.demo.endings import perform

# Each module holds BENCHES: name -> function that yields rows. Order: cheap and basic first.
MODULES = (
    *("hotpath", "gate", "daemon", "hello", "demo", "policies", "granting", "grants", "reclaim", "hook"),
    *("telemetry", "podstart", "failover", "clustersize", "reviews", "cluster", "route"),
)
EXIT_OVER_BUDGET = 3
EXIT_UNKNOWN = 2
OPT_IN = ("rungs", "tune")  # modules that run for a quarter of an hour, or need what is not installed: only when named

CLUSTER = "Needs make cluster-tools."
TOLD = {  # `--list` prints it beside the name
    "hotpath": "What the shim adds to a launch while nothing changes.",
    "gate-sleep": "From an online launch to the driver call that stops offline work, with threads that sleep.",
    "gate-spin": "The same with threads that spin. Needs a core for each of four threads.",
    "gate-8gpu": "How long it takes to stop eight GPUs, with the stock driver and with the driver patch.",
    "daemon-cost": "What valved costs a node with 164 processes, idle and at 1,000 edges a second.",
    "once-per-request": "How often a request is preempted: 10,000 bursty requests of an engine with hints.",
    "hello": "How long a new online process waits for its welcome, alone and beside hostile processes.",
    "demo-interference": "What offline work costs an online service, and what it gets.",
    "select": "How long it takes to choose what an offline engine loses.",
    "reservation": "Reclaims in the worst hour, and the memory that offline work keeps of a clairvoyant's.",
    "eviction": "The tokens that the cheapest victims save, compared with the oldest.",
    "granting": "What the policy of granted time costs a step of an engine.",
    "grant-gate": "What one pause of granted time costs on the rung `gate`.",
    "grant-slice": "What one pause of granted time costs on the rung `timeslice`.",
    "reclaim": "How long a GiB takes from an offline to an online engine, by size of handle and layout.",
    "hook": "What the engine hook adds to a step of 1,024 requests, and how long it takes over a loss.",
    "telemetry": "How often 1,000 nodes of eight GPUs write their reports.",
    "pod-start": f"What the injection of the shim adds to a pod's start. {CLUSTER}",
    "failover": f"How long nothing is placed when the leading scheduler dies. {CLUSTER}",
    "extender-size": "What a placement costs the extender with 100, 1,000 and 5,000 nodes.",
    "extender-pods": "What a placement costs the extender with up to 40,000 offline pods.",
    "controller-nodes": "What the controller keeps in memory, by nodes.",
    "controller-round": "What a round of the controller costs with 500 kinds of jobs that wait.",
    "cluster-memory": f"The most memory that each process of the scheduler ever holds. {CLUSTER}",
    "webhook-review": "What the review of a pod of megabytes costs the webhook.",
    "webhook-memory": "The memory of the webhook while it reviews such pods.",
    "webhook-beside": "How long an ordinary pod waits beside such reviews.",
    "extender-filter": f"The answer to a filter call of kube-scheduler, over 1,000 nodes. {CLUSTER}",
    "extender-prioritize": f"The answer to a prioritize call. {CLUSTER}",
    "bind": f"The answer to a bind call. {CLUSTER}",
    "bind-rate": f"Pods bound a second, compared with an extender that decides nothing. {CLUSTER}",
    "extender-rss": f"The memory of the extender in that run. {CLUSTER}",
    "requeue": f"From room on a node to the bind of a pod that waited for it. {CLUSTER}",
    "cluster-pause": f"How long until all nodes have heard of a pause of the cluster. {CLUSTER}",
    "route": "The router, compared with a bare pass-through.",
    "plan": "The CPU time of one decision of the router's planner.",
    "rungs": "What each way to take KV memory costs a service. Runs only where named.",
    "sparse": "The same for `sparse` alone: a quarter of an hour. Runs only where named.",
    "tune-idle": "The share of idle time in which a finetuning job computes. Needs .venv-tune, and to be named.",
}

Bench = Callable[[], Iterable[Row]]


def registry() -> dict[str, Bench]:
    """Every benchmark by name. A module that cannot be imported is an error, not a shorter list."""
    found: dict[str, Bench] = {}
    for module in (*MODULES, *OPT_IN):
        found.update(importlib.import_module(f"valve_tools.bench.{module}").BENCHES)
    return found


def unasked(benches: Iterable[str]) -> list[str]:
    """What runs when none is named."""
    long = {name for module in OPT_IN for name in importlib.import_module(f"valve_tools.bench.{module}").BENCHES}
    return [name for name in benches if name not in long]


def machine() -> str:
    """The machine in words: figures from different ones must not be compared."""
    model = platform.processor() or platform.machine()
    with open("/proc/cpuinfo", encoding="utf-8") as lines:
        model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), model)
    return f"{model}, {os.cpu_count()} cores, Linux {platform.release()}"


def commit() -> str:
    """The commit of the checkout we stand in, or "installed" outside one."""
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=12"], check=False, capture_output=True, text=True
    )
    return done.stdout.strip() if done.returncode == 0 else "installed"


def show(rows: list[Row]) -> None:
    """A line a figure, and what is to be said of it below: notes are sentences, no column is wide enough for them."""
    console = Console(highlight=False)
    names = max(len(f"{row.name} {row.metric}") for row in rows)
    for row in rows:
        figures = "".join(f"{value:>10.4g}" for value in (row.p50, row.p99, row.max))
        console.print(
            f"{f'{row.name} {row.metric}':{names}}{figures}{row.n:>8}  {row.unit}  {verdict(row)}", soft_wrap=True
        )
        told = [row.note, "" if row.baseline is None else f"baseline {row.baseline:.4g}"]
        if any(told):
            console.print(Padding("; ".join(filter(None, told)), (0, 0, 0, 4)), style="dim")


def verdict(row: Row) -> str:
    if row.budget is None:
        return "not judged"
    if row.is_void:
        return "[yellow]void[/]"
    bound = f"{row.judged} {'<=' if row.better == 'lower' else '>='} {row.budget:g}"
    return f"[green]ok[/] ({bound})" if row.ok else f"[red]over[/] ({bound})"


def main(argv: list[str]) -> int:
    return perform("valve bench", lambda: chosen(argv))


def chosen(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="valve bench", description=__doc__)
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="The benchmarks to run. Default: all but rungs, sparse and tune-idle."
    )
    parser.add_argument("--json", action="store_true", help="Print one JSON object per figure and line.")
    parser.add_argument("--list", action="store_true", help="Say what each benchmark measures, and run none.")
    options = parser.parse_args(argv)
    benches = registry()
    if options.list:
        print("\n".join(f"{name:{max(map(len, benches))}}  {TOLD[name]}" for name in benches))
        return 0
    unknown = [name for name in options.names if name not in benches]
    if unknown:
        print(f"valve bench: no benchmark {', '.join(unknown)}; there are: {', '.join(benches)}", file=sys.stderr)
        return EXIT_UNKNOWN
    rows: list[Row] = []
    where, what = machine(), commit()
    for name in options.names or unasked(benches):
        for row in benches[name]():
            rows.append(row)
            if options.json:
                print(row.as_json(commit=what, machine=where), flush=True)
            else:
                print(f"  {row.name} {row.metric}: {row.p50:.4g} {row.unit}", file=sys.stderr, flush=True)
    if rows and not options.json:
        show(rows)
    return 0 if all(row.ok for row in rows) else EXIT_OVER_BUDGET
