"""Asks each replica after its health and its models, again and again, and gives it the adapters that it lost."""

from __future__ import annotations

import asyncio
import json
import logging
import ssl
import time

import aiohttp

from valve_router.adapters import HeldAdapters
from valve_router.listing import ListedAdapter, listing_of
from valve_router.prompt import NO_REQUEST
from valve_router.replicas import Replica, Replicas
from valve_router.settings import RouterSettings

log = logging.getLogger("valve_router")

LATE = 3  # questions in a row without an answer in time: a busy replica is not a dead one
MODELS_BYTES = 1 << 20  # of an answer to /v1/models
QUIET = 10  # where nothing is published, one in so many questions after health is followed by one after models
BETWEEN_S = 0.1  # two looks at one replica because of answers: clients that ask for nonsense cause no more
LOAD_S = 300.0  # a large adapter from slow storage takes its time
AGAIN_S = (1.0, 60.0)  # after a load that failed: the first pause, and the longest
BROKEN = (aiohttp.ClientError, asyncio.TimeoutError, OSError, ValueError)


class ModelLooks:
    """At /v1/models of replicas."""

    def __init__(self, client: aiohttp.ClientSession, settings: RouterSettings, replicas: Replicas) -> None:
        self._client, self._settings, self._replicas = client, settings, replicas
        self._timeout = aiohttp.ClientTimeout(total=settings.connect_s)
        self._next: dict[str, asyncio.Task[bool]] = {}  # by replica: the look that is about to begin
        self._begun: dict[str, float] = {}
        self._taken: dict[str, float] = {}  # when the look began that was taken last

    def headers(self) -> dict[str, str]:
        token = self._settings.replica_token
        return {"Authorization": f"Bearer {token}"} if token else {}

    async def look(self, replica: Replica) -> bool:
        """Whether it said. One that does not say, or nothing that can be read, keeps what it had."""
        began_s = self._begun[replica.name] = time.monotonic()
        try:
            listing = listing_of(await self._read(replica), self._settings.newest)
        except (*BROKEN, *NO_REQUEST):
            return False
        if began_s >= self._taken.get(replica.name, 0.0):  # a slow answer says nothing of what a later one says
            self._taken[replica.name] = began_s
            self._replicas.listed(replica, listing)
        return True

    async def _read(self, replica: Replica) -> bytes:
        url, told = f"{replica.url}/v1/models", b""
        async with self._client.get(
            url, headers=self.headers(), timeout=self._timeout, allow_redirects=False
        ) as answer:
            if answer.status != 200:
                raise ValueError(f"it answers {answer.status}")
            while piece := await answer.content.read(MODELS_BYTES):
                told += piece
                if len(told) > MODELS_BYTES:
                    raise ValueError("it says too much")
        return told

    async def again(self, replica: Replica) -> bool:
        """By a look that begins from now on; callers that ask meanwhile share it."""
        task = self._next.get(replica.name)
        if task is None:
            task = self._next[replica.name] = asyncio.create_task(self._soon(replica))
        return await asyncio.shield(task)

    async def everybody(self) -> None:
        await asyncio.gather(*(self.again(one) for one in self._replicas.all if one.is_alive))

    async def _soon(self, replica: Replica) -> bool:
        try:
            await asyncio.sleep(self._begun.get(replica.name, 0.0) + BETWEEN_S - time.monotonic())
        finally:
            del self._next[replica.name]
        return await self.look(replica)

    def forget(self, name: str) -> None:
        self._begun.pop(name, None)
        self._taken.pop(name, None)


class Checkups:
    """One task for each replica that there is, and one more while it lacks adapters."""

    def __init__(self, client: aiohttp.ClientSession, settings: RouterSettings, replicas: Replicas) -> None:
        self._client, self._settings, self._replicas = client, settings, replicas
        self.looks = ModelLooks(client, settings, replicas)
        self._tasks: dict[str, asyncio.Task[None]] = {}  # by name
        self._giving: dict[str, asyncio.Task[None]] = {}

    def change(self, pods: dict[str, str]) -> None:
        self._replicas.follow(pods)
        self.follow()

    def follow(self) -> None:
        there = {one.name: one for one in self._replicas.all}
        for name in self._tasks.keys() - there.keys():
            self._tasks.pop(name).cancel()
            self.looks.forget(name)
            if name in self._giving:
                self._giving.pop(name).cancel()
        for name in there.keys() - self._tasks.keys():
            self._tasks[name] = asyncio.create_task(self._ask(there[name]))

    async def end(self) -> None:
        tasks = [*self._tasks.values(), *self._giving.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _ask(self, replica: Replica) -> None:
        """How one replica is, again and again."""
        late = quiet = 0
        timeout = aiohttp.ClientTimeout(total=self._settings.connect_s)
        while True:
            why_not: str | None = ""
            try:
                async with self._client.get(f"{replica.url}/health", timeout=timeout) as answer:
                    late, why_not = 0, "" if answer.status < 400 else f"its /health answers {answer.status}"
            except asyncio.TimeoutError:
                late += 1
                why_not = f"its /health has not answered {late} times" if late >= LATE else None
            except (aiohttp.ClientError, OSError, ssl.SSLError) as error:
                late, why_not = 0, f"it does not answer: {type(error).__name__}"
            if why_not == "" and (self._is_published() or not replica.is_alive or quiet % QUIET == 0):
                await self.looks.look(replica)  # before it gets requests for what it may not have
            quiet += why_not == ""
            if why_not is not None:
                self._replicas.heard(replica, why_not)
            if replica.adapters.lost and replica.name not in self._giving:
                self._giving[replica.name] = asyncio.create_task(self._give(replica))
            await asyncio.sleep(self._settings.health_s)

    def _is_published(self) -> bool:
        return bool(self._settings.newest or self._replicas.published.names)

    async def _give(self, replica: Replica) -> None:
        """Until it lacks nothing. One that cannot load is asked less and less often."""
        pause_s = AGAIN_S[0]
        try:
            while replica.adapters.lost:
                if not replica.is_alive:
                    pause_s = AGAIN_S[0]
                    await asyncio.sleep(self._settings.health_s)
                    continue
                tried = sorted(replica.adapters.lost.values(), key=lambda each: each.version, reverse=True)
                for one in tried:
                    why_not = await self._load(replica.adapters, replica.url, one)
                    log.warning("replica %s: %s %s", replica.url, one.name, why_not or "was lost, and is loaded again")
                if await self.looks.again(replica):
                    self._replicas.given(replica, [one.name for one in tried])
                if replica.adapters.lost:
                    await asyncio.sleep(pause_s)
                    pause_s = min(AGAIN_S[1], 2 * pause_s)
        finally:
            self._giving.pop(replica.name, None)

    async def _load(self, held: HeldAdapters, url: str, adapter: ListedAdapter) -> str:
        """Why not, if it did not."""
        is_sglang = held.listing is not None and held.listing.is_sglang
        path = "/load_lora_adapter" if is_sglang else "/v1/load_lora_adapter"
        asked = json.dumps({"lora_name": adapter.name, "lora_path": adapter.path}).encode()
        headers = {**self.looks.headers(), "Content-Type": "application/json"}
        timeout = aiohttp.ClientTimeout(total=LOAD_S, sock_connect=self._settings.connect_s)
        try:
            async with self._client.post(
                url + path, data=asked, headers=headers, timeout=timeout, allow_redirects=False
            ) as answer:
                return "" if answer.status == 200 else f"cannot be loaded again: the engine answers {answer.status}"
        except BROKEN as error:
            return f"cannot be loaded again: {type(error).__name__}"
