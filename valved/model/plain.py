"""Names and words that a stranger chose, as they may stand in a line on a terminal."""

from __future__ import annotations

MOST = 256  # characters; a pod's name with its namespace fits


def plain(text: str) -> str:
    """Without escape sequences, line ends, and what is no text at all."""
    return "".join(one if one.isprintable() else "?" for one in text[:MOST])
