"""The requests of an engine whose tokens are followed: which of them are readers, and how much context they hold.

A reader is a request that has its first token and not its last. A step gives every reader one token, so only
exceptions are looked at one by one: a step of 500 requests costs no more than one of five.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

Row = tuple[str, int, bool]
"""Of one step's output: the request, its new tokens, whether it has ended."""


@dataclass(slots=True, kw_only=True)
class Request:
    number: int
    streamed: bool
    base: int
    """Tokens of the prompt until the first of the answer comes; then tokens of both, less `Followed._steps`."""


@dataclass(slots=True, kw_only=True)
class StepOutput:
    """What the output of a step says, by the numbers of requests."""

    skipped: list[int]
    """Readers that got no token."""
    extra: dict[int, int]
    """Readers that got more than one token: how many more."""
    firsts: list[Request]
    ended: list[str]


class Followed:
    """The followed requests of one engine, under one target."""

    def __init__(self) -> None:
        self.readers: dict[str, Request] = {}
        self.context = 0
        """Tokens of all readers."""
        self._prompts: dict[str, Request] = {}
        self._numbers = 0
        self._steps = 0

    def arrived(self, name: str, prompt_tokens: int, *, streamed: bool) -> int:
        """The number of a new request; 0 for one that is known already."""
        if name in self._prompts or name in self.readers:
            return 0
        self._numbers += 1
        self._prompts[name] = Request(number=self._numbers, streamed=streamed, base=prompt_tokens)
        return self._numbers

    def delivered(self, odd: Iterable[Row], plain: int, names: Collection[str]) -> StepOutput:
        """`plain` readers, whose names are among `names`, got one token each. `odd` has the other requests of the
        step one by one. Unknown requests are skipped.
        """
        step = StepOutput(skipped=[], extra={}, firsts=[], ended=[])
        self._steps += 1
        self.context += len(self.readers)
        before, served, unserved = len(self.readers), set[str](), set[str]()
        for name, tokens, has_ended in odd:
            reader = self.readers.get(name)
            if tokens <= 0:
                unserved.add(name)
            elif reader is not None:
                served.add(name)
                self._correct(reader, tokens - 1)
                if tokens > 1:
                    step.extra[reader.number] = tokens - 1
            elif name in self._prompts:
                step.firsts.append(self._begin(name, tokens))
            if has_ended:
                step.ended.append(name)
        if plain + len(served) < before:
            firsts = {each.number for each in step.firsts}
            for name, reader in self.readers.items():
                is_served = name in served or (name in names and name not in unserved) or reader.number in firsts
                if not is_served:
                    self._correct(reader, -1)
                    step.skipped.append(reader.number)
        return step

    def _correct(self, reader: Request, tokens: int) -> None:
        reader.base += tokens
        self.context += tokens

    def _begin(self, name: str, tokens: int) -> Request:
        request = self._prompts.pop(name)
        self.context += request.base + tokens
        request.base += tokens - self._steps
        self.readers[name] = request
        return request

    def forget(self, name: str) -> int:
        """The request has ended, or its client left. Returns its number, 0 if it was not known."""
        request = self.readers.pop(name, None)
        if request is not None:
            self.context -= request.base + self._steps
        else:
            request = self._prompts.pop(name, None)
        return request.number if request is not None else 0
