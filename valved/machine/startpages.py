"""Gives back the pages of large libraries that only the start needed. What is used again is mapped again.

The kernel maps a file's pages around each one that is touched, as far as it has them in memory: after a fresh
installation that is most of the libraries, and valved does not look at some 5 MB of them again.
"""

from __future__ import annotations

import contextlib
import ctypes
import re
from collections.abc import Iterator
from pathlib import Path

LARGE_BYTES = 1 << 20
_MADV_DONTNEED = 4
_HEAD = re.compile(r"([0-9a-f]+)-([0-9a-f]+) (\S+) \S+ \S+ ([1-9]\d*) ")
_libc = ctypes.CDLL(None)


def give_back_start_pages() -> None:
    """Of this process. Not on the loop: the kernel walks all page tables for it."""
    with contextlib.suppress(OSError):  # a /proc without it
        for begin, size in _code(Path("/proc/self/smaps").read_text(errors="replace")):
            _libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(size), _MADV_DONTNEED)


def _code(smaps: str) -> Iterator[tuple[int, int]]:
    """Mappings of files that nobody can write through, that hold no page of our own and stay where they are: nothing
    is lost, and nothing else is there by the time it is given back."""
    found = None
    for line in smaps.splitlines():
        head = _HEAD.match(line)
        if head is not None:
            begin, size = int(head[1], 16), int(head[2], 16) - int(head[1], 16)
            found = (begin, size) if size >= LARGE_BYTES and head[3] == "r-xp" else None
        elif found is not None and line.startswith("Anonymous:"):
            if int(line.split()[1]) == 0:
                yield found
            found = None
