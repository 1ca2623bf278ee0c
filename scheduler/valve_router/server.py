"""The router as a process: the proxy, questions after the health of replicas, and what an operator asks."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from valve_kube.access import Access
from valve_kube.client import KubeClient

from valve_router.advice import Advice
from valve_router.answers import is_allowed, refusal
from valve_router.checkups import Checkups, ModelLooks
from valve_router.counts import Counts
from valve_router.endpoints import Endpoints
from valve_router.proxy import Proxy
from valve_router.replicas import Replica, Replicas
from valve_router.settings import RouterSettings
from valve_router.training.api import TrainingApi
from valve_router.training.desk import Desk
from valve_router.training.ledger import FleetBooks

IDLE_S = 75.0  # a client's connection without a request
END_S = 30.0  # for what runs when the router is told to end


async def serve(
    settings: RouterSettings, *, stop: asyncio.Event, ready: asyncio.Event | None = None, access: Access | None = None
) -> None:
    """Until `stop`; requests under way may end. `access`: to the API server, where replicas are those of a Service."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)  # two sockets for each request under way
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    async with assembled(settings, access) as app:
        runner = web.AppRunner(
            app,
            handler_cancellation=True,
            access_log=None,
            auto_decompress=False,
            keepalive_timeout=IDLE_S,
            shutdown_timeout=END_S,
        )
        await runner.setup()
        await web.TCPSite(runner, settings.host, settings.port, backlog=1024).start()
        if ready is not None:
            ready.set()
        try:
            await stop.wait()
        finally:
            await runner.cleanup()


@contextlib.asynccontextmanager
async def assembled(settings: RouterSettings, access: Access | None = None) -> AsyncIterator[web.Application]:
    async with known(settings, access) as (client, replicas, advice, looks):
        proxy = Proxy(settings, replicas, client, looks)
        app = web.Application(client_max_size=settings.body_bytes)
        Operators(settings, replicas, proxy.counts, advice).add_to(app)
        if settings.training_folder:
            ledger = FleetBooks(Path(settings.training_folder), settings.training_silent_s)
            training = web.Application()
            TrainingApi(settings, ledger, Desk(settings, replicas)).add_to(training)
            app.add_subapp("/route/training", training)
        app.router.add_route("*", "/{path:.*}", proxy.handle)
        yield app


@contextlib.asynccontextmanager
async def known(
    settings: RouterSettings, access: Access | None = None
) -> AsyncIterator[tuple[aiohttp.ClientSession, Replicas, Advice, ModelLooks]]:
    """The client that asks, the replicas, how many should be awake, and the part that looks at their models."""
    replicas = Replicas(settings, time.monotonic)
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=settings.connect_s, sock_read=settings.silent_s)
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=30)
    async with aiohttp.ClientSession(
        connector=connector,
        timeout=timeout,
        auto_decompress=False,
        cookie_jar=aiohttp.DummyCookieJar(),  # no client gets a cookie of another one
        skip_auto_headers=("Accept", "Accept-Encoding", "Content-Type", "User-Agent"),
    ) as client:
        advice = Advice(settings, replicas)
        checkups = Checkups(client, settings, replicas)
        checkups.follow()
        looking = asyncio.create_task(advice.run())
        async with following(settings, access, checkups):
            try:
                yield client, replicas, advice, checkups.looks
            finally:
                looking.cancel()
                await asyncio.gather(looking, return_exceptions=True)
                await checkups.end()


@contextlib.asynccontextmanager
async def following(settings: RouterSettings, access: Access | None, checkups: Checkups) -> AsyncIterator[None]:
    """The endpoints of the Service, if the replicas are those."""
    if settings.service is None or access is None:
        yield
        return
    with contextlib.closing(KubeClient(access)) as kube:
        task = asyncio.create_task(Endpoints(kube, settings.service, checkups.change).run())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


