"""How far Valve may go right now: mode, pause, drain. One place turns them into what the gate and the register do.

| state    | gates            | wakes | offline newcomers |
| harvest  | yes              | yes   | welcome           |
| observe  | counted only     | yes   | welcome           |
| off      | no               | no    | refused           |
| paused   | yes, every GPU   | no    | welcome, gated    |
| draining | no, all enabled  | no    | refused           |

Pausing is a file in the run folder: it works without the API and outlives a restart.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from valved.clients.register import Register
from valved.gate.freeze import Ladder
from valved.gate.wake import GateService
from valved.machine.ports import GatePort
from valved.model.events import EventKind
from valved.model.ids import Mode
from valved.state.journal import Journal


class Brake:
    def __init__(
        self,
        gate: GatePort,
        keeper: GateService,
        register: Register,
        ladder: Ladder,
        journal: Journal,
        pause_file: Path,
    ) -> None:
        self.mode = Mode.HARVEST
        self.is_paused = False
        self.paused_by = ""
        self.is_draining = False
        self.allow_reclaim: Callable[[bool], None] = lambda on: None
        self.when_still: Callable[[Callable[[], None]], None] = lambda call: call()
        self._gate = gate
        self._keeper = keeper
        self._register = register
        self.ladder = self._ladder = ladder
        self._journal = journal
        self._pause_file = pause_file

    def set_mode(self, mode: Mode, by: str) -> None:
        changed = mode is not self.mode
        self.mode = mode
        self._apply()
        self.when_still(lambda: self._gate.set_observe(self.mode is not Mode.HARVEST))
        if changed:
            self._journal.emit(EventKind.POLICY, reason=f"mode {mode.value}", by=by)

    def pause(self, by: str) -> None:
        """Write the file; what follows is the same as if somebody else had."""
        if not self._pause_file.exists():
            self._pause_file.write_text(f"{by}\n", encoding="utf-8")
        self.look_at_file()

    def resume(self) -> None:
        self._pause_file.unlink(missing_ok=True)
        self.look_at_file()
        if self.is_draining:
            self.is_draining = False
            self._gate.set_draining(False)
            self._gate.set_observe(self.mode is not Mode.HARVEST)
            self._apply()
            self._journal.emit(EventKind.RESUMED, reason="drain taken back")

    def look_at_file(self) -> None:
        by = _first_line(self._pause_file)
        is_paused = by is not None
        self.paused_by = by or ""
        if is_paused == self.is_paused:
            return
        self.is_paused = is_paused
        self._keeper.set_pause(is_paused)
        self._apply()
        kind = EventKind.PAUSED if is_paused else EventKind.RESUMED
        self._journal.emit(kind, reason=f"by {by}" if by else "pause file removed")

    def drain(self, by: str, then: Callable[[], None] = lambda: None) -> None:
        """Enable everything and gate nothing from here on. No reclaim begins; one under way ends first, for its pages
        have holes: some milliseconds."""
        self.is_draining = True
        self._apply()
        self.when_still(lambda: self._let_go(by, then))

    def _let_go(self, by: str, then: Callable[[], None]) -> None:
        if self.is_draining:
            self._gate.set_draining(True)
            left = self._gate.enable_all()
            self._keeper.drain()
            self._register.channels.release_schedules()
            self._journal.emit(EventKind.DRAINED, reason=f"by {by}", channels_left_off=len(left))
        then()

    def _apply(self) -> None:
        self._keeper.is_braked = self.is_paused or self.is_draining or self.mode is Mode.OFF
        self._keeper.ask_idleness("observe", self.mode is Mode.OBSERVE)
        self._ladder.set_active(self.mode is Mode.HARVEST and not self.is_draining)
        self.allow_reclaim(self.mode is Mode.HARVEST and not self.is_draining)
        self._register.channels.is_draining = self.is_draining
        self._keeper.look_at_all()


def _first_line(path: Path) -> str | None:
    """Who paused, from the file's first line; None if there is no file."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            return file.readline(64).strip() or "a file"
    except FileNotFoundError:
        return None
    except OSError:
        return "an unreadable file"
