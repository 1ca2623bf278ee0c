"""Pages that only the start needed are given back, and nothing that is ours alone goes with them."""

from __future__ import annotations

import subprocess
import sys

# A child: what it gives back is its own. It changes a page of code as a debugger would, and keeps a private page of a
# file that it may not write to any more, as the loader leaves them.
CHILD = """
import ctypes, mmap, re, sys
import numpy as np
from valved.machine import startpages

def resident_kb():
    return int(re.search(r"RssFile:\\s+(\\d+)", open("/proc/self/status").read())[1])

libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
size = 4 << 20
with open(sys.argv[1], "rb") as file:
    mine, others = (libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE, file.fileno(), 0)
                    for _ in range(2))
ctypes.memset(mine, 7, 1)
for at in (mine, others):
    ctypes.string_at(at, size)
    assert libc.mprotect(ctypes.c_void_p(at), ctypes.c_size_t(size), mmap.PROT_READ | mmap.PROT_EXEC) == 0
before = resident_kb()
startpages.give_back_start_pages()
after = resident_kb()
assert ctypes.string_at(mine, 2) == b"\\7a", "a page of its own was given back"
assert ctypes.string_at(others, 2) == b"aa"
assert np.linalg.inv(np.eye(3)).sum() == 3
print(before - after)
"""


def test_pages_that_only_the_start_needed_are_never_kept_and_none_of_our_own_is_given_back(tmp_path):
    (tmp_path / "file").write_bytes(b"a" * (4 << 20))

    child = subprocess.run(
        [sys.executable, "-c", CHILD, str(tmp_path / "file")], capture_output=True, text=True, check=True, cwd=tmp_path
    )

    assert int(child.stdout) > 3000, "the file of 4 MiB was mapped and is not any more"
