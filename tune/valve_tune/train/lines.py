"""Read a jsonl file of examples and check every line before anything runs. A bad line is named by number and field."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
NAMED_AT_MOST = 20  # bad lines in one error
KINDS = "messages, prompt and completion, text, or input_ids"


@dataclass(frozen=True, slots=True)
class BadLine:
    line: int
    field: str
    message: str

    def __str__(self) -> str:
        return f"line {self.line}, {self.field}: {self.message}"


class DataError(ValueError):
    """The data cannot be trained on. `lines` says where; nothing has run yet."""

    def __init__(self, path: str, bad: list[BadLine], message: str = "") -> None:
        more = len(bad) - NAMED_AT_MOST
        said = [message] if message else []
        said += [str(each) for each in bad[:NAMED_AT_MOST]]
        said += [f"and {more} more bad lines"] if more > 0 else []
        super().__init__(f"{path}: " + "\n  ".join(said))
        self.lines = bad


class Unfit(Exception):
    """Why one line cannot be used."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


@dataclass(frozen=True, slots=True)
class RawExample:
    """One example as it stands in the file, of known shape."""

    line: int
    kind: str  # "messages", "prompt", "text", "input_ids"
    values: Mapping[str, Any]


def read(path: str, bad: list[BadLine]) -> Iterator[RawExample]:
    """Good lines in order; bad ones are added to `bad`. Blank lines are passed over."""
    try:
        with Path(path).open("rb") as file:
            for number, raw in enumerate(file, 1):
                if not raw.strip():
                    continue
                try:
                    yield RawExample(number, *checked_line(raw))
                except Unfit as why:
                    bad.append(BadLine(number, why.field, str(why)))
    except OSError as error:
        raise DataError(path, [], f"cannot be read: {error.strerror}") from None


def checked_line(raw: bytes) -> tuple[str, Mapping[str, Any]]:
    try:
        values = json.loads(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise Unfit("encoding", f"is no UTF-8 at byte {error.start}") from None
    except (ValueError, RecursionError) as error:
        raise Unfit("JSON", str(error)) from None
    if not isinstance(values, dict):
        raise Unfit("JSON", f"must be an object, not {type(values).__name__}")
    for kind, check in CHECKS.items():
        if kind in values:
            check(values)
            return kind, values
    raise Unfit("fields", f"needs {KINDS}; has {', '.join(sorted(map(str, values))[:8]) or 'none'}")


def check_messages(values: Mapping[str, Any], field: str = "messages") -> None:
    messages = values[field]
    if not isinstance(messages, list) or not messages:
        raise Unfit(field, "must be a list of messages")
    for index, message in enumerate(messages):
        check_message(message, f"{field}[{index}]")


def check_message(message: object, place: str) -> None:
    if not isinstance(message, dict):
        raise Unfit(place, "must be an object with role and content")
    if message.get("role") not in ROLES:
        raise Unfit(f"{place}.role", f"must be one of {', '.join(ROLES)}, not {message.get('role')!r}")
    content = message.get("content")
    if isinstance(content, str) or (content is None and message.get("tool_calls")):
        return
    raise Unfit(f"{place}.content", f"must be text, not {type(content).__name__}")


def check_prompt(values: Mapping[str, Any]) -> None:
    if "completion" not in values:
        raise Unfit("completion", "is missing beside prompt")
    both = values["prompt"], values["completion"]
    if all(isinstance(each, list) for each in both):
        check_messages(values, "prompt")
        check_messages(values, "completion")
        return
    for name, value in zip(("prompt", "completion"), both, strict=True):
        if not isinstance(value, str):
            raise Unfit(name, "must be text, as must the other; or both are lists of messages")
    if not values["completion"]:
        raise Unfit("completion", "is empty: nothing to learn")


def check_text(values: Mapping[str, Any]) -> None:
    if not isinstance(values["text"], str) or not values["text"]:
        raise Unfit("text", "must be text that is not empty")


def check_ids(values: Mapping[str, Any]) -> None:
    for name in ("input_ids", "labels"):
        if name in values:
            check_integers(name, values[name])
    if "labels" in values and len(values["labels"]) != len(values["input_ids"]):
        raise Unfit("labels", f"has {len(values['labels'])} entries, input_ids {len(values['input_ids'])}")


def check_integers(name: str, value: object) -> None:
    if not isinstance(value, list) or not value:
        raise Unfit(name, "must be a list of whole numbers")
    for index, each in enumerate(value):
        if type(each) is not int:
            raise Unfit(f"{name}[{index}]", f"must be a whole number, not {each!r}")


CHECKS = {"messages": check_messages, "prompt": check_prompt, "text": check_text, "input_ids": check_ids}
