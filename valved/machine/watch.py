"""Tells when a file in a folder appears, changes or goes (inotify), so that the pause file needs no polling."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

IN_CLOSE_WRITE, IN_MOVED, IN_CREATE, IN_DELETE = 0x8, 0xC0, 0x100, 0x200


class FolderWatch:
    """`fd` is readable after a change; -1 where inotify is not to be had, and then the caller has to look itself."""

    def __init__(self, folder: Path) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self.fd = int(libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC))
        if self.fd < 0:
            return
        events = IN_CLOSE_WRITE | IN_MOVED | IN_CREATE | IN_DELETE
        if libc.inotify_add_watch(self.fd, os.fsencode(folder), events) < 0:
            self.close()

    def clear(self) -> None:
        """Swallow what is queued: any change means the same, look again."""
        try:
            while os.read(self.fd, 4096):
                pass
        except BlockingIOError:
            pass

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
