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
from valve_tools.bench.told import TOLD
from valve_tools.demo.endings import perform

# Each module holds BENCHES: name -> function that yields rows. Order: cheap and basic first.
MODULES = (
    *("hotpath", "gate", "daemon", "hello", "demo", "policies", "granting", "grants", "reclaim", "hook"),
    *("telemetry", "podstart", "failover", "clustersize", "reviews", "cluster", "route"),
)
EXIT_OVER_BUDGET = 3
EXIT_UNKNOWN = 2
OPT_IN = ("rungs", "tune")  # modules that run for a quarter of an hour, or need what is not installed: only when named

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
