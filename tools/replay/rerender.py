"""`valve replay render FILE.json …`: the pages of finished experiments once more, from their figures.

The layout of a page may change after the figures were computed. What is written keeps the commit, the machine and the
seeds of the run; claims are judged anew, by the marks of today.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
from valve_tools.replay import cluster, crowding, eviction, fleet, forecast, pairs, rivals, sensitivity
from valve_tools.replay.report import Report, write
from valve_tools.sim.traces import TraceError

MADE_FROM: dict[str, Callable[[Mapping[str, Any], Sequence[int]], Report]] = {
    "pairs": pairs.from_data,
    "rivals": rivals.from_data,
    "sensitivity": sensitivity.from_data,
    "fleet": fleet.from_data,
    "cluster": cluster.from_data,
    "forecast": forecast.from_data,
    "crowding": crowding.from_data,
    "eviction": lambda data, _: eviction.from_data(data),
}


def render(path: Path, folder: Path | None = None) -> list[Path]:
    """Beside the file itself unless `folder` says otherwise."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        made = MADE_FROM[document["experiment"]](document["data"], document["seeds"])
    except (UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError, msgspec.ValidationError) as error:
        known = ", ".join(MADE_FROM)
        raise TraceError(f"{path}: not the figures of one of {known}: {type(error).__name__} {error}") from error
    origin = {name: document[name] for name in ("commit", "machine", "made_with")}
    report = replace(made, input=document.get("input", {}))
    return write(report, folder or path.parent, origin)


def add_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("files", type=Path, nargs="+", metavar="FILE", help="The NAME.json that an experiment wrote.")
    command.add_argument(
        "--out", type=Path, metavar="DIR", help="Write the pages to this folder. Default: beside each file."
    )
