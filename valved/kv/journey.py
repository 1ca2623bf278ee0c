"""Journeys: services that take several steps and wait in between, written top to bottom.

A journey is a coroutine that awaits `Pause`s. The code that sets a pause takes the journey on at once, in the same turn
of the loop: on the way of a reclaim no turn is lost, and tests run it on virtual time without a loop.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine, Generator
from typing import Any

from valved.machine.clock import Clock

log = logging.getLogger(__name__)


class Pause:
    """Set once, from outside. A reclaim makes dozens of them: what none waits for costs nothing."""

    is_set = False
    _then: tuple[Callable[[], object], ...] = ()

    def set(self) -> None:
        if self.is_set:
            return
        self.is_set = True
        waiting, self._then = self._then, ()
        errors = []
        for call in waiting:  # each of them waits for itself: one that fails takes no other along
            try:
                call()
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def then(self, call: Callable[[], object]) -> None:
        """Call it when set; at once if it is."""
        if self.is_set:
            call()
        else:
            self._then = (*self._then, call)

    def __await__(self) -> Generator[Pause, None, None]:
        if not self.is_set:
            yield self


def _log(error: Exception) -> None:
    log.error("a step of the memory service failed and was given up; the other steps go on", exc_info=error)


failed: Callable[[Exception], None] = _log
"""What is done about a journey that raised."""


def start(journey: Coroutine[Pause, None, Any]) -> None:
    """Run until it ends, from pause to pause. What it raises ends it alone: the code that set the pause goes on, and
    what it holds is let go by its own `finally`."""

    coroutine: Any = journey  # its type says nothing of its state

    def go_on() -> None:
        if coroutine.cr_running or coroutine.cr_frame is None:  # dropped for want of a waker; its `finally` set a pause
            return
        try:
            pause = journey.send(None)
        except StopIteration:
            return
        except Exception as error:
            failed(error)
            return
        pause.then(go_on)

    go_on()


async def until(pause: Pause, clock: Clock, deadline_ns: int) -> bool:
    """Wait for it, at most until then. False: the time came first."""
    if pause.is_set:
        return True
    either = Pause()
    timer = clock.call_at_ns(deadline_ns, either.set)
    pause.then(either.set)
    await either
    timer.cancel()
    return pause.is_set


def all_of(pauses: list[Pause]) -> Pause:
    """Set when every one of them is."""
    whole = Pause()
    left = len(pauses)

    def one() -> None:
        nonlocal left
        left -= 1
        if left == 0:
            whole.set()

    for pause in pauses:
        pause.then(one)
    if not pauses:
        whole.set()
    return whole
