"""Pages that only the start needed are given back, and nothing that is ours alone goes with them."""

from __future__ import annotations

import struct
import subprocess
import sys
from pathlib import Path

HEADER = struct.Struct("=16sHHIQQQIHHHHHH")
SEGMENT = struct.Struct("=IIQQQQQQ")
LOAD, EXECUTED, WRITTEN, READ = 1, 1, 2, 4
MIB = 1 << 20

# Children: what they give back is their own.
MAPS = """
import ctypes, mmap, re, sys
from pathlib import Path
from valved.machine import startpages

libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
size, may_write = 4 << 20, mmap.PROT_READ | mmap.PROT_WRITE
"""

# It changes a page as a debugger would, and keeps a private page of a file that it may not write to any more, as
# the loader leaves them.
KEEPS = """
def resident_kb():
    return int(re.search(r"RssFile:\\s+(\\d+)", open("/proc/self/status").read())[1])

with open(sys.argv[1], "rb") as file:
    mine, others = (libc.mmap(None, size, may_write, mmap.MAP_PRIVATE, file.fileno(), 0) for _ in range(2))
ctypes.memset(mine + 4096, 7, 1)
for at in (mine, others):
    ctypes.string_at(at, size)
    assert libc.mprotect(ctypes.c_void_p(at), ctypes.c_size_t(size), mmap.PROT_READ | int(sys.argv[2])) == 0
before = resident_kb()
startpages.give_back_start_pages()
after = resident_kb()
assert ctypes.string_at(mine + 4096, 2) == b"\\7a", "a page of its own was given back"
assert ctypes.string_at(others + 4096, 2) == b"aa"
print(before - after)
"""

# The same page, when the kernel has swapped it out.
SWAPPED = """
with open(sys.argv[1], "rb") as file:
    mine = libc.mmap(None, size, may_write, mmap.MAP_PRIVATE, file.fileno(), 0)
ctypes.memset(mine + 4096, 7, 1)
assert libc.mprotect(ctypes.c_void_p(mine), ctypes.c_size_t(size), mmap.PROT_READ | int(sys.argv[2])) == 0
seen = Path("/proc/self/smaps").read_text()
swapped = re.sub(r"(?m)(^Anonymous: +)4( kB$(?s:.+?)^Swap: +)0 kB", r"\\g<1>0\\g<2>4 kB", seen)
assert swapped != seen
Path.read_text = lambda *_, **__: swapped
startpages.give_back_start_pages()
assert ctypes.string_at(mine + 4096, 2) == b"\7a", "a page of its own was given back"
"""

# The loader maps all of a library, then its data over that, and writes there: between look and advice, here.
LOADS = """
fixed = 0x10
with open(sys.argv[1], "rb") as file:
    whole = libc.mmap(None, size, mmap.PROT_READ | int(sys.argv[2]), mmap.MAP_PRIVATE, file.fileno(), 0)
    seen = Path("/proc/self/smaps").read_text()
    assert libc.mmap(whole + size // 2, size // 2, may_write, mmap.MAP_PRIVATE | fixed, file.fileno(), size // 2)
ctypes.memset(whole + size // 2, 7, 1)
Path.read_text = lambda *_, **__: seen
startpages.give_back_start_pages()
assert ctypes.string_at(whole + size // 2, 2) == b"\\7a", "what was written while it was loaded is lost"
"""


def library(path: Path, *segments: tuple[int, int]) -> str:
    """Of 4 MiB, with these flags and sizes of its segments."""
    parts, at = [], 0
    for flags, size in segments:
        parts.append(SEGMENT.pack(LOAD, flags, at, at, at, size, size, 4096))
        at += size
    head = HEADER.pack(b"\x7fELF\x02\x01\x01", 3, 62, 1, 0, HEADER.size, 0, 0, HEADER.size, 56, len(parts), 0, 0, 0)
    path.write_bytes((head + b"".join(parts)).ljust(4 * MIB, b"a"))
    return str(path)


def child(program: str, path: str, protection: int, folder: Path) -> str:
    argv = [sys.executable, "-c", MAPS + program, path, str(protection)]
    return subprocess.run(argv, capture_output=True, text=True, check=True, cwd=folder).stdout


def test_pages_that_only_the_start_needed_are_never_kept_and_none_of_our_own_is_given_back(tmp_path):
    path = library(tmp_path / "library", (READ | EXECUTED, 4 * MIB))

    for protection in (0, 4):  # constants and tables; code
        given_kb = int(child(KEEPS, path, protection, tmp_path))

        assert given_kb > 3000, "the file of 4 MiB was mapped and is not any more"


def test_a_page_of_our_own_that_is_swapped_out_is_never_given_back(tmp_path):
    path = library(tmp_path / "library", (READ | EXECUTED, 4 * MIB))

    child(SWAPPED, path, 4, tmp_path)


def test_a_library_that_is_being_loaded_meanwhile_never_loses_its_data(tmp_path):
    path = library(tmp_path / "library", (READ | EXECUTED, 2 * MIB), (READ | WRITTEN, 2 * MIB))

    for protection in (0, 4):
        child(LOADS, path, protection, tmp_path)
