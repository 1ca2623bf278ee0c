"""`valve mode` and `valve policy`: read and set what valved decides by, without a restart."""

from __future__ import annotations

import argparse
from typing import Any

from google.protobuf.json_format import MessageToJson
from valve.v1 import node_pb2

from valved.cli import words
from valved.cli.client import must_last, node
from valved.cli.drain import staying
from valved.cli.exits import OK, USAGE, CliError
from valved.paths import STATE_FILE

MODES: dict[str, Any] = {word: value for value, word in words.MODES.items()}
MS, S = 1_000_000, 1_000_000_000
# Name as in the configuration, field of valve.v1.Policy, what the field counts in one unit of the terminal.
SETTINGS = {
    "cooldown.start_ms": ("cooldown_start_ns", MS),
    "cooldown.floor_ms": ("cooldown_floor_ns", MS),
    "cooldown.ceiling_ms": ("cooldown_ceiling_ns", MS),
    "cooldown.window_s": ("cooldown_window_ns", S),
    "cooldown.factor": ("cooldown_factor", 1),
}
TAKEN = {**SETTINGS, "cooldown.window_ms": ("cooldown_window_ns", MS)}  # and its name in 0.1
MOST_NS = 30 * 24 * 3600 * 1000 * MS  # the longest window that valved takes
POSITIVE = "give a positive number, as in cooldown.floor_ms=10"


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    modes = commands.add_parser("mode", help="Show or set how far Valve may go on this node.")
    modes.add_argument("mode", nargs="?", choices=sorted(MODES), help="Set this mode. Default: show the mode in force.")
    modes.set_defaults(run=mode)
    policies = commands.add_parser("policy", help="Show or set the cooldown while valved runs.")
    policies.add_argument(
        "settings",
        nargs="*",
        metavar="NAME=VALUE",
        help=f"Set one or more of {', '.join(SETTINGS)}. Default: show all.",
    )
    policies.add_argument("--json", action="store_true", help="Print the settings as JSON.")
    policies.set_defaults(run=policy)


def mode(options: argparse.Namespace) -> int:
    with node() as connection:
        if options.mode:
            connection.call(connection.stub.SetPolicy, node_pb2.Policy(mode=MODES[options.mode]))
        status = connection.status()
    print(f"mode: {words.mode(status)}", flush=True)
    left = staying(status) if options.mode and status.mode != node_pb2.MODE_HARVEST else []
    if left:
        print(f"offline work is stopped and asked to end: {', '.join(left)}", flush=True)
    if options.mode:
        must_last(status, STATE_FILE, f"the mode is {options.mode}")
    return OK


def policy(options: argparse.Namespace) -> int:
    wanted = changes(options.settings)
    with node() as connection:
        if wanted:
            answer = connection.call(connection.stub.SetPolicy, node_pb2.Policy(**wanted))
            status = connection.status()
        else:
            answer = connection.call(connection.stub.GetPolicy, node_pb2.GetPolicyRequest())
    text = MessageToJson(answer, preserving_proto_field_name=True) if options.json else "\n".join(lines(answer))
    print(text, flush=True)
    if wanted:
        must_last(status, STATE_FILE, "these settings are in force")
    return OK


def changes(settings: list[str]) -> dict[str, Any]:
    """Fields of valve.v1.Policy for `name=value` words; a word that makes no sense is named."""
    found: dict[str, Any] = {}
    for word in settings:
        name, equals, text = word.partition("=")
        if name in TAKEN and not equals:
            raise CliError(f"{name}: no value", USAGE, f"give a positive number, as in {name}=10")
        if name not in TAKEN:
            raise CliError(f"{word}: no such setting", USAGE, f"known: {', '.join(SETTINGS)}")
        field, scale = TAKEN[name]
        try:
            value = float(text)
        except ValueError:
            raise CliError(f"{name}: {text!r} is no number", USAGE, POSITIVE) from None
        if not 0 < value < float("inf"):
            raise CliError(f"{name}: {text} is not a positive, finite number", USAGE, POSITIVE)
        found[field] = value if scale == 1 else round(value * scale)
        if scale != 1 and not 1 <= found[field] <= MOST_NS:  # valved takes 0 for "as it was"
            raise CliError(f"{name}: {text} is out of range", USAGE, f"give {1 / scale:g} to {MOST_NS / scale:.0f}")
    return found


def lines(answer: Any) -> list[str]:
    shown = [f"{name} = {getattr(answer, field) / scale:g}" for name, (field, scale) in SETTINGS.items()]
    return [f"mode = {words.MODES.get(answer.mode, 'unknown')}", *shown, f"lease_ms = {answer.lease_ns / MS:g} (fixed)"]
