"""The gRPC client that every command uses: connect, call, and turn errors into exits."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import grpc
from valve.v1 import node_pb2, node_pb2_grpc

from valved.cli.exits import FAILED, NOT_RUNNING, REFUSED, USAGE, CliError
from valved.paths import API_SOCKET, run_dir

Answer = TypeVar("Answer")

DEADLINE_S = 10.0
EXITS = {
    grpc.StatusCode.UNAVAILABLE: NOT_RUNNING,
    grpc.StatusCode.INVALID_ARGUMENT: USAGE,
    grpc.StatusCode.NOT_FOUND: FAILED,
    grpc.StatusCode.FAILED_PRECONDITION: REFUSED,
    grpc.StatusCode.PERMISSION_DENIED: REFUSED,
    grpc.StatusCode.RESOURCE_EXHAUSTED: REFUSED,
}


class Node:
    """One connection to the valved of this node."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._channel = grpc.insecure_channel(f"unix:{folder / API_SOCKET}")
        self.stub = node_pb2_grpc.NodeStub(self._channel)

    def call(self, method: Callable[..., Answer], request: object, *, deadline_s: float = DEADLINE_S) -> Answer:
        """Call one method; a gRPC error becomes a CliError with what to do next."""
        try:
            return method(request, timeout=deadline_s)
        except grpc.RpcError as error:
            raise explain_error(error, self.folder) from None

    def status(self) -> Any:
        return self.call(self.stub.GetStatus, node_pb2.GetStatusRequest())

    def close(self) -> None:
        self._channel.close()


def explain_error(error: Any, folder: Path) -> CliError:
    """What a gRPC error means for the person at the terminal."""
    code = error.code()
    if code is grpc.StatusCode.UNAVAILABLE:
        return CliError(f"no valved answers in {folder}", NOT_RUNNING, "start it: valve up")
    problem = next((item.value for item in error.trailing_metadata() or () if item.key == "valve-next-step"), "")
    text = problem.decode() if isinstance(problem, bytes) else problem
    return CliError(error.details() or code.name, EXITS.get(code, FAILED), text)


@contextlib.contextmanager
def node() -> Iterator[Node]:
    """The valved of this node, or CliError(NOT_RUNNING) at the first call."""
    connection = Node(run_dir())
    try:
        yield connection
    finally:
        connection.close()


def status_of(folder: Path) -> Any | None:
    """What the valved of this folder says of itself; None if none answers."""
    connection = Node(folder)
    try:
        return connection.status()
    except CliError:
        return None
    finally:
        connection.close()


def is_running(folder: Path) -> bool:
    return status_of(folder) is not None
