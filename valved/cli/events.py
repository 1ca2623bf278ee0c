"""`valve events`: what happened on this node, newest last, and with --follow what happens next."""

from __future__ import annotations

import argparse
import json
from typing import Any

from rich.text import Text

from valved.cli import words
from valved.cli.client import node
from valved.cli.exits import OK
from valved.cli.record import as_record
from valved.cli.stream import EventStream
from valved.cli.tables import Paper

# Each stop and wake, and each channel: hundreds a second at times, and `valve explain` has them.
MANY = ("gate", "hold", "wake", "wake-refused", "decided", "cooldown", "channel-added", "channel-gone")


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("events", help="Show what happened on this node.")
    parser.add_argument(
        "--kind",
        action="append",
        default=[],
        help="Show only this kind (reclaimed, refused, killed, ...). Repeat the option for several kinds.",
    )
    parser.add_argument("--all", action="store_true", help="Show each stop and wake, too.")
    parser.add_argument("--follow", action="store_true", help="Then show new events, until Ctrl-C.")
    parser.add_argument(
        "--json", action="store_true", help="Print one JSON object a line, as `valve record` writes them."
    )
    parser.set_defaults(run=events)


def events(options: argparse.Namespace) -> int:
    console, errors = Paper(soft_wrap=True), Paper(stderr=True, soft_wrap=True)
    with node() as connection:
        now_ns = connection.status().monotonic_ns
        stream = EventStream(connection, options.kind, lambda text: errors.print(Text(f"valve: {text}")))
        for event in stream.follow() if options.follow else stream.kept():
            if event.kind in MANY and not (options.all or options.kind):
                continue
            if options.json:
                print(json.dumps(as_record(event), separators=(",", ":")), flush=True)
            else:
                console.print(line(event, now_ns))
    return OK


def line(event: Any, now_ns: int) -> Text:
    """When, what, and why: `     4.2 s ago  paused: by alice  (pid 4711)`."""
    detail = words.details(event.detail)
    age = f"{words.duration(now_ns - event.t_ns)} ago" if event.t_ns <= now_ns else "now"
    number = f"  #{event.seq}" if event.kind == "reclaimed" else ""
    return Text(f"{age:>16}  {event.kind}{number}: {event.reason}" + (f"  ({detail})" if detail else ""))
