"""Reads two things from the body of a request: its prompt, for the length of it, and the model that it asks for. It
reads no other field."""

from __future__ import annotations

from typing import Any

import msgspec

READ_BYTES = 1 << 20  # a longer body is not read for its prompt, which counts as unknown
READ_ITEMS = 16_384  # items of a list in the body
NO_REQUEST = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class AskedModel(msgspec.Struct):
    model: Any = None


class AskedPrompt(AskedModel):
    """The fields that hold text in the shapes of OpenAI's API."""

    prompt: Any = None
    messages: Any = None
    input: Any = None


class AskedBody:
    """A request's body. One of up to READ_BYTES is decoded once, a longer one only if its model is needed."""

    def __init__(self, body: bytes) -> None:
        self.body = body
        self.prompt = ""  # the text that a replica will read first, as far as the router can tell
        self._model: str | None = None
        if len(body) <= READ_BYTES:
            self._read()

    def _read(self) -> None:
        self._model = ""
        parts: list[str] = []
        try:
            asked = msgspec.json.decode(self.body, type=AskedPrompt)
            self._model = _name(asked.model)
            _collect(asked.messages if asked.messages is not None else asked.prompt or asked.input, parts)
        except NO_REQUEST:
            return
        self.prompt = "\n".join(parts)

    @property
    def model(self) -> str:
        """Empty if the body names no model."""
        if self._model is None:
            self._model = model_of(self.body)
        return self._model


def model_of(body: bytes) -> str:
    try:
        return _name(msgspec.json.decode(body, type=AskedModel).model)
    except NO_REQUEST:
        return ""


def _name(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _collect(value: Any, parts: list[str]) -> None:
    """Collects the texts of a prompt, of a list of prompts, of messages and of their parts."""
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
