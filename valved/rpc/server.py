"""The API socket: gRPC on a unix socket that root and its group may use."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import grpc
from valve.v1 import node_pb2_grpc

from valved.node.api import Node
from valved.rpc.node import NodeServicer

API_MODE = 0o660  # whoever may call this may claim roles and stop the harvest
OPTIONS = (("grpc.max_receive_message_length", 1 << 20), ("grpc.so_reuseport", 0))


async def serve(node: Node, path: Path) -> Any:
    """A server that answers on `path`. The umask closes the moment between bind and chmod."""
    path.unlink(missing_ok=True)
    server = grpc.aio.server(options=OPTIONS)
    node_pb2_grpc.add_NodeServicer_to_server(NodeServicer(node), server)
    before = os.umask(0o117)
    try:
        server.add_insecure_port(f"unix:{path}")
    finally:
        os.umask(before)
    await server.start()
    path.chmod(API_MODE)
    return server
