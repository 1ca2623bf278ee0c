"""How often a trainer asks a router that fails it, when its operator is told, and when the trainer gives up."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from valve_tune.serve.folder import FolderError
from valve_tune.serve.link import GivenUp, RouterAway

FIRST_S, LONGEST_S = 1.0, 30.0  # until it is asked again: each wait is twice the last
TOLD = (3, 6, 12, 24)  # failures; one that the next try heals is no trouble
GIVE_UP_S, TRIES = 600.0, 10  # both: a trainer that stood still for an hour has seen nothing of a router


T = TypeVar("T")


class AsksRouter(Protocol):
    """What `link.RouterLink` is."""

    def ask(self, path: str, asked: dict[str, Any]) -> dict[str, Any]: ...

    def send(self, path: str, said: dict[str, Any], document: bytes) -> dict[str, Any]: ...

    def blob(self, name: str) -> bytes: ...


@dataclass(slots=True)
class _Failing:
    since_s: float
    tries: int = 0


class PatientLink:
    """Each kind of question is counted by itself. Otherwise a router that answers `join` and fails `take` would be
    asked for ever: after each failure the trainer joins again."""

    def __init__(self, link: AsksRouter, tell: Callable[[str], None]) -> None:
        """`tell` hears of a trouble that lasts, and the empty text when it is over."""
        self._link, self._tell = link, tell
        self._failing: dict[str, _Failing] = {}
        self._last, self._told = "", ""

    def ask(self, path: str, asked: dict[str, Any]) -> dict[str, Any]:
        return self._tried(path, lambda: self._link.ask(path, asked))

    def send(self, path: str, said: dict[str, Any], document: bytes) -> dict[str, Any]:
        return self._tried(path, lambda: self._link.send(path, said, document))

    def blob(self, name: str) -> bytes:
        return self._tried("blob", lambda: self._link.blob(name)) if name else b""

    def _tried(self, path: str, call: Callable[[], T]) -> T:
        try:
            answer = call()
        except (RouterAway, GivenUp):
            self._failing.setdefault(path, _Failing(time.monotonic())).tries += 1
            self._last = path
            raise
        except FolderError:  # the router has answered
            self._over(path)
            raise
        self._over(path)
        return answer

    def _over(self, path: str) -> None:
        self._failing.pop(path, None)
        if path == self._told:
            self._told = ""
            self._tell("")

    def after(self, error: RouterAway | GivenUp) -> float:
        """How long to wait after what has failed last."""
        failing = self._failing[self._last]
        lasts_s = time.monotonic() - failing.since_s
        is_gone = isinstance(error, GivenUp)
        what = "the router gives this trainer up" if is_gone else "the router is away"
        if lasts_s > GIVE_UP_S and failing.tries >= TRIES:
            hint = "; is there another trainer of its name?" if is_gone else ""
            raise FolderError(f"{what}: {self._last} failed {failing.tries} times in {lasts_s:.0f} s: {error}{hint}")
        wait_s: float = min(LONGEST_S, FIRST_S * 2 ** min(failing.tries - 1, 10))
        if failing.tries in TOLD:
            self._told = self._last
            self._tell(f"{what}: {self._last} failed {failing.tries} times: {error}; asking again in {wait_s:g} s")
        return wait_s

    def paused(self, seconds: float) -> None:
        """A pause is the owner's, and nobody asked the router in it."""
        for failing in self._failing.values():
            failing.since_s += seconds
