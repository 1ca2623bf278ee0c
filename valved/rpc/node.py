"""The valve.v1 Node service. Each method reads its message, makes one call, and writes the answer.

Errors keep their kind: a ValveError becomes a status code with the field and the next step in the trailing metadata
(`valve-field`, `valve-next-step`) and, as one Problem message, in `valve-problem-bin`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import grpc
from valve.v1 import node_pb2, node_pb2_grpc

from valved.errors import InvalidRequest, NotFound, NotNow, ValveError, cure
from valved.fds import is_scarce
from valved.machine.helpers import heard
from valved.model.consent import Said
from valved.model.plain import plain
from valved.node.api import ANSWER_NS, CLAIM_NS, Node
from valved.rpc import convert
from valved.rpc.front import Caller, Crowd, Places
from valved.rpc.pace import CallPace, Rate
from valved.state.journal import Watcher

CODES = (
    (InvalidRequest, grpc.StatusCode.INVALID_ARGUMENT),
    (NotFound, grpc.StatusCode.NOT_FOUND),
    (NotNow, grpc.StatusCode.FAILED_PRECONDITION),
)
MODES = "known: " + ", ".join(f"{mode.value} ({number})" for number, mode in convert.MODE_OF.items())
COOLDOWN_FIELDS = {
    "cooldown_start_ns": "start_ns",
    "cooldown_floor_ns": "floor_ns",
    "cooldown_ceiling_ns": "ceiling_ns",
    "cooldown_factor": "factor",
    "cooldown_window_ns": "window_ns",
}
WATCHERS = Places(per_user=4, others=32, own=32)  # each costs some 0.1 ms of the loop for every event that it reads
CALLS = Rate(per_user=25.0, others=100.0, burst_s=2.0)  # `valve record` asks 20 times a second
ROWS = 16  # made in one turn of the loop, in less than 1 ms
LATE_S, LOOK_S = 1.0, 0.05  # a file takes an order as late as this where others have the cores; looked at so often
SLOW_S = 10.0  # a reader that takes nothing for so long is ended; it can go on from the last event it has


class NodeServicer(node_pb2_grpc.NodeServicer):  # type: ignore[misc]
    def __init__(
        self, node: Node, watchers: Crowd | None = None, *, slow_s: float = SLOW_S, calls: Rate = CALLS
    ) -> None:
        self._node = node
        self._watchers = watchers or Crowd("watchers", WATCHERS)
        self._pace = CallPace(calls, self._watchers.own, time.monotonic)
        self._slow_s = slow_s
        self._turn = asyncio.Lock()
        self._next_look_s = 0.0

    async def GetStatus(self, request: Any, context: Any) -> Any:
        """Looked at in one go, as its rows must agree. To make a message of them takes as long, and can wait."""
        del request
        status = await self._answer(context, self._node.status)
        message = convert.fill(node_pb2.Status(), replace(status, services=(), clients=()))
        for rows, states in ((message.services, status.services), (message.clients, status.clients)):
            for number, state in enumerate(states):
                if number % ROWS == 0:
                    await asyncio.sleep(0)
                convert.fill(rows.add(), state)
        return message

    async def GetPolicy(self, request: Any, context: Any) -> Any:
        del request
        return await self._answer(context, lambda: convert.fill(node_pb2.Policy(), self._node.policy()))

    async def SetPolicy(self, request: Any, context: Any) -> Any:
        changes = {
            inner: getattr(request, outer) for outer, inner in COOLDOWN_FIELDS.items() if getattr(request, outer)
        }
        mode = convert.MODE_OF.get(request.mode)

        def call(by: str) -> Any:
            if mode is None and request.mode != node_pb2.MODE_UNSPECIFIED:
                raise InvalidRequest(f"there is no mode {request.mode}", field="mode", next_step=MODES)
            return convert.fill(node_pb2.Policy(), self._node.set_policy(mode, changes, request.lease_ns, by))

        return await self._change(context, call)

    async def Launch(self, request: Any, context: Any) -> Any:
        role = convert.role(request.role)
        said = Said(slo=request.slo, grant=request.grant, share_weights=request.share_weights)

        def call(_: str) -> Any:
            service = self._node.launch(request.pid, request.start_time, role, request.name, said)
            return node_pb2.LaunchReply(service=service)

        return await self._change(context, call, CLAIM_NS)

    async def Pause(self, request: Any, context: Any) -> Any:
        return await self._order(context, self._node.pause, request.by)

    async def Resume(self, request: Any, context: Any) -> Any:
        del request
        return await self._order(context, self._node.resume)

    async def Drain(self, request: Any, context: Any) -> Any:
        return await self._order(context, partial(self._node.drain, stop=request.stop), request.by)

    async def Explain(self, request: Any, context: Any) -> Any:
        subject = request.WhichOneof("subject") or ""

        def call() -> Any:
            answer = self._node.explain(subject, getattr(request, subject) if subject else 0)
            return node_pb2.Explanation(
                summary=answer.summary,
                facts=answer.facts,
                decisions=[convert.event(one, self._node.epoch) for one in answer.decisions],
            )

        return await self._answer(context, call)

    async def Watch(self, request: Any, context: Any) -> None:
        uid = (await self._caller(context)).uid
        refusal = self._watchers.refusal(uid)
        if refusal:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, refusal)
        self._watchers.enter(uid)
        try:
            await self._watch(request, context)
        finally:
            self._watchers.leave(uid)

    async def _watch(self, request: Any, context: Any) -> None:
        ready = asyncio.Event()
        since = request.since_seq if request.HasField("since_seq") else None
        epoch = request.epoch if request.HasField("epoch") else None
        watcher = await self._answer(context, lambda: self._node.watch(tuple(request.kinds), ready.set, since, epoch))
        try:
            await context.send_initial_metadata(  # tells the caller that nothing is missed from here on
                (
                    ("valve-kept", str(watcher.kept)),
                    ("valve-epoch", str(self._node.epoch)),
                    ("valve-missed", "unknown" if watcher.missed is None else str(watcher.missed)),
                )
            )
            while await self._send(watcher, context):
                await ready.wait()
                ready.clear()
        finally:
            self._node.unwatch(watcher)
        text = f"this reader took no event for {self._slow_s:g} s"
        step = "ask again with since_seq and epoch of the last event that arrived"
        await _abort(context, grpc.StatusCode.RESOURCE_EXHAUSTED, text, step)

    async def _send(self, watcher: Watcher, context: Any) -> bool:
        """Write what is queued; False if the reader does not take it."""
        loop, task, is_slow = asyncio.get_running_loop(), asyncio.current_task(), False
        assert task is not None

        def give_up() -> None:
            nonlocal is_slow
            is_slow = True
            task.cancel()

        for event, lost in watcher.take():
            message = convert.event(event, self._node.epoch, lost)
            timer = loop.call_later(self._slow_s, give_up)
            try:
                await context.write(message)
            except asyncio.CancelledError:
                if is_slow:
                    return False
                raise
            finally:
                timer.cancel()
        return True

    async def _caller(self, context: Any) -> Caller:
        """The caller, once it is this user's turn."""
        who = await caller(context)
        await self._pace.turn(who.uid)
        return who

    async def _change(self, context: Any, call: Callable[[str], Any], within_ns: int = ANSWER_NS) -> Any:
        """Who was answered reads nothing else after a crash, or reads in the status what is not written."""
        who = await self._caller(context)
        answer = await self._in_turn(who, context, partial(call, named(who)))
        await heard(partial(self._node.when_saved, within_ns=within_ns))
        return answer

    async def _order(self, context: Any, call: Callable[[str], Any], by: str = "") -> Any:
        """Nobody is told of a failure for what a file takes a moment later. `by`: what the caller calls itself."""
        late: list[TimeoutError] = []  # of a resume alone

        def order() -> None:
            try:
                call(named(who, by))
            except TimeoutError as error:
                late.append(error)

        def told() -> Any:
            status = self._node.status()
            if late and not self._node.is_sure:
                raise late[0]
            return convert.fill(node_pb2.Status(), status)

        who = await self._caller(context)
        await self._in_turn(who, context, order)
        await asyncio.gather(heard(partial(self._node.when_saved, within_ns=ANSWER_NS)), self._sure())
        return await self._in_turn(who, context, told)

    async def _sure(self) -> None:
        """Until the files have said what is ordered, or not in time. All who wait have one look among them: each may
        keep the loop waiting. The last comes after that time, however long the loop stood."""
        ends_s = time.monotonic() + LATE_S
        while not self._node.is_sure:
            if (now_s := time.monotonic()) >= self._next_look_s:
                self._next_look_s = now_s + LOOK_S
                self._node.look()
            if now_s >= ends_s:
                return
            await asyncio.sleep(LOOK_S)

    async def _answer(self, context: Any, call: Callable[[], Any]) -> Any:
        return await self._in_turn(await self._caller(context), context, call)

    async def _in_turn(self, who: Caller, context: Any, call: Callable[[], Any]) -> Any:
        """Users other than root and valved's own are answered one at a time, and others of the loop come between."""
        if who.uid in self._watchers.own:
            return await self._told(context, call)
        async with self._turn:
            await asyncio.sleep(0)
            return await self._told(context, call)

    async def _told(self, context: Any, call: Callable[[], Any]) -> Any:
        """What it returns; an error in the words of this API."""
        try:
            return call()
        except OSError as error:
            if is_scarce(error):
                text = f"valved cannot look now: {error.strerror}"
                step = "try again; if it fails again, find out what uses up valved's descriptors or memory"
                await _abort(context, grpc.StatusCode.UNAVAILABLE, text, step)
            text = f"valved cannot do that: {error.filename or 'a file'}: {error.strerror}"
            step = cure(error, "see that the run folder can be written, and what is in it")
            await _abort(context, grpc.StatusCode.FAILED_PRECONDITION, text, step)
        except ValveError as error:
            code = next((code for kind, code in CODES if isinstance(error, kind)), grpc.StatusCode.INTERNAL)
            problem = node_pb2.Problem(field=error.field, next_step=error.next_step)
            more = (("valve-field", error.field), ("valve-problem-bin", problem.SerializeToString()))
            await _abort(context, code, str(error), error.next_step, *more)


class ViewServicer(NodeServicer):
    """Answers questions alone."""

    async def _refuse(self, request: Any, context: Any) -> Any:
        del request
        await self._caller(context)
        step = "use sudo, or have valved's `group` name your group"
        await _abort(context, grpc.StatusCode.PERMISSION_DENIED, "members of `view_group` may only look", step)

    SetPolicy = Launch = Pause = Resume = Drain = _refuse


async def caller(context: Any) -> Caller:
    """The caller. A connection beyond those that its user may have gets no answer but this."""
    who = Caller.of(context.peer())
    if not who.is_welcome:
        text = f"no more connections for user {who.uid}"
        step = "end another command of this user that is connected to valved"
        await _abort(context, grpc.StatusCode.RESOURCE_EXHAUSTED, text, step)
    return who


def named(who: Caller, by: str = "") -> str:
    """Who gave an order: the user first, as the kernel says. `by`, the caller's own word, may be cut short."""
    return f"uid {who.uid} ({plain(by)})" if by else f"uid {who.uid}"


async def _abort(context: Any, code: grpc.StatusCode, text: str, next_step: str, *more: tuple[str, Any]) -> None:
    await context.abort(code, text, (("valve-next-step", next_step), *more))
