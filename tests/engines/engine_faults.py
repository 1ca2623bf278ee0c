"""What goes wrong under a real engine beside reclaims, by a seed: the same for vLLM and SGLang, in the scheduler's
process.

Every few steps one of them: valved dies and comes back, at once or some steps later; the link is cut; valved refuses
the layout or the attachment for some steps; it lets go of its table just after a loss was told; a function of the hook
raises, another one in each trial.
"""

from __future__ import annotations

import contextlib
import errno
import random
import socket
from collections.abc import Callable, Sequence
from typing import Any

from faults import Fault
from kv_node import wait_for

EVERY = 9  # steps between two faults, in the mean
AWAY = 6  # steps that an engine makes without a valved, or with one that refuses it
KINDS = (
    *("daemon_dies", "link_is_cut", "table_is_left", "attach_is_slow", "attach_is_refused", "layout_is_refused"),
    "hook_raises",  # first in a trial, and once
)


class Patches:
    """What Fault asks of pytest's monkeypatch."""

    def __init__(self) -> None:
        self._before: list[tuple[Any, str, Any]] = []

    def setattr(self, owner: Any, name: str, value: Any) -> None:
        self._before.append((owner, name, getattr(owner, name)))
        setattr(owner, name, value)

    def undo(self) -> None:
        while self._before:
            setattr(*self._before.pop())


class Faults:
    """`injector` takes blocks; `functions` are those of the hook that may raise, one of them in a trial."""

    def __init__(self, injector: Any, hook: Any, node: Any, functions: Sequence[tuple[Any, str]], seed: int) -> None:
        self.injector, self.hook, self.node = injector, hook, node
        self.chance = random.Random(seed)
        self.raises = functions[seed % len(functions)]
        self.patches = Patches()
        self.done: dict[str, int] = {}
        self.armed: list[Fault] = []
        self._steps_away = 0
        self._come_back: Callable[[], None] = lambda: None

    def between(self) -> None:
        """Between two steps."""
        if self._steps_away:
            self._steps_away -= 1
            if not self._steps_away:
                self._come_back()
                self.injector.is_paused = False
        elif self.chance.randrange(EVERY) == 0:
            kind = self.chance.choice(KINDS[:-1]) if self.armed else KINDS[-1]
            getattr(self, kind)()
            self.done[kind] = self.done.get(kind, 0) + 1

    def end(self) -> None:
        if self._steps_away:
            self._steps_away = 1
            self.between()
        self.patches.undo()

    # ---- kinds ----

    def daemon_dies(self) -> None:
        before = self.hook.link.session
        self.node.stop()
        self.node.start()
        self._wait_for_another(before)

    def link_is_cut(self) -> None:
        before = self.hook.link.session
        self._cut()
        self._wait_for_another(before)

    def table_is_left(self) -> None:
        """A loss is told in a table that valved lets go of at once."""
        before = self.hook.link.session
        self.injector.lose_now()
        self.node.detach()
        self._cut()
        self._wait_for_another(before)

    def attach_is_slow(self) -> None:
        before = self.hook.link.session
        self.node.stop()

        def come_back() -> None:
            self.node.start()
            self._wait_for_another(before)

        self._be_away(come_back)

    def attach_is_refused(self) -> None:
        self._refuse("attach_status", "KV_ATTACH was refused")

    def layout_is_refused(self) -> None:
        self._refuse("layout_status", "KV_LAYOUT was refused")

    def hook_raises(self) -> None:
        fault = Fault(is_late=self.chance.random() < 0.5, is_lasting=False)
        fault.put(self.patches, *self.raises)
        fault.is_armed = True
        self.armed.append(fault)

    # ---- parts ----

    def _refuse(self, answer: str, said: str) -> None:
        before = self.hook.link.session
        setattr(self.node, answer, errno.EINVAL)
        self.node.stop()
        self.node.start()
        self.hook.link._poke.set()
        wait_for(lambda: self.hook.link.said.startswith(said), said)

        def come_back() -> None:
            setattr(self.node, answer, 0)
            self._cut()
            self._wait_for_another(before)

        self._be_away(come_back)

    def _be_away(self, come_back: Callable[[], None]) -> None:
        """valved takes nothing from an engine that is not attached."""
        self.injector.is_paused = True
        self._steps_away, self._come_back = AWAY, come_back

    def _cut(self) -> None:
        for link in self.node._connections:
            with contextlib.suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)
        self.node._connections.clear()

    def _wait_for_another(self, before: Any) -> None:
        self.hook.link._poke.set()
        wait_for(lambda: self.hook.link.session is not before and self.node.attached, "attached again")


def is_believed_again(hook: Any) -> None:
    """The next trial begins with a hook that has never failed."""
    from valve_hook.wire import Mode

    hook.reconciler.is_sure, hook.reconciler.lends, hook.reconciler.mode = True, True, Mode.FULL
    hook.reconciler.ledger._lock._is_whole = True


def detached_is_deaf() -> None:
    """An old fault: a loss in a table that valved has left is not heeded."""
    from valve_hook.reconciler import Reconciler

    heed = Reconciler._heed

    def deaf(reconciler: Any) -> bool:
        session = reconciler.session
        return False if session is not None and session.table.is_detached else heed(reconciler)

    Reconciler._heed = deaf  # type: ignore[method-assign]


HANDLING: dict[str, Callable[[], None]] = {"full": lambda: None, "detached_is_deaf": detached_is_deaf}
