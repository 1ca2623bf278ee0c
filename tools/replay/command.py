"""`valve replay EXPERIMENT`: run it, write its JSON, table and page, and say by the exit code whether its claims hold.

0: all claims hold; 3: one is missed; 2: bad input.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.table import Table as Shown
from valve_tools.replay import machine, pairs, sensitivity, tp8, validate, whatif
from valve_tools.replay.report import Report, Table, claims_table, markdown, text, write
from valve_tools.replay.store import Store, default_folder
from valve_tools.replay.work import Progress, Workers, bars, silent
from valve_tools.replay.work import Shown as Bars
from valve_tools.sim.generator import generate
from valve_tools.sim.traces import Folder, TraceError, read_folder

EXIT_MISSED = 3
EXIT_BAD_INPUT = 2
GENERATOR_SEED = 1
NODES = 100
"""Of the small fleet."""
Experiment = Callable[[argparse.Namespace, Progress], Report]


def _pairs(options: argparse.Namespace, progress: Progress) -> Report:
    return pairs.run(folder_of(options), seeds_of(options), progress, workers_of(options))


def _tp8(options: argparse.Namespace, progress: Progress) -> Report:
    return tp8.run(folder_of(options), seeds_of(options), progress, workers_of(options))


def _sensitivity(options: argparse.Namespace, progress: Progress) -> Report:
    return sensitivity.run(folder_of(options), seeds_of(options), progress, workers_of(options))


def _eviction(options: argparse.Namespace, progress: Progress) -> Report:
    from valve_tools.replay import eviction

    return eviction.run(options.traces, seeds_of(options), progress, workers_of(options))


def _cluster(options: argparse.Namespace, progress: Progress) -> Report:
    from valve_tools.replay import cluster

    return cluster.run(options.traces, seeds_of(options), progress, workers_of(options))


def _whatif(options: argparse.Namespace, progress: Progress) -> Report:
    question = whatif.Question(
        requests=options.requests,
        prometheus=options.prometheus,
        machine=options.machine,
        gpu=options.gpu,
        online=options.online,
        offline=options.offline,
        tp=options.tp,
        replicas=options.replicas,
    )
    return whatif.run(question, seeds_of(options), progress, workers_of(options))


def _validate(options: argparse.Namespace, progress: Progress) -> Report:
    return validate.run_validation(options.seconds, seeds_of(options), progress)


def _fleet(options: argparse.Namespace, progress: Progress) -> Report:
    from valve_tools.replay import fleet

    return fleet.run(options.traces, seeds_of(options), progress, workers_of(options), getattr(options, "nodes", NODES))


def _machine(options: argparse.Namespace, progress: Progress) -> Report:
    return machine.run(options.traces)


EXPERIMENTS: dict[str, Experiment] = {
    "pairs": _pairs,
    "tp8": _tp8,
    "eviction": _eviction,
    "cluster": _cluster,
    "sensitivity": _sensitivity,
    "fleet": _fleet,
}
ALL = tuple(EXPERIMENTS)
EXPERIMENTS |= {"validate": _validate, "whatif": _whatif, "machine": _machine}
HELP = {
    "pairs": "ten online/offline pairs under every combination of policies",
    "tp8": "an eight-GPU service on the stock driver and on the patched one",
    "eviction": "which KV columns to take: policies over reclaim rate and size",
    "cluster": "a week of 8,000 GPUs under five schedulers",
    "sensitivity": "one setting of a node at a time, as tornado charts",
    "fleet": "theta and the rules for SLAs on a small fleet, as tornado charts",
    "whatif": "your own load and machine: an estimate and recommended settings",
    "validate": "the simulator against the product on the emulated GPU, in real time",
    "machine": "the machine model against tables of measured layer times, and a refit",
    "all": "every experiment but validate, whatif and machine",
}


def folder_of(options: argparse.Namespace) -> Folder:
    """The operator's traces, or the seeded ones; `--hours` cuts both."""
    folder = read_folder(options.traces) if options.traces else generate(GENERATOR_SEED)
    if options.hours is None:
        return folder
    return replace(folder, traces=tuple(trace.first(options.hours * 3600) for trace in folder.traces))


