"""/healthz, /readyz and /metrics of each process, on a port of their own."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from valve_scheduler import metrics
from valve_scheduler.server import Answer, serve, text_answer

# Nobody who asks here has anything to say or stays: the kubelet and Prometheus. Every pod can reach the port.
_MOST_BODY, _MOST_CONNECTIONS = 1024, 64


class Probes:
    """`missing` names what is not there yet; `refresh` sets gauges that are read, not counted; `checks` are more
    paths, each with what says why it fails (empty: it does not)."""

    def __init__(
        self,
        missing: Callable[[], list[str]],
        refresh: Callable[[], None] = lambda: None,
        checks: Mapping[str, Callable[[], Awaitable[str]]] | None = None,
    ) -> None:
        self._missing = missing
        self._refresh = refresh
        self._checks = checks or {}

    async def answer(self, method: str, path: str, body: bytes) -> Answer:
        if path == "/healthz":
            return text_answer("ok")
        if path == "/readyz":
            missing = self._missing()
            return text_answer("not ready: " + " ".join(missing), 503) if missing else text_answer("ok")
        if path == "/metrics":
            self._refresh()
            return Answer(body=generate_latest(metrics.REGISTRY), content_type=CONTENT_TYPE_LATEST)
        if check := self._checks.get(path):
            why = await check()
            return text_answer(why, 503) if why else text_answer("ok")
        return text_answer("try /healthz, /readyz or /metrics", 404)

    async def serve(self, host: str, port: int) -> asyncio.Server:
        return await serve(self.answer, host, port, most=_MOST_BODY, connections=_MOST_CONNECTIONS)
