"""Bench `route`: the router against a bare pass-through of the same library, in turns, and what it adds to an answer.
Bench `plan`: the CPU time of one decision.

Three processes: an engine that answers a small body at once, the proxy under test, and this one as the client. The mark
on requests a second is the ratio of pairs, by the worse end of its interval. The mark on latency is what comes on top
of the engine asked directly.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import socket
import statistics
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from typing import Any

from valve_router.plan.score import ScoreSettings, choose
from valve_router.plan.timeline import Timeline
from valve_tools.bench.row import Row, row_of
from valve_tools.bench.rungs import interval
from valve_tools.lab.fleet.load import Arrivals, FleetShape

CLIENT = "client"
BODY = b'{"model": "m", "prompt": "a short question", "max_tokens": 8}'
TURNS = 11
TURN_S = 1.0
OPEN = 64
RATE_MARK = 0.8
ALONE = 300  # requests, one after another, for the latency


def engine(port: int) -> None:
    from aiohttp import web

    async def answer(request: web.Request) -> web.Response:
        await request.read()
        return web.json_response({"text": "an answer"})

    _serve(port, answer)


def bare(port: int, to: int) -> None:
    """What passes a request and does nothing else."""
    import aiohttp
    from aiohttp import web

    async def answer(request: web.Request) -> web.Response:
        body, url = await request.read(), f"http://127.0.0.1:{to}{request.raw_path}"
        async with request.app[CLIENT].request(request.method, url, data=body, headers=request.headers) as there:
            return web.Response(status=there.status, body=await there.read(), content_type=there.content_type)

    async def client(app: web.Application) -> AsyncIterator[None]:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as app[CLIENT]:
            yield

    _serve(port, answer, client)


def router(port: int, to: int) -> None:
    from valve_router.server import serve
    from valve_router.settings import RouterSettings

    async def run() -> None:
        settings = RouterSettings(replicas=(f"http://127.0.0.1:{to}",), port=port, open_per_replica=10_000)
        await serve(settings, stop=asyncio.Event())

    asyncio.run(run())


def _serve(port: int, answer: Any, *contexts: Any) -> None:
    from aiohttp import web

    app = web.Application()
    app.cleanup_ctx.extend(contexts)
    app.router.add_route("*", "/{path:.*}", answer)
    web.run_app(app, host="127.0.0.1", port=port, print=None, access_log=None)


async def rate(client: Any, port: int) -> float:
    """Requests a second with OPEN under way."""
    url, count, end_s = f"http://127.0.0.1:{port}/v1/completions", 0, time.monotonic() + TURN_S

    async def one() -> None:
        nonlocal count
        while time.monotonic() < end_s:
            async with client.post(url, data=BODY) as answer:
                await answer.read()
                assert answer.status == 200, answer.status
            count += 1

    began_s = time.monotonic()
    await asyncio.gather(*(one() for _ in range(OPEN)))
    return count / (time.monotonic() - began_s)


async def latencies(client: Any, ports: tuple[int, ...]) -> list[list[float]]:
    """In ms, one request after another, the ports in turn."""
    found: list[list[float]] = [[] for _ in ports]
    for _ in range(ALONE):
        for index, port in enumerate(ports):
            began_s = time.perf_counter()
            async with client.post(f"http://127.0.0.1:{port}/v1/completions", data=BODY) as answer:
                await answer.read()
            found[index].append((time.perf_counter() - began_s) * 1e3)
    return found


async def compare(ports: tuple[int, int, int]) -> tuple[list[float], list[float], list[list[float]]]:
    import aiohttp

    there, plain, ours = ports
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:
        for port in ports:
            await _until_open(port)
        for port in (plain, ours):
            await rate(client, port)
        pairs = [(await rate(client, plain), await rate(client, ours)) for _ in range(TURNS)]
        return [one for one, _ in pairs], [one for _, one in pairs], await latencies(client, (there, ours))


async def _until_open(port: int) -> None:
    for _ in range(600):
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            await asyncio.sleep(0.05)
            continue
        writer.close()
        return
    raise TimeoutError(f"nobody listens on port {port}")


def bench_route() -> Iterator[Row]:
    ports = (_free(), _free(), _free())
    spawn = multiprocessing.get_context("spawn")
    processes = [
        spawn.Process(target=engine, args=(ports[0],), daemon=True),
        spawn.Process(target=bare, args=(ports[1], ports[0]), daemon=True),
        spawn.Process(target=router, args=(ports[2], ports[0]), daemon=True),
    ]
    for process in processes:
        process.start()
    try:
        plain, ours, (direct, routed) = asyncio.run(compare(ports))
    finally:
        for process in processes:
            process.terminate()
            process.join()
    yield from rate_rows(plain, ours)
    added = [one - other for one, other in zip(routed, direct, strict=True)]
    yield row_of("route", "added latency, median", "ms", added, 1.0, judged="p50")
    yield row_of("route", "added latency, p99", "ms", added, 5.0, judged="p99")


def rate_rows(plain: Sequence[float], ours: Sequence[float]) -> Iterator[Row]:
    median, low, high = interval([one / other for one, other in zip(ours, plain, strict=True)])
    note = f"bare pass-through: {statistics.median(plain):.0f} a second in the median of {len(plain)} turns"
    yield row_of("route", "requests a second", "1/s", ours, None, judged="p50", better="higher", note=note)
    note = f"median {median:.2f}, 95 % of {low:.2f} to {high:.2f}; judged by the worse end"
    is_void = high - low > 1 - RATE_MARK
    worse: dict[str, Any] = {"judged": "p50", "better": "higher", "note": note, "is_void": is_void}
    yield row_of("route", "of a bare pass-through", "x", [low], RATE_MARK, **worse)


def _free() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


def bench_plan() -> Iterator[Row]:
    """One decision of the planner: requests and training in turn, on replicas that have work."""
    for nodes, stages, mark_ms in ((4, 2, 0.2), (100, 8, 2.0)):
        took_ms = decisions(nodes, stages)
        yield row_of("plan", f"a choice among {nodes} x {stages}", "ms", took_ms, mark_ms, judged="p50")


def decisions(nodes: int, stages: int, count: int = 400) -> list[float]:
    """CPU time: what other processes do is not the planner's."""
    fleet, rules = FleetShape(nodes=nodes, stages=stages), ScoreSettings()
    timelines = [Timeline(fleet.profile) for _ in range(nodes)]
    found = []
    for task in Arrivals(per_s=3.0 * nodes, training=0.5, count=count).tasks(1):
        began_s = time.process_time()
        choice = choose(timelines, [task] * nodes, rules)
        timelines[choice.index].add(choice.placed)
        found.append(1e3 * (time.process_time() - began_s))
    return found


BENCHES: dict[str, Callable[[], Iterable[Row]]] = {"route": bench_route, "plan": bench_plan}
