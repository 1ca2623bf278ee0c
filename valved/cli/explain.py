"""`valve explain WHAT`: why is it in this state? Facts, then the last decisions with their reasons, newest last."""

from __future__ import annotations

import argparse
import re
from typing import Any

from google.protobuf.json_format import MessageToJson
from rich.console import Console
from valve.v1 import node_pb2

from valved.cli import words
from valved.cli.client import node
from valved.cli.exits import OK, USAGE, CliError


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "explain", help="why a GPU or process is in its state", epilog="in a cluster: explain pod [NAMESPACE/]NAME"
    )
    parser.add_argument(
        "subject",
        nargs="+",
        help="gpu0, pid1234, service3 or reclaim 120 (its event's number); a bare number is a GPU below 64, else a pid",
    )
    parser.add_argument("--json", action="store_true")
    parser.set_defaults(run=explain)


def subject(text: str) -> node_pb2.ExplainRequest:
    """What the word means. A bare number is a GPU where such a GPU can exist, else a process."""
    match = re.fullmatch(r"(gpu|pid|service|reclaim)?:?(\d+)", text.lower())
    if not match:
        raise CliError(
            f"{text}: neither a GPU nor a process, a service or a reclaim", USAGE, "for example: valve explain gpu0"
        )
    kind, number = match[1], int(match[2])
    kind = kind or ("gpu" if number < 64 else "pid")
    return node_pb2.ExplainRequest(**{kind: number})


def explain(options: argparse.Namespace) -> int:
    with node() as connection:
        now = connection.status().monotonic_ns
        answer = connection.call(connection.stub.Explain, subject("".join(options.subject)))
    if options.json:
        print(MessageToJson(answer, preserving_proto_field_name=True))
    else:
        show(answer, now)
    return OK


def show(answer: Any, now_ns: int) -> None:
    console = Console()
    console.print(answer.summary, style="bold")
    for fact in answer.facts:
        console.print(f"  {fact}")
    for event in answer.decisions:
        detail = ", ".join(f"{name} {value}" for name, value in sorted(event.detail.items()))
        age = words.duration(max(0, now_ns - event.t_ns))
        console.print(f"  {age:>10} ago  {event.kind}: {event.reason}" + (f"  ({detail})" if detail else ""))
