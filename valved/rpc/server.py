"""The API sockets: gRPC on a unix socket for those who may steer valved, and on another for those who may look."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import grpc
from valve.v1 import node_pb2_grpc

from valved.config import EVERYBODY, group_id
from valved.node.api import Node
from valved.rpc.node import NodeServicer, ViewServicer

API_MODE = 0o660  # whoever may call this may claim roles and stop the harvest
OPTIONS = (("grpc.max_receive_message_length", 1 << 20), ("grpc.so_reuseport", 0))


async def serve(node: Node, path: Path, group: str = "") -> Any:
    """A server that answers on `path`, for root and the members of `group`."""
    return await _serve(NodeServicer(node), path, API_MODE, group_id(group))


async def serve_view(node: Node, path: Path, group: str) -> Any:
    """The same for those who may look: what would change anything is refused."""
    everybody = group == EVERYBODY
    return await _serve(
        ViewServicer(node), path, 0o666 if everybody else API_MODE, group_id("" if everybody else group)
    )


async def _serve(servicer: NodeServicer, path: Path, mode: int, gid: int) -> Any:
    """The umask closes the moment between bind and chmod."""
    path.unlink(missing_ok=True)
    server = grpc.aio.server(options=OPTIONS)
    node_pb2_grpc.add_NodeServicer_to_server(servicer, server)
    before = os.umask(0o117)
    try:
        server.add_insecure_port(f"unix:{path}")
    finally:
        os.umask(before)
    await server.start()
    if gid >= 0:
        os.chown(path, -1, gid)
    path.chmod(mode)
    return server
