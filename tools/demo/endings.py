"""How a demo ends: by itself, by Ctrl-C, by a kill, by a terminal that closes. All that it started ends with it."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Callable, Iterator
from types import FrameType

ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # the first also where a shell had it ignored in the background


class Interrupted(KeyboardInterrupt):
    """One of these signals came."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.code = 128 + number


class DemoError(Exception):
    """The demo cannot go on; the message holds what is known."""


def perform(name: str, act: Callable[[], int]) -> int:
    """Its exit code. The first signal takes everything down; those that come meanwhile change nothing."""
    for number in ENDS:
        signal.signal(number, _interrupt)
    try:
        return act()
    except Interrupted as end:
        print(f"{name}: interrupted; everything was taken down", file=sys.stderr)
        return end.code
    except DemoError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 1


def _interrupt(number: int, _frame: FrameType | None) -> None:
    for one in ENDS:
        signal.signal(one, signal.SIG_IGN)
    raise Interrupted(number)


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """A signal that comes meanwhile counts at the end. Nothing may be started in here: it would inherit that."""
    former = signal.pthread_sigmask(signal.SIG_BLOCK, ENDS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, former)
