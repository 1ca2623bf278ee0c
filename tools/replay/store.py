"""Results of finished tasks on disk, so that a long experiment goes on where it was stopped.

The key is the content of everything that a result follows from: the task (traces, settings, seed), the function that
works on it and the code that simulates and decides. Whatever changes there changes the key; an old result can never
stand for a new question.
"""

from __future__ import annotations

import hashlib
import inspect
import os
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import valve_scheduler
import valve_tools.sim

import valved.model
import valved.policy

A = TypeVar("A")
B = TypeVar("B")
CODE = (valve_tools.sim, valved.policy, valved.model, valve_scheduler)
PROTOCOL = 5


def default_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "valve" / "replay"


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskStore:
    """A folder with one file per finished task; None keeps nothing."""

    folder: Path | None

    def run(self, work: Callable[[A], B], task: A) -> B:
        """The kept result, else `work(task)`, kept at once."""
        if self.folder is None:
            return work(task)
        path = self.folder / f"{_key(work, task)}.pickle"
        found: list[B] = _load(path)
        if found:
            return found[0]
        result = work(task)
        self.folder.mkdir(parents=True, exist_ok=True)
        partly = path.with_suffix(f".{os.getpid()}")
        partly.write_bytes(pickle.dumps(result, PROTOCOL))
        partly.replace(path)
        return result


def _load(path: Path) -> list[Any]:
    """The result as the only element; nothing where there is none, or none that can be read."""
    try:
        return [pickle.loads(path.read_bytes())]
    except (OSError, EOFError, pickle.UnpicklingError, AttributeError, ImportError):
        return []


def _key(work: Callable[..., Any], task: object) -> str:
    content = hashlib.sha256(code_digest() + inspect.getsource(work).encode())
    content.update(pickle.dumps(task, PROTOCOL))
    return content.hexdigest()


@cache
def code_digest() -> bytes:
    """Of all sources that simulate or decide; how pages are made does not matter."""
    digest = hashlib.sha256()
    for package in CODE:
        for path in sorted(Path(str(package.__file__)).parent.rglob("*")):
            if path.suffix in (".py", ".so", ".c", ".h"):
                digest.update(path.name.encode() + path.read_bytes())
    return digest.digest()
