"""Starts an emulated node and gives programs the environment to live on it."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from valve_tools.emulator import survivors
from valve_tools.emulator.client import Emulator

LIBRARIES = Path(__file__).resolve().parent / "lib"

# For tests of what happens rather than of how long it takes.
_COSTS = (
    "rpc_us preempt_us enable_us runlist_us switch_us masking_us alloc_us alloc_mib_us free_us map_us map_mib_us"
    " unmap_us unmap_mib_us sparse_us sparse_mib_us reserve_us book_us fill_gbps copy_gbps"
)
NO_LATENCY = dict.fromkeys(_COSTS.split(), "0")


class NoCard(RuntimeError):
    """The server did not start. It said why on standard error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What a node is made of; knobs as in server/knobs.h."""

    gpus: int = 1
    gpu_bytes: int = 80 << 30
    name: str = "NVIDIA H100 80GB HBM3 (emulated)"
    seed: int = 1
    knobs: Mapping[str, str] = field(default_factory=dict)
    faults: Sequence[str] = ()
    server: Path | None = None  # a server built otherwise (also VALVE_EMU_SERVER), e.g. with a sanitizer

    def command(self, directory: Path) -> list[str]:
        server = self.server or os.environ.get("VALVE_EMU_SERVER") or LIBRARIES / "valve-emu-server"
        command = [os.fspath(server), "--dir", os.fspath(directory), "--gpus", str(self.gpus)]
        command += ["--bytes", str(self.gpu_bytes), "--name", self.name, "--seed", str(self.seed)]
        for name, value in self.knobs.items():
            command += ["--set", f"{name}={value}"]
        for line in self.faults:
            command += ["--fault", line]
        return command


def environment(directory: Path, base: Mapping[str, str]) -> dict[str, str]:
    """`base` with what a program needs to find the emulated driver. Our preload stands behind those already
    there, so that a shim in front of it sees every call first."""
    result = dict(base)
    preload = [entry for entry in base.get("LD_PRELOAD", "").split(":") if entry]
    fakenv = os.fspath(LIBRARIES / "libfakenv.so")
    result["LD_PRELOAD"] = ":".join([entry for entry in preload if entry != fakenv] + [fakenv])
    paths = [os.fspath(LIBRARIES), *filter(None, base.get("LD_LIBRARY_PATH", "").split(":"))]
    result["LD_LIBRARY_PATH"] = ":".join(dict.fromkeys(paths))
    result["VALVE_EMU_DIR"] = os.fspath(directory)
    return result


def is_running(directory: Path) -> bool:
    probe = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        probe.connect(os.fspath(directory / "emu.sock"))
    except OSError:
        return False
    finally:
        probe.close()
    return True


def start(directory: Path, options: Options) -> subprocess.Popen[str]:
    """Start the server and return once it accepts connections."""
    directory.mkdir(parents=True, exist_ok=True)
    server = subprocess.Popen(options.command(directory), stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert server.stdout is not None
    try:
        banner = server.stdout.readline()  # written after listen()
        if not banner:
            raise NoCard(f"valve-emu-server did not start (exit code {server.wait()})")
        (directory / "server.txt").write_text(banner)
    except BaseException:  # a Ctrl-C, too: nobody else knows of it yet
        server.kill()
        server.wait()
        raise
    return server


def stop(server: subprocess.Popen[str]) -> int:
    """End the server and return its exit code; processes still on the node find their nodes dead."""
    server.send_signal(signal.SIGTERM)
    code = server.wait()
    if server.stdout is not None:
        server.stdout.close()
    return code


@contextmanager
def node(options: Options | None = None, directory: Path | None = None) -> Iterator[Emulator]:
    """A node for a test: its own directory, server started and stopped, the client as the value."""
    survivors.end_with_us()
    made = Path(tempfile.mkdtemp(prefix="valve-emu-")) if directory is None else directory
    server = start(made, options or Options())
    try:
        with Emulator(made) as emulator:
            yield emulator
    finally:
        stop(server)
        if directory is None:
            shutil.rmtree(made, ignore_errors=True)


def _quit(directory: Path) -> None:
    with Emulator(directory) as emulator:
        emulator.quit()
    while is_running(directory):
        time.sleep(0.002)


@contextmanager
def shared_node(directory: Path, options: Options) -> Iterator[bool]:
    """A node that several commands may share: the first starts the server, the last stops it.
    A server that was there before all of them is left alone. The value says whether we started it."""
    directory.mkdir(parents=True, exist_ok=True)
    ours = directory / "started-by-run"
    with (directory / "lock").open("w") as lock, (directory / "users").open("w") as users:
        fcntl.flock(lock, fcntl.LOCK_EX)
        first = not is_running(directory)
        if first:
            start(directory, options)
            ours.touch()
        fcntl.flock(users, fcntl.LOCK_SH)
        fcntl.flock(lock, fcntl.LOCK_UN)
        try:
            yield first
        finally:
            fcntl.flock(lock, fcntl.LOCK_EX)
            with suppress(BlockingIOError):  # others still use it
                fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if ours.exists():
                    ours.unlink()
                    _quit(directory)
