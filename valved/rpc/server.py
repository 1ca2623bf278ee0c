"""The API sockets: gRPC on a unix socket for users that may change something, on another for readers."""

from __future__ import annotations

import os
from pathlib import Path

import grpc
from valve.v1 import node_pb2_grpc

from valved.config import EVERYBODY, group_id
from valved.node.api import Node
from valved.paths import grpc_address
from valved.rpc.aside import LoopAside
from valved.rpc.front import Crowd, Front, Places
from valved.rpc.node import NodeServicer, ViewServicer

API_MODE = 0o660  # every caller of this may claim roles and stop the harvest
CONNECTIONS = Places(per_user=8, others=64, own=64)  # a command has one, an exporter one
CALLS_PER_CONNECTION = 8  # `valve record` has two at a time; further ones wait in the client or are refused
OPTIONS = (
    ("grpc.max_receive_message_length", 64 << 10),  # held of each call; the longest have names in them
    ("grpc.max_concurrent_streams", CALLS_PER_CONNECTION),
    ("grpc.so_reuseport", 0),
)


class GrpcServer:
    """A gRPC server that nobody but valved reaches, and the front that passes callers on to it."""

    def __init__(self, servicer: NodeServicer, path: Path, crowd: Crowd) -> None:
        self._behind = path.with_name(path.name + ".in")
        self.names = [path, self._behind]  # of files, for whoever ends it; gRPC looks for its own all the same
        self._front = Front(path, self._behind, crowd)
        self._aside = LoopAside("valved-api")
        self._server = grpc.aio.server(options=OPTIONS)
        node_pb2_grpc.add_NodeServicer_to_server(servicer, self._server)

    async def start(self, mode: int, gid: int) -> None:
        self._behind.unlink(missing_ok=True)
        before = os.umask(0o177)
        try:
            self._server.add_insecure_port(grpc_address(self._behind))
        finally:
            os.umask(before)
        await self._server.start()
        await self._aside.begin()
        try:
            await self._aside.do(self._front.start(mode, gid))
        except OSError:
            await self.stop(0)  # gRPC complains of a server that nobody stopped
            raise

    async def stop(self, grace: float) -> None:
        await self._aside.do_in_time(self._front.stop_listening())
        await self._server.stop(grace)
        await self._aside.do_in_time(self._front.close())
        self._aside.end()


async def serve(node: Node, path: Path, group: str = "") -> GrpcServer:
    """A server that answers on `path`, for root and the members of `group`."""
    return await start(NodeServicer(node), path, API_MODE, group_id(group))


async def serve_view(node: Node, path: Path, group: str) -> GrpcServer:
    """The same for users who may only look: what would change anything is refused."""
    everybody = group == EVERYBODY
    return await start(ViewServicer(node), path, 0o666 if everybody else API_MODE, group_id("" if everybody else group))


async def start(servicer: NodeServicer, path: Path, mode: int, gid: int) -> GrpcServer:
    server = GrpcServer(servicer, path, Crowd("connections to this socket", CONNECTIONS))
    await server.start(mode, gid)
    return server
