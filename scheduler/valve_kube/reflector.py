"""Keeps a local view of one kind of object: a consistent list, then its watch, for ever.

`run` is one attempt after another: list (paged), replace, watch from there with bookmarks. A dropped watch
goes on from the last version seen; 410 Gone, or a call of `relist`, starts from the list again. No object ends it: one
that its sink cannot take changes nothing, and the log says which."""

import asyncio
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import uniform

from valve_kube.client import ApiError, Json, KubeClient, Unreachable
from valve_kube.failures import leave_out, round_failed
from valve_kube.shapes import Shape

log = logging.getLogger(__name__)

# client-go asks for 5 to 10 minutes; the server closes the stream then and we go on from the last bookmark.
WATCH_S = 300
# Bookmarks come about once a minute: a stream silent for longer is a connection that died unnoticed.
SILENCE_S = 150.0
BACKOFF_MIN_S, BACKOFF_MAX_S = 0.1, 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sink:
    """Where the objects go. `replace` gets a whole list, `put` and `drop` single changes."""

    replace: Callable[[list[Json]], None]
    put: Callable[[Json], None]
    drop: Callable[[Json], None]


def at_each_change(act: Callable[[object], None]) -> Sink:
    return Sink(replace=act, put=act, drop=act)


Key = tuple[str, str]


class Store:
    """Objects of one kind as they are, by namespace and name."""

    def __init__(self) -> None:
        self.items: dict[Key, Json] = {}

    def tee(self, inner: Sink) -> Sink:
        """Keep the raw objects of a view beside what it does with them."""

        def replace(items: list[Json]) -> None:
            self.items = {key_of(item): item for item in items}
            inner.replace(items)

        def put(item: Json) -> None:
            self.items[key_of(item)] = item
            inner.put(item)

        def drop(item: Json) -> None:
            self.items.pop(key_of(item), None)
            inner.drop(item)

        return Sink(replace=replace, put=put, drop=drop)


def key_of(item: Json) -> Key:
    return item["metadata"].get("namespace", ""), item["metadata"]["name"]


class Reflector:
    def __init__(
        self,
        client: KubeClient,
        path: str,
        sink: Sink,
        *,
        query: Mapping[str, str] | None = None,
        relist_s: float = math.inf,
        shape: Shape | None = None,
    ) -> None:
        self._client = client
        self.path = path
        self._kind = path.rpartition("/")[2] if shape is None else shape.of
        self.sink = sink
        self.query = dict(query or {})
        self._shaped: Json = {} if shape is None else {"shape": shape}  # how objects are read; None: as they are
        self._relist_s = relist_s  # a list this old is read again when the next watch would begin
        self._listed_at_s = float("-inf")
        self._version = ""
        self._wanted = 0  # counts relists, so that a list begun before one does not answer it
        self._relisted = asyncio.Event()
        self._listed = asyncio.Event()
        self.lists = 0
        self.live_at_s = float("-inf")  # loop time of the last proof that the view is current

    @property
    def synced(self) -> bool:
        return self._listed.is_set()

    async def wait_synced(self) -> None:
        await self._listed.wait()

    def relist(self) -> None:
        """Forget the version: the next view rests on a new consistent read. Not synced until then."""
        self._version = ""
        self._wanted += 1
        self._listed.clear()
        self._relisted.set()

    async def run(self) -> None:
        """Until cancelled. Every failure is logged and retried with back-off, which ends when the server has answered.

        Every node watches: spread in time, or they would all meet a server that comes back in the same moment.
        """
        backoff_s = BACKOFF_MIN_S
        while True:
            seen_s = self.live_at_s
            try:
                while not self._version or self._loop_s() - self._listed_at_s >= self._relist_s:
                    await self._list()
                await self._watch_once()
                backoff_s = BACKOFF_MIN_S
                continue
            except (ApiError, Unreachable) as error:
                if self.live_at_s > seen_s:
                    backoff_s = BACKOFF_MIN_S
                backoff_s = max(backoff_s, self._refused(error))
            except Exception:  # a defect of ours: the view begins anew, and is none until it has
                round_failed(f"view of {self._kind}")
                self.relist()
            await asyncio.sleep(backoff_s * uniform(1.0, 1.5))
            backoff_s = min(backoff_s * 2, BACKOFF_MAX_S)

    def _refused(self, error: ApiError | Unreachable) -> float:
        """For how many seconds the server asked not to be asked again."""
        if isinstance(error, Unreachable):
            log.warning("API server unreachable", extra={"path": self.path, "error": str(error)})
            return 0.0
        if error.status == 410:
            self._version = ""
        log.warning("watch refused", extra={"path": self.path, "error": str(error)})
        return error.retry_after_s

    async def listed(self) -> tuple[list[Json], str]:
        """The whole list as it is now, and its version."""
        return await self._client.list(self.path, self.query, **self._shaped)

    async def _list(self) -> None:
        wanted, begun_s = self._wanted, self._loop_s()
        items, version = await self.listed()
        if wanted != self._wanted:
            return
        self.sink.replace(items)
        self._version, self._listed_at_s = version, begun_s
        self.lists += 1
        self._alive()
        self._listed.set()

    async def _watch_once(self) -> None:
        """One stream, until it ends or a relist is wanted.

        It is left behind, not waited for: before Python 3.12 `wait_for` swallows a cancellation that meets its result,
        and an extender that had just begun to lead answered 503 until the old stream ended minutes later.
        """
        self._relisted.clear()
        watching = asyncio.ensure_future(self._follow())
        relisted = asyncio.ensure_future(self._relisted.wait())
        watching.add_done_callback(lambda done: done.cancelled() or done.exception())  # no task may be left to read it
        try:
            await asyncio.wait({watching, relisted}, return_when=asyncio.FIRST_COMPLETED)
            if watching.done():
                watching.result()
        finally:
            relisted.cancel()
            watching.cancel()

    async def _follow(self) -> None:
        query = {
            **self.query,
            "resourceVersion": self._version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(WATCH_S),
        }
        wanted = self._wanted
        stream = self._client.watch(self.path, query, silence_s=SILENCE_S, **self._shaped)
        async for event in stream:
            if wanted != self._wanted:
                return  # left behind by a relist: this event belongs to the old view
            self._alive()
            kind, item = event["type"], event["object"]
            if kind == "ERROR":
                raise ApiError(item.get("code", 500), item.get("reason", ""), item.get("message", ""))
            self._version = item["metadata"]["resourceVersion"]
            if kind == "DELETED":
                self._hand(self.sink.drop, item)
            elif kind != "BOOKMARK":
                self._hand(self.sink.put, item)
        if wanted == self._wanted:
            self._alive()

    def _hand(self, take: Callable[[Json], None], item: Json) -> None:
        """One object, whose failure is its own."""
        try:
            take(item)
        except Exception:
            leave_out(str(item.get("kind") or self._kind), "/".join(key_of(item)))

    def _alive(self) -> None:
        self.live_at_s = self._loop_s()

    def _loop_s(self) -> float:
        return asyncio.get_running_loop().time()
