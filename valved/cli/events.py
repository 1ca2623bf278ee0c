"""`valve events`: what happened on this node, newest last, and with --follow what happens next."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from typing import Any

import grpc
from rich.console import Console
from rich.text import Text
from valve.v1 import node_pb2

from valved.cli import words
from valved.cli.client import DEADLINE_S, Node, explain_error, node
from valved.cli.exits import OK
from valved.cli.record import as_record

# Each stop and wake, and each channel: hundreds a second at times, and `valve explain` has them.
MANY = ("gate", "hold", "wake", "wake-refused", "decided", "cooldown", "channel-added", "channel-gone")


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("events", help="what happened on this node")
    parser.add_argument("--kind", action="append", default=[], help="only this kind (reclaimed, refused, killed, ...)")
    parser.add_argument("--all", action="store_true", help="each stop and wake, too")
    parser.add_argument("--follow", action="store_true", help="go on with what happens from now on, until Ctrl-C")
    parser.add_argument("--json", action="store_true", help="one JSON object a line, as `valve record` writes them")
    parser.set_defaults(run=events)


def events(options: argparse.Namespace) -> int:
    console = Console(soft_wrap=True)
    with node() as connection:
        now_ns = connection.status().monotonic_ns
        for event in read(connection, options.kind, follow=options.follow):
            if event.kind in MANY and not (options.all or options.kind):
                continue
            if options.json:
                print(json.dumps(as_record(event), separators=(",", ":")), flush=True)
            else:
                console.print(line(event, now_ns))
    return OK


def read(connection: Node, kinds: list[str], *, follow: bool = False) -> Iterator[Any]:
    """The events that valved keeps, oldest first; with `follow` those to come as well."""
    request = node_pb2.WatchRequest(kinds=kinds, since_seq=0)
    stream = connection.stub.Watch(request, timeout=None if follow else DEADLINE_S)
    try:
        kept = next(int(item.value) for item in stream.initial_metadata() if item.key == "valve-kept")
        while follow or kept:
            yield next(stream)
            kept -= 1
    except grpc.RpcError as error:
        raise explain_error(error, connection.folder) from None
    finally:
        stream.cancel()


def line(event: Any, now_ns: int) -> Text:
    """When, what, and why: `     4.2 s ago  paused: by alice  (pid 4711)`."""
    detail = words.details(event.detail)
    age = f"{words.duration(now_ns - event.t_ns)} ago" if event.t_ns <= now_ns else "now"
    number = f"  #{event.seq}" if event.kind == "reclaimed" else ""
    return Text(f"{age:>16}  {event.kind}{number}: {event.reason}" + (f"  ({detail})" if detail else ""))
