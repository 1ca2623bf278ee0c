"""What failed and was left behind, so that all else goes on: objects that could not be used, and rounds of work.

Each is in the log once, where it happened, and is counted here for the metrics of the process."""

import logging
from collections import Counter

log = logging.getLogger(__name__)

objects: Counter[str] = Counter()  # by kind
rounds: Counter[str] = Counter()  # by what they do


def leave_out(kind: str, name: str, told: str = "object left out") -> None:
    """In an `except`: this object changes nothing."""
    objects[kind] += 1
    log.exception(told, extra={"kind": kind, "object": name})


def round_failed(what: str) -> None:
    """In an `except`: the next round begins anew."""
    rounds[what] += 1
    log.exception("round failed", extra={"round": what})
