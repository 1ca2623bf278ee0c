"""Threads for calls that may never come back: closing and looking at descriptors that strangers sent.

The loop hands a job over and goes on. A job that hangs keeps its thread; the next gets another one, up to `most`.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import errno
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar, cast

from valved.machine.callers import close_all

Result = TypeVar("Result")

log = logging.getLogger("valved")

PATIENCE_S = 0.01  # of the loop, with a disk; online work may wait for the loop
SHORT = "valved gets no thread, and what needs one waits, such as new processes: see its limits of memory and tasks"
NO_ANSWER = "the disk does not answer"
MOST_LEFT = 10_000  # jobs that a disk which hangs has not taken
CLOSERS = 32
CLOSERS_OF_ACCOUNT = CLOSERS // 4
WORKERS = 2  # that compute: more would keep the interpreter from the loop
AGAIN_S = 0.1  # where no thread can be had
BACKLOG = 256  # descriptors of an account that wait to be closed; beyond, it is not read


class Helpers:
    def __init__(self, name: str, most: int) -> None:
        self._name = name
        self._most = most
        self._work: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._lock = threading.Lock()
        self._threads = 0
        self._free = 0  # threads that wait for work, less jobs that wait for a thread
        self._is_due = False  # a timer asks for a thread again
        self._is_short = False  # and the log says so

    def do(self, job: Callable[[], None]) -> None:
        with self._lock:
            fresh = self._free <= 0 and self._threads < self._most
            self._threads += fresh
            self._free -= not fresh
        self._work.put(job)
        if fresh:
            self._begin()

    def _begin(self) -> None:
        """A daemon: a call that never comes back must not keep valved from leaving. Where there is no thread to be had,
        the job waits for the one that a timer asks for, or the next job."""
        try:
            threading.Thread(target=self._serve, name=self._name, daemon=True).start()
            self._is_short = False
        except RuntimeError as error:
            with self._lock:
                self._threads -= 1
                self._free -= 1
                is_due, self._is_due = self._is_due, True
                is_said, self._is_short = self._is_short, True
            if not is_due:
                self._ask_later()
            if not is_said:
                log.warning(SHORT, extra={"facts": {"thread": self._name, "error": str(error)}})

    def _ask_later(self) -> None:
        try:
            asyncio.get_running_loop().call_later(AGAIN_S, self._ask_again)
        except RuntimeError:  # no loop, no timer
            self._is_due = False

    def _ask_again(self) -> None:
        with self._lock:
            self._is_due = False
            is_wanted = self._free < 0 and self._threads < self._most
            self._threads += is_wanted
            self._free += is_wanted
        if is_wanted:
            self._begin()

    def _serve(self) -> None:
        while True:
            job = self._work.get()
            try:
                job()
            except OSError:
                pass
            except Exception:  # a defect: it costs this job, not the thread, which may be the only one
                log.exception("job failed", extra={"facts": {"thread": self._name}})
            del job
            with self._lock:
                self._free += 1

    @property
    def backlog(self) -> int:
        """Jobs that no thread has begun."""
        return self._work.qsize()


@dataclass(slots=True)
class _Closings:
    """Of one account."""

    waiting: deque[Callable[[], None]] = field(default_factory=deque)
    under_way: int = 0


class Closer:
    """Closes what strangers sent. close() may wait for as long as its sender likes: SO_LINGER, a FUSE file. So an
    account has a quarter of the threads at most, and what others sent does not wait for its own."""

    def __init__(self) -> None:
        self._helpers = Helpers("valved-close", CLOSERS)
        self._lock = threading.Lock()
        self._accounts: dict[Hashable, _Closings] = {}
        self._account: Hashable = None  # nobody's: what is valved's own, or comes before anybody has looked who it is

    def of(self, account: Hashable) -> Closer:
        """The same, for what an account sent."""
        mine = copy.copy(self)
        mine._account = account
        return mine

    def close(self, fds: Iterable[int]) -> None:
        for fd in fds:
            self.do(partial(os.close, fd))

    def do(self, job: Callable[[], None]) -> None:
        most = CLOSERS if self._account is None else CLOSERS_OF_ACCOUNT
        with self._lock:
            mine = self._accounts.setdefault(self._account, _Closings())
            mine.waiting.append(job)
            may_begin = mine.under_way < most
            mine.under_way += may_begin
        if may_begin:
            self._helpers.do(self._next)

    def _next(self) -> None:
        """One job in its turn, behind those of other accounts."""
        with self._lock:
            mine = self._accounts[self._account]
            job = mine.waiting.popleft() if mine.waiting else None
        try:
            if job is not None:
                job()
        finally:
            with self._lock:
                has_more = bool(mine.waiting)
                mine.under_way -= not has_more
                if not mine.under_way:
                    del self._accounts[self._account]
            if has_more:
                self._helpers.do(self._next)

    def close_in_turn(self, fds: Iterable[int]) -> None:
        """Many of one kind, by one thread: the driver's own, which may wait for its lock but not for a stranger, or
        what one stranger sent, who can keep nothing else open."""
        mine = list(fds)
        self.do(lambda: close_all(mine))

    @property
    def is_behind(self) -> bool:
        return self.is_behind_with(self._account)

    def is_behind_with(self, account: Hashable) -> bool:
        """More wait of what this account sent than may."""
        with self._lock:
            mine = self._accounts.get(account)
            return mine is not None and len(mine.waiting) > BACKLOG


class Worker:
    """Does what would keep the loop for long, such as work whose size is for a client to choose."""

    def __init__(self, loop: asyncio.AbstractEventLoop, helpers: Helpers | None = None) -> None:
        self._loop = loop
        self._helpers = helpers or Helpers("valved-work", WORKERS)

    def do(self, job: Callable[[], Any], then: Callable[[Any, Exception | None], None]) -> None:
        """The job in a thread; `then`, in the loop, with what it returned or raised."""

        def work() -> None:
            result, error = None, None
            try:
                result = job()
            except Exception as caught:
                error = caught
            with contextlib.suppress(RuntimeError):  # the loop is closed: valved leaves
                self._loop.call_soon_threadsafe(then, result, error)

        self._helpers.do(work)

    def result_of(self, job: Callable[[], Result]) -> asyncio.Future[Result]:
        """What it returns or raises, for one who may give up waiting."""
        answer: asyncio.Future[Result] = self._loop.create_future()

        def then(result: Result, error: Exception | None) -> None:
            if answer.done():
                return
            if error is not None:
                answer.set_exception(error)
            else:
                answer.set_result(result)

        self.do(job, then)
        return answer


async def heard(ask: Callable[[Callable[[Result], None]], None]) -> Result:
    """What `ask` calls back with."""
    answer: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
    ask(lambda result: None if answer.done() else answer.set_result(result))
    return await answer


class Prompt:
    """Small jobs on files, one after another, in a thread. The loop waits for each, as what follows must not come
    before it; but for a disk that hangs it waits once, and not long."""

    def __init__(self, helpers: Helpers | None = None) -> None:
        self._helpers = helpers or Helpers("valved-files", 1)
        self._last = threading.Event()
        self._last.set()

    def do(self, job: Callable[[], Result]) -> Result:
        """What it returns or raises. TimeoutError, which is an OSError: its disk does not answer. The job is done when
        it does, in its turn."""
        if self._helpers.backlog > MOST_LEFT:
            raise TimeoutError(errno.ETIMEDOUT, NO_ANSWER)
        is_done, answer = threading.Event(), list[tuple[Result | None, Exception | None]]()

        def work() -> None:
            try:
                answer.append((job(), None))
            except Exception as error:
                answer.append((None, error))
            is_done.set()

        before, self._last = self._last, is_done
        self._helpers.do(work)
        if not before.is_set() or not is_done.wait(PATIENCE_S):
            raise TimeoutError(errno.ETIMEDOUT, NO_ANSWER)
        ((result, error),) = answer
        if error is not None:
            raise error
        return cast("Result", result)

    def ask(self, question: Callable[[], Result]) -> Result:
        """A job that changes nothing. As long as another one has no answer it is not left for later: hours of such
        would leave no room for those that must be done."""
        if not self._last.is_set():
            raise TimeoutError(errno.ETIMEDOUT, NO_ANSWER)
        return self.do(question)
