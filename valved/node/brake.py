"""Applies mode, pause and drain: the one place that turns them into what the gate, the register and the ladder do.

policy/stopping.py decides what becomes of offline work. node/leaving.py ends the processes that must leave.

| switch | offline work | its processes | newcomers that `valve run --offline` brings |
|---|---|---|---|
| harvest | as online services let it | stay | welcome |
| pause | stopped on every GPU | stay | welcome, stopped |
| observe, off, drain | stopped on every GPU | must leave | refused |

A process that connects is welcomed in every row, and stopped: one that is turned away would run beside online work.
Pause and drain are files in the run folder: they work without the API and outlive a restart. An order whose file
cannot be made is in force, and lost if valved ends before it can; the status says so.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType

from valved.clients.register import Register
from valved.fds import open_at_once
from valved.gate.freeze import Ladder
from valved.gate.wake import GateService
from valved.machine.ports import PromptPort
from valved.model.events import EventKind
from valved.model.ids import Mode
from valved.model.plain import plain
from valved.model.states import DriverState, UnwrittenState
from valved.node.kv import Kv
from valved.node.leaving import Leaving
from valved.paths import DRAIN_FILE
from valved.policy.stopping import Switches, Work, decide_work
from valved.state.journal import Journal
from valved.state.registry import BRAKE_SERVICE


@dataclass(eq=False, repr=False)
class Brake:
    _gating: GateService
    _register: Register
    ladder: Ladder
    leaving: Leaving
    _journal: Journal
    _pause_file: Path
    _files: PromptPort
    driver: DriverState
    _kv: Kv | None = None

    def __post_init__(self) -> None:
        self.mode = Mode.HARVEST
        self.is_paused = False
        self.paused_by = ""
        self.is_draining = False
        self._drain_file = self._pause_file.with_name(DRAIN_FILE)
        self._unwritten: dict[Path, tuple[str, str]] = {}  # orders that no file took: by whom, and why
        self.is_unsure = False  # the disk did not say whether there is an order
        self._is_drained_by_file = False
        self._is_handed_over = False
        self._then: list[Callable[[], None]] = []  # once the drained node is empty

    @property
    def switches(self) -> Switches:
        return Switches(mode=self.mode, is_paused=self.is_paused, is_draining=self.is_draining)

    @property
    def work(self) -> Work:
        return decide_work(self.switches, is_present=bool(self.leaving.present()))

    @property
    def refusal(self) -> str:
        """Why no offline job may be started here; empty: it may."""
        if self.is_draining:
            return "this node is draining"
        if self.mode is not Mode.HARVEST:
            return f"the mode of this node is {self.mode.value}"
        return self.driver.blindness

    @property
    def next_step(self) -> str:
        """What ends that refusal."""
        if self.is_draining:
            return "valve resume"
        return "set the mode to harvest: valve mode harvest" if self.mode is not Mode.HARVEST else "valve doctor"

    def set_mode(self, mode: Mode, by: str) -> None:
        changed = mode is not self.mode
        self.mode = mode
        self._apply()
        if changed:
            self._journal.emit(EventKind.POLICY, reason=f"mode {mode.value}", by=by)

    def pause(self, by: str) -> None:
        """Write the file; what follows is the same as if a user had written it."""
        self._put(self._pause_file, by, is_first=True)
        self.look_at_file({self._pause_file: self.paused_by if self.is_paused else by})

    def resume(self, by: str = "") -> None:
        if self.is_paused or self.is_draining:
            self._journal.emit(EventKind.POLICY, reason="resume", by=by)
        try:
            self._files.do(partial(_remove, self._pause_file, self._drain_file))
        except TimeoutError:  # it goes once its disk answers: an order that was not written by now is over, too
            self._unwritten.clear()
            self.is_unsure = True
            if not self._is_drained_by_file:  # else the file's end ends the drain
                self._end_drain()
            raise
        self._unwritten.clear()
        self.look_at_file({self._pause_file: None, self._drain_file: None})
        self._end_drain()

    def look_at_file(self, said: Mapping[Path, str | None] = MappingProxyType({})) -> None:
        """Do what the files in the run folder say. `said`: what was just written there, should the disk answer no
        more."""
        self.is_unsure = False
        drained_by = self._order(self._drain_file, "a file" if self._is_drained_by_file else None, said)
        if drained_by is not None and not self._is_drained_by_file:
            self._is_drained_by_file = True
            self._begin_drain()
        elif drained_by is None and self._is_drained_by_file:
            self._end_drain()
        by = self._order(self._pause_file, self.paused_by if self.is_paused else None, said)
        is_paused = by is not None
        self.paused_by = plain(by or "")  # anything may stand in a file
        if is_paused == self.is_paused:
            return
        self.is_paused = is_paused
        self._apply()
        kind = EventKind.PAUSED if is_paused else EventKind.RESUMED
        self._journal.emit(kind, reason=f"by {self.paused_by}" if by else "pause file removed")

    def drain(self, by: str, then: Callable[[], None] | None = None) -> None:
        """Stop all offline work, end its processes, and take none until resumed. With `then`, which is called when
        none is left and no memory moves, this daemon is about to end: its successor begins without a drain."""
        if then is None:
            self._put(self._drain_file, by)
        self._journal.emit(EventKind.POLICY, reason="drain", by=by)
        if then is None:
            self.look_at_file({self._drain_file: by})
        else:
            self._then.append(then)
            self._begin_drain()

    def unwritten(self) -> list[UnwrittenState]:
        """Orders that end with this daemon."""
        return [
            UnwrittenState(path=plain(str(path)), error=why, loss="the order holds until valved ends")
            for path, (_, why) in self._unwritten.items()
        ]

    def _put(self, path: Path, by: str, *, is_first: bool = False) -> None:
        """No file system is in such trouble that offline work could not be stopped."""
        try:
            self._files.do(partial(_put, path, by, is_first=is_first))
            self._unwritten.pop(path, None)
        except OSError as error:
            self._unwritten[path] = by, error.strerror or str(error)

    def _order(self, path: Path, known: str | None, said: Mapping[Path, str | None]) -> str | None:
        """By whom; None: there is none. A file says it, else what no file took: that is tried again at each look. A
        disk that hangs changes nothing."""
        try:
            by = self._files.ask(partial(_first_line, path))
        except TimeoutError:
            self.is_unsure = True
            return self._unwritten[path][0] if path in self._unwritten else said.get(path, known)
        if by is not None:
            self._unwritten.pop(path, None)
        elif path in self._unwritten:
            by = self._unwritten[path][0]
            self._put(path, by)
        return by

    def hand_over(self) -> None:
        """This daemon ends and offline work stays: on GPUs that online services use it is stopped until a successor
        is there, so none runs unwatched. Shims keep to that when the lease ends."""
        self._is_handed_over = True  # no switch takes this back
        self._gating.permits.is_braked = True  # no process that comes from here on is woken
        self.leaving.take_back()  # a drain is its successor's: nobody stays stopped for it
        self._gating.set_standing(
            BRAKE_SERVICE, frozenset(self._gating.gpus) if self.switches.is_closed else self._gating.shared()
        )

    def _begin_drain(self) -> None:
        self.is_draining = True
        self._apply()

    def _end_drain(self) -> None:
        self._is_drained_by_file = False
        if not self.is_draining:
            return
        self.is_draining = False
        self._then.clear()
        self._apply()
        self._journal.emit(EventKind.RESUMED, reason="drain taken back")

    def _emptied(self) -> None:
        if self._kv is None:
            self._end()
        elif self._then:
            self._kv.turn.when_still(self._end)

    def _end(self) -> None:
        """Unless the drain was taken back while memory moved."""
        calls, self._then = self._then, []
        for call in calls:
            call()

    def _apply(self) -> None:
        """The hold first: whatever else follows, offline work is stopped by then."""
        if self._is_handed_over:
            return
        switches = self.switches
        self._gating.set_standing(BRAKE_SERVICE, frozenset(self._gating.gpus if switches.is_closed else ()))
        self._register.channels.lease.set_closed(switches.is_closed)
        # Observing goes on looking when online services are idle; GPUs stay held all the same.
        self._gating.permits.is_braked = self.is_paused or self.is_draining or self.mode is Mode.OFF
        self._gating.permits.ask_idleness("observe", self.mode is Mode.OBSERVE)
        if self._kv is not None:
            self._kv.allow(not switches.must_leave)
        if switches.must_leave:
            self.leaving.begin(self._emptied)
        else:
            self.leaving.take_back()
        self._gating.permits.look_at_all()


def _put(path: Path, by: str, *, is_first: bool) -> None:
    """An empty file says enough: a full disk still takes names. So does what is no file, and a pipe would wait."""
    if path.exists() and (is_first or not path.is_file()):
        return
    try:
        path.write_text(f"{by}\n", encoding="utf-8")
    except OSError:
        if not path.exists():
            raise


def _remove(*paths: Path) -> None:
    """A file system that can only be read refuses this of names that are not there, too."""
    for path in paths:
        try:
            path.unlink(missing_ok=True)
        except OSError:
            if os.path.lexists(path):
                raise


def _first_line(path: Path) -> str | None:
    """The author of the file, from its first line; None if there is no file."""
    try:
        with open(path, encoding="utf-8", errors="replace", opener=open_at_once) as file:
            return file.readline(64).strip() or "a file"
    except OSError:  # a link to nothing is an order, too: whoever made it meant one
        return "an unreadable file" if os.path.lexists(path) else None
