"""How a demo ends: by itself, by Ctrl-C, by a kill, by a terminal that closes. All that it started ends with it."""

from __future__ import annotations

import contextlib
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType

from valve_tools.emulator import survivors
from valve_tools.emulator.run import ENDS

from valved.cli.exits import CliError

EXIT_VOID = 3  # this machine says nothing about what was to be shown


class Interrupted(KeyboardInterrupt):
    """One of these signals came."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.code = 128 + number


class DemoError(Exception):
    """The demo cannot go on; the message holds what is known."""


def performed(argv: Sequence[str], env: Mapping[str, str] | None = None) -> str:
    """Runs a program of which nothing is shown unless it fails. What it printed."""
    done = subprocess.run(argv, capture_output=True, text=True, errors="replace", env=env, check=False)
    if done.returncode:
        raise DemoError(f"{shlex.join(argv)} ended with {done.returncode}. Its end:\n{done.stderr[-2000:].strip()}")
    return done.stdout


def perform(name: str, act: Callable[[], int]) -> int:
    """Its exit code. The first signal takes everything down; those that come meanwhile change nothing."""
    for number in ENDS:
        signal.signal(number, _interrupt)
    try:
        with survivors.ended_with_us():
            return act()
    except Interrupted as end:
        print(f"{name}: interrupted; everything was taken down", file=sys.stderr)
        return end.code
    except (DemoError, CliError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 1


@dataclass(slots=True)
class _Signals:
    """What came while nothing may be left half done."""

    held: int = 0
    waiting: int = 0


_signals = _Signals()


def _interrupt(number: int, _frame: FrameType | None) -> None:
    if _signals.held:
        _signals.waiting = number
        return
    for one in ENDS:
        signal.signal(one, signal.SIG_IGN)
    raise Interrupted(number)


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """A signal that comes meanwhile counts at the end. No mask, which a program that is started would inherit."""
    _signals.held += 1
    try:
        yield
    finally:
        _signals.held -= 1
    if _signals.waiting and not _signals.held:
        _interrupt(_signals.waiting, None)
