"""`valve tune serve`: the HTTP service, and one worker process for each base that has work."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import fcntl
import ipaddress
import os
import signal
import sqlite3
import sys
import time
from pathlib import Path

from aiohttp import web

from valve_tune.serve.api import TuneApi
from valve_tune.serve.folder import FolderError
from valve_tune.serve.publish import token_in
from valve_tune.serve.store import Row, TuneStore
from valve_tune.serve.worker import NO_DATABASE

AGAIN_S = 1.0  # until a worker that died is started again
LONGEST_S = 60.0  # each further death without a look doubles the time, up to this
BARREN = 8  # starts of a worker that never looked at its jobs; then they fail
LOOK_S = 0.5
LEAVE_S = 30.0  # how long workers have to end their tile when the service is told to end
SHORTEST_TOKEN = 16


class JobWorkers:
    """Keeps one process per base alive while it has jobs that have not ended."""

    def __init__(self, store: TuneStore, bases: dict[str, str]) -> None:
        self._store, self._bases = store, bases
        self._changed = asyncio.Event()
        self._running: dict[str, asyncio.subprocess.Process] = {}
        self._barren: dict[str, int] = {}  # starts in a row that never looked
        self._vain: dict[str, int] = {}  # deaths in a row that no job was charged with
        self._due: dict[str, float] = {}

    def changed(self) -> None:
        self._changed.set()

    async def keep(self) -> None:
        while True:
            try:
                await self._look()
            except (sqlite3.Error, OSError) as error:  # a full disk, a locked database, no process to be had: all pass
                print(f"valve tune: workers: {error}", file=sys.stderr)
            self._changed.clear()
            with contextlib.suppress(TimeoutError, asyncio.TimeoutError):
                await asyncio.wait_for(self._changed.wait(), LOOK_S)

    async def _look(self) -> None:
        for base, process in list(self._running.items()):
            if process.returncode is not None:
                self._ended(base, process.pid, process.returncode)
                del self._running[base]
        needed = {row["base"] for row in self._needed()}
        for base in needed & self._bases.keys() - self._running.keys():
            if time.monotonic() < self._due.get(base, 0.0):
                continue
            argv = ["--folder", str(self._store.folder), "--base", base, "--model", self._bases[base]]
            self._running[base] = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "valve_tune.serve.worker", *argv, "--parent", str(os.getpid())
            )

    def _needed(self, base: str | None = None) -> list[Row]:
        return [row for row in self._store.live(base) if row["status"] != "paused" or row["wanted"] != "pause"]

    def _ended(self, base: str, pid: int, code: int) -> None:
        if not code:
            self._barren[base] = self._vain[base] = 0
            return
        is_barren = code != NO_DATABASE and not self._store.has_looked(base, pid)
        if is_barren and self._barren.get(base, 0) + 1 >= BARREN:
            for row in self._needed(base):
                self._store.fail(row["id"], f"the worker of {base} ended {BARREN} times before it looked at its jobs")
            self._barren[base] = 0
            return
        self._vain[base] = 0 if self._store.died(base) else self._vain.get(base, 0) + 1
        self._barren[base] = self._barren.get(base, 0) + 1 if is_barren else 0
        self._due[base] = time.monotonic() + min(LONGEST_S, AGAIN_S * 2 ** max(0, min(self._vain[base] - 1, 10)))
        print(f"valve tune: the worker of {base} ended with {code}", file=sys.stderr)

    async def leave(self) -> None:
        for process in self._running.values():
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
        for process in self._running.values():
            try:
                await asyncio.wait_for(process.wait(), LEAVE_S)
            except (TimeoutError, asyncio.TimeoutError):
                process.kill()


def bases_of(named: list[str]) -> dict[str, str]:
    bases = {}
    for each in named:
        name, sign, folder = each.partition("=")
        if not name or not sign or not (Path(folder) / "config.json").is_file():
            raise FolderError(f"--model {each}: must be NAME=DIR, with a base model in DIR")
        bases[name] = str(Path(folder).absolute())
    return bases


def token_of(host: str, path: str) -> str:
    """Empty only on loopback."""
    try:
        is_local = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_local = False
    token = token_in(path)
    if path and len(token) < SHORTEST_TOKEN:
        raise FolderError(f"--token-file {path}: a token has at least {SHORTEST_TOKEN} characters")
    if not token and not is_local:
        raise FolderError(f"--host {host} is not loopback: name a --token-file")
    return token


async def serve(store: TuneStore, bases: dict[str, str], host: str, port: int, token: str) -> None:
    workers = JobWorkers(store, bases)
    runner = web.AppRunner(TuneApi(store, bases, token=token, changed=workers.changed).application(), access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, host, port)
    await site.start()
    bound = runner.addresses[0]
    print(f"valve tune: serving {', '.join(bases)} on http://{bound[0]}:{bound[1]}/v1", flush=True)
    keeping = asyncio.ensure_future(workers.keep())
    told = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, told.set)
    waiting = asyncio.ensure_future(told.wait())
    await asyncio.wait({keeping, waiting}, return_when=asyncio.FIRST_COMPLETED)
    for task in (keeping, waiting):
        task.cancel()
    await runner.cleanup()
    await workers.leave()
    if keeping.done() and not keeping.cancelled() and keeping.exception():
        raise keeping.exception() or RuntimeError


def command(options: argparse.Namespace) -> int:
    bases = bases_of(options.model)
    token = token_of(options.host, options.token_file)
    folder = Path(options.folder).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)
    with (folder / "service.lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise FolderError(f"--folder {folder}: another service works here") from None
        store = TuneStore(folder)
        store.sweep_files()
        try:
            asyncio.run(serve(store, bases, options.host, options.port, token))
        finally:
            store.close()
    return 0