def seeds_of(options: argparse.Namespace) -> list[int]:
    return list(range(1, options.seeds + 1))


def workers_of(options: argparse.Namespace) -> Workers:
    return Workers(processes=options.jobs, store=Store(folder=None if options.fresh else options.cache))


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="valve replay", description=__doc__.splitlines()[0] if __doc__ else None)
    commands = top.add_subparsers(dest="experiment", required=True, metavar="EXPERIMENT")
    for name, words in HELP.items():
        command = commands.add_parser(name, help=words)
        command.add_argument("--traces", type=Path, metavar="DIR", help="folder of request traces (default: generated)")
        command.add_argument("--out", type=Path, metavar="DIR", help="write NAME.json, NAME.md and NAME.html there")
        command.add_argument("--seeds", type=_positive, default=5, metavar="N", help="seeds 1..N (default 5)")
        command.add_argument("--hours", type=float, metavar="H", help="only the first H hours of every trace")
        command.add_argument("--jobs", type=_positive, default=2, metavar="N", help="processes (default 2)")
        command.add_argument(
            "--cache",
            type=Path,
            metavar="DIR",
            default=default_folder(),
            help="finished tasks are kept here, and a stopped run goes on from them",
        )
        command.add_argument("--fresh", action="store_true", help="neither use nor keep finished tasks")
        command.add_argument("--json", action="store_true", help="one line per claim, nothing else")
        if name == "validate":
            command.add_argument("--seconds", type=float, default=60.0, metavar="S", help="of arrivals (default 60)")
        if name == "fleet":
            command.add_argument(
                "--nodes", type=_positive, default=NODES, metavar="N", help="of 8 GPUs (default %(default)s)"
            )
        if name == "whatif":
            _whatif_options(command)
    return top


def _whatif_options(command: argparse.ArgumentParser) -> None:
    load = command.add_argument_group("load (one of the two)")
    load.add_argument("--requests", type=Path, metavar="FILE", help="CSV with t_s,in_tok,out_tok")
    load.add_argument("--prometheus", type=Path, metavar="FILE", help="JSON of /api/v1/query_range, see docs/replay.md")
    load.add_argument("--replicas", type=_positive, default=1, metavar="K", help="the load is that of K replicas")
    machine = command.add_argument_group("machine")
    machine.add_argument("--gpu", default="H100", help="H100, H200 or A100 (default H100)")
    machine.add_argument("--machine", type=Path, metavar="FILE", help="JSON with figures of another card")
    machine.add_argument("--online", default="8B", metavar="MODEL", help="1B to 70B (default 8B)")
    machine.add_argument("--offline", default="8B", metavar="MODEL", help="1B to 70B (default 8B)")
    machine.add_argument("--tp", type=_positive, default=1, metavar="K", help="GPUs that both run on (default 1)")


def _positive(words: str) -> int:
    value = int(words)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def main(argv: list[str] | None = None) -> int:
    options = parser().parse_args(argv)
    names = list(ALL) if options.experiment == "all" else [options.experiment]
    held = True
    for name in names:
        try:
            report = _run(EXPERIMENTS[name], options)
        except (TraceError, ValueError) as error:
            print(f"valve replay {name}: {error}", file=sys.stderr)
            return EXIT_BAD_INPUT
        held &= report.ok
        _deliver(report, options)
    return 0 if held else EXIT_MISSED


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
        print("wrote " + ", ".join(str(path) for path in paths), file=sys.stderr)


def _show(report: Report) -> None:
    console = Console()
    console.rule(report.title)
    for paragraph in report.summary:
        console.print(paragraph)
    tables: Sequence[Table] = [*report.tables, *([claims_table(report.claims)] if report.claims else [])]
    for table in tables:
        _show_table(console, table)


def _show_table(console: Console, table: Table) -> None:
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
