"""`valve explain WHAT`: why is it in this state? Facts, then the last decisions with their reasons, newest last."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable
from typing import Any

from google.protobuf.json_format import MessageToJson
from rich.text import Text
from valve.v1 import node_pb2

from valved.cli.client import NodeClient, node
from valved.cli.events import line
from valved.cli.exits import OK, USAGE, CliError
from valved.cli.stream import EventStream
from valved.cli.tables import Paper

SUBJECT = r"(gpu|pid|service|reclaim)?[: ]?(0|[1-9][0-9]*)"  # 007 is a name


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "explain",
        help="Say why a GPU or a process is in its state.",
        epilog="in a cluster: explain pod [NAMESPACE/]NAME",
    )
    parser.add_argument(
        "subject",
        nargs="+",
        help="Name one of: gpu0, pid1234, service3, a service's name, reclaims (a list) or reclaim 120 (one of it). "
        "A bare number below 64 is a GPU, else a pid.",
    )
    parser.add_argument("--json", action="store_true", help="Print the facts as JSON.")
    parser.set_defaults(run=explain)


def subject(text: str) -> node_pb2.ExplainRequest:
    """What the word means. A bare number is a GPU where such a GPU can exist, else a process."""
    match = re.fullmatch(SUBJECT, text.lower())
    if not match:
        raise CliError(
            f"{text}: neither a GPU nor a process, a service or a reclaim", USAGE, "for example: valve explain gpu0"
        )
    kind, number = match[1], int(match[2])
    kind = kind or ("gpu" if number < 64 else "pid")
    try:
        return node_pb2.ExplainRequest(**{kind: number})
    except ValueError:
        raise CliError(f"{text}: no such number exists", USAGE, "see: valve status") from None


def is_name(words_given: list[str]) -> bool:
    """Whether the subject can only be the name of a service."""
    return len(words_given) == 1 and not re.fullmatch(SUBJECT, words_given[0].lower())


def service_named(name: str, status: Any, ended: Iterable[Any]) -> node_pb2.ExplainRequest:
    """The service of that name, the newest of several; one that is here before one that has ended."""
    found = [service.id for service in status.services if service.name == name]
    found = found or [event.service for event in ended if event.detail.get("name") == name]
    if not found:
        known = ", ".join(sorted({service.name for service in status.services})) or "none yet"
        raise CliError(
            f"{name}: neither a GPU nor a process, a service or a reclaim",
            USAGE,
            f"for example: valve explain gpu0; services here: {known}",
        )
    return node_pb2.ExplainRequest(service=max(found))


def explain(options: argparse.Namespace) -> int:
    with node() as connection:
        if options.subject == ["reclaims"]:
            return reclaims(connection)
        wanted = subject(" ".join(options.subject)) if not is_name(options.subject) else None
        status = connection.status()
        now = status.monotonic_ns
        if wanted is None:
            wanted = service_named(options.subject[0], status, EventStream(connection, ["ended"]).kept())
        answer = connection.call(connection.stub.Explain, wanted)
    if options.json:
        print(MessageToJson(answer, preserving_proto_field_name=True))
    else:
        show(answer, now)
    return OK


def reclaims(connection: NodeClient) -> int:
    """The reclaims that valved still knows, with the numbers by which each is explained."""
    console, now_ns = Paper(soft_wrap=True), connection.status().monotonic_ns
    found = [line(event, now_ns) for event in EventStream(connection, ["reclaimed"]).kept()]
    for each in found:
        console.print(each)
    console.print(
        "valve explain reclaim NUMBER says which engine lost memory, and why" if found else "no reclaim so far"
    )
    return OK


def show(answer: Any, now_ns: int) -> None:
    console = Paper(soft_wrap=True)
    console.print(Text(answer.summary, style="bold"))
    for fact in answer.facts:
        console.print(Text(f"  {fact}"))
    for event in answer.decisions:
        console.print(line(event, now_ns))
