"""Gives back the pages of large libraries that only the start needed. What is used again is mapped again.

The kernel maps a file's pages around each one that is touched, as far as it has them in memory: after a fresh
installation that is most of the libraries, and valved does not look at some 10 MB of them again.
"""

from __future__ import annotations

import contextlib
import ctypes
import re
import struct
from collections.abc import Iterator
from mmap import PAGESIZE
from pathlib import Path

LARGE_BYTES = 1 << 18
_MADV_DONTNEED = 4
_HEAD = re.compile(r"([0-9a-f]+)-([0-9a-f]+) (r-[x-]p) ([0-9a-f]+) \S+ [1-9]\d* +(/.*)")
_ELF, _ELF64 = struct.Struct("=6s26xQ14xHH6x"), b"\x7fELF\x02\x01"
_SEGMENT, _LOAD, _WRITABLE = struct.Struct("=IIQQQQQQ"), 1, 2
_libc = ctypes.CDLL(None)


def give_back_start_pages() -> None:
    """Of this process. Not on the loop: the kernel walks all page tables for it."""
    with contextlib.suppress(OSError):  # a /proc without it
        for begin, size in _code(Path("/proc/self/smaps").read_text(errors="replace")):
            _libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(size), _MADV_DONTNEED)


def _code(smaps: str) -> Iterator[tuple[int, int]]:
    """Mappings of libraries that nobody can write through, that hold no page of our own and stay where they are:
    nothing is lost, and nothing else is there by the time it is given back."""
    found = None
    for line in smaps.splitlines():
        if head := _HEAD.match(line):
            begin, size = int(head[1], 16), int(head[2], 16) - int(head[1], 16)
            found = (begin, size, int(head[4], 16), head[5]) if size >= LARGE_BYTES else None
        elif found is not None and line.startswith(("Anonymous:", "Swap:")):
            begin, size, offset, path = found
            if int(line.split()[1]):
                found = None
            elif line.startswith("Swap:") and (offset, size) in _fixed(path):  # the later of the two
                yield begin, size


def _fixed(path: str) -> set[tuple[int, int]]:
    """Offset and size of what a library is never written in, page by page. While a library is being loaded, a mapping
    for all of it stands where its data will be, and is no such one."""
    with contextlib.suppress(OSError, OverflowError, struct.error), open(path, "rb") as file:
        magic, at, each, count = _ELF.unpack(file.read(_ELF.size))
        if magic == _ELF64 and each == _SEGMENT.size:
            file.seek(at)
            found = set()
            for kind, flags, offset, _, _, size, _, _ in _SEGMENT.iter_unpack(file.read(each * count)):
                if kind == _LOAD and not flags & _WRITABLE:
                    start = offset // PAGESIZE * PAGESIZE
                    found.add((start, -(-(offset + size) // PAGESIZE) * PAGESIZE - start))
            return found
    return set()
