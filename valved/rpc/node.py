"""The valve.v1 Node service. Each method reads its message, makes one call, and writes the answer.

Errors keep their kind: a ValveError becomes a status code with the field and the next step in the trailing metadata
(`valve-field`, `valve-next-step`) and, as one Problem message, in `valve-problem-bin`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
from valve.v1 import node_pb2, node_pb2_grpc

from valved.errors import InvalidRequest, NotFound, NotNow, ValveError
from valved.node.api import Node
from valved.rpc import convert

CODES = (
    (InvalidRequest, grpc.StatusCode.INVALID_ARGUMENT),
    (NotFound, grpc.StatusCode.NOT_FOUND),
    (NotNow, grpc.StatusCode.FAILED_PRECONDITION),
)
COOLDOWN_FIELDS = {
    "cooldown_start_ns": "start_ns",
    "cooldown_floor_ns": "floor_ns",
    "cooldown_ceiling_ns": "ceiling_ns",
    "cooldown_factor": "factor",
    "cooldown_window_ns": "window_ns",
}


class NodeServicer(node_pb2_grpc.NodeServicer):  # type: ignore[misc]
    def __init__(self, node: Node) -> None:
        self._node = node

    async def GetStatus(self, request: Any, context: Any) -> Any:
        del request
        return await _answer(context, lambda: convert.fill(node_pb2.Status(), self._node.status()))

    async def GetPolicy(self, request: Any, context: Any) -> Any:
        del request
        return await _answer(context, lambda: convert.fill(node_pb2.Policy(), self._node.policy()))

    async def SetPolicy(self, request: Any, context: Any) -> Any:
        changes = {
            inner: getattr(request, outer) for outer, inner in COOLDOWN_FIELDS.items() if getattr(request, outer)
        }
        mode = convert.MODE_OF.get(request.mode)

        def call() -> Any:
            return convert.fill(node_pb2.Policy(), self._node.set_policy(mode, changes, request.lease_ns))

        return await _answer(context, call)

    async def Launch(self, request: Any, context: Any) -> Any:
        role = convert.role(request.role)

        def call() -> Any:
            service = self._node.launch(request.pid, request.start_time, role, request.name)
            return node_pb2.LaunchReply(service=service)

        return await _answer(context, call)

    async def Pause(self, request: Any, context: Any) -> Any:
        return await _answer(context, lambda: convert.fill(node_pb2.Status(), self._node.pause(request.by)))

    async def Resume(self, request: Any, context: Any) -> Any:
        del request
        return await _answer(context, lambda: convert.fill(node_pb2.Status(), self._node.resume()))

    async def Drain(self, request: Any, context: Any) -> Any:
        def call() -> Any:
            return convert.fill(node_pb2.Status(), self._node.drain(request.by, stop=request.stop))

        return await _answer(context, call)

    async def Explain(self, request: Any, context: Any) -> Any:
        subject = request.WhichOneof("subject") or ""

        def call() -> Any:
            answer = self._node.explain(subject, getattr(request, subject) if subject else 0)
            return node_pb2.Explanation(
                summary=answer.summary,
                facts=answer.facts,
                decisions=[convert.event(decision) for decision in answer.decisions],
            )

        return await _answer(context, call)

    async def Watch(self, request: Any, context: Any) -> AsyncIterator[Any]:
        ready = asyncio.Event()
        since = request.since_seq if request.HasField("since_seq") else None
        watcher = await _answer(context, lambda: self._node.watch(tuple(request.kinds), ready.set, since))
        await context.send_initial_metadata(
            (("valve-kept", str(watcher.kept)),)
        )  # tells the caller that nothing is missed from here on
        try:
            while True:
                await ready.wait()
                ready.clear()
                for event, lost in watcher.take():
                    yield convert.event(event, lost)
        finally:
            self._node.unwatch(watcher)


class ViewServicer(NodeServicer):
    """Answers questions alone."""

    async def _refuse(self, request: Any, context: Any) -> Any:
        del request
        await context.abort(grpc.StatusCode.PERMISSION_DENIED, "this socket answers questions and changes nothing")

    SetPolicy = Launch = Pause = Resume = Drain = _refuse


async def _answer(context: Any, call: Callable[[], Any]) -> Any:
    try:
        return call()
    except ValveError as error:
        code = next((code for kind, code in CODES if isinstance(error, kind)), grpc.StatusCode.INTERNAL)
        problem = node_pb2.Problem(field=error.field, next_step=error.next_step)
        await context.abort(
            code,
            str(error),
            (
                ("valve-field", error.field),
                ("valve-next-step", error.next_step),
                ("valve-problem-bin", problem.SerializeToString()),
            ),
        )
