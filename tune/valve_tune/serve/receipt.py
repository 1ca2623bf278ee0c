"""What a process has trained, told to valved: its receipts show it as the useful tokens of an offline service.

Through the engine hook's page, which `valve run` brings along. Without a hook or a valved no receipt is written.
"""

from __future__ import annotations

import os
import threading
from typing import Any

ENV_ROLE = "VALVE_ROLE"


def process_link() -> Any:
    """The hook's connection of this process, or None. A process that is no offline work has none: valved would take an
    open request of it for one of a service, and stop others.
    """
    if os.environ.get(ENV_ROLE) != "offline":
        return None
    try:
        from valve_hook import link
    except ImportError:
        return None
    return link.process_link()


class TrainedTokens:
    """One per process, for all jobs in it. valved keeps the highest figure that a process tells."""

    def __init__(self, link: Any = None) -> None:
        self._link, self._lock = link, threading.Lock()
        self._tokens = self._steps = 0

    def add(self, tokens: int) -> None:
        """A step is done that was not counted before."""
        with self._lock:
            self._tokens += tokens
            self._steps += 1
            if self._link is not None:
                self._link.lifecycle.tell(1, self._steps, self._tokens)
