"""Keeps an offline engine's steps short where valved takes memory between two of them.

A request of an online service may wait for the end of such a step. valved writes into the table how many tokens one may
have; the engine's own limit carries it out. Where a shorter step could leave a request out for ever, nothing is cut.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

log = logging.getLogger("valve")


@dataclass(slots=True, kw_only=True)
class StepLimit:
    """One per scheduler."""

    set_limit: Callable[[int], None]
    own: int
    """The engine's limit before anybody asked for less."""
    why_not: str = ""
    """Why its steps cannot be cut; empty if they can."""
    least: int = 1
    unit: int = 1
    """Limits are multiples of it."""
    _tokens: int = 0

    def heed(self, tokens: int) -> None:
        """0: the engine's own limit again."""
        if tokens == self._tokens:
            return
        is_first, self._tokens = self._tokens == 0, tokens
        if self.why_not:
            if is_first:
                log.warning("valve: online requests may wait for a whole step of this engine: %s", self.why_not)
            return
        self.set_limit(self.limit(tokens))

    def limit(self, tokens: int) -> int:
        """What it amounts to in this engine."""
        cut = max(tokens, self.least, self.unit) // self.unit * self.unit
        return min(self.own, cut) if tokens else self.own
