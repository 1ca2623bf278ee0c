"""Reads from the body of a request what says how long its prompt is. Anything else of it stays unread."""

from __future__ import annotations

from typing import Any

import msgspec

READ_BYTES = 1 << 20  # of a longer body nothing is read: its prompt counts as unknown
READ_ITEMS = 16_384  # of a list in it


class Prompt(msgspec.Struct):
    """The fields that hold text in the shapes of OpenAI's API."""

    prompt: Any = None
    messages: Any = None
    input: Any = None


def prompt_of(body: bytes) -> str:
    """The text that a replica will read first, as well as it can be told; empty for whatever is no such request."""
    if len(body) > READ_BYTES:
        return ""
    parts: list[str] = []
    try:
        asked = msgspec.json.decode(body, type=Prompt)
        _collect(asked.messages if asked.messages is not None else asked.prompt or asked.input, parts)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ""
    return "\n".join(parts)


def _collect(value: Any, parts: list[str]) -> None:
    """Texts of a prompt, of a list of them, of messages and of their parts."""
    if isinstance(value, str):
        parts.append(value)
    elif isinstance(value, list):
        read = value[:READ_ITEMS]
        if read and all(isinstance(one, int) for one in read):  # tokens: about so many characters
            parts.append(" ".join(f"{one:x}"[:3] for one in read))
        else:
            for one in read:
                _collect(one, parts)
    elif isinstance(value, dict):
        for key in ("role", "content", "text"):
            _collect(value.get(key), parts)
