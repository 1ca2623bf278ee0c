"""`python -m valve_tools.lab.fleet --traces DIR --out docs/results/fleet`: the grid, its claims and its page.

--table NAME runs one table alone and keeps its figures; --from FILE... makes the page of such figures. --quick runs
a few cells and makes no page. Exit 0: every claim holds; 3: one is missed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import msgspec
from valve_kube.options import option
from valve_tools.lab.fleet import cells, freed
from valve_tools.lab.fleet.page import Found, page
from valve_tools.lab.fleet.proofs import proofs
from valve_tools.lab.fleet.reading import reading
from valve_tools.replay.work import Workers, silent, spread
from valve_tools.sim.traces import TraceError, require_folder

EXIT_MISSED, EXIT_BAD_INPUT = 3, 2


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m valve_tools.lab.fleet", description=__doc__)
    parser.add_argument(
        "--traces", type=Path, help="The folder of request traces. It is needed without --from and --quick."
    )
    option(parser, "--out", Path("results"), "Write the page and its figures to this folder.")
    parser.add_argument("--table", help="Run this table alone. It writes the figures and no page.")
    parser.add_argument(
        "--only", default="", help="Run only the cells whose name begins so. The page is then made in parts."
    )
    parser.add_argument(
        "--from", dest="kept", type=Path, nargs="+", help="Make the page of these figures, which are there already."
    )
    parser.add_argument("--quick", action="store_true", help="Run a few cells, which a test can wait for.")
    option(parser, "--jobs", 2, "The number of processes.")
    options = parser.parse_args(argv)
    if options.traces is None and options.kept is None and not options.quick:
        parser.error("--traces, --from or --quick is needed")
    try:
        found = joined(options.kept) if options.kept else simulated(options)
    except TraceError as error:
        print(error, file=sys.stderr)
        return EXIT_BAD_INPUT
    judged = found.claims()
    for claim in judged:
        print(f"{claim.verdict:6} {claim.claim}, {claim.pair}: {claim.value} ({claim.bound:g})")
    if not options.quick:
        options.out.mkdir(parents=True, exist_ok=True)
        name = " ".join(part for part in (options.table or "fleet", options.only) if part)
        figures = options.out / f"{name}.json".replace(" ", "-").replace("/", "-")
        figures.write_text(json.dumps(asdict(found), indent=1) + "\n", encoding="utf-8")
        if options.table is None and not options.only:
            wanted = [(one.table, one.name) for one in cells.settings(str(options.traces or ""))]
            for name, text in page(found, reading(found), wanted).items():
                (options.out / name).write_text(text, encoding="utf-8")
    return 0 if judged and all(claim.ok for claim in judged) else EXIT_MISSED


def simulated(options: argparse.Namespace) -> Found:
    workers = Workers(processes=options.jobs)
    if options.quick:
        found = [cell for setting in cells.quick() for cell in cells.work(setting)]
        return Found(cells=found, proofs=proofs(20), freed=[freed.work(one) for one in freed.quick()])
    folder = require_folder(options.traces)
    settings = [
        one
        for one in cells.settings(str(folder))
        if options.table in (None, one.table) and one.name.startswith(options.only)
    ]
    ran = [cell for some in spread(cells.work, settings, silent, workers) for cell in some] if settings else []
    if options.table not in (None, "freed"):
        return Found(cells=ran, proofs=[], freed=[])
    loads = freed.parts(folder, cells.SEEDS)
    return Found(cells=ran, proofs=proofs(), freed=spread(freed.work, loads, silent, workers))


def joined(paths: Sequence[Path]) -> Found:
    parts = [msgspec.convert(json.loads(path.read_text(encoding="utf-8")), Found) for path in paths]
    return Found(
        cells=[cell for part in parts for cell in part.cells],
        proofs=[claim for part in parts for claim in part.proofs] or proofs(),
        freed=[one for part in parts for one in part.freed],
    )


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
