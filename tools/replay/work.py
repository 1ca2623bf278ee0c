"""Runs independent tasks over a few processes, with a progress bar; results come back in the order of the tasks."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, TypeVar

from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars
from valve_tools.replay.store import TaskStore

A = TypeVar("A")
B = TypeVar("B")


class TellProgress(Protocol):
    """Told how far a named piece of work is."""

    def __call__(self, label: str, done: int, of: int) -> None: ...


def silent(label: str, done: int, of: int) -> None:
    """For machines and tests."""


class Shown:
    """A progress bar on the error stream, so that results on the output stay clean."""

    def __init__(self, bars: Bars) -> None:
        self._bars = bars
        self._tasks: dict[str, object] = {}

    def __call__(self, label: str, done: int, of: int) -> None:
        if label not in self._tasks:
            self._tasks[label] = self._bars.add_task(label, total=of)
        self._bars.update(self._tasks[label], completed=done, total=of)  # type: ignore[arg-type]


def bars() -> Bars:
    from rich.console import Console

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Bars(*columns, console=Console(stderr=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Workers:
    """How independent tasks are worked off."""

    processes: int = 1
    store: TaskStore = field(default_factory=lambda: TaskStore(folder=None))


def spread(
    work: Callable[[A], B], tasks: Sequence[A], progress: TellProgress, workers: Workers, label: str = "runs"
) -> list[B]:
    """`work` on every task whose result is not kept yet, results in the order of the tasks.

    Spawned processes: the C core's state and rich's threads do not survive a fork.
    """
    results: list[B] = []
    progress(label, 0, len(tasks))
    kept = partial(workers.store.run, work)
    if workers.processes <= 1 or len(tasks) == 1:
        for task in tasks:
            results.append(kept(task))
            progress(label, len(results), len(tasks))
        return results
    pool = ProcessPoolExecutor(
        min(workers.processes, len(tasks)),
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_end_with,
        initargs=(os.getpid(),),
    )
    try:
        for result in pool.map(kept, tasks):
            results.append(result)
            progress(label, len(results), len(tasks))
    except BaseException:
        # The user who interrupts wants the machine back now; a task half done is worth nothing.
        for process in multiprocessing.active_children():
            process.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)
    return results


PR_SET_PDEATHSIG = 1


def _end_with(parent: int) -> None:
    """In a worker: it lives no longer than its parent, which alone answers ^C (a terminal sends it to all)."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
