"""A blocking API client for scripts and tests: plain JSON in, plain JSON out, any user by impersonation."""

from __future__ import annotations

import http.client
import json
import ssl
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import local
from typing import Any
from urllib.parse import quote

Json = dict[str, Any]
TABLE = "application/json;as=Table;v=v1;g=meta.k8s.io"
MERGE_PATCH = "application/merge-patch+json"
KEPT_S = 45.0  # the API server closes a connection after 90 s without a request


class ApiRefused(Exception):
    """The API server said no."""

    def __init__(self, status: int, answer: Json) -> None:
        super().__init__(f"{status} {answer.get('reason')}: {answer.get('message')}")
        self.status = status
        self.answer = answer


class ClusterApi:
    """One connection per thread, kept. The server's certificate is its own and not checked.

    It is on loopback.
    """

    def __init__(self, port: int, token: str, impersonated: tuple[tuple[str, str], ...] = ()) -> None:
        """`impersonated`: headers that say whom."""
        self._port = port
        self._token = token
        self._impersonated = impersonated
        self._tls = ssl._create_unverified_context()
        self._local = local()

    def user(self, name: str, *groups: str) -> ClusterApi:
        member_of = (("Impersonate-Group", group) for group in groups)
        return ClusterApi(self._port, self._token, (("Impersonate-User", name), *member_of))

    def with_extra(self, key: str, value: str) -> ClusterApi:
        """The same user, with one more fact of its token, such as the node it runs on."""
        fact = (f"Impersonate-Extra-{quote(key, safe='')}", value)
        return ClusterApi(self._port, self._token, (*self._impersonated, fact))

    def call(
        self, method: str, path: str, body: Any = None, *, content_type: str = "application/json", accept: str = "*/*"
    ) -> Json:
        data = None if body is None else json.dumps(body).encode()
        try:
            status, raw = self._exchange(method, path, data, {"Content-Type": content_type, "Accept": accept})
        except (OSError, http.client.HTTPException):
            self._local.connection = None  # half-used: the next call starts afresh
            raise
        try:
            answer = json.loads(raw)
        except ValueError:
            answer = {"message": raw.decode(errors="replace")}
        if status >= 400:
            raise ApiRefused(status, answer)

        return dict(answer)

    def _exchange(self, method: str, path: str, data: bytes | None, told: Json) -> tuple[int, bytes]:
        if time.monotonic() - getattr(self._local, "used_s", 0.0) > KEPT_S:
            self._local.connection = None
        connection = self._connection()
        connection.putrequest(method, path)
        if data is not None:
            told["Content-Length"] = str(len(data))
        for header in (("Authorization", f"Bearer {self._token}"), *told.items(), *self._impersonated):
            connection.putheader(*header)
        connection.endheaders(data)
        response = connection.getresponse()
        raw = response.read()
        self._local.used_s = time.monotonic()

        return response.status, raw

    def get(self, path: str) -> Json:
        return self.call("GET", path)

    def table(self, path: str) -> dict[str, dict[str, Any]]:
        """What `kubectl get` shows: by name, column and cell."""
        found = self.call("GET", path, accept=TABLE)
        heads = [column["name"] for column in found["columnDefinitions"]]
        return {row["object"]["metadata"]["name"]: dict(zip(heads, row["cells"], strict=True)) for row in found["rows"]}

    def post(self, path: str, body: Any) -> Json:
        return self.call("POST", path, body)

    def put(self, path: str, body: Any) -> Json:
        return self.call("PUT", path, body)

    def patch(self, path: str, body: Any) -> Json:
        return self.call("PATCH", path, body, content_type=MERGE_PATCH)

    def delete(self, path: str, body: Any = None) -> Json:
        return self.call("DELETE", path, body)

    def watch_lines(self, path: str) -> Iterator[bytes]:
        """Lines of a watch that ends by its own timeoutSeconds; it has begun when this returns."""
        connection = self._new_connection()
        connection.request("GET", path, headers={"Authorization": f"Bearer {self._token}"})
        response = connection.getresponse()

        return iter(response.readline, b"")

    def each(self, calls: Iterable[tuple[str, str, Any]], threads: int = 8) -> None:
        """Many calls of (method, path, body) at once; PATCH is a merge patch. The first failure is raised."""

        def one(call: tuple[str, str, Any]) -> None:
            method, path, body = call
            kind = MERGE_PATCH if method == "PATCH" else "application/json"
            self.call(method, path, body, content_type=kind)

        with ThreadPoolExecutor(threads) as pool:
            for done in [pool.submit(one, call) for call in calls]:
                done.result()

    def _connection(self) -> http.client.HTTPSConnection:
        if getattr(self._local, "connection", None) is None:
            self._local.connection = self._new_connection()
        connection: http.client.HTTPSConnection = self._local.connection

        return connection

    def _new_connection(self) -> http.client.HTTPSConnection:
        return http.client.HTTPSConnection("127.0.0.1", self._port, context=self._tls, timeout=60)
