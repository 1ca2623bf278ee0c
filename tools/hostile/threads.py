"""A hostile process of very many threads."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import threading
from collections.abc import Callable

DEAD = 2000
PR_SET_PDEATHSIG = 1
PTRACE_SEIZE, SYS_EXIT = 0x4206, 60


def die_with_parent(parent: int = 0) -> None:
    """The bench may be killed: its processes end, too. A change of user takes this back. `parent`: it may have ended by
    now, and who stands still then keeps the bench's pipe for ever."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent and os.getppid() != parent:
        os._exit(1)


class KeepsDeadThreads:
    """A process of thousands of threads that ended, first of all its first one, and that another one traces: the
    kernel keeps them. The last of its threads lives, and speaks."""

    def __init__(self, speak: Callable[[str], object]) -> None:
        self._speak = speak
        self._is_traced = False

    def __call__(self, path: str) -> None:
        if self._is_traced:
            signal.pause()
            return
        told, tell = os.pipe()
        go, begin = os.pipe()
        if os.fork() == 0:
            die_with_parent()
            os.close(begin)
            self._live(path, tell, go)
        libc = ctypes.CDLL(None)
        for _ in range(DEAD):
            libc.ptrace(PTRACE_SEIZE, int.from_bytes(os.read(told, 4), "little"), None, None)
        os.close(begin)
        os.close(go)
        self._is_traced = True

    def _live(self, path: str, tell: int, go: int) -> None:
        def end() -> None:
            os.write(tell, threading.get_native_id().to_bytes(4, "little"))
            os.read(go, 1)

        def speak() -> None:
            os.read(go, 1)
            while True:
                with contextlib.suppress(OSError):
                    self._speak(path)

        threading.stack_size(32 << 10)
        for _ in range(DEAD):
            threading.Thread(target=end).start()
        threading.Thread(target=speak).start()
        os.read(go, 1)
        ctypes.CDLL(None).syscall(SYS_EXIT, 0)
