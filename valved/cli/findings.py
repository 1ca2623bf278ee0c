"""What a check of `valve doctor` says: how it stands, what was seen, and how to mend it."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Grade(enum.Enum):
    FINE = "ok"
    NOTE = "note"  # works, but the operator should know
    BROKEN = "broken"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    check: str
    verdict: Grade
    what: str
    fix: str = ""


def fine(check: str, what: str) -> Finding:
    return Finding(check=check, verdict=Grade.FINE, what=what)


def note(check: str, what: str, fix: str = "") -> Finding:
    return Finding(check=check, verdict=Grade.NOTE, what=what, fix=fix)


def broken(check: str, what: str, fix: str) -> Finding:
    return Finding(check=check, verdict=Grade.BROKEN, what=what, fix=fix)


def unknown(check: str, what: str) -> Finding:
    return Finding(check=check, verdict=Grade.UNKNOWN, what=what)
