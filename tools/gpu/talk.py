"""Text packets over unix sockets (native/share.c), with descriptors."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

PACKET = 1 << 16


class TooLate(Exception):
    """No answer within the time given; it may still come."""


class Talk:
    """One connection to a helper, a tracer or the guard."""

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.connect(str(path))

    def say(self, text: str, fd: int = -1) -> None:
        if fd < 0:
            self._socket.send(text.encode())
        else:
            socket.send_fds(self._socket, [text.encode()], [fd])

    def hear(self, patience_s: float) -> tuple[str, int]:
        """The next packet, and the descriptor that came with it (-1: none)."""
        self._socket.settimeout(patience_s)
        try:
            data, fds, _, _ = socket.recv_fds(self._socket, PACKET, 1)
        except TimeoutError:
            raise TooLate from None
        if not data:
            raise ConnectionError("the other side is gone")
        return data.decode(), fds[0] if fds else -1

    def ask(self, text: str, patience_s: float = 30.0, fd: int = -1) -> tuple[str, int]:
        self.say(text, fd)
        return self.hear(patience_s)

    def ask_json(self, text: str, patience_s: float = 30.0, fd: int = -1) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(self.ask(text, patience_s, fd)[0])
        return answer

    def close(self) -> None:
        self._socket.close()

    def __enter__(self) -> Talk:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
