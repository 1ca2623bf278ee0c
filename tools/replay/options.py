"""The options of `valve replay` and the help of its experiments."""

from __future__ import annotations

import argparse
from pathlib import Path

from valve_kube.options import SUBCOMMAND, option
from valve_tools.replay import rerender
from valve_tools.replay.store import default_folder
from valve_tools.sim.traces import Half

NODES = 100
"""Of the small fleet."""
MOST_HOURS = 24.0 * 366
UNTIMED = ("validate", "machine")
"""Experiments that replay no load, so that hours of it mean nothing."""
HELP = {
    "pairs": "Replay ten online/offline pairs under every combination of policies.",
    "rivals": "Run each rival under every value of its setting, to find its best.",
    "tp8": "Compare an eight-GPU service on the stock driver with one on the patched driver.",
    "eviction": "Ask which KV columns to take: policies over reclaim rate and size.",
    "cluster": "Simulate a week of 8,000 GPUs under five schedulers.",
    "sensitivity": "Vary one setting of a node at a time and draw tornado charts.",
    "fleet": "Vary theta and the rules for SLAs on a small fleet and draw tornado charts.",
    "forecast": "Ask what placement should count on: missed SLAs against saved GPUs, beside an oracle.",
    "crowding": "Ask which pairs placement refuses because online needs, at its peaks, the memory that the job holds.",
    "early": "Ask how early to take memory that comes between two offline steps.",
    "cooldown": "Ask what the cooldown of a service without hints should learn from.",
    "whatif": "Estimate your own load on your own machine and recommend settings.",
    "validate": "Compare the simulator with the product on the emulated GPU, in real time.",
    "machine": "Compare the machine model with tables of measured layer times, and fit it again.",
    "quick": "Check the claims of pairs once more, small and loosely, in minutes.",
    "render": "Make the pages of finished experiments again, from their JSON.",
    "stale": "Name the pages that another product made, with other settings or policies.",
    "all": "Run all but validate, whatif, early and cooldown. Machine runs where the folder has its tables.",
}


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="valve replay",
        description="Run an experiment, write its JSON, table and page. The exit code says whether its claims hold.",
    )
    commands = top.add_subparsers(dest="experiment", required=True, metavar="EXPERIMENT", parser_class=SUBCOMMAND)
    for name, words in HELP.items():
        command = commands.add_parser(name, help=words)
        if name == "render":
            rerender.add_options(command)
            continue
        if name == "stale":
            command.add_argument(
                "folder",
                type=Path,
                nargs="?",
                default=Path("docs/results"),
                help="The folder of pages to compare. Default: %(default)s.",
            )
            continue
        _shared_options(command, is_timed=name not in UNTIMED)
        if name == "validate":
            option(
                command,
                "--seconds",
                20.0,
                "The seconds of arrivals. Real time is 15 times that for each seed.",
                metavar="S",
            )
        if name == "fleet":
            option(command, "--nodes", NODES, "The number of nodes of 8 GPUs.", type=_positive, metavar="N")
        if name == "whatif":
            _whatif_options(command)
    return top


def _shared_options(command: argparse.ArgumentParser, is_timed: bool) -> None:
    command.add_argument(
        "--traces", type=Path, metavar="DIR", help="The folder of request traces. Default: generated ones."
    )
    command.add_argument(
        "--half",
        type=Half,
        choices=list(Half),
        default=Half.ALL,
        metavar="all|tuning|claims",
        help="Use only the traces that settings are chosen on, or only those they are judged on. The file's "
        "hash decides. Default: all.",
    )
    command.add_argument(
        "--out", type=Path, metavar="DIR", help="Write NAME.json, NAME.md and NAME.html to this folder."
    )
    option(command, "--seeds", 5, "Use the seeds 1 to N, a number.", type=_positive, metavar="N")
    if is_timed:
        command.add_argument(
            "--hours",
            type=_hours,
            metavar="H",
            help="Use only the first H hours of every trace. For eviction, cluster, fleet and forecast: a run "
            "of H/6 the size.",
        )
    option(command, "--jobs", 2, "The number of processes.", type=_positive, metavar="N")
    option(
        command,
        "--cache",
        default_folder(),
        "Keep finished tasks in this folder. A stopped run goes on from them.",
        type=Path,
        metavar="DIR",
    )
    command.add_argument("--fresh", action="store_true", help="Neither use nor keep finished tasks.")
    command.add_argument("--json", action="store_true", help="Print one line per claim and nothing else.")


def _whatif_options(command: argparse.ArgumentParser) -> None:
    load = command.add_argument_group("load (one of the two)")
    load.add_argument(
        "--requests",
        type=Path,
        metavar="FILE",
        help="A CSV file with t_s,in_tok,out_tok. In a folder of them each is a service.",
    )
    load.add_argument(
        "--prometheus", type=Path, metavar="FILE", help="A JSON file of /api/v1/query_range. See docs/replay.md."
    )
    option(load, "--replicas", 1, "The number of replicas whose load it is.", type=_positive, metavar="K")
    machine = command.add_argument_group("machine")
    option(machine, "--gpu", "H100", "The card: H100, H200 or A100.")
    machine.add_argument("--machine", type=Path, metavar="FILE", help="A JSON file with the figures of another card.")
    option(machine, "--online", "8B", "The online model, 1B to 70B parameters.", metavar="MODEL")
    option(machine, "--offline", "8B", "The offline model, 1B to 70B parameters.", metavar="MODEL")
    option(machine, "--tp", 1, "The number of GPUs that both run on.", type=_positive, metavar="K")


def _positive(words: str) -> int:
    value = int(words)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def _hours(words: str) -> float:
    value = float(words)
    if not 0 < value <= MOST_HOURS:
        raise argparse.ArgumentTypeError(f"must be above 0 and at most {MOST_HOURS:g}")
    return value
