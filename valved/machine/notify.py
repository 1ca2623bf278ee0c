"""Reports to systemd that the loop turns. systemd restarts a valved that is silent for WatchdogSec."""

from __future__ import annotations

import contextlib
import os
import socket


class Notify:
    def __init__(self) -> None:
        address = os.environ.pop("NOTIFY_SOCKET", "")  # not for what valved starts
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) if address else None

    def alive(self) -> None:
        if self._socket is not None:
            with contextlib.suppress(OSError):  # full, or gone: not worth a word
                self._socket.sendto(b"WATCHDOG=1", self._address)

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
