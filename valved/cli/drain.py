"""`valve drain`: stop all offline work, end its processes, say when none is left. With --stop valved ends then."""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

from valve.v1 import node_pb2

from valved.cli import words
from valved.cli.client import node
from valved.cli.exits import FAILED, NOT_RUNNING, OK, CliError

LOOK_S = 0.2


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "drain", help="End all offline work on this node and accept none until `valve resume`."
    )
    parser.add_argument("--stop", action="store_true", help="End valved when no offline process is left.")
    parser.add_argument(
        "--timeout",
        type=words.seconds,
        default=120.0,
        help="Wait this many seconds for the processes to end. Default: %(default)g.",
    )
    parser.set_defaults(run=drain)


def drain(options: argparse.Namespace) -> int:
    end_s = time.monotonic() + options.timeout
    with node() as connection:
        request = node_pb2.DrainRequest(stop=options.stop, by="valve drain")
        left = staying(connection.call(connection.stub.Drain, request))
        if left:
            print(f"offline work is stopped; waiting for its end: {', '.join(left)}", file=sys.stderr)
        while left:
            if time.monotonic() > end_s:
                step = "they stay stopped; see valve explain, the log, and on Kubernetes the disruption budgets"
                raise CliError(f"still there: {', '.join(left)}", FAILED, step)
            time.sleep(LOOK_S)
            try:
                left = staying(connection.status())
            except CliError as error:
                if not options.stop or error.code != NOT_RUNNING:
                    raise
                break  # valved has ended: none was left
    print("drained: no offline process is left" + (", valved ends" if options.stop else ""))
    return OK


def staying(status: Any) -> list[str]:
    """Offline services that are still there, with their processes; else processes of none."""
    services = [
        f"{service.name} ({', '.join(map(str, service.pids)) or 'not connected'})"
        for service in status.services
        if service.role == node_pb2.ROLE_OFFLINE
    ]
    return services or [f"process {pid}" for pid in status.offline_pids]
