"""`valve replay EXPERIMENT`: run it, write its JSON, table and page, and say by the exit code whether its claims hold.

0: all claims hold; 3: one is missed; 2: bad input, or a folder that cannot be written.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from types import ModuleType

from rich.console import Console
from rich.table import Table as Shown
from valve_tools.replay import (
    cluster,
    cooldown,
    crowding,
    early,
    eviction,
    fleet,
    forecast,
    machine,
    pairs,
    quick,
    rerender,
    rivals,
    sensitivity,
    services,
    tp8,
    validate,
    whatif,
)
from valve_tools.replay.options import parser
from valve_tools.replay.provenance import stale
from valve_tools.replay.question import Question
from valve_tools.replay.report import Report, ReportTable, claims_table, markdown, text, write
from valve_tools.replay.store import TaskStore
from valve_tools.replay.work import Shown as Bars
from valve_tools.replay.work import TellProgress, Workers, bars, silent
from valve_tools.sim.generator import generate
from valve_tools.sim.shape import LONGEST_S
from valve_tools.sim.traces import Folder, Half, TraceError, read_folder, require_folder

EXIT_MISSED = 3
EXIT_BAD_INPUT = 2
GENERATOR_SEED = 1
FEW_SEEDS = 3
Experiment = Callable[[argparse.Namespace, TellProgress], Report]


def _replayed(experiment: ModuleType, options: argparse.Namespace, progress: TellProgress) -> Report:
    """An experiment that replays requests; its page says what of the folder was left out."""
    folder = folder_of(options)
    report: Report = experiment.run(folder, seeds_of(options), progress, workers_of(options))
    files = f" ({', '.join(folder.ignored)})" if folder.ignored else ""
    of = "" if options.half is Half.ALL else f" (the half for {options.half.value})"
    told = (
        f"Input: {len(folder.traces)} request traces{of}, {len(folder.lengths)} files of lengths; "
        f"{len(folder.ignored)} other files ignored{files}, {folder.skipped} rows with a blank cell skipped."
    )
    counts = {"traces": len(folder.traces), "ignored": list(folder.ignored), "skipped rows": folder.skipped}
    return replace(report, summary=(*report.summary, told), input=counts)


def _scaled(experiment: ModuleType, words: str, options: argparse.Namespace, progress: TellProgress) -> Report:
    """An experiment that knows no hours: it shrinks by what `--hours` is of the longest replay, and says so."""
    share = 1.0 if options.hours is None else min(1.0, options.hours * 3600 / LONGEST_S)
    own = {"nodes": options.nodes} if experiment is fleet else {}
    report: Report = experiment.run(options.traces, seeds_of(options), progress, workers_of(options), share, **own)
    if share >= 1:
        return report
    warning = (
        f"SMOKE RUN at {share:.3g} of the full size ({words}): it shows that the experiment runs; its figures and "
        "verdicts stand for nothing else."
    )
    return replace(report, summary=(warning, *report.summary))


def _whatif(options: argparse.Namespace, progress: TellProgress) -> Report:
    asked = Question(**{each.name: getattr(options, each.name) for each in fields(Question)})
    if options.requests is not None and options.requests.is_dir():
        return services.run(asked, seeds_of(options), progress, workers_of(options))
    return whatif.run(asked, seeds_of(options), progress, workers_of(options))


def _over_traces(experiment: ModuleType, options: argparse.Namespace, progress: TellProgress) -> Report:
    report: Report = experiment.run(folder_of(options), seeds_of(options), progress, workers_of(options))
    return report


def _validate(options: argparse.Namespace, progress: TellProgress) -> Report:
    return validate.run_validation(options.seconds, seeds_of(options), progress)


def _machine(options: argparse.Namespace, progress: TellProgress) -> Report:
    return machine.run(options.traces)


EXPERIMENTS: dict[str, Experiment] = {
    "pairs": partial(_replayed, pairs),
    "rivals": partial(_replayed, rivals),
    "tp8": partial(_replayed, tp8),
    "eviction": partial(_scaled, eviction, "of the churn; six cells of two reclaims, one handle size"),
    "cluster": partial(_scaled, cluster, "so much of the nodes, the highest demand alone"),
    "sensitivity": partial(_replayed, sensitivity),
    "fleet": partial(_scaled, fleet, "so much of the nodes"),
    "forecast": partial(_scaled, forecast, "so much of the nodes"),
    "crowding": partial(_replayed, crowding),
}
ALL = tuple(EXPERIMENTS)
EXPERIMENTS |= {
    "quick": partial(_over_traces, quick),
    "validate": _validate,
    "whatif": _whatif,
    "machine": _machine,
    "early": partial(_over_traces, early),
    "cooldown": partial(_over_traces, cooldown),
}


def folder_of(options: argparse.Namespace) -> Folder:
    """The operator's traces, or the seeded ones; `--hours` cuts both."""
    folder = read_folder(options.traces) if options.traces else generate(GENERATOR_SEED)
    if options.hours is not None:
        folder = replace(folder, traces=tuple(trace.first(options.hours * 3600) for trace in folder.traces))
    if options.traces:
        folder = folder.half(options.half)
    if not any(trace.requests for trace in folder.traces):
        within = f" in its first {options.hours:g} hours" if options.hours is not None else ""
        raise TraceError(f"{options.traces or 'the generated folder'} holds no trace with a request{within}")
    return folder


