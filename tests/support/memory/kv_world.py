"""An emulated node, a fake valved with a pool, and processes with KV memory: the world of the shim's memory tests."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import rooms
from fake_daemon import CHANNEL_ADD, LONG_S, ONLINE, Client, FakeDaemon, Message, until
from kv_pool import Pool
from valve_tools.emulator.client import Emulator
from valve_tools.emulator.node import environment

from valved.paths import preload_library

PROGRAM = Path(__file__).with_name("kv_process.py")


@dataclass
class Engine:
    """A process of kv_process.py. Calls of its commands travel as JSON lines."""

    process: subprocess.Popen[str]
    errors: Path

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> Any:
            assert self.process.stdin is not None
            assert self.process.stdout is not None
            self.process.stdin.write(json.dumps([name, arguments]) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
            assert line, f"the engine ended in {name}: {self.process.wait()}\n{self.errors.read_text()}"
            return json.loads(line)

        return call

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def leave(self) -> int:
        """An ordinary exit."""
        self.process.communicate()
        return self.process.wait()


@dataclass
class World:
    emulator: Emulator
    folder: Path
    role: int = ONLINE
    daemons: list[FakeDaemon] = field(default_factory=list)
    pools: list[Pool] = field(default_factory=list)
    engines: list[Engine] = field(default_factory=list)
    more: int = 0  # features of each valved, beyond the usual ones
    prefix: tuple[str, ...] = ()  # of the command of each engine
    programs: list[subprocess.Popen[str]] = field(default_factory=list)

    def begin(self, **settings: Any) -> Pool:
        """A valved; a later one takes the place of the one before."""
        self.daemons.append(FakeDaemon(self.folder, self.role, more=self.more))
        self.pools.append(Pool(self.daemons[-1], **settings))
        return self.pools[-1]

    def engine(self, cuda: str = "", preload: str = "") -> tuple[Engine, Client]:
        """Registered, with a context; and valved's view of it. One whose start did not wait for its link to the end has
        told of its channels once it has taken the link, and not before."""
        preloads = ":".join(filter(None, [preload, os.fspath(preload_library())]))
        own = {
            **os.environ,
            "LD_PRELOAD": preloads,
            "VALVE_RUN_DIR": os.fspath(self.folder),
            "VALVE_ROLE": "online" if self.role == ONLINE else "offline",
            "VALVE_EMU_CUDA": cuda,
            "PYTHONPATH": rooms.PYTHONPATH,
        }
        errors = self.folder / f"engine-{len(self.engines)}.err"
        with errors.open("w") as sink:
            made = Engine(
                subprocess.Popen(
                    [*self.prefix, sys.executable, "-X", "faulthandler", PROGRAM],
                    env=environment(self.emulator.directory, own),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=sink,
                    text=True,
                ),
                errors,
            )
        self.engines.append(made)
        made.start()
        client = self.daemons[-1].client()
        until(lambda: client.has_said(CHANNEL_ADD) or client.gone.is_set(), "it is linked")
        return made, client

    def program(self, *command: str | Path, preload: bool = True) -> subprocess.Popen[str]:
        """Any program with the shim, its output piped."""
        own = {
            **os.environ,
            "LD_PRELOAD": os.fspath(preload_library()) if preload else "",
            "VALVE_RUN_DIR": os.fspath(self.folder),
            "VALVE_ROLE": "online" if self.role == ONLINE else "offline",
        }
        self.programs.append(
            subprocess.Popen(
                [os.fspath(part) for part in command],
                env=environment(self.emulator.directory, own),
                stdout=subprocess.PIPE,
                text=True,
            )
        )
        return self.programs[-1]

    def range_of(self, pool: Pool) -> Message:
        """The next range that a client announced."""
        return pool.born.get(timeout=LONG_S)

    def close(self) -> None:
        for engine in self.engines:
            if engine.process.poll() is None:
                engine.kill()
            for pipe in (engine.process.stdin, engine.process.stdout):
                assert pipe is not None
                pipe.close()
        for program in self.programs:
            program.kill()
            program.communicate()
        for daemon in self.daemons:
            daemon.discard()
        for pool in self.pools:
            pool.close()
