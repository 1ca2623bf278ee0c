"""Descriptors that run out, and whether all of them were given back."""

from __future__ import annotations

import os
import resource
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress


def opened() -> Counter[str]:
    """What this process has open, by what it is. Where no descriptor is free, `left` bounds the numbers to look at.

    Ask for `opened() - before`: what earlier tests left to the garbage collector may be closed in between.
    """
    try:
        numbers = list(map(int, os.listdir("/proc/self/fd")))
    except OSError:
        numbers = list(range(resource.getrlimit(resource.RLIMIT_NOFILE)[0]))
    found: Counter[str] = Counter()
    for number in numbers:
        with suppress(FileNotFoundError):  # the listing's own
            found[os.readlink(f"/proc/self/fd/{number}").partition("[")[0]] += 1
    return found


@contextmanager
def left(count: int) -> Iterator[None]:
    """No more than `count` further descriptors can be open at a time: who asks for one beyond gets EMFILE."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    top = max(map(int, os.listdir("/proc/self/fd"))) + 64 + count
    fillers = [os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)]
    while fillers[-1] < top:  # the kernel gives out the lowest number that is free
        fillers.append(os.dup(fillers[0]))
    try:
        for _ in range(count):
            os.close(fillers.pop())
        resource.setrlimit(resource.RLIMIT_NOFILE, (top + 1, hard))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in fillers:
            os.close(fd)
