"""`valve tune serve`: the HTTP service, and one worker process for each base that has work."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import fcntl
import ipaddress
import os
import signal
import sys
from pathlib import Path

from aiohttp import web

from valve_tune.serve.api import TuneApi
from valve_tune.serve.folder import FolderError
from valve_tune.serve.store import TuneStore

AGAIN_S = 1.0  # until a worker that died is started again
LOOK_S = 0.5
LEAVE_S = 30.0  # how long workers have to end their tile when the service is told to end
SHORTEST_TOKEN = 16


class Workers:
    """Keeps one process per base alive while it has jobs that have not ended."""

    def __init__(self, store: TuneStore, bases: dict[str, str]) -> None:
        self._store, self._bases = store, bases
        self._changed = asyncio.Event()
        self._running: dict[str, asyncio.subprocess.Process] = {}

    def changed(self) -> None:
        self._changed.set()

    async def keep(self) -> None:
        while True:
            await self._look()
            self._changed.clear()
            with contextlib.suppress(TimeoutError, asyncio.TimeoutError):
                await asyncio.wait_for(self._changed.wait(), LOOK_S)

    async def _look(self) -> None:
        for base, process in list(self._running.items()):
            if process.returncode is not None:
                del self._running[base]
                if process.returncode:
                    self._store.died(base)
                    print(f"valve tune: the worker of {base} ended with {process.returncode}", file=sys.stderr)
                    await asyncio.sleep(AGAIN_S)
        needed = {row["base"] for row in self._store.live() if row["status"] != "paused" or row["wanted"] != "pause"}
        for base in needed & self._bases.keys() - self._running.keys():
            argv = ["--folder", str(self._store.folder), "--base", base, "--model", self._bases[base]]
            self._running[base] = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "valve_tune.serve.worker", *argv, "--parent", str(os.getpid())
            )

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
    try:
        token = Path(path).read_text(encoding="utf-8").strip() if path else ""
    except OSError as error:
        raise FolderError(f"--token-file {path}: {error.strerror}") from None
    if path and len(token) < SHORTEST_TOKEN:
        raise FolderError(f"--token-file {path}: a token has at least {SHORTEST_TOKEN} characters")
    if not token and not is_local:
        raise FolderError(f"--host {host} is not loopback: name a --token-file")
    return token


async def serve(store: TuneStore, bases: dict[str, str], host: str, port: int, token: str) -> None:
    workers = Workers(store, bases)
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
