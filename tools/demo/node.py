"""A whole Valve node on the emulated GPU, in a folder of its own: server, valved, and whatever runs on it.

The product's own binaries run here exactly as on a real node; only the driver behind them is a stand-in. The demo, the
node benchmarks and tests/node share this one way of bringing it up and taking it down.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from valve_tools.demo.endings import DemoError, undisturbed
from valve_tools.emulator import node as emulated
from valve_tools.emulator import survivors
from valve_tools.emulator.client import Emulator

from valved.cli.client import ask, status_of
from valved.cli.exits import NOT_RUNNING, CliError

if TYPE_CHECKING:
    from rich.console import Console

Seen = TypeVar("Seen")

PATIENCE_S = 200.0  # only ends a hung run; nothing is judged by it
ENDING_S = 5.0
TELL_S = 10.0
VALVE = Path(sys.executable).parent / "valve"


class NodeError(DemoError):
    """The node did not do what was waited for; the message holds what is known."""


@contextlib.contextmanager
def demo_folder(kept: Path | None) -> Iterator[Path]:
    """Where a demo leaves logs and outputs: the folder that was named, or one that goes at the end. Never one that was
    used before: the traces and the state in it would count for the next run."""
    with tempfile.TemporaryDirectory(prefix="valve-demo-") as scratch:
        folder = kept.resolve() if kept else Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        node = EmulatedNode(folder)
        node.refuse_living()
        if node.run_dir.exists():
            raise NodeError(f"{folder} holds an earlier run. Remove it, or take another folder")
        yield folder


@contextlib.contextmanager
def progress(
    console: Console, first: str, now_s: Callable[[], float] = time.monotonic
) -> Iterator[Callable[[str], None]]:
    """Takes texts that say how far a demo is. A terminal has a line that changes; rich writes none into a file or a
    pipe, which gets lines, the next after TELL_S at the earliest."""
    told_s = -math.inf

    def say(text: str) -> None:
        nonlocal told_s
        line.update(text)
        if not console.is_terminal and now_s() - told_s >= TELL_S:
            told_s = now_s()
            console.print(f"  {text}", highlight=False)

    with console.status(first) as line:
        if not console.is_terminal:
            console.print(f"  {first}", highlight=False)
        yield say


class EmulatedNode:
    """Use as a context manager. Everything started through it is gone afterwards, also where we are killed."""

    valve: Sequence[str] = (str(VALVE),)
    valved_prefix: Sequence[str] = ()  # of the command that starts valved
    ends_with_us = True  # also where we are killed

    def __init__(
        self, folder: Path, *, options: emulated.Options | None = None, mode: str = "harvest", config: str = ""
    ) -> None:
        self.folder = folder
        self.run_dir = folder / "run"
        self.mode = mode
        self.config = config
        self.valved: subprocess.Popen[bytes] | None = None
        self._options = options or emulated.Options()
        self._server: subprocess.Popen[str] | None = None
        self._children: list[subprocess.Popen[Any]] = []
        self._emulator: Emulator | None = None

    def __enter__(self) -> EmulatedNode:
        self.refuse_living()
        if self.ends_with_us:
            survivors.end_with_us()
        self.run_dir.mkdir(parents=True, exist_ok=True)
        try:
            with undisturbed():  # a card that is being started is nobody's yet
                self._server = emulated.start(self.folder / "emu", self._options)
                self._emulator = Emulator(self.folder / "emu")
        except emulated.NoCard as error:
            raise NodeError(str(error)) from None
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        with undisturbed():
            for child in [*self._children, *([self.valved] if self.valved else [])]:
                if child.poll() is None:
                    child.send_signal(signal.SIGCONT)
                    child.kill()
                child.wait()
            self._end_descendants()
            if self._emulator:
                self._emulator.close()
            if self._server:
                emulated.stop(self._server)

    def refuse_living(self) -> None:
        """A demo that was killed may have left some."""
        if left := self.inhabitants():
            raise NodeError(
                f"processes of an earlier run still live in {self.folder}: {', '.join(map(str, left))}. "
                "End them, or take another folder"
            )

    def inhabitants(self) -> list[int]:
        """Processes on this node's card, whatever started them: its folder stands in their environment. And the server
        of an earlier card."""
        card = os.fsencode(self.folder / "emu")
        known = {os.getpid(), self._server.pid if self._server else 0}
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                is_on_it = b"VALVE_EMU_DIR=" + card in (entry / "environ").read_bytes().split(b"\0")
                if is_on_it or b"\0--dir\0" + card + b"\0" in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
        return [pid for pid in found if pid not in known]

    def _end_descendants(self) -> None:
        """An engine runs in processes of its own, in sessions of their own; those that are stopped stay killed."""
        deadline = time.monotonic() + PATIENCE_S
        while left := self.inhabitants():
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if time.monotonic() > deadline:
                raise NodeError(f"processes that do not end: {left}")
            time.sleep(0.005)

    @property
    def emulator(self) -> Emulator:
        assert self._emulator is not None, "enter the node first"
        return self._emulator

    def environment(self, extra: Mapping[str, str] | None = None) -> dict[str, str]:
        """What a process on this node finds: the stand-in driver and the run folder."""
        env = emulated.environment(self.folder / "emu", os.environ)
        return {**env, "VALVE_RUN_DIR": str(self.run_dir), **(extra or {})}

    # valved

    def start_valved(self, *flags: str) -> subprocess.Popen[bytes]:
        """Start valved and return once it answers. Its log is `valved.log` in the node's folder."""
        argv = [*self.valved_prefix, sys.executable, "-m", "valved.main"]
        argv += ["--run-dir", str(self.run_dir), "--mode", self.mode, *flags]
        if self.config:
            path = self.folder / "valve.toml"
            path.write_text(self.config)
            argv += ["--config", str(path)]
        with (self.folder / "valved.log").open("ab") as log:
            self.valved = subprocess.Popen(
                argv, env=self.environment(), stdout=log, stderr=log, cwd="/", start_new_session=True
            )
        self.wait_for(self._is_answering, "valved answers")
        return self.valved

    def _is_answering(self) -> bool:
        if self.valved is not None and self.valved.poll() is not None:
            raise NodeError(self._end_of_valved())
        answering = status_of(self.run_dir)  # with --replace, and in a folder in use, an earlier one answers
        return answering is not None and self.valved is not None and answering.pid == self.valved.pid

    def _end_of_valved(self) -> str:
        assert self.valved is not None, "start valved first"
        log = (self.folder / "valved.log").read_text(errors="replace")[-2000:].strip()
        return f"valved ended with {self.valved.returncode}. The end of its log:\n{log}"

    def _is_ending(self, valved: subprocess.Popen[bytes]) -> bool:
        """One that was killed closes its sockets a moment before its end is known."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            valved.wait(ENDING_S)
        return valved.poll() is not None

    def stop_valved(self, how: signal.Signals = signal.SIGTERM) -> int:
        assert self.valved is not None, "start valved first"
        self.valved.send_signal(how)
        return self.valved.wait(PATIENCE_S)

    def status(self) -> Any:
        """One answer of GetStatus."""
        try:
            return ask(self.run_dir)
        except CliError as error:
            if self.valved is None or not (error.code == NOT_RUNNING and self._is_ending(self.valved)):
                raise
            raise NodeError(self._end_of_valved()) from None

    def valved_fds(self) -> int:
        """How many descriptors valved holds: what tests compare before and after."""
        assert self.valved is not None, "start valved first"
        return len(os.listdir(f"/proc/{self.valved.pid}/fd"))

    def valve_command(self, *arguments: str) -> list[str]:
        return [*self.valve, *arguments]

    # workloads

    def run(
        self,
        role: str,
        argv: Sequence[str | Path],
        *,
        name: str = "",
        env: Mapping[str, str] | None = None,
        out: Path | None = None,
    ) -> subprocess.Popen[bytes]:
        """Start a program: role "online" or "offline" through `valve run`, "" without Valve."""
        command = [str(part) for part in argv]
        if role:
            command = [*self.valve, "run", f"--{role}", *(["--name", name] if name else []), "--", *command]
        sink = out.open("wb") if out else (self.folder / f"{name or 'program'}.log").open("ab")
        with sink:
            child = subprocess.Popen(command, env=self.environment(env), stdout=sink, stderr=subprocess.STDOUT, cwd="/")
        self.adopt(child)
        return child

    def adopt(self, child: subprocess.Popen[Any]) -> None:
        """End this process, too, when the node goes."""
        self._children.append(child)

    def wait_for(self, look: Callable[[], Seen], what: str, patience_s: float = PATIENCE_S) -> Seen:
        """The first truthy answer of `look`. The patience ends only a hung run."""
        deadline = time.monotonic() + patience_s
        while True:
            seen = look()
            if seen:
                return seen
            if time.monotonic() > deadline:
                raise NodeError(f"never happened: {what}")
            time.sleep(0.005)
