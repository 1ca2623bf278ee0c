"""From a line of the file to tokens and labels: which tokens of a conversation are the assistant's own.

Templates that mark what the assistant says (`{% generation %}`) are asked. Any other is asked twice per turn, with the
turn and without; what was added is the assistant's. That holds only while the template writes the earlier turns the
same way, which is checked.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from valve_tune.train.batch import IGNORED, IntArray
from valve_tune.train.lines import NoTemplate, RawExample, Unfit, arguments_of

MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")
Span = tuple[int, int]  # characters of the rendered text


@dataclass(frozen=True, slots=True, eq=False)
class Example:
    ids: IntArray
    labels: IntArray

    def __len__(self) -> int:
        return len(self.ids)

    def cut(self, length: int) -> Example:
        return self if len(self) <= length else Example(self.ids[:length], self.labels[:length])


class Encoder:
    """Tokens and labels of one source, by the rules of one tokenizer."""

    def __init__(self, tokenizer: Any, *, assistant_only: bool, vocabulary: int) -> None:
        self._tokenizer = tokenizer
        self._assistant_only = assistant_only
        self._vocabulary = vocabulary
        self._marked = bool(MARKED.search(template_of(tokenizer)))
        self.joined = 0  # examples with a token of both prompt and completion, which is not learnt
        self._kinds: dict[str, Callable[[Mapping[str, Any]], tuple[list[int], list[bool]]]] = {
            "messages": self._messages,
            "prompt": self._prompt,
            "text": self._text,
        }

    def encode(self, source: RawExample) -> Example:
        """Unfit, if the line has nothing to learn from or does not suit tokenizer and model."""
        if source.kind == "input_ids":
            ids = source.values["input_ids"]
            labels = source.values.get("labels", ids)
        else:
            ids, said = self._kinds[source.kind](source.values)
            labels = [each if own else IGNORED for each, own in zip(ids, said, strict=True)]
        self._within("input_ids", ids)
        self._within("labels", [each for each in labels if each != IGNORED])
        example = Example(np.array(ids, dtype=np.int64), np.array(labels, dtype=np.int64))
        example.labels[:1] = IGNORED  # nothing stands before the first token
        return example

    def _within(self, field: str, ids: Sequence[int]) -> None:
        if ids and not (min(ids) >= 0 and max(ids) < self._vocabulary):
            wrong = next(each for each in ids if not 0 <= each < self._vocabulary)
            raise Unfit(field, f"token {wrong} is outside the model's vocabulary of {self._vocabulary}")

    def _text(self, values: Mapping[str, Any]) -> tuple[list[int], list[bool]]:
        ids = self._ended(self._tokenizer(values["text"])["input_ids"])
        return ids, [True] * len(ids)

    def _prompt(self, values: Mapping[str, Any]) -> tuple[list[int], list[bool]]:
        prompt, completion = values["prompt"], values["completion"]
        if isinstance(prompt, list):
            return self._conversation([*prompt, *completion], values.get("tools"), learn_from=len(prompt))
        encoded = self._offsets(prompt + completion, specials=True)
        ids = self._ended(encoded["input_ids"])
        if not self._assistant_only:
            return ids, [True] * len(ids)
        said = [begin >= len(prompt) and end > begin for begin, end in encoded["offset_mapping"]]
        self.joined += any(begin < len(prompt) < end for begin, end in encoded["offset_mapping"])
        said += [True] * (len(ids) - len(said))
        said[-1] = True  # the end token, whichever side added it
        return ids, said

    def _messages(self, values: Mapping[str, Any]) -> tuple[list[int], list[bool]]:
        return self._conversation(values["messages"], values.get("tools"))

    def _conversation(self, messages: list[Any], tools: Any, learn_from: int = 0) -> tuple[list[int], list[bool]]:
        if not template_of(self._tokenizer):
            raise NoTemplate("messages", "the tokenizer has no chat template: add chat_template.jinja beside the model")
        messages = [called(each) for each in messages]
        assistant = [index for index, each in enumerate(messages) if each["role"] == "assistant"]
        turns = [index for index in assistant if index >= learn_from and messages[index].get("weight") != 0]
        if self._assistant_only and not turns:
            raise Unfit("messages", "no message of the assistant: nothing to learn")
        if not self._assistant_only and any(messages[index].get("weight") == 0 for index in assistant):
            raise Unfit("weight", "is 0 at a message, and assistant_only_loss is off: then everything is learnt")
        whole, spans = self._marks(messages, tools) if self._marked else (self._rendered(messages, tools), [])
        encoded = self._offsets(whole, specials=False)
        ids = list(encoded["input_ids"])
        if not self._assistant_only:
            return ids, [True] * len(ids)
        if not self._marked:
            spans = [self._turn(whole, messages, tools, index) for index in turns]
        elif turns != assistant:
            spans = chosen(spans, assistant, turns)
        return ids, [any(low <= begin < high for low, high in spans) for begin, _ in encoded["offset_mapping"]]

    def _marks(self, messages: list[Any], tools: Any) -> tuple[str, list[Span]]:
        """The text and what the template marks in it. Marks are read here as characters: the library's own mask of
        tokens runs to the end of the text where a mark ends in a blank.
        """
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            texts, spans = render_jinja_template(
                [messages], tools, None, template_of(self._tokenizer), True, **self._tokenizer.special_tokens_map
            )
        except Exception as error:
            raise Unfit("messages", f"the chat template refuses: {error}") from None
        return texts[0], [(int(low), int(high)) for low, high in spans[0]]

    def _rendered(self, messages: list[Any], tools: Any, *, ask: bool = False) -> str:
        try:
            text = self._tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=ask)
        except Exception as error:
            raise Unfit("messages", f"the chat template refuses: {error}") from None
        return str(text)

    def _turn(self, whole: str, messages: list[Any], tools: Any, index: int) -> Span:
        """Where message `index` stands in the whole text, without its header."""
        upto = self._rendered(messages[: index + 1], tools)
        before = self._rendered(messages[:index], tools) if index else ""
        # Where the assistant is asked to begin; some templates open there what they leave out of a finished turn.
        begin = common_length(self._rendered(messages[:index], tools, ask=True), upto) if index else 0
        if not whole.startswith(upto.rstrip()) or begin < len(before.rstrip()):
            raise Unfit(
                f"messages[{index}]",
                "the chat template writes earlier turns differently later on; mark what the assistant says with "
                "{% generation %} in the template",
            )
        return begin, len(upto)

    def _offsets(self, text: str, *, specials: bool) -> Any:
        return self._tokenizer(text, add_special_tokens=specials, return_offsets_mapping=True)

    def _ended(self, ids: Sequence[int]) -> list[int]:
        """With the end token, so that the model learns to stop."""
        end = self._tokenizer.eos_token_id
        return list(ids) if end is None or (ids and ids[-1] == end) else [*ids, end]


def chosen(spans: Sequence[Span], assistant: Sequence[int], turns: Sequence[int]) -> list[Span]:
    """The marks of `turns` among those of all messages of the assistant."""
    if len(spans) != len(assistant):
        raise Unfit(
            "messages",
            f"not all that the assistant says is to be learnt, and the template makes {len(spans)} marks "
            f"{{% generation %}} for {len(assistant)} messages of the assistant: which is whose is not known",
        )
    return [span for span, index in zip(spans, assistant, strict=True) if index in turns]


def called(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as engines hand it to the template: arguments of tool calls are objects."""
    whole: list[dict[str, Any]] = []
    for call in message.get("tool_calls") or []:
        function = {**call.get("function", call), "arguments": arguments_of(call)}
        whole.append({**call, "function": function} if "function" in call else function)
    return {**message, "tool_calls": whole} if whole else dict(message)


def common_length(one: str, other: str) -> int:
    """Characters that both texts begin with."""
    for place, (here, there) in enumerate(zip(one, other, strict=False)):
        if here != there:
            return place
    return min(len(one), len(other))


def template_of(tokenizer: Any) -> str:
    template = getattr(tokenizer, "chat_template", None) or ""
    return str(template.get("default", "")) if isinstance(template, dict) else str(template)
