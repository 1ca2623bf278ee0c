"""The lab's errors, by what the reader must do."""

from __future__ import annotations


class LabError(Exception):
    """Something is missing; the message says what and how to get it."""


class StopRule(Exception):
    """A stop rule: enable everything, write what is known, leave."""


class LabRefused(Exception):
    """A program of the lab answered with an error of its own."""
