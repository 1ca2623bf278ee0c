"""Descriptors under way: a neighbour of the same user that has too many, and processes to which that matters."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

BOUND = """
import ctypes, os, resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))
for capability in (21, 24):  # CAP_SYS_ADMIN, CAP_SYS_RESOURCE: out of the bounding set
    ctypes.CDLL(None).prctl(24, capability, 0, 0, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""
BOUNDED = (sys.executable, "-S", "-c", BOUND)  # a limit like another's, and nothing that the kernel takes instead
FILL = """
import socket, sys
pairs = []
for _ in range(6):
    pairs.append(socket.socketpair())
    try:
        socket.send_fds(pairs[-1][0], [b"x"], [0] * 253)
    except OSError:
        break
print("full", flush=True)
sys.stdin.read()
"""


@contextmanager
def neighbour() -> Iterator[None]:
    """Has more under way than BOUNDED allows until the end."""
    with subprocess.Popen(
        [sys.executable, "-c", FILL], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "full\n"
            yield
        finally:
            process.kill()
