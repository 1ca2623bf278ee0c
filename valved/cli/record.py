"""`valve record FILE`: write every event and decision from now on, and a timeline that people can look at.

FILE gets one JSON object per line (proto/trace). At the end FILE.perfetto.json is written beside it, in the trace-event
form that https://ui.perfetto.dev and chrome://tracing open.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from valved.cli import words
from valved.cli.client import NodeClient, node
from valved.cli.exits import FAILED, OK, USAGE, CliError
from valved.cli.stream import EventStream
from valved.errors import cure
from valved.state.trace import read_lines, to_trace_events

Tracked = dict[int, tuple[int, int, dict[str, int]]]
"""When each client was looked at last, how much it had launched, and what was told of it."""

SAMPLE_S = 0.05  # how often launch counters are read: a rate, not single launches


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("record", help="Record events, decisions and a timeline for Perfetto.")
    parser.add_argument("file", type=Path, help="Write the events to this file. The timeline is written beside it.")
    parser.add_argument("--force", action="store_true", help="Write over FILE if it exists.")
    parser.add_argument(
        "--for",
        dest="seconds",
        type=words.seconds,
        default=0.0,
        help="End after this many seconds. 0 means: run until Ctrl-C. Default: %(default)g.",
    )
    parser.set_defaults(run=record)


def record(options: argparse.Namespace) -> int:
    if options.file.is_dir():
        raise CliError(f"{options.file} is a folder", FAILED, "name a file")
    timeline = options.file.with_name(options.file.name + ".perfetto.json")
    for path in (options.file, timeline):
        if path.exists() and not options.force:
            raise CliError(f"{path} exists", USAGE, "name another file, or say --force")
    samples: list[dict[str, Any]] = []
    with node() as connection:
        names = {service.id: service.name for service in connection.status().services}  # and says so if nobody answers
        done = threading.Event()
        sampler = threading.Thread(target=sample, args=(connection, samples, done), daemon=True)
        sampler.start()
        with writing(options.file), open_file(options.file) as out:
            count = follow(connection, out, options.seconds)
        done.set()
        sampler.join()
    document = to_trace_events(read_lines(options.file), names)
    document["traceEvents"] += [{"ph": "M", "name": "process_name", "pid": 3, "args": {"name": "processes"}}, *samples]
    with writing(timeline):
        timeline.write_text(json.dumps(document))
    print(f"{count} events in {options.file}; timeline for ui.perfetto.dev: {timeline}")
    return OK


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """An error of a write names no file."""
    try:
        yield
    except OSError as error:
        text = f"{path}: {error.strerror}: it is not whole"
        raise CliError(text, FAILED, cure(error, "name a file that you may write")) from None


def open_file(path: Path) -> TextIO:
    """For lines that are on disk as soon as they are written: a recorder that is killed loses none."""
    try:
        return path.open("w", encoding="utf-8", buffering=1)
    except OSError as error:
        raise CliError(f"{path}: {error.strerror}", FAILED, cure(error, "name a file that you may write")) from None


def follow(connection: NodeClient, out: TextIO, seconds: float) -> int:
    """Write events until the time is over or the user stops; returns how many. A valved that ends is waited for."""
    stream = EventStream(connection, (), lambda text: print(f"valve: {text}"), since_seq=None, seconds=seconds)
    count = 0
    for ends in (signal.SIGINT, signal.SIGTERM):  # a shell's background job is begun with the first one ignored
        signal.signal(ends, signal.default_int_handler)
    try:
        for event in stream.follow():
            out.write(json.dumps(as_record(event), separators=(",", ":")) + "\n")
            count += 1
            if event.lost:
                print(f"valve: {event.lost} events were lost: this reader was too slow")
    except KeyboardInterrupt:
        pass
    return count


def as_record(event: Any) -> dict[str, Any]:
    """One event as a line of proto/trace. Numbers in `detail` travel as text and become numbers again."""
    found = {name: words.number(value) for name, value in event.detail.items()}
    detail = {name: value if found[name] is None else found[name] for name, value in event.detail.items()}
    return {
        "seq": event.seq,
        "t_ns": event.t_ns,
        "kind": event.kind,
        "service": event.service,
        "client": event.client,
        "gpus": list(event.gpus),
        "reason": event.reason,
        "detail": detail,
    }


def sample(connection: NodeClient, samples: list[dict[str, Any]], done: threading.Event) -> None:
    """Launch rate and busy state per process, as counter tracks of the timeline."""
    last: Tracked = {}
    while not done.wait(SAMPLE_S):
        try:
            status = connection.status()
        except CliError:  # valved is started again, perhaps
            continue
        samples.extend(tracks(status, last))


def tracks(status: Any, last: Tracked) -> Iterator[dict[str, Any]]:
    """What has changed since the last look: most processes rest most of the time."""
    now_ns = status.monotonic_ns
    for client in status.clients:
        then_ns, before, shown = last.get(client.id, (now_ns, client.submitted, {}))
        rate = 1e9 * (client.submitted - before) / (now_ns - then_ns) if now_ns > then_ns else 0.0
        found = {"launches/s": round(rate), "busy": int(client.busy)}
        last[client.id] = (now_ns, client.submitted, found)
        name = f"{client.comm} {client.pid}"
        for what, value in found.items() - shown.items():
            yield {"ph": "C", "name": f"{name}: {what}", "pid": 3, "tid": 0, "ts": now_ns / 1e3, "args": {what: value}}
