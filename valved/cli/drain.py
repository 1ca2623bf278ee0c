"""`valve drain`: enable every channel, harvest no more, and say when nothing is left off. With --stop valved ends."""

from __future__ import annotations

import argparse

from valve.v1 import node_pb2

from valved.cli.client import node
from valved.cli.exits import FAILED, OK, CliError


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("drain", help="let everything go: no channel stays off")
    parser.add_argument("--stop", action="store_true", help="end valved when it is done")
    parser.set_defaults(run=drain)


def drain(options: argparse.Namespace) -> int:
    with node() as connection:
        request = node_pb2.DrainRequest(stop=options.stop, by="valve drain")
        answer = connection.call(connection.stub.Drain, request, deadline_s=60.0)
    still_off = [gpu.index for gpu in answer.gpus if gpu.gated and gpu.channels]
    if still_off:
        raise CliError(f"GPUs {still_off} still have channels off", FAILED, "look at: valve explain GPU, and the log")
    print("drained: no channel is off" + (", valved ends" if options.stop else ""))
    return OK
