"""`python -m valve_tools.lab.granted --traces DIR --out docs/results`: the sweep, its figures and its page.

--load NAME sweeps one load; --from FILE... makes the page of figures that are there already, of one source. --quick
asks loosely over generated traces, and says whether the page in --out is stale. Exit 0: every claim holds; 3: one is
missed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from valve_tools.lab.granted.page import claims, loosely, page
from valve_tools.lab.granted.parts import PARTS, ROW_SEEDS, SEEDS, quick, sources
from valve_tools.lab.granted.parts import swept as sweep_of
from valve_tools.lab.granted.sweep import CellResult, split
from valve_tools.sim.metrics import Claim
from valve_tools.sim.traces import TraceError, require_folder

EXIT_MISSED, EXIT_BAD_INPUT = 3, 2
TABLES = ("cells", "row")


def read(path: Path) -> dict[str, Any]:
    found = json.loads(path.read_text(encoding="utf-8"))
    names = {one.name for one in fields(CellResult)}
    for table in TABLES:
        found[table] = [CellResult(**{name: cell[name] for name in names}) for cell in found[table]]
    return dict(found)


def joined(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Figures of several runs, in the order of PARTS."""
    whole = dict(parts[0])
    for part in parts[1:]:
        if any(part[name] != whole[name] for name in whole.keys() - set(TABLES)):
            raise TraceError("figures of other sources, seeds or traces make no page together")
    order = [part.label for part in PARTS]
    for table in TABLES:
        cells = [cell for part in parts for cell in part[table]]
        whole[table] = sorted(cells, key=lambda cell: order.index(cell.load))
    return whole


def keep(found: dict[str, Any]) -> str:
    tables = {table: [asdict(cell) for cell in found[table]] for table in TABLES}
    return json.dumps(found | tables, indent=1, sort_keys=True) + "\n"


def swept(options: argparse.Namespace) -> dict[str, Any]:
    folder = require_folder(options.traces)
    tuning, held = split(folder)
    parts = [part for part in PARTS if options.load in (None, part.label)]
    if not parts:
        raise TraceError(f"no load is named {options.load}; there are: {', '.join(part.label for part in PARTS)}")
    return {
        **sweep_of(folder, parts, options.seeds, options.row_seeds, options.jobs),
        "tuning": tuning,
        "claims": held,
        "sources": sources(),
    }


def loose(pages: Path) -> int:
    """The quick sweep; the page of a product that decided otherwise is missed, too."""
    judged = loosely(quick())
    told(judged)
    path = pages / "granted.md"
    if path.is_file() and f"sha256 `{sources()}`" not in path.read_text(encoding="utf-8"):
        print(f"STALE  {path}: made by another policy or simulator")
        return EXIT_MISSED
    return 0 if all(claim.ok for claim in judged) else EXIT_MISSED


def told(judged: Sequence[Claim]) -> None:
    for claim in judged:
        print(f"{claim.verdict:6} {claim.claim}: {claim.value} ({claim.bound})")


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m valve_tools.lab.granted", description=__doc__)
    parser.add_argument("--traces", type=Path, help="folder of request traces")
    parser.add_argument("--out", type=Path, default=Path("results"), help="folder for granted.json and granted.md")
    parser.add_argument("--load", help="one load alone: its figures")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--row-seeds", type=int, default=ROW_SEEDS, help="for one setting on every load")
    parser.add_argument("--from", dest="kept", type=Path, nargs="+", help="figures that are there already")
    parser.add_argument("--quick", action="store_true", help="generated traces, few cells, loose claims, no page")
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args(argv)
    if options.quick:
        return loose(options.out)
    if options.kept is None and options.traces is None:
        parser.error("--traces, --from or --quick is needed")
    try:
        found = joined([read(path) for path in options.kept]) if options.kept else swept(options)
    except TraceError as error:
        print(error, file=sys.stderr)
        return EXIT_BAD_INPUT
    options.out.mkdir(parents=True, exist_ok=True)
    content = keep(found)
    (options.out / "granted.json").write_text(content, encoding="utf-8")
    if options.load is None:
        for name, text in page(found, content).items():
            (options.out / name).write_text(text, encoding="utf-8")
    judged = claims(found["cells"])
    told(judged)
    return 0 if all(claim.ok for claim in judged) else EXIT_MISSED


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
