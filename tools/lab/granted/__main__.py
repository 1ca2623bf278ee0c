"""`python -m valve_tools.lab.granted --traces DIR --out docs/results`: the sweep, its figures and its page.

--quick sweeps less; --from FILE makes the page of figures that are there already. Exit 0: every claim holds; 3: one
is missed.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from valve_tools.lab.granted.page import claims, page
from valve_tools.lab.granted.parts import PARTS, figures, load_of, quick, sources
from valve_tools.lab.granted.sweep import COSTS_MS, CellResult, split
from valve_tools.sim.traces import TraceError, require_folder

EXIT_MISSED, EXIT_BAD_INPUT = 3, 2


def read(path: Path) -> dict[str, Any]:
    found = json.loads(path.read_text(encoding="utf-8"))
    names = {one.name for one in fields(CellResult)}
    found["cells"] = [CellResult(**{name: cell[name] for name in names}) for cell in found["cells"]]
    return dict(found)


def keep(found: dict[str, Any], path: Path) -> str:
    cells = [asdict(cell) for cell in found["cells"]]
    content = json.dumps(found | {"cells": cells}, indent=1, sort_keys=True) + "\n"
    path.write_text(content, encoding="utf-8")
    return content


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m valve_tools.lab.granted", description=__doc__)
    parser.add_argument("--traces", type=Path, help="folder of request traces")
    parser.add_argument("--out", type=Path, default=Path("results"), help="folder for granted.json and granted.md")
    parser.add_argument("--from", dest="kept", type=Path, help="figures that are there already")
    parser.add_argument("--quick", action="store_true", help="generated traces, few cells")
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {"cells": [], "tuning": [], "claims": [], "sources": sources()}
    content = ""
    try:
        if options.kept is not None:
            found = read(options.kept)
            content = options.kept.read_text(encoding="utf-8")
        elif options.quick:
            found["cells"] = quick()
        elif options.traces is None:
            parser.error("--traces, --from or --quick is needed")
        else:
            folder = require_folder(options.traces)
            found["tuning"], found["claims"] = split(folder)
            for cells in figures([load_of(folder, part) for part in PARTS], COSTS_MS, options.jobs):
                found["cells"] += cells
                content = keep(found, options.out / "granted.json")
    except TraceError as error:
        print(error, file=sys.stderr)
        return EXIT_BAD_INPUT
    content = content or keep(found, options.out / "granted.json")
    for name, text in page(found, content).items():
        (options.out / name).write_text(text, encoding="utf-8")
    judged = claims(found["cells"])
    for claim in judged:
        print(f"{'holds ' if claim.ok else 'MISSED'} {claim.claim}: {claim.value} ({claim.bound})")
    return 0 if all(claim.ok for claim in judged) else EXIT_MISSED


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
