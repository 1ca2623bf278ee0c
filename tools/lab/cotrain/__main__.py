"""`python -m valve_tools.lab.cotrain PAGE --traces DIR --out docs/results/cotrain`: a paper, or shared.

--quick runs a small part over generated requests; --from FILE makes the page of figures that are there already; `stale`
names pages of the folder that other planners made. Exit 0: every claim holds; 3: one is missed, or a page is stale.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol, TypeVar

from valve_tools.lab.cotrain import flexllm, harli, llmstation, llmstation_rest, shared
from valve_tools.lab.cotrain.cells import Cell
from valve_tools.lab.cotrain.flexllm_page import flexllm_page
from valve_tools.lab.cotrain.llmstation_page import llmstation_page
from valve_tools.lab.cotrain.machines import Machine
from valve_tools.lab.cotrain.page import harli_page, shared_page, stale
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


class OnMachine(Protocol):
    @property
    def machine(self) -> Machine: ...


T = TypeVar("T", bound=OnMachine)


def all_of(work: Callable[[T], list[Cell]], tasks: Sequence[T], options: argparse.Namespace) -> list[Cell]:
    asked = [task for task in tasks if task.machine.name.startswith(options.machine)]
    return [cell for cells in spread(work, asked, silent, Workers(processes=options.jobs)) for cell in cells]


def simulate(name: str, options: argparse.Namespace) -> tuple[list[Cell], dict[str, harli.Accuracy]]:
    folder = None if options.quick else require_folder(options.traces)
    if name == "harli":
        workers = Workers(processes=options.jobs)
        exact = {law: harli.accuracy(contention) for law, contention in harli.CONTENTION.items()}
        tasks = harli.quick() if folder is None else harli.tasks(folder)
        tasks = [task for task in tasks if task.machine.name.startswith(options.machine)]
        return list(spread(harli.work, tasks, silent, workers)), exact
    if name == "flexllm":
        return all_of(flexllm.work, flexllm.quick() if folder is None else flexllm.tasks(folder), options), {}
    return all_of(shared.work, shared.quick() if folder is None else shared.tasks(folder), options), {}


def made(options: argparse.Namespace) -> tuple[dict[str, str], list[Claim]]:
    cells, exact = kept(options.kept) if options.kept else simulate(options.page, options)
    keep(cells, exact, options.out / f"{options.page}.json")
    if options.page == "harli":
        return harli_page(cells, exact), harli.claims(cells, exact)
    if options.page == "flexllm":
        return flexllm_page(cells), flexllm.claims(cells)
    return shared_page(cells), shared.claims(cells)


def llmstation_made(options: argparse.Namespace) -> tuple[dict[str, str], list[Claim]]:
    rest: list[Claim] = []
    if options.kept:
        found = [json.loads(path.read_text(encoding="utf-8")) for path in options.kept]
        points = [llmstation.Point(**one) for part in found for one in part["points"]]
        rest = [Claim(**one) for part in found for one in part["rest"]]
    else:
        workers = Workers(processes=options.jobs)
        folder = None if options.quick else require_folder(options.traces)
        tasks = llmstation.quick() if folder is None else llmstation.tasks(folder)
        points = [one for several in spread(llmstation.work, tasks, silent, workers) for one in several]
        if folder is not None:
            rest = llmstation_rest.claims(folder, options.jobs)
    kept_now = {"points": [asdict(one) for one in points], "rest": [asdict(one) for one in rest]}
    (options.out / "llmstation.json").write_text(json.dumps(kept_now, indent=1) + "\n", encoding="utf-8")
    return llmstation_page(points, rest), [*llmstation.claims(points), *rest]


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m valve_tools.lab.cotrain", description=__doc__)
    parser.add_argument("page", choices=("flexllm", "harli", "llmstation", "shared", "stale"))
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
        print(f"{claim.verdict:6} {claim.claim}, {claim.pair}: {claim.value} ({claim.bound:g})")
    return 0 if all(claim.ok for claim in judged) else EXIT_MISSED


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
