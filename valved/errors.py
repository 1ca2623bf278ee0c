"""Valve's errors, by what the reader must do. The RPC layer and the command line translate them in one place."""

from __future__ import annotations


class ValveError(Exception):
    """Root of Valve's own errors: what happened, in which field, and the next step."""

    def __init__(self, message: str, *, field: str = "", next_step: str = "") -> None:
        super().__init__(message)
        self.field = field
        self.next_step = next_step


class ConfigError(ValveError):
    """A setting is unknown, unreadable or out of range: correct it and start again."""


class InvalidRequest(ValveError):
    """An argument makes no sense: correct the call."""


class NotFound(ValveError):
    """What was named is not here, or not any more: name another one."""


class NotNow(ValveError):
    """The request is fine, but the state of the node does not allow it: do the next step first."""


class AlreadyRunning(ValveError):
    """Another valved owns the run folder."""
