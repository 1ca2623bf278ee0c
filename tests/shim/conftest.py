"""Worlds for the shim: a fake valved, a driver that says yes, a libcuda to hook, and a puppet process inside."""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from fake_daemon import OFFLINE, ONLINE, Client, FakeDaemon, until
from kv_world import World as KvWorld
from valve_tools.emulator.client import Emulator
from valve_tools.emulator.node import NO_LATENCY, Options, node

from valved.paths import preload_library

HERE = Path(__file__).parent
CC = shutil.which("cc") or shutil.which("gcc")


@dataclass(frozen=True)
class Libraries:
    """What the tests run against. `cuda` is put on LD_LIBRARY_PATH."""

    shim: Path
    fakerm: Path
    cuda: Path
    old_cuda: Path
    folder: Path
    repository: Path

    def compile(self, name: str, *flags: str, compiler: str | None = None) -> Path:
        """A test program from tests/shim/c, built once per session."""
        out = self.folder / (name + "-" + str(abs(hash(flags)) % 10**8))
        if not out.exists():
            command = [compiler or CC, "-O1", "-g", "-Wall", "-D_GNU_SOURCE", f"-I{self.repository}/proto/abi"]
            subprocess.run([*command, HERE / "c" / f"{name}.c", "-o", out, *flags], check=True)
        return out


@pytest.fixture(scope="session")
def libraries(tmp_path_factory, repository) -> Libraries:
    folder = tmp_path_factory.mktemp("shim-libraries")

    def shared(source: str, out: Path, *flags: str) -> Path:
        out.parent.mkdir(exist_ok=True)
        command = [CC, "-shared", "-fPIC", "-O1", "-g", "-Wall", "-Wextra", f"-I{repository}/proto/abi"]
        subprocess.run([*command, HERE / "c" / source, "-o", out, *flags], check=True)
        return out

    soname = ("-Wl,-Bsymbolic", "-Wl,-soname,libcuda.so.1")
    return Libraries(
        shim=preload_library(),
        fakerm=shared("fakerm.c", folder / "libfakerm.so", "-ldl"),
        cuda=shared("stubcuda.c", folder / "cuda" / "libcuda.so.1", *soname).parent,
        old_cuda=shared("stubcuda.c", folder / "old" / "libcuda.so.1", "-DSTUB_WITHOUT_CONTEXT_EVENTS", *soname).parent,
        folder=folder,
        repository=repository,
    )


@dataclass
class Puppet:
    """A process that does what it is told; see puppet.py."""

    process: subprocess.Popen[str]

    def __getattr__(self, name: str):
        def call(*arguments: Any, **named: Any) -> Any:
            assert self.process.stdin is not None
            assert self.process.stdout is not None
            self.process.stdin.write(json.dumps([name, arguments, named]) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
            assert line, f"the puppet ended in {name}: exit code {self.process.wait()}"
            return json.loads(line)

        return call


@dataclass
class World:
    """Everything one test needs, torn down with it."""

    libraries: Libraries
    folder: Path
    daemons: list[FakeDaemon] = field(default_factory=list)
    puppets: list[Puppet] = field(default_factory=list)
    prefix: tuple[str, ...] = ()  # of the command of each puppet

    def environment(self, role: str = "online", cuda: Path | None = None, **more: str) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("VALVE_", "CUDA_"))}
        return {
            **kept,
            "LD_PRELOAD": f"{self.libraries.shim}:{self.libraries.fakerm}",
            "LD_LIBRARY_PATH": str(cuda or self.libraries.cuda),
            "VALVE_RUN_DIR": str(self.folder),
            "VALVE_ROLE": role,
            "FAKERM_LOG": str(self.log),
            **more,
        }

    @property
    def log(self) -> Path:
        return self.folder / "fakerm.log"

    def gate_calls(self) -> list[str]:
        """The disable and enable calls that reached the driver, in order."""
        return self.log.read_text().splitlines() if self.log.exists() else []

    def daemon(self, role: int = ONLINE, more: int = 0, on_message: Any = None, **words: int) -> FakeDaemon:
        """`more`: features beyond the usual ones. What is said here holds for the first client, too."""
        made = FakeDaemon(self.folder, role, words, more, on_message)
        self.daemons.append(made)
        return made

    def puppet(self, **settings: Any) -> Puppet:
        made = Puppet(
            subprocess.Popen(
                [*self.prefix, sys.executable, HERE / "puppet.py"],
                env=self.environment(**settings),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        )
        self.puppets.append(made)
        return made

    def online(self, daemon: FakeDaemon | None = None, **settings: Any) -> tuple[Puppet, Client]:
        """A registered online process with a context, and valved's view of it."""
        daemon = daemon or self.daemon(ONLINE)
        puppet = self.puppet(role="online", **settings)
        puppet.load()
        puppet.cu("cuInit", 0)
        puppet.cu_out("cuDevicePrimaryCtxRetain", 0)
        client = daemon.client()
        os.eventfd_write(client.order_bell, 1)
        heard = select.poll()
        heard.register(client.order_bell, select.POLLIN)
        until(lambda: not heard.poll(0), "its session has the link, and speaks for no launch from before")
        return puppet, client

    def offline(self, daemon: FakeDaemon | None = None, **settings: Any) -> tuple[Puppet, Client]:
        daemon = daemon or self.daemon(OFFLINE)
        puppet = self.puppet(role="offline", **settings)
        puppet.load()
        puppet.cu("cuInit", 0)
        return puppet, daemon.client()

    def close(self) -> None:
        for puppet in self.puppets:
            puppet.process.kill()
            puppet.process.wait()
            puppet.process.stdin.close()
            puppet.process.stdout.close()
        for daemon in self.daemons:
            daemon.discard()


@pytest.fixture
def world(libraries, tmp_path) -> Iterator[World]:
    made = World(libraries, tmp_path)
    yield made
    made.close()


@pytest.fixture(scope="module")
def emulated_gpus() -> Iterator[Emulator]:
    """Two GPUs whose driver costs nothing."""
    with node(Options(gpus=2, gpu_bytes=1 << 30, knobs=NO_LATENCY)) as emulator:
        yield emulator


@pytest.fixture
def kv_world(emulated_gpus, tmp_path_factory) -> Iterator[Callable[..., KvWorld]]:
    """Makes worlds with KV memory on them, one run folder each."""
    made: list[KvWorld] = []

    def build(role: int = ONLINE) -> KvWorld:
        made.append(KvWorld(emulated_gpus, tmp_path_factory.mktemp("kv"), role))
        return made[-1]

    yield build
    for each in made:
        each.close()
    emulated_gpus.wait(lambda state: not (state.used_bytes(0) or state.used_bytes(1)), "nothing is left behind")
