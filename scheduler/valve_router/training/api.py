"""/route/training: what trainers of fleet jobs ask, and what an operator does. For the operator's token alone."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import Any

from aiohttp import web

from valve_router.answers import is_allowed, refusal
from valve_router.plan.task import Task
from valve_router.settings import RouterSettings
from valve_router.training.desk import Desk
from valve_router.training.ledger import FleetBooks
from valve_router.training.records import Gone, LedgerRefused, Push

log = logging.getLogger("valve_router")
SWEEP_S = 1.0
DOCUMENT = "application/octet-stream"
Asked = dict[str, Any]


class TrainingApi:
    """SQLite forces every change to disk: that is done in threads, never on the loop that passes requests."""

    def __init__(self, settings: RouterSettings, ledger: FleetBooks, desk: Desk) -> None:
        self._settings, self._ledger, self._desk = settings, ledger, desk
        self._out: dict[int, tuple[str, Task]] = {}  # by trainer: replica, planned task

    def add_to(self, app: web.Application) -> None:
        for name in ("job", "join", "take", "seen"):
            app.router.add_post(f"/{name}", self._json(getattr(self, f"_{name}")))
        for name in ("push", "publish"):
            app.router.add_post(f"/{name}", self._document(getattr(self, f"_{name}")))
        app.router.add_get("/jobs", self._checked(self._jobs))
        app.router.add_get("/blob/{blob}", self._checked(self._blob))
        app.cleanup_ctx.append(self._sweeping)

    def _checked(self, handle: Callable[[web.Request], Awaitable[web.Response]]) -> Any:
        async def answer(request: web.Request) -> web.Response:
            if self._settings.token and not self._settings.operator_token:
                return refusal(403, "training needs --operator-token-file where clients have a token", "forbidden")
            if not is_allowed(request, self._settings.operator_token):
                return refusal(401, "the operator's token is needed", "invalid_api_key")
            try:
                return await handle(request)
            except Gone as error:
                return refusal(410, str(error), "gone")
            except LedgerRefused as error:
                return refusal(409, str(error), "conflict")
            except (KeyError, TypeError, ValueError) as error:
                return refusal(400, f"{type(error).__name__}: {error}", "invalid_request")

        return answer

    def _json(self, handle: Callable[[Asked], Awaitable[Asked]]) -> Any:
        async def answer(request: web.Request) -> web.Response:
            if request.content_type != "application/json":  # no page in a browser may say it
                return refusal(415, "send the body as application/json", "invalid_request")
            asked = await request.json()
            if not isinstance(asked, dict):
                raise ValueError("the body is a JSON object")
            return web.json_response(await handle(asked))

        return self._checked(answer)

    async def _sweeping(self, _: web.Application) -> Any:
        task = asyncio.create_task(self._sweep())
        yield
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        self._ledger.close()

    async def _sweep(self) -> None:
        """While this process was away or stood still, or where the clock was set, no trainer was silent."""
        heard_since_s = last_s = time.time()
        while True:
            await asyncio.sleep(SWEEP_S)
            now_s = time.time()
            if not 0 <= now_s - last_s <= self._settings.training_silent_s / 2:
                heard_since_s = now_s
            last_s = now_s
            try:
                for trainer in await asyncio.to_thread(self._ledger.sweep, now_s, heard_since_s):
                    self._over(trainer, 0.0)
            except Exception:  # a full disk, say: the next sweep may do better
                log.exception("giving up silent trainers failed")

    async def _job(self, asked: Asked) -> Asked:
        values = {name: int(asked[name]) for name in ("rounds", "round_batches", "tokens")}
        limit_s = float(asked["limit_s"]) if "limit_s" in asked else None  # a trainer of before knows none
        await asyncio.to_thread(
            lambda: self._ledger.add_job(
                str(asked["job"]), digest=str(asked["digest"]), limit_s=limit_s, now_s=time.time(), **values
            )
        )
        return {"job": asked["job"]}

    async def _join(self, asked: Asked) -> Asked:
        joined = await asyncio.to_thread(self._ledger.join, str(asked["job"]), str(asked["name"]), time.time())
        for trainer in joined.given_up:
            self._over(trainer, 0.0)
        return asdict(joined)

    async def _seen(self, asked: Asked) -> Asked:
        await asyncio.to_thread(self._ledger.seen, int(asked["trainer"]), time.time())
        return {}

    async def _take(self, asked: Asked) -> Asked:
        """One of: number, wait (deferred), empty (push what you have), average (parts), version (moved), done."""
        job, trainer, replica = str(asked["job"]), int(asked["trainer"]), str(asked.get("replica", ""))
        self._over(trainer, float(asked.get("took_s", 0.0)))
        version = int(asked["version"])
        standing = await asyncio.to_thread(self._ledger.standing, job, time.time())
        if standing.version != version:
            return {"version": standing.version}
        if standing.is_done:
            return {"done": True, "version": version}
        if standing.queued_s is None:
            await asyncio.to_thread(self._ledger.seen, trainer, time.time())
            return {"empty": True} if standing.parts is None else {"average": standing.parts}
        now_s = time.monotonic()
        queued_s = now_s - max(0.0, time.time() - standing.queued_s)
        task = self._desk.may_train(replica, standing.tokens, queued_s, now_s)
        if task is None:
            await asyncio.to_thread(self._ledger.seen, trainer, time.time())
            return {"wait": True}
        self._out[trainer] = (replica, task)  # before the ledger says so: giving the trainer up meanwhile finds it
        try:
            number = await asyncio.to_thread(self._ledger.take, job, trainer, version, time.time())
        except BaseException:
            self._over(trainer, 0.0)
            raise
        if number is None:
            self._over(trainer, 0.0)
            return {"empty": True}
        return {"number": number}

    def _over(self, trainer: int, took_s: float) -> None:
        if trainer in self._out:
            replica, task = self._out.pop(trainer)
            self._desk.trained(replica, task, took_s)

    def _document(self, handle: Callable[[Asked, memoryview], Awaitable[Asked]]) -> Any:
        """The body: a line of JSON, then a checkpoint. aiohttp reads only the root application's limit, the proxy's."""

        async def answer(request: web.Request) -> web.Response:
            if request.content_type != DOCUMENT:  # no page in a browser may say it
                return refusal(415, f"the body is {DOCUMENT}", "invalid_request")
            body = await request.clone(client_max_size=self._settings.training_bytes).read()
            end = body.index(b"\n")
            return web.json_response(await handle(json.loads(body[:end]), memoryview(body)[end + 1 :]))

        return self._checked(answer)

    async def _push(self, said: Asked, document: memoryview) -> Asked:
        push = Push(
            numbers=[int(one) for one in said["numbers"]],
            tokens=int(said["tokens"]),
            steps=int(said["steps"]),
            blob=document,
        )
        values = (str(said["job"]), int(said["trainer"]), int(said["version"]), push, time.time())
        return {"is_new": await asyncio.to_thread(self._ledger.push, *values)}

    async def _publish(self, said: Asked, document: memoryview) -> Asked:
        values = (str(said["job"]), int(said["version"]), document, time.time())
        return {"version": await asyncio.to_thread(self._ledger.publish, *values)}

    async def _jobs(self, _: web.Request) -> web.Response:
        return web.json_response({"jobs": await asyncio.to_thread(self._ledger.jobs), "deferred": self._desk.deferred})

    async def _blob(self, request: web.Request) -> web.Response:
        body = await asyncio.to_thread(self._ledger.read, request.match_info["blob"])
        return web.Response(body=body, content_type=DOCUMENT)
