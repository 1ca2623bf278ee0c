"""Played engines, one process each: two of them can serve, and any of them can be killed."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from pathlib import Path

import aiohttp

ENGINE = Path(__file__).with_name("played_engine.py")
# Settings of a router before them: asked often, and none is away because the machine is busy.
PATIENT = {"health_s": 0.05, "connect_s": 200.0}


class AskedRouter:
    """What a client asks, before these engines: a router, or a gateway that asks one."""

    def __init__(self, url, engines, settings, client):
        self.url, self.engines, self.settings, self.client = url, engines, settings, client

    def post(self, body, **more):
        return self.client.post(f"{self.url}/v1/completions", json=body, **more)

    async def whole(self, body, **more):
        """The answer, once its body is here: a client that leaves before that is counted as one that left."""
        async with self.post(body, **more) as answer:
            await answer.read()
            return answer

    async def status(self):
        async with self.client.get(f"http://127.0.0.1:{self.settings.port}/route/status") as answer:
            return await answer.json()


class Engines:
    def __init__(self, ports, piece_s, *flags):
        self.ports = ports
        self.piece_s = piece_s
        self.flags = flags
        self.processes = [self.start(port) for port in self.ports]

    def start(self, port):
        return subprocess.Popen([sys.executable, str(ENGINE), str(port), "--piece-s", str(self.piece_s), *self.flags])

    @property
    def urls(self):
        return tuple(f"http://127.0.0.1:{port}" for port in self.ports)

    async def until_well(self, client):
        for url in self.urls:
            while True:
                with contextlib.suppress(aiohttp.ClientError):
                    async with client.get(f"{url}/health"):
                        break
                await asyncio.sleep(0.02)

    def end(self):
        for process in self.processes:
            process.kill()
            process.wait()
