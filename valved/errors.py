"""Valve's errors, by what the reader must do. The RPC layer and the command line translate them in one place."""

from __future__ import annotations

import errno
from typing import ClassVar

MOST_TEXT = 200  # of what somebody else wrote, in a message that people read in a terminal


def short(text: str) -> str:
    """A value may be as long as its file. What is wrong with it stands at the end."""
    return text if len(text) <= MOST_TEXT else f"{text[: MOST_TEXT // 2]} ... {text[-MOST_TEXT // 2 :]}"


def told(error: Exception) -> str:
    """An error in words: of a file by its name, without a number that only a program knows. Of two names the one that a
    file was to have: whoever reads it knows that one, and what stands in the way is there."""
    if not isinstance(error, OSError) or not error.strerror:
        return str(error)
    name = error.filename2 or error.filename
    return f"{name}: {error.strerror}" if name else error.strerror


_CURES = {
    errno.ENOSPC: "make room there: space, or names of files (df, df -i)",
    errno.EDQUOT: "make room there: this user's quota is used up",
    errno.EROFS: "that file system can only be read now: see the kernel log, then mount it for writing again",
    errno.EIO: "that device fails: see the kernel log",
    errno.EMFILE: "raise the limit of descriptors (ulimit -n, LimitNOFILE=)",
    errno.ENFILE: "this machine has no descriptor left: see fs.file-max",
    errno.ENOMEM: "see the limits of memory: of its control group, and of this machine",
}


def cure(error: OSError, otherwise: str) -> str:
    """The next step where a file could not be written; `otherwise`: where the user or the name may be the wrong one."""
    return _CURES.get(error.errno or 0, otherwise)


class ValveError(Exception):
    """Root of Valve's own errors: what happened, in which field, and the next step. Each class has a usual one, so that
    none goes without."""

    usual: ClassVar[str]

    def __init__(self, message: str, *, field: str = "", next_step: str = "") -> None:
        super().__init__(message)
        self.field = field
        self.next_step = next_step or self.usual


class ConfigError(ValveError):
    """A setting is unknown, unreadable or out of range: correct it and start again."""

    usual = "see docs/configuration.md for names, units and bounds"


class InvalidRequest(ValveError):
    """An argument makes no sense: correct the call."""

    usual = "correct the call: see --help and docs/cli.md"


class NotFound(ValveError):
    """What was named is not here, or not any more: name another one."""

    usual = "name another one: valve status shows what is here"


class NotNow(ValveError):
    """The request is fine, but the state of the node does not allow it: do the next step first."""

    usual = "see valve status, and try again"


class AlreadyRunning(ValveError):
    """Another valved owns the run folder."""

    usual = "see in its log what keeps it, or end it, and start again"
