"""The gRPC client that every command uses: connect, call, and turn errors into exits."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import grpc
from valve.v1 import node_pb2, node_pb2_grpc

from valved.cli.exits import FAILED, NOT_RUNNING, REFUSED, USAGE, CliError
from valved.paths import API_SOCKET, ENV_RUN_DIR, VIEW_SOCKET, grpc_address, run_dir, unfit

Answer = TypeVar("Answer")

DEADLINE_S = 3.0
"""valved answers within milliseconds; one that does not in this time is stuck, and a person should read so."""
OPTIONS = (
    # A command that waits for the next valved (`valve events --follow`) looks for it each second.
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.max_receive_message_length", 256 << 20),  # the status of a node full of processes
)
EXITS = {
    grpc.StatusCode.INVALID_ARGUMENT: USAGE,
    grpc.StatusCode.NOT_FOUND: USAGE,
    grpc.StatusCode.FAILED_PRECONDITION: REFUSED,
    grpc.StatusCode.PERMISSION_DENIED: REFUSED,
    grpc.StatusCode.RESOURCE_EXHAUSTED: REFUSED,
}


class NodeClient:
    """One connection to the valved of this node."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        name = API_SOCKET if may_use(folder) or not may_use(folder, VIEW_SOCKET) else VIEW_SOCKET
        self._channel = grpc.insecure_channel(grpc_address(folder / name), options=OPTIONS)
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
    if why := unfit(folder):
        return CliError(f"{folder} cannot be a run folder: {why}", USAGE, f"set {ENV_RUN_DIR} to another")
    code = error.code()
    found = dict(error.trailing_metadata() or ()).get("valve-next-step", "")
    next_step = found.decode() if isinstance(found, bytes) else found
    if code is grpc.StatusCode.UNAVAILABLE and not may_use(folder):
        return CliError(
            f"you may not use {folder / API_SOCKET}",
            REFUSED,
            "valved runs as another user: use sudo, or have its `group` (or `view_group`, to look) name yours",
        )
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return CliError(
            f"valved in {folder} does not answer",
            FAILED,
            "it is stuck or stopped: see its log, then restart it; valve pause works without it",
            is_silence=True,
        )
    if code is grpc.StatusCode.UNAVAILABLE and next_step:  # in valved's own words: it runs, and may answer yet
        return CliError(error.details(), FAILED, next_step, is_silence=True)
    if code is grpc.StatusCode.UNAVAILABLE:
        return CliError(f"no valved answers in {folder}", NOT_RUNNING, "start it: valve up", is_silence=True)
    return CliError(error.details() or code.name, EXITS.get(code, FAILED), next_step)


def may_use(folder: Path, name: str = API_SOCKET) -> bool:
    """False only where the socket is there and this user may not open it."""
    path = folder / name
    try:
        return not path.exists() or os.access(path, os.R_OK | os.W_OK)
    except PermissionError:  # not even the folder
        return False


def unwritten(status: Any, name: str) -> Any | None:
    """What valved says of its file of this name, if it could not write it."""
    return next((one for one in status.unwritten if os.path.basename(one.path) == name), None)


def must_last(status: Any, name: str, what: str) -> None:
    """CliError: it is in force, and yet not all was done that was asked for."""
    if (lost := unwritten(status, name)) is not None:
        text = f"{what}, but only until valved ends: {lost.path} cannot be written: {lost.error}"
        raise CliError(text, FAILED, "see that it can be written; valve status says which files valved cannot write")


@contextlib.contextmanager
def node() -> Iterator[NodeClient]:
    """The valved of this node, or CliError(NOT_RUNNING) at the first call."""
    connection = NodeClient(run_dir())
    try:
        yield connection
    finally:
        connection.close()


def ask(folder: Path) -> Any:
    """What the valved of this folder says of itself. CliError: why there is no answer."""
    connection = NodeClient(folder)
    try:
        return connection.status()
    finally:
        connection.close()


def status_of(folder: Path) -> Any | None:
    """The same; None if none answers."""
    try:
        return ask(folder)
    except CliError:
        return None


def is_running(folder: Path) -> bool:
    return status_of(folder) is not None
