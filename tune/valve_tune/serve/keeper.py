"""Sees to it that engines have the versions of a fleet job: also one that was away, or restarted without them.

An engine that restarts comes back without the adapters that were loaded into it. An adapter that goes while the engine
is seen all the time was unloaded by an operator, and stays away.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from valve_tune.serve.engines import EngineError, RunningEngine
from valve_tune.serve.publish import hand_over

LOOK_S = 1.0
LONGEST_S = 60.0  # between two tries at an engine that refuses; each pause is twice the last
CLOSE_S = 60.0  # for the last version, where a job ends
KEPT = 2  # versions that stay loaded


class EngineKeeper:
    """Of one engine. A thread looks at it; what the engine refuses is tried again, less and less often."""

    def __init__(self, url: str, token: str, name: str, say: Callable[[str], None], look_s: float = LOOK_S) -> None:
        """`name`: its versions are called NAME-vN."""
        self._url, self._token, self._name, self._say, self._look_s = url, token, name, say, look_s
        self._waiting: Path | None = None  # the version that it has still to get
        self._giving: Path | None = None  # the last one that it was given or is being given
        self._given: list[Path] = []  # it had these, oldest first
        self._base = ("", "")  # that took them
        self._loaded: set[str] | None = None  # what it had when it was asked last, and the folders of that
        self._was_away, self._trouble = False, ""
        self._pause_s = self._next_s = 0.0  # what was refused is tried again then
        self._changing = threading.Lock()  # of what waits; never held while the engine is asked
        self._has_more, self._is_over = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="engine-keeper", daemon=True)
        self._thread.start()

    def hand(self, version: Path) -> None:
        """As soon as the engine takes it; the job does not wait. A newer version takes the place of one that waits."""
        with self._changing:
            self._waiting = version
        self._has_more.set()

    def uses(self) -> set[str] | None:
        """The versions that it has or is to get. None: it has not said yet what it has."""
        if self._loaded is None:
            return None
        with self._changing:
            coming = [one for one in (self._waiting, self._giving) if one]
        return self._loaded | {one.name for one in (*self._given, *coming)}

    def close(self) -> None:
        """One last try for what waits, and not without end."""
        self._is_over.set()
        self._has_more.set()
        self._thread.join(CLOSE_S)

    def _run(self) -> None:
        is_over = False
        while not is_over:
            has_more = self._has_more.wait(self._look_s)
            self._has_more.clear()
            is_over = self._is_over.is_set()
            if is_over and self._waiting is None:
                return
            try:
                self._look(is_due=has_more)
            except EngineError as error:
                self._tell(str(error))
            except Exception as error:  # whatever an engine says, the others of its versions are kept
                self._tell(f"{self._url}: {type(error).__name__}: {error}")

    def _look(self, *, is_due: bool) -> None:
        """Whether it is away is asked at one pace. Only what it refuses is tried less and less often."""
        if self._waiting is None and not self._given:
            return
        try:
            engine = RunningEngine(self._url, self._token)
        except EngineError as error:
            self._was_away, self._next_s = True, 0.0
            self._tell(str(error))
            return
        if not is_due and time.monotonic() < self._next_s:
            return
        self._pause_s = min(LONGEST_S, 2 * self._pause_s or self._look_s)
        try:
            self._give(engine)
            self._trouble, self._pause_s = "", 0.0
        finally:
            self._next_s = time.monotonic() + self._pause_s

    def _give(self, engine: RunningEngine) -> None:
        loaded = engine.loaded()
        paths = [each for path in loaded.values() for each in (path, os.path.realpath(path))]
        self._loaded = {*loaded, *(Path(path).name for path in paths)}  # a folder may serve under another name
        if self._was_away and self._given and not any(one.name in loaded for one in self._given):
            if (engine.base, engine.root) != self._base:
                raise EngineError(
                    f"{self._url}: serves another base now, {engine.base}; it gets no adapter of the old one"
                )
            for one in reversed(self._given):  # the newest first
                if one.name not in engine.loaded():
                    engine.load(one.name, str(one))
                self._say(f"{self._url} had lost {one.name} and has it again")
        self._was_away = False
        with self._changing:  # a newer one may come while the engine still reads this one
            version = self._waiting
            self._giving = version or self._giving
        if version is None:
            return
        if version.name not in loaded:
            hand_over(engine, version, self._name, KEPT, probe=False)
        elif engine.path_of(version.name) not in ("", str(version)):  # else this command was started again
            raise EngineError(
                f"{self._url}: its {version.name} is another adapter, from {engine.path_of(version.name)}"
            )
        self._given = [*(one for one in self._given if one != version), version][-KEPT:]
        self._base = (engine.base, engine.root)
        with self._changing:
            if self._waiting == version:
                self._waiting = None
        self._say(f"{self._url} answers as {engine.model_of(version.name)}")

    def _tell(self, trouble: str) -> None:
        """Once for each kind of trouble."""
        if trouble != self._trouble:
            self._trouble = trouble
            self._say(f"valve tune: {trouble}; tried again")
