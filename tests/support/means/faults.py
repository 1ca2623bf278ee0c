"""A fault in a function of the code under test."""

from __future__ import annotations

import functools
import itertools
import os

import pytest

WHOLE = "VALVE_WHOLE_TABLES"  # set: every combination (make test-all)


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


def cases(places, *flags, whole=None):
    """Parameters (owner, name, *flags). `flags`: what False and True are called. Each function with each flag both
    ways, in two cases that are each other's opposite and differ from function to function; or every combination.
    """
    combinations = list(itertools.product([False, True], repeat=len(flags)))
    whole = bool(os.environ.get(WHOLE)) if whole is None else whole
    found = []
    for number, (owner, name) in enumerate(places):
        one = combinations[number % (len(combinations) // 2)]
        chosen = combinations if whole else [one, tuple(not flag for flag in one)]
        for values in chosen:
            words = [words[value] for words, value in zip(flags, values, strict=True)]
            found.append(pytest.param(owner, name, *values, id=f"{owner.__name__}.{name}, {', '.join(words)}"))
    return found
