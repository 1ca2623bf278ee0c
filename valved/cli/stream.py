"""Events of valved as they come, over its restarts: the stream goes on behind the last event that arrived.

A valved that hangs sends nothing, as one to which nothing happens. So it is asked meanwhile
whether it answers.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import grpc
from valve.v1 import node_pb2

from valved.cli.client import DEADLINE_S, NodeClient, explain_error

GONE = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)  # valved ended, or ends
FROM_NOW = (1 << 64) - 1  # of this start of valved; of another one: all that it keeps
LOOK_S = 2.0  # after so long without an event
JOIN_S = 0.05
TOO_SLOW = "this reader took no event for too long"


class EventStream:
    """`kept`: what is kept now. `follow`: what happens as well. `say` hears what a reader should know about gaps.

    `since_seq`: 0 for all that is kept, None for what happens from now on. `seconds`: `follow` ends then; 0: never.
    """

    def __init__(
        self,
        node: NodeClient,
        kinds: Sequence[str],
        say: Callable[[str], None] = lambda text: None,
        *,
        since_seq: int | None = 0,
        seconds: float = 0.0,
    ) -> None:
        self._node = node
        self._kinds = kinds
        self._say = say
        self._since = since_seq
        self._epoch: int | None = None
        self._until_s = time.monotonic() + seconds if seconds else None
        self._heard_s = time.monotonic()

    def kept(self) -> Iterator[Any]:
        """What valved keeps now, oldest first."""
        call = self._ask(DEADLINE_S, wait=False)
        try:
            for _ in range(int(self._metadata(call)["valve-kept"])):
                yield next(call)
        except grpc.RpcError as error:
            raise explain_error(error, self._node.folder) from None
        finally:
            call.cancel()

    def follow(self) -> Iterator[Any]:
        """What is kept, then what happens. A valved that ends or hangs is waited for; one that never answered is an
        error."""
        with self._asked_meanwhile():
            yield from self._follow()

    def _follow(self) -> Iterator[Any]:
        has_answered = False
        while True:
            left_s = None if self._until_s is None else max(0.0, self._until_s - time.monotonic())
            call = self._ask(left_s, wait=has_answered)
            try:
                metadata = self._metadata(call)
                has_answered = True
                self._begin(metadata)
                for event in call:
                    self._since, self._epoch, self._heard_s = event.seq, event.epoch or None, time.monotonic()
                    yield event
            except grpc.RpcError as error:
                if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED and left_s is not None:
                    return
                if not has_answered or not self._goes_on(error):
                    raise explain_error(error, self._node.folder) from None
            finally:
                call.cancel()

    @contextlib.contextmanager
    def _asked_meanwhile(self) -> Iterator[None]:
        over = threading.Event()
        asking: list[Any] = []
        thread = threading.Thread(target=self._look, args=(over, asking), daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            while thread.is_alive():
                for call in asking:  # it may be about to ask
                    call.cancel()
                thread.join(JOIN_S)

    def _look(self, over: threading.Event, asking: list[Any]) -> None:
        """A thread, for the other one waits for events. That a valved has ended, the stream itself says."""
        hung = False
        while not over.wait(LOOK_S):
            if time.monotonic() - self._heard_s < LOOK_S:
                continue
            asking[:] = [self._node.stub.GetPolicy.future(node_pb2.GetPolicyRequest(), timeout=DEADLINE_S)]
            with contextlib.suppress(grpc.FutureCancelledError):
                error = asking[0].exception()
                if error is not None and error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                    told = explain_error(error, self._node.folder)
                    if not hung:
                        self._say(f"{told}: {told.next_step}; events go on when it does")
                    hung = True
                elif hung and error is None:
                    self._say("valved answers again")
                    hung = False

    def _ask(self, timeout: float | None, *, wait: bool) -> Any:
        request = node_pb2.WatchRequest(kinds=self._kinds, since_seq=self._since, epoch=self._epoch)
        return self._node.stub.Watch(request, timeout=timeout, wait_for_ready=wait)

    def _metadata(self, call: Any) -> dict[str, str]:
        """What valved says first. A call that valved refuses has none; then the refusal is raised."""
        found = {item.key: item.value for item in call.initial_metadata()}
        if "valve-kept" not in found:
            next(call)
        return found

    def _goes_on(self, error: Any) -> bool:
        if error.code() in GONE:
            self._say("valved ended; waiting for the next one")
            return True
        return error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and TOO_SLOW in (error.details() or "")

    def _begin(self, metadata: dict[str, str]) -> None:
        """Say what is missing. An older valved names no epoch, and says nothing of what it does not keep."""
        epoch = int(metadata.get("valve-epoch", 0)) or None
        missed = metadata.get("valve-missed", "0")
        if self._epoch is not None and epoch != self._epoch:
            self._say(
                "valved was started again: its events follow; the last ones of the former valved are in the audit file"
            )
            self._since = 0
        elif self._epoch is not None and missed != "0":
            self._say(f"{missed} events are no longer kept")
        if self._since is None and epoch is not None:
            self._since = FROM_NOW
        self._epoch = epoch
