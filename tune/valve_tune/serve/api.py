"""The HTTP routes in the shape of OpenAI's fine-tuning API: files, jobs, events, checkpoints, cancel, pause, resume."""

from __future__ import annotations

import asyncio
import functools
import hmac
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from aiohttp import BodyPartReader, web

from valve_tune.serve import shape
from valve_tune.serve.shape import BadRequest
from valve_tune.serve.store import ENDED, Row, TuneStore, new_id

LARGEST_FILE = 2 << 30
LARGEST_TOTAL = 64 << 30  # of all files together
LARGEST_BODY = 1 << 20  # of what is no file
PIECE = 1 << 20
LOCAL_NAMES = ("localhost", "127.0.0.1", "[::1]")
OWN_SITE = ("none", "same-origin")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class TuneApi:
    """`changed` is called when there may be work for a worker."""

    def __init__(
        self, store: TuneStore, bases: dict[str, str], *, token: str = "", changed: Callable[[], None]
    ) -> None:
        self._store, self._bases, self._token, self._changed = store, bases, token, changed

    def application(self) -> web.Application:
        app = web.Application(
            middlewares=[web.middleware(functools.partial(self._checked))], client_max_size=LARGEST_BODY
        )
        jobs = "/v1/fine_tuning/jobs"
        app.add_routes(
            [
                web.get("/health", self.health),
                web.get("/v1/models", self.models),
                web.post("/v1/files", self.upload),
                web.get("/v1/files", self.files),
                web.get("/v1/files/{file}", self.file),
                web.delete("/v1/files/{file}", self.drop_file),
                web.get("/v1/files/{file}/content", self.content),
                web.post(jobs, self.create),
                web.get(jobs, self.jobs),
                web.get(jobs + "/{job}", self.job),
                web.get(jobs + "/{job}/events", self.events),
                web.get(jobs + "/{job}/checkpoints", self.checkpoints),
                web.post(jobs + "/{job}/{wish:cancel|pause|resume}", self.wish),
            ]
        )
        return app

    async def _checked(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Which clients may ask, and every refusal in the shape clients read."""
        try:
            self._admit(request)
            return await handler(request)
        except BadRequest as error:
            return web.json_response(shape.error_object(str(error), error.param), status=error.status)
        except web.HTTPException as error:
            if error.status < 400:
                raise
            return web.json_response(shape.error_object(error.reason, None), status=error.status)

    def _admit(self, request: web.Request) -> None:
        if self._token:
            said = request.headers.get("Authorization", "").removeprefix("Bearer ").encode()
            if not hmac.compare_digest(said, self._token.encode()):
                raise BadRequest(None, "the bearer token is missing or wrong", 401)
        elif (request.host.rpartition(":")[0] or request.host) not in LOCAL_NAMES and request.host not in LOCAL_NAMES:
            # A page in this machine's browser may reach loopback under a name of its own; it cannot choose this one.
            raise BadRequest(None, "without a token only localhost is answered", 403)
        elif "Origin" in request.headers or request.headers.get("Sec-Fetch-Site", "none") not in OWN_SITE:
            # A page may send a form to localhost under localhost's name; a browser says which page sends it.
            raise BadRequest(None, "without a token no page of a browser is answered", 403)

    async def health(self, _: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def models(self, _: web.Request) -> web.Response:
        data = [{"id": name, "object": "model", "created": 0, "owned_by": "valve"} for name in self._bases]
        return web.json_response({"object": "list", "data": data})

    # files

    async def upload(self, request: web.Request) -> web.Response:
        if not request.content_type.startswith("multipart/"):
            raise BadRequest("file", "must be sent as multipart/form-data")
        received: list[str] = []
        try:
            return await self._take(request, received)
        finally:
            # The row is made when the file is whole; no row names a half one.
            for file in received:
                if self._store.file(file) is None:
                    self._store.file_path(file).unlink(missing_ok=True)

    async def _take(self, request: web.Request, received: list[str]) -> web.Response:
        purpose, size, filename = "", 0, ""
        async for part in await request.multipart():
            if not isinstance(part, BodyPartReader):
                continue
            if part.name == "purpose":
                purpose = (await part.text())[:100]
            elif part.name == "file":
                if received:
                    raise BadRequest("file", "one request carries one file")
                received.append(new_id("file-"))
                size = await self._receive(part, self._store.file_path(received[0]))
                filename = Path(part.filename or "file.jsonl").name[:200]
        if not received:
            raise BadRequest("file", "is missing")
        if purpose != "fine-tune":
            raise BadRequest("purpose", "must be fine-tune")
        row = self._store.add_file(received[0], size, filename, purpose)
        return web.json_response(shape.file_object(row))

    async def _receive(self, part: BodyPartReader, path: Path) -> int:
        size, others = 0, self._stored()
        try:
            with path.open("wb") as target:
                while piece := await part.read_chunk(PIECE):
                    size += len(piece)
                    if size > LARGEST_FILE:
                        raise BadRequest("file", f"is larger than {LARGEST_FILE >> 30} GiB", 413)
                    if others + size > LARGEST_TOTAL:
                        raise BadRequest("file", f"all files may have {LARGEST_TOTAL >> 30} GiB: delete some", 507)
                    await asyncio.to_thread(target.write, piece)
        except OSError as error:
            raise BadRequest("file", f"cannot be stored: {error.strerror}", 507) from None
        return size

    def _stored(self) -> int:
        """Bytes of all files, those that come in at this moment too."""
        return sum(path.stat().st_size for path in (self._store.folder / "files").iterdir())

    async def files(self, request: web.Request) -> web.Response:
        purpose = request.query.get("purpose")
        rows = [row for row in self._store.files() if purpose in (None, row["purpose"])]
        return web.json_response(shape.page_object([shape.file_object(row) for row in rows], len(rows)))

    def _file(self, request: web.Request) -> Row:
        row = self._store.file(request.match_info["file"])
        if row is None:
            raise BadRequest("file_id", f"no file {request.match_info['file']}", 404)
        return row

    async def file(self, request: web.Request) -> web.Response:
        return web.json_response(shape.file_object(self._file(request)))

    async def drop_file(self, request: web.Request) -> web.Response:
        file = self._file(request)["id"]
        if not self._store.drop_file(file):
            raise BadRequest("file_id", "a job that has not ended needs this file", 409)
        return web.json_response({"id": file, "object": "file", "deleted": True})

    async def content(self, request: web.Request) -> web.StreamResponse:
        return web.FileResponse(self._store.file_path(self._file(request)["id"]))

    # jobs

    async def create(self, request: web.Request) -> web.Response:
        body = await self._body(request)
        base = body.get("model")
        if not isinstance(base, str) or base not in self._bases:
            raise BadRequest("model", f"must be one of {', '.join(self._bases)}, not {base!r}", 404)
        for name in ("training_file", "validation_file"):
            file = body.get(name)
            if name == "validation_file" and not file:
                continue
            if not isinstance(file, str) or self._store.file(file) is None:
                raise BadRequest(name, f"no file {file!r}", 404)
        wish = shape.wish_of(body)
        self._check_alike(base, wish)
        row = self._store.add_job(base, body["training_file"], wish, wish["weight"])
        self._changed()
        return web.json_response(shape.job_object(row))

    def _check_alike(self, base: str, wish: Row) -> None:
        """Torch holds this setting per process, and jobs of a base share one."""
        wanted = wish["spec"].get("deterministic", True)
        others = [json.loads(row["wish"])["spec"].get("deterministic", True) for row in self._store.live(base)]
        if any(other != wanted for other in others):
            raise BadRequest("valve.deterministic", f"a job of {base} that has not ended has another value", 409)

    async def _body(self, request: web.Request) -> dict[str, Any]:
        try:
            body = json.loads(await request.text())
        except (ValueError, RecursionError) as error:
            raise BadRequest(None, f"no JSON: {error}") from None
        if not isinstance(body, dict):
            raise BadRequest(None, "must be a JSON object")
        return body

    def _job(self, request: web.Request) -> Row:
        row = self._store.job(request.match_info["job"])
        if row is None:
            raise BadRequest("fine_tuning_job_id", f"no job {request.match_info['job']}", 404)
        return row

    async def jobs(self, request: web.Request) -> web.Response:
        after, limit = self._window(request)
        rows = self._store.jobs(after, limit)
        return web.json_response(shape.page_object([shape.job_object(row) for row in rows], limit))

    async def job(self, request: web.Request) -> web.Response:
        return web.json_response(shape.job_object(self._job(request)))

    async def events(self, request: web.Request) -> web.Response:
        after, limit = self._window(request)
        rows = self._store.events(self._job(request)["id"], after, limit)
        return web.json_response(shape.page_object([shape.event_object(row) for row in rows], limit))

    async def checkpoints(self, request: web.Request) -> web.Response:
        (after, limit), job = self._window(request), self._job(request)
        rows = self._store.checkpoints(job["id"], after, limit)
        return web.json_response(shape.page_object([shape.checkpoint_object(row, job) for row in rows], limit))

    async def wish(self, request: web.Request) -> web.Response:
        """The answer comes at once; the worker follows between two tiles."""
        job, wish = self._job(request)["id"], request.match_info["wish"]
        if not self._store.wish(job, "go" if wish == "resume" else wish):
            state = (self._store.job(job) or {})["status"]
            said = state if state in ENDED else "being cancelled"
            raise BadRequest("fine_tuning_job_id", f"the job is {said}", 400)
        self._changed()
        return web.json_response(shape.job_object(self._store.job(job) or {}))

    def _window(self, request: web.Request) -> tuple[str | None, int]:
        text = request.query.get("limit", "20")
        if not text.isdecimal() or not 1 <= int(text[:9]) <= 1000:
            raise BadRequest("limit", "must be a whole number from 1 to 1000")
        return request.query.get("after"), int(text[:9])
