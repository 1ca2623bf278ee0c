"""`python -m valve_tools.lab.cotrain PAGE --traces DIR --out docs/results/cotrain`: harli, llmstation or shared.

--quick runs a small part over generated requests; --from FILE makes the page of figures that are there already; `stale`
names pages of the folder that other planners made. Exit 0: every claim holds; 3: one is missed, or a page is stale.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from valve_tools.lab.cotrain import harli, llmstation, shared
from valve_tools.lab.cotrain.cells import Cell
from valve_tools.lab.cotrain.page import harli_page, llmstation_page, shared_page, stale
from valve_tools.replay.work import Workers, silent, spread
from valve_tools.sim.metrics import Claim
from valve_tools.sim.traces import TraceError, require_folder

EXIT_MISSED, EXIT_BAD_INPUT = 3, 2


def keep(cells: Sequence[Cell], exact: dict[str, harli.Accuracy], path: Path) -> None:
    found = {"cells": [asdict(cell) for cell in cells], "exact": {law: asdict(one) for law, one in exact.items()}}
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def kept(paths: Sequence[Path]) -> tuple[list[Cell], dict[str, harli.Accuracy]]:
    cells: list[Cell] = []
    exact: dict[str, harli.Accuracy] = {}
    for path in paths:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        cells += [Cell(**{**cell, "tokens_s": tuple(cell["tokens_s"])}) for cell in found["cells"]]
        exact |= {law: harli.Accuracy(**one) for law, one in found["exact"].items()}
    return cells, exact


def simulate(name: str, options: argparse.Namespace) -> tuple[list[Cell], dict[str, harli.Accuracy]]:
    workers = Workers(processes=options.jobs)
    folder = None if options.quick else require_folder(options.traces)
    if name == "harli":
        exact = {law: harli.accuracy(contention) for law, contention in harli.CONTENTION.items()}
        tasks = harli.quick() if folder is None else harli.tasks(folder)
        tasks = [task for task in tasks if task.machine.name.startswith(options.machine)]
        return list(spread(harli.work, tasks, silent, workers)), exact
    asked = shared.quick() if folder is None else shared.tasks(folder)
    asked = [task for task in asked if task.machine.name.startswith(options.machine)]
    return [cell for cells in spread(shared.work, asked, silent, workers) for cell in cells], {}


def made(options: argparse.Namespace) -> tuple[dict[str, str], list[Claim]]:
    cells, exact = kept(options.kept) if options.kept else simulate(options.page, options)
    keep(cells, exact, options.out / f"{options.page}.json")
    if options.page == "harli":
        return harli_page(cells, exact), harli.claims(cells, exact)
    return shared_page(cells), shared.claims(cells)


def llmstation_made(options: argparse.Namespace) -> tuple[dict[str, str], list[Claim]]:
    if options.kept:
        found = [one for path in options.kept for one in json.loads(path.read_text(encoding="utf-8"))]
        points = [llmstation.Point(**one) for one in found]
    else:
        tasks = llmstation.quick() if options.quick else llmstation.tasks(require_folder(options.traces))
        workers = Workers(processes=options.jobs)
        points = [one for several in spread(llmstation.work, tasks, silent, workers) for one in several]
    content = json.dumps([asdict(one) for one in points], indent=1) + "\n"
    (options.out / "llmstation.json").write_text(content, encoding="utf-8")
    return llmstation_page(points), llmstation.claims(points)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m valve_tools.lab.cotrain", description=__doc__)
    parser.add_argument("page", choices=("harli", "llmstation", "shared", "stale"))
    parser.add_argument("--traces", type=Path, help="folder of request traces and layer tables")
    parser.add_argument("--out", type=Path, default=Path("results"))
    parser.add_argument("--from", dest="kept", type=Path, nargs="+", help="figures that are there already, joined")
    parser.add_argument("--machine", default="", help="only machines whose name begins so: the page is made in parts")
    parser.add_argument("--quick", action="store_true", help="generated requests, few cells")
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args(argv)
    if options.page == "stale":
        old = stale(options.out)
        print("\n".join(old))
        return EXIT_MISSED if old else 0
    if options.traces is None and options.kept is None and not options.quick:
        parser.error("--traces, --from or --quick is needed")
    options.out.mkdir(parents=True, exist_ok=True)
    try:
        pages, judged = llmstation_made(options) if options.page == "llmstation" else made(options)
    except TraceError as error:
        print(error, file=sys.stderr)
        return EXIT_BAD_INPUT
    for name, text in pages.items():
        (options.out / name).write_text(text, encoding="utf-8")
    for claim in judged:
        print(f"{'holds ' if claim.ok else 'MISSED'} {claim.claim}, {claim.pair}: {claim.value} ({claim.bound:g})")
    return 0 if all(claim.ok for claim in judged) else EXIT_MISSED


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