class Operators:
    """/health, /metrics and /route: for the router's operator."""

    def __init__(self, settings: RouterSettings, replicas: Replicas, counts: Counts, advice: Advice) -> None:
        self._settings = settings
        self._replicas = replicas
        self._counts = counts
        self._advice = advice
        self._registry = CollectorRegistry()
        self._registry.register(RouterCollector(replicas, counts, advice))

    def add_to(self, app: web.Application) -> None:
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/route/status", self._status)
        app.router.add_post("/route/drain", self._drain)

    async def _health(self, request: web.Request) -> web.Response:
        is_well = any(one.is_alive and not one.is_drained for one in self._replicas.all)
        return web.Response(status=200 if is_well else 503, text="ok\n" if is_well else "no replica answers\n")

    def _may_look(self, request: web.Request) -> bool:
        return is_allowed(request, self._settings.operator_token or self._settings.token)

    async def _metrics(self, request: web.Request) -> web.Response:
        if not self._may_look(request):
            return refusal(401, "a bearer token is needed", "invalid_api_key")
        return web.Response(body=generate_latest(self._registry), content_type="text/plain")

    async def _status(self, request: web.Request) -> web.Response:
        if not self._may_look(request):
            return refusal(401, "a bearer token is needed", "invalid_api_key")
        return web.json_response(status_of(self._replicas, self._counts, self._advice))

    async def _drain(self, request: web.Request) -> web.Response:
        """Body: {"replica": NAME or URL, "is_drained": true or false}. No page in a browser may say it."""
        if self._settings.token and not self._settings.operator_token:
            return refusal(403, "draining is off: start the router with --operator-token-file", "forbidden")
        if not is_allowed(request, self._settings.operator_token):
            return refusal(401, "the operator's token is needed", "invalid_api_key")
        if request.content_type != "application/json":
            return refusal(415, "send the body as application/json", "invalid_request")
        try:
            asked = await request.json()
            name, is_drained = str(asked["replica"]), asked["is_drained"]
        except (ValueError, KeyError, TypeError):
            return refusal(400, 'the body is {"replica": NAME, "is_drained": true}', "invalid_request")
        replica = self._replicas.find(name)
        if replica is None or not isinstance(is_drained, bool):
            known = ", ".join(one.name for one in self._replicas.all)
            return refusal(404, f"there is no replica {name}: {known}", "not_found")
        replica.is_drained = is_drained
        return web.json_response(status_of(self._replicas, self._counts, self._advice))


def status_of(replicas: Replicas, counts: Counts, advice: Advice) -> dict[str, Any]:
    surplus = advice.surplus()
    return {
        "wanted": advice.active.wanted if advice.active is not None else None,
        "requests": {str(status): count for status, count in sorted(counts.requests.items())},
        "retries": counts.retries,
        "broken": counts.broken,
        "replicas": [
            {
                "name": one.name,
                "url": one.url,
                "state": state_of(one),
                "may_sleep": one.name in surplus,
                "why_not": one.why_not,
                "under_way": one.under_way,
                "served": one.served,
                "failed": one.failed,
                "gap_ms": round(one.gap_s * 1e3, 2),
                "prediction_error": round(one.error, 3),
                "adapters": sorted(one.adapters.listing.adapters) if one.adapters.listing is not None else [],
                "lost": sorted(one.adapters.lost),
            }
            for one in replicas.all
        ],
    }


def state_of(replica: Replica) -> str:
    if not replica.is_alive:
        return "away"
    return "drained" if replica.is_drained else "serving"


class RouterCollector(Collector):
    """The router's figures as Prometheus reads them."""

    def __init__(self, replicas: Replicas, counts: Counts, advice: Advice) -> None:
        self._replicas = replicas
        self._counts = counts
        self._advice = advice

    def collect(self) -> Iterator[Metric]:
        counts = self._counts
        requests = CounterMetricFamily("valve_router_requests", "Requests answered, by status", labels=["status"])
        for status, count in counts.requests.items():
            requests.add_metric([str(status)], count)
        yield requests
        yield CounterMetricFamily(
            "valve_router_retries", "Requests tried again on another replica", value=counts.retries
        )
        yield CounterMetricFamily("valve_router_broken", "Answers that a replica broke off", value=counts.broken)
        under_way = GaugeMetricFamily("valve_router_under_way", "Requests that are in the replica", labels=["replica"])
        alive = GaugeMetricFamily("valve_router_replica_alive", "1 if the replica answers", labels=["replica"])
        error = GaugeMetricFamily(
            "valve_router_prediction_error_ratio", "Relative error of the last predicted responses", labels=["replica"]
        )
        if self._advice.active is not None:
            yield GaugeMetricFamily(
                "valve_router_replicas_wanted", "Replicas that should be awake", value=self._advice.active.wanted
            )
        for one in self._replicas.all:
            under_way.add_metric([one.url], one.under_way)
            alive.add_metric([one.url], float(one.is_alive))
            error.add_metric([one.url], one.error)
        yield from (under_way, alive, error)
