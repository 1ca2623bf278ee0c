"""A fault in a function of the code under test."""

from __future__ import annotations

import functools


class Fault:
    """Raises where it was put, from the moment it is armed: before the work or after it, once or for ever."""

    def __init__(self, *, is_late: bool, is_lasting: bool) -> None:
        self.is_late, self.is_lasting, self.is_armed, self.raised = is_late, is_lasting, False, 0

    def put(self, monkeypatch, owner, name):
        original = getattr(owner, name)

        @functools.wraps(original)
        def failing(*arguments, **options):
            if not self.is_armed:
                return original(*arguments, **options)
            self.is_armed, self.raised = self.is_lasting, self.raised + 1
            if self.is_late:
                original(*arguments, **options)
            raise RuntimeError(f"on purpose, in {name}")

        monkeypatch.setattr(owner, name, failing)
