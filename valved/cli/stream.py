"""Events of valved as they come, over its restarts: the stream goes on behind the last event that arrived."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import grpc
from valve.v1 import node_pb2

from valved.cli.client import DEADLINE_S, NodeClient, explain_error

GONE = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)  # valved ended, or ends
FROM_NOW = (1 << 64) - 1  # of this start of valved; of another one: all that it keeps
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
        """What is kept, then what happens. A valved that ends is waited for; one that never answered is an error."""
        has_answered = False
        while True:
            left_s = None if self._until_s is None else max(0.0, self._until_s - time.monotonic())
            call = self._ask(left_s, wait=has_answered)
            try:
                metadata = self._metadata(call)
                has_answered = True
                self._begin(metadata)
                for event in call:
                    self._since, self._epoch = event.seq, event.epoch or None
                    yield event
            except grpc.RpcError as error:
                if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED and left_s is not None:
                    return
                if not has_answered or not self._goes_on(error):
                    raise explain_error(error, self._node.folder) from None
            finally:
                call.cancel()

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
