"""Read a jsonl file of examples and check every line before anything runs. A bad line is named by number and field."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
NAMED_AT_MOST = 20  # bad lines in one error
KEPT_AT_MOST = 1000  # bad lines in memory; the rest are counted
LONGEST_LINE = 16 << 20  # bytes
SURROGATE = re.compile("[\ud800-\udfff]")
KINDS = "messages, prompt and completion, text, or input_ids"


@dataclass(frozen=True, slots=True)
class BadLine:
    line: int
    field: str
    message: str

    def __str__(self) -> str:
        return f"line {self.line}, {self.field}: {self.message}"


class BadLines:
    """What is wrong with a file: the first lines in full, the rest as a number, so that no file fills the memory."""

    def __init__(self) -> None:
        self.kept: list[BadLine] = []
        self.count = 0

    def add(self, line: int, why: Unfit) -> None:
        self.count += 1
        if len(self.kept) < KEPT_AT_MOST:
            self.kept.append(BadLine(line, why.field, str(why)))


class DataError(ValueError):
    """The data cannot be trained on. `lines` says where, `count` how often; nothing has run yet."""

    def __init__(self, path: str, bad: list[BadLine], message: str = "", count: int = 0) -> None:
        self.count = max(count, len(bad))
        more = self.count - NAMED_AT_MOST
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


class NoTemplate(Unfit):
    """Every line with messages has this fault, and it is the tokenizer's: one line tells it all."""


@dataclass(frozen=True, slots=True)
class RawExample:
    """One example as it stands in the file, of known shape."""

    line: int
    kind: str  # "messages", "prompt", "text", "input_ids"
    values: Mapping[str, Any]


def numbered(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Lines from 1 on. One that is longer than the limit comes as its beginning, a byte more than the limit."""
    number = 0
    while raw := file.readline(LONGEST_LINE + 1):
        number += 1
        rest = raw
        while len(rest) > LONGEST_LINE and not rest.endswith(b"\n"):
            rest = file.readline(LONGEST_LINE + 1)
        yield number, raw


def read(path: str, bad: BadLines) -> Iterator[RawExample]:
    """Good lines in order; bad ones are added to `bad`. Blank lines are passed over."""
    try:
        with Path(path).open("rb") as file:
            for number, raw in numbered(file):
                if not raw.strip():
                    continue
                try:
                    yield RawExample(number, *checked_line(raw))
                except Unfit as why:
                    bad.add(number, why)
    except OSError as error:
        raise DataError(path, [], f"cannot be read: {error.strerror}") from None


def checked_line(raw: bytes) -> tuple[str, Mapping[str, Any]]:
    if len(raw) > LONGEST_LINE:
        raise Unfit("length", f"has more than {LONGEST_LINE >> 20} MiB")
    try:
        values = json.loads(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise Unfit("encoding", f"is no UTF-8 at byte {error.start}") from None
    except json.JSONDecodeError as error:
        raise Unfit("JSON", f"{error.msg} at character {error.pos + 1}") from None
    except (ValueError, RecursionError) as error:
        raise Unfit("JSON", str(error)) from None
    if not isinstance(values, dict):
        raise Unfit("JSON", f"must be an object, not {type(values).__name__}")
    for kind, check in CHECKS.items():
        if kind in values:
            check(values)
            if b"\\u" in raw:  # no other way leads to half a character: the decoder refuses its bytes
                check_characters(values)
            return kind, values
    raise Unfit("fields", f"needs {KINDS}; has {', '.join(sorted(map(str, values))[:8]) or 'none'}")


def check_characters(value: object, place: str = "") -> None:
    """JSON can name half of a surrogate pair, which is no text: no tokenizer takes it."""
    if isinstance(value, str) and SURROGATE.search(value):
        raise Unfit(place or "fields", "holds half of a surrogate pair (\\ud800 to \\udfff), which is no character")
    if isinstance(value, Mapping):
        for name, each in value.items():
            check_characters(name, place)
            check_characters(each, f"{place}.{name}".lstrip("."))
    elif isinstance(value, list):
        for index, each in enumerate(value):
            check_characters(each, f"{place}[{index}]")


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
    if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
        raise Unfit(f"{place}.content", f"must be text, not {type(content).__name__}")
    check_weight(message, f"{place}.weight")
    check_calls(message.get("tool_calls") or [], f"{place}.tool_calls")


def check_weight(message: Mapping[str, Any], place: str) -> None:
    """Of OpenAI's files: 0 says that the assistant's message is only read, not learnt."""
    weight = message.get("weight")
    if weight is not None and (type(weight) is not int or weight not in (0, 1)):
        raise Unfit(place, f"must be 0 or 1, not {weight!r}")
    if weight and message["role"] != "assistant":
        raise Unfit(place, f"is 1 at a message of {message['role']}: only what the assistant says is learnt")


def check_calls(calls: object, place: str) -> None:
    if not isinstance(calls, list):
        raise Unfit(place, f"must be a list, not {type(calls).__name__}")
    for index, call in enumerate(calls):
        arguments_of(call, f"{place}[{index}]")


def arguments_of(call: object, place: str = "tool_calls") -> Any:
    """Of a tool call. OpenAI's files have them as text. Engines hand them to the template as an object; as text most
    templates would write them inside quotes, and the model would learn to answer so.
    """
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict):
        raise Unfit(place, "must be an object with a function")
    arguments = function.get("arguments") or {}
    try:
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError) as error:
        raise Unfit(f"{place}.arguments", f"is no JSON: {error}") from None
    if not isinstance(arguments, dict):
        raise Unfit(f"{place}.arguments", f"must be an object, not {type(arguments).__name__}")
    return arguments


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
