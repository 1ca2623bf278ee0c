"""What a trainer of a fleet job asks its router over HTTP.

A proxy may stand between them, and answers in place of a router that is away: with a page, a redirect, a body that
is packed, cut short or endless. Only what the router itself says counts. All else is a failed attempt.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import json
import socket
import threading
import time
import urllib.error
import urllib.request
from typing import Any
from urllib.parse import urlsplit

from valve_tune.serve.engines import NoRedirect
from valve_tune.serve.folder import FolderError

SILENT_S = 60.0  # without a byte, and until the head of an answer is whole
BYTES_PER_S = 128 * 1024  # less is no connection
MOST_BYTES = 4 << 30  # of one answer
DOCUMENT = "application/octet-stream"


class RouterAway(Exception):
    """It does not answer, and what was asked may have happened or not."""


class GivenUp(Exception):
    """The router took this trainer for dead, or what it asked for is over."""


class RouterLink:
    def __init__(self, url: str, token: str = "") -> None:
        if urlsplit(url).scheme not in ("http", "https"):
            raise FolderError(f"--router {url}: not a URL such as http://127.0.0.1:8100")
        self._url, self._token = url.rstrip("/") + "/route/training/", token
        self._opener = urllib.request.build_opener(NoRedirect, _Http, _Https)

    def ask(self, path: str, asked: dict[str, Any]) -> dict[str, Any]:
        return self._told(path, json.dumps(asked).encode(), "application/json")

    def send(self, path: str, said: dict[str, Any], document: bytes) -> dict[str, Any]:
        body = json.dumps(said).encode() + b"\n" + document  # a line of a head has 8,190 bytes, and numbers may be more
        return self._told(path, body, DOCUMENT)

    def _told(self, path: str, body: bytes, kind: str) -> dict[str, Any]:
        answer = self._call(path, body, {"Content-Type": kind})
        found = _parsed(answer)
        if not isinstance(found, dict) or not is_answer(path, found):
            raise RouterAway(f"{self._url}{path}: answered {answer[:80]!r}, which is no answer of a router")
        return found

    def blob(self, name: str) -> bytes:
        """A blob has the name of its content. Another content is not the router's: it looks at what it sends."""
        content = self._call(f"blob/{name}", None, {}) if name else b""
        if name and hashlib.sha256(content).hexdigest() != name:
            raise RouterAway(f"{self._url}blob/{name}: is not what was pushed, but begins {content[:80]!r}")
        return content

    def _call(self, path: str, body: bytes | None, heads: dict[str, str]) -> bytes:
        request = urllib.request.Request(self._url + path, data=body, headers=heads)
        if self._token:
            request.add_header("Authorization", f"Bearer {self._token}")
        wait_s = SILENT_S + len(body or b"") / BYTES_PER_S  # for all of the body together
        try:
            with self._opener.open(request, timeout=wait_s) as answer:
                return _read(answer)
        except urllib.error.HTTPError as error:
            raise self._refused(path, error) from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise RouterAway(f"{self._url}{path}: {error or type(error).__name__}") from None

    def _refused(self, path: str, error: urllib.error.HTTPError) -> Exception:
        try:
            said = _read(error)
        except (OSError, http.client.HTTPException, ValueError):
            said = b""
        text = f"{self._url}{path}: {error.code} {said.decode(errors='replace')[:500]}"
        if 300 <= error.code < 400:
            return RouterAway(f"{text} points to {error.headers['Location']}; if the router is there, name that URL")
        is_own = _is_refusal(_parsed(said))
        if error.code == 410 and is_own:
            return GivenUp(text)
        if error.code == 413:
            return FolderError(f"{text}: neither the router nor a proxy before it takes a checkpoint of this size")
        return FolderError(text) if is_own and error.code < 500 else RouterAway(text)


def _parsed(answer: bytes) -> Any:
    try:
        return json.loads(answer)
    except (ValueError, RecursionError):
        return None


def _is_refusal(found: Any) -> bool:
    """The shape of valve_router's refusals."""
    error = found.get("error") if isinstance(found, dict) else None
    return isinstance(error, dict) and error.get("type") == "valve_router"


def is_answer(path: str, found: dict[str, Any]) -> bool:
    """Whether a router says this to that question. If a stand-in's `{}` counted as an answer to a push, what was pushed
    would be lost, and be computed again on top of itself."""

    def counts(*names: str) -> bool:
        return all(type(found.get(name)) is int and found[name] >= 0 for name in names)

    if path == "job":
        return isinstance(found.get("job"), str)
    if path == "join":
        texts = all(isinstance(found.get(name), str) for name in ("start", "push"))
        silent_s = found.get("silent_s")
        return texts and counts("trainer", "version", "tokens", "steps") and isinstance(silent_s, int | float)
    if path == "take":
        if "average" in found:
            return isinstance(found["average"], list) and all(map(_is_part, found["average"]))
        return (
            any(found.get(name) is True for name in ("wait", "empty", "done")) or counts("number") or counts("version")
        )
    if path == "push":
        return isinstance(found.get("is_new"), bool)
    return path != "publish" or counts("version")


def _is_part(found: Any) -> bool:
    return isinstance(found, dict) and isinstance(found.get("blob"), str) and type(found.get("tokens")) is int


def _read(answer: Any) -> bytes:
    """All of it. A byte now and then is no answer, and neither is one that ends early or never."""
    began, pieces, size = time.monotonic(), [], 0
    while piece := answer.read1(1 << 20):
        pieces.append(piece)
        size += len(piece)
        if time.monotonic() - began > SILENT_S + size / BYTES_PER_S:
            raise OSError(f"only {size:,} bytes in {time.monotonic() - began:.0f} s")
        if size > MOST_BYTES:
            raise OSError(f"more than {MOST_BYTES:,} bytes")
    if answer.length:
        raise OSError(f"ends {answer.length:,} bytes early")
    return b"".join(pieces)


class _Timed(http.client.HTTPConnection):
    """A socket's own time begins again with each byte: the head of an answer could come for ever."""

    def getresponse(self) -> http.client.HTTPResponse:
        timer = threading.Timer(SILENT_S, self._cut, [self.sock])
        timer.daemon = True
        timer.start()
        try:
            return super().getresponse()
        finally:
            timer.cancel()

    @staticmethod
    def _cut(connection: socket.socket) -> None:
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)


class _TimedTls(_Timed, http.client.HTTPSConnection):
    pass


class _Http(urllib.request.HTTPHandler):
    def http_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_Timed, request)


class _Https(urllib.request.HTTPSHandler):
    def https_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_TimedTls, request)
