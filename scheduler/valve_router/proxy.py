"""Passes OpenAI-shaped requests to one replica and its answer back, piece by piece.

A request is tried on another replica only while no byte of an answer has come. A client that hangs up ends its request
in the replica, too. Overload is answered at once (429), never queued here.
"""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import time

import aiohttp
from aiohttp import web
from multidict import CIMultiDict, CIMultiDictProxy

from valve_router.answers import is_allowed, refusal
from valve_router.checkups import ModelLooks
from valve_router.counts import EVENTS, GIVEN_UP, REPLICA_HEADER, Counts
from valve_router.doubts import DOUBTED, Lacking, has_changed
from valve_router.listing import renamed
from valve_router.prompt import READ_BYTES, AskedBody
from valve_router.replicas import Full, NobodyAlive, Replica, Replicas, Sent
from valve_router.settings import RouterSettings

log = logging.getLogger("valve_router.access")

PER_HOP = frozenset(
    {
        "connection",
        "host",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
RETRIED = frozenset({502, 503})  # a replica that starts or stops says so before it has begun
READERS = 1  # replicas that may have begun with a request, and failed, before it is tried once more: one that kills its
# reader must not go through the whole fleet
OURS = frozenset({errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL})  # what this process lacks is no replica's fault


class ReplicaFailed(Exception):
    """A replica failed before any byte of its answer came. `has_read`: it may have begun with the request."""

    def __init__(self, text: str, *, has_read: bool, status: int = 502) -> None:
        super().__init__(text)
        self.has_read = has_read
        self.status = status


class Proxy:
    def __init__(
        self, settings: RouterSettings, replicas: Replicas, client: aiohttp.ClientSession, looks: ModelLooks
    ) -> None:
        self._settings = settings
        self._replicas = replicas
        self._client = client
        self._looks = looks
        self._held = 0  # bytes of bodies
        self.counts = Counts()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        began_s, status, name = time.monotonic(), GIVEN_UP, ""
        try:
            answer = await self._answer(request)
            status, name = answer.status, answer.headers.get(REPLICA_HEADER, "")
            return answer
        except web.HTTPException as error:
            status = error.status
            raise
        except asyncio.CancelledError:
            raise
        except Exception:
            status = 500
            raise
        finally:
            self.counts.add(status)
            took_ms = (time.monotonic() - began_s) * 1e3
            line = {"path": request.path, "status": status, "replica": name, "ms": round(took_ms, 1)}
            log.info("%s", json.dumps(line))

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        if not is_allowed(request, self._settings.token):
            return refusal(401, "a bearer token is needed", "invalid_api_key")
        if request.path not in self._settings.paths or not request.raw_path.startswith("/"):
            return refusal(404, "the router does not pass this path on", "not_found")
        length = request.content_length or READ_BYTES
        if self._replicas.is_full() or self._held + length > self._settings.held_bytes:
            return refusal(429, "every replica is full", "overloaded", retry_after_s=1)
        self._held += length
        try:
            return await self._try(request, AskedBody(await request.read()))
        except web.HTTPRequestEntityTooLarge:
            return refusal(413, f"a body has at most {self._settings.body_bytes} bytes", "too_large")
        finally:
            self._held -= length

    async def _try(self, request: web.Request, asked: AskedBody) -> web.StreamResponse:
        tried: list[Replica] = []
        readers = 0
        while True:
            try:
                sent = self._replicas.send(asked.prompt, tried, self._model(asked))
            except Full:
                return refusal(429, "every replica is full", "overloaded", retry_after_s=1)
            except NobodyAlive as error:
                if tried and readers == 1:  # an old connection had broken, and there is no other replica
                    tried, readers = [], READERS
                    continue
                return refusal(503, str(error), "unavailable", retry_after_s=1)
            self.counts.retries += bool(tried)
            is_served = has_failed = False
            try:
                answer = await self._pass(request, asked, sent)
                is_served, has_failed = not sent.is_broken, sent.is_broken
                return answer
            except Lacking:
                tried.append(sent.replica)
            except ReplicaFailed as error:
                has_failed = True
                tried.append(sent.replica)
                readers += error.has_read
                if error.has_read and readers > READERS:
                    return refusal(error.status, f"the replica failed: {error}", "replica_failed", retry_after_s=1)
                if not error.has_read:
                    self._replicas.heard(sent.replica, str(error))
            finally:
                self._replicas.ended(sent, is_served=is_served, has_failed=has_failed)

    def _model(self, asked: AskedBody) -> str:
        """A long body is not read for it where nothing is published."""
        return asked.model if self._replicas.published.names else ""

    async def _pass(self, request: web.Request, asked: AskedBody, sent: Sent) -> web.StreamResponse:
        while True:
            there = await self._send(request, asked, sent)
            try:
                if there.status in RETRIED:
                    raise ReplicaFailed(f"it answers {there.status}", has_read=True, status=there.status)
                if there.status not in DOUBTED or not await has_changed(
                    there.status, asked.model, sent, self._replicas, self._looks
                ):
                    return await self._copy(request, there, sent)
                sent.is_second = True
            finally:
                there.close() if not there.content.at_eof() else there.release()

    async def _send(self, request: web.Request, asked: AskedBody, sent: Sent) -> aiohttp.ClientResponse:
        held, model = sent.replica.adapters, self._model(asked)
        sent.version, sent.losses = held.asks(model), held.losses
        is_renamed = sent.version is not None and sent.version != model
        body = renamed(asked.body, str(sent.version)) if is_renamed else asked.body
        try:
            return await self._client.request(
                request.method,
                sent.replica.url + request.raw_path,
                data=body or None,
                headers=self._headers(request),
                allow_redirects=False,
            )
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            if getattr(error, "errno", None) in OURS:
                raise ReplicaFailed("the router is out of sockets", has_read=True, status=503) from error
            raise ReplicaFailed(f"it does not answer: {type(error).__name__}", has_read=False) from error
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError) as error:
            raise ReplicaFailed(f"it broke off: {type(error).__name__}", has_read=True) from error

    async def _copy(self, request: web.Request, there: aiohttp.ClientResponse, sent: Sent) -> web.StreamResponse:
        try:
            piece = await there.content.readany()
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError) as error:
            raise ReplicaFailed(f"it broke off: {type(error).__name__}", has_read=True) from error
        if there.status == 200 and there.content_type == EVENTS:  # else this is no time to a first token
            self._replicas.answered(sent)
        headers = end_to_end(there.headers)
        headers[REPLICA_HEADER] = sent.replica.name
        if there.content.at_eof() and "content-length" in there.headers:  # all of it: one write
            return web.Response(status=there.status, headers=headers, body=piece)
        answer = web.StreamResponse(status=there.status, headers=headers)
        await answer.prepare(request)
        while piece:
            stuck = asyncio.get_running_loop().call_later(self._settings.stuck_s, cut, request)
            try:
                await answer.write(piece)
            finally:
                stuck.cancel()
            asked_s = time.monotonic()
            try:
                piece = await there.content.readany()
            except (aiohttp.ClientError, asyncio.TimeoutError, OSError):
                sent.is_broken = True
                self.counts.broken += 1
                cut(request)  # no proper end: the client sees that the answer is not whole
                return answer
            sent.replica.saw_gap(time.monotonic() - asked_s)
        await answer.write_eof()
        return answer

    def _headers(self, request: web.Request) -> CIMultiDict[str]:
        headers = end_to_end(request.headers)
        headers.popall("Content-Length", None)
        if self._settings.token:
            headers.popall("Authorization", None)
        if self._settings.replica_token:
            headers["Authorization"] = f"Bearer {self._settings.replica_token}"
        return headers


def end_to_end(headers: CIMultiDictProxy[str]) -> CIMultiDict[str]:
    """Without those of one hop: the usual ones, and what `Connection` names."""
    named = {name.strip().lower() for value in headers.getall("Connection", ()) for name in value.split(",")}
    dropped = PER_HOP | named
    return CIMultiDict((key, value) for key, value in headers.items() if key.lower() not in dropped)


def cut(request: web.Request) -> None:
    if request.transport is not None:
        request.transport.abort()
