"""`valve gpu-lab`: experiments that only a real GPU can answer, under a guard, with a rehearsal on the emulated one."""

from __future__ import annotations

import argparse
import signal
import sys
from contextlib import ExitStack
from pathlib import Path

from valve_tools.gpu import catalog, replay, report
from valve_tools.gpu.errors import LabError, StopRule
from valve_tools.gpu.machine import EmulatedMachine, Machine, RealMachine
from valve_tools.gpu.outcome import LabVerdict
from valve_tools.gpu.session import LabSession, scratch
from valve_tools.gpu.table import show

OK, FAILED, USAGE, STOPPED = 0, 1, 2, 3


def names(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def parse(argv: list[str]) -> argparse.Namespace:
    more = "valve gpu-lab report: write docs/results/hardware.md; valve gpu-lab replay TRACE: compare the emulated GPU"
    parser = argparse.ArgumentParser(prog="valve gpu-lab", description=__doc__, epilog=more)
    parser.add_argument("--list", action="store_true", help="Name every experiment and what its answer decides.")
    parser.add_argument("--dry-run", action="store_true", help="Rehearse on the emulated GPU. Nothing is measured.")
    parser.add_argument("--only", type=names, default=[], metavar="D4,C4", help="Run only these experiments.")
    parser.add_argument(
        "--batch",
        type=names,
        default=[],
        metavar="NAME",
        help="Run only these batches. Each takes less than nine minutes.",
    )
    parser.add_argument("--resume", action="store_true", help="Leave out experiments that have an answer in --out.")
    parser.add_argument(
        "--out", type=Path, default=Path("gpu-lab"), help="The folder for the results. Default: %(default)s."
    )
    parser.add_argument(
        "--budget",
        type=float,
        default=catalog.BATCH_LIMIT_S,
        metavar="S",
        help="Start no experiment after this many seconds. Default: %(default)s.",
    )
    return parser.parse_args(argv)


def show_list() -> None:
    for batch in catalog.BATCHES:
        print(f"\n--batch {batch.name}: {batch.about} (up to {batch.seconds} s)")
        for each in batch.experiments:
            note = f"  [emulated GPU: {each.silicon}]" if each.silicon else ""
            named = "  [only when named]" if each.opt_in else ""
            print(f"  {each.name:<4} {each.question}{note}{named}\n       decides {each.decides}")


def run(options: argparse.Namespace) -> int:
    wanted = catalog.chosen(options.only, options.batch)
    out = options.out.resolve()
    with ExitStack() as stack:
        folder = stack.enter_context(scratch())
        machine: Machine = stack.enter_context(EmulatedMachine(folder)) if options.dry_run else RealMachine()
        session = LabSession(machine, out, lambda text: print(text, flush=True), budget_s=options.budget)
        if options.resume:
            settled = session.settled(wanted)
            wanted = [pair for pair in wanted if pair[1].name not in settled]
        rows = session.run(wanted, folder)
    show(rows, {each.name: each.question for _, each in wanted})
    print(f"\nWritten to {out}." + (" A dry run: valve gpu-lab report ignores it." if options.dry_run else ""))
    if any(row.verdict is LabVerdict.STOPPED for row in rows):
        return STOPPED
    return FAILED if any(row.verdict is LabVerdict.BAD for row in rows) else OK


def write_report(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="valve gpu-lab report", description=report.__doc__)
    parser.add_argument(
        "folders",
        nargs="*",
        type=Path,
        default=[Path("docs/results/hardware")],
        help="The folders of found results. Default: docs/results/hardware.",
    )
    parser.add_argument(
        "--to",
        type=Path,
        default=Path("docs/results/hardware.md"),
        help="Write the page to this file. Default: %(default)s.",
    )
    options = parser.parse_args(argv)
    answered = report.write(options.folders, options.to)
    print(f"{options.to}: {answered} of {len(catalog.experiments())} experiments have an answer of a real GPU")
    return OK


def main(argv: list[str]) -> int:
    if argv[:1] == ["report"]:
        return write_report(argv[1:])
    if argv[:1] == ["replay"]:
        return replay.main(argv[1:])
    options = parse(argv)
    if options.list:
        show_list()
        return OK
    for number in (signal.SIGTERM, signal.SIGHUP):  # as an interrupt: everything on, workloads ended
        signal.signal(number, signal.default_int_handler)
    try:
        return run(options)
    except LabError as error:
        print(f"valve gpu-lab: {error}", file=sys.stderr)
        return FAILED
    except StopRule as stop:  # before the first experiment or after the last
        print(f"valve gpu-lab: stopped: {stop}", file=sys.stderr)
        return STOPPED
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
