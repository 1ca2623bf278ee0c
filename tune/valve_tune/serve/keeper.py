"""Sees to it that engines have the versions of a fleet job: also one that was away, or restarted without them.

An engine that restarts comes back without what was loaded into it. What is missing while it stays in sight was unloaded
by somebody, and stays away.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from valve_tune.serve.engines import EngineError, RunningEngine
from valve_tune.serve.publish import hand_over

LOOK_S = 1.0
LONGEST_S = 60.0  # between two tries at an engine that refuses; each pause is twice the last
KEPT = 2  # versions that stay loaded


class EngineKeeper:
    """Of one engine. A thread looks at it; what the engine refuses is tried again, less and less often."""

    def __init__(self, url: str, token: str, name: str, say: Callable[[str], None], look_s: float = LOOK_S) -> None:
        """`name`: its versions are called NAME-vN."""
        self._url, self._token, self._name, self._say, self._look_s = url, token, name, say, look_s
        self._waiting: Path | None = None  # the version that it has still to get
        self._given: list[Path] = []  # it had these, oldest first
        self._base = ("", "")  # that took them
        self._was_away, self._trouble = False, ""
        self._turn = threading.Lock()
        self._is_over = threading.Event()
        threading.Thread(target=self._run, name="engine-keeper", daemon=True).start()

    def hand(self, version: Path) -> None:
        """Now, or as soon as the engine takes it. A newer version takes the place of one that waits."""
        with self._turn:
            self._waiting = version
        self.look()

    def close(self) -> None:
        """One last try for what waits."""
        self._is_over.set()
        if self._waiting is not None:
            self.look()

    def _run(self) -> None:
        pause_s = self._look_s
        while not self._is_over.wait(pause_s):
            is_well = self.look()
            pause_s = self._look_s if is_well else min(LONGEST_S, 2 * pause_s)

    def look(self) -> bool:
        """False: the engine is there, and refuses. One that is away is asked at the same pace as one that is well."""
        with self._turn:
            if self._waiting is None and not self._given:
                return True
            try:
                engine = RunningEngine(self._url, self._token)
            except EngineError as error:
                self._was_away = True
                self._tell(str(error))
                return True
            try:
                self._give(engine)
            except EngineError as error:
                self._tell(str(error))
                return False
            self._trouble = ""
            return True

    def _give(self, engine: RunningEngine) -> None:
        loaded = engine.loaded()
        if self._was_away and self._given and not any(one.name in loaded for one in self._given):
            if (engine.base, engine.root) != self._base:
                raise EngineError(
                    f"{self._url}: serves another base now, {engine.base}; it gets no adapter of the old one"
                )
            for one in reversed(self._given):  # the newest first
                if one.name not in engine.loaded():
                    engine.load(one.name, str(one))
                self._say(f"{self._url} had lost {one.name}, and answers as it again")
        self._was_away = False
        if self._waiting is None:
            return
        version = self._waiting
        if version.name not in loaded:
            hand_over(engine, version, self._name, KEPT, probe=False)
        elif engine.path_of(version.name) not in ("", str(version)):  # else this command was started again
            raise EngineError(f"{self._url}: its {version.name} is another one, from {engine.path_of(version.name)}")
        self._given = [*(one for one in self._given if one != version), version][-KEPT:]
        self._base, self._waiting = (engine.base, engine.root), None
        self._say(f"{self._url} answers as {engine.model_of(version.name)}")

    def _tell(self, trouble: str) -> None:
        """Once for each kind of trouble."""
        if trouble != self._trouble:
            self._trouble = trouble
            self._say(f"valve tune: {trouble}; tried again")
