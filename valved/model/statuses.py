"""Says in words how a driver call ended, wherever an operator reads it. Numbers stay in traces and metrics.

A status above 0 is the resource manager's (proto/abi/nvrm.h; a test compares the two), below 0 a -errno.
"""

from __future__ import annotations

import errno
import os

RM_WORDS = {
    0x0F: "the GPU is lost",
    0x1B: "not permitted",
    0x1F: "an argument is invalid",
    0x21: "no such channel",
    0x23: "no such RM client",
    0x2F: "the driver's lock is in another state",
    0x31: "no such object",
    0x33: "no object of that handle",
    0x36: "the object has another parent",
    0x3A: "the arguments have another layout",
    0x40: "not in its present state",
    0x51: "no memory left",
    0x56: "not supported",
    0x57: "the object was not found",
    0x65: "the GPU did not answer in time",
}
ERRNO_WORDS = {errno.ETIMEDOUT: "no answer in time"}  # strerror speaks of a connection


def status_text(status: int) -> str:
    """A known status by its meaning; the driver's number stands behind it, to be searched for."""
    if status <= 0:
        return ERRNO_WORDS.get(-status) or os.strerror(-status)
    number = f"RM status {status:#x}"
    return f"{RM_WORDS[status]} ({number})" if status in RM_WORDS else number
