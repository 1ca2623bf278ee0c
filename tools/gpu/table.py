"""Rows as a table: with rich where it is installed (a GPU machine may have nothing), else as plain lines."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Sequence

from valve_tools.gpu.outcome import LabRow, LabVerdict

COLOURS = {
    LabVerdict.OK: "green",
    LabVerdict.SILICON: "cyan",
    LabVerdict.SKIPPED: "cyan",
    LabVerdict.BAD: "red",
    LabVerdict.STOPPED: "red",
    LabVerdict.DIFFERS: "red",
}


def line(row: LabRow) -> str:
    """One row as it is found, for the terminal and table.txt."""
    mark = "dry run " if row.dry_run else ""
    return f"{row.experiment:<4} {mark}{row.verdict.value:<13} {row.seconds:5.1f} s  {row.detail}"


def show(rows: Sequence[LabRow], questions: dict[str, str]) -> None:
    """The whole session."""
    dry = any(row.dry_run for row in rows)
    title = "DRY RUN on the emulated GPU: a rehearsal, not a measurement" if dry else "GPU lab"
    try:
        from rich import box
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        _plain(title, rows, questions)
        return
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for name in ("", "question", "verdict", "what was found"):
        table.add_column(name, overflow="fold")
    for row in rows:
        verdict = Text(row.verdict.value + ("\ndry run" if dry else ""), style=COLOURS.get(row.verdict, "yellow"))
        table.add_row(row.experiment, questions.get(row.experiment, ""), verdict, Text(row.detail))
    Console(file=sys.stdout).print(table)


def _plain(title: str, rows: Sequence[LabRow], questions: dict[str, str]) -> None:
    width = max(60, shutil.get_terminal_size((120, 24)).columns)
    print(f"{title}\n")
    for row in rows:
        verdict = row.verdict.value + (", dry run" if row.dry_run else "")
        print(f"{row.experiment:<5}{verdict:<24}{questions.get(row.experiment, '')}")
        print(textwrap.fill(row.detail, width, initial_indent=" " * 29, subsequent_indent=" " * 29))