def seeds_of(options: argparse.Namespace) -> list[int]:
    return list(range(1, options.seeds + 1))


def workers_of(options: argparse.Namespace) -> Workers:
    return Workers(processes=options.jobs, store=TaskStore(folder=None if options.fresh else options.cache))


def main(argv: list[str] | None = None) -> int:
    options = parser().parse_args(argv)
    try:
        return OTHERS.get(options.experiment, _experiments)(options)
    except (TraceError, OSError) as error:
        print(f"valve replay {options.experiment}: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT


def _render(options: argparse.Namespace) -> int:
    for path in options.files:
        _say_written(rerender.render(path, options.out))
    return 0


def _stale(options: argparse.Namespace) -> int:
    found = stale(require_folder(options.folder))
    print("\n".join(found) or f"every page in {options.folder} was made by this product")
    return EXIT_MISSED if found else 0


OTHERS = {"render": _render, "stale": _stale}


def _experiments(options: argparse.Namespace) -> int:
    _check(options)
    names = [options.experiment]
    if options.experiment == "all":
        names = [*ALL, *(["machine"] if machine.has_tables(options.traces) else [])]
    held = True
    for name in names:
        report = _run(EXPERIMENTS[name], options)
        held &= report.ok
        _deliver(report, options)
    return 0 if held else EXIT_MISSED


def _check(options: argparse.Namespace) -> None:
    """What an hour of computing should not end with."""
    if options.traces:
        require_folder(options.traces)
    for folder in (options.out, None if options.fresh else options.cache):
        if folder:
            folder.mkdir(parents=True, exist_ok=True)
    if options.experiment != "machine" and options.seeds < FEW_SEEDS:
        words = "one seed gives no interval" if options.seeds == 1 else "two seeds give a very wide interval"
        print(f"valve replay: {words}; claims are judged with five", file=sys.stderr)


def _run(experiment: Experiment, options: argparse.Namespace) -> Report:
    if options.json:
        return experiment(options, silent)
    with bars() as shown:
        return experiment(options, Bars(shown))


def _deliver(report: Report, options: argparse.Namespace) -> None:
    if options.json:
        for claim in report.claims:
            print(claim.line(), flush=True)
    else:
        _show(report)
    if options.out:
        paths = write(report, options.out)
        _say_written(paths)


def _say_written(paths: Sequence[Path]) -> None:
    print("wrote " + ", ".join(str(path) for path in paths), file=sys.stderr)


def _show(report: Report) -> None:
    console = Console()
    console.rule(report.title)
    for paragraph in report.summary:
        console.print(paragraph)
    tables: Sequence[ReportTable] = [*report.tables, *([claims_table(report.claims)] if report.claims else [])]
    for table in tables:
        _show_table(console, table)


def _show_table(console: Console, table: ReportTable) -> None:
    """Drawn where it fits; else as plain rows, for a folded table cannot be read."""
    rows = [[text(cell) for cell in row] for row in table.rows]
    width = sum(3 + max(map(len, column)) for column in zip(table.columns, *rows, strict=True))
    if width >= console.width:
        print(markdown([table]))
        return
    shown = Shown(title=table.title, title_justify="left")
    for column in table.columns:
        shown.add_column(column)
    for i, row in enumerate(rows):
        shown.add_row(*(f"[red]{cell}[/]" if (i, j) in table.marks else cell for j, cell in enumerate(row)))
    console.print(shown)
    if table.note:
        console.print(table.note)


if __name__ == "__main__":
    raise SystemExit(main())
