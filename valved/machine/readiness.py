"""Waits a moment for a descriptor: where going back to the loop would cost more than the wait."""

from __future__ import annotations

import select


def is_readable_within(fd: int, ms: int) -> bool:
    """At once where there is no descriptor."""
    if fd < 0:
        return False
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(ms))
