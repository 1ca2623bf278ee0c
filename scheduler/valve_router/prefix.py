"""Remembers which beginnings of prompts a replica has seen, to guess how much of a prompt its prefix cache holds.

A guess by text, not by tokens: the router has no tokenizer. Only whole chunks count, each with what comes before it.
"""

from __future__ import annotations

from collections import OrderedDict
from hashlib import blake2b

CHUNK_CHARACTERS = 256
CHUNKS_PER_REPLICA = 50_000
CHUNKS_PER_PROMPT = 256


def chunks(prompt: str) -> list[bytes]:
    """One name for each beginning of the prompt that ends with a whole chunk."""
    names, state = [], blake2b(digest_size=8)
    for at in range(0, min(len(prompt), CHUNK_CHARACTERS * CHUNKS_PER_PROMPT) - CHUNK_CHARACTERS + 1, CHUNK_CHARACTERS):
        state.update(prompt[at : at + CHUNK_CHARACTERS].encode("utf-8", "surrogatepass"))
        names.append(state.digest())
    return names


class SeenPrompts:
    """Of one replica. The least recently used go first."""

    def __init__(self, most: int = CHUNKS_PER_REPLICA) -> None:
        self._seen: OrderedDict[bytes, None] = OrderedDict()
        self._most = most

    def shared_characters(self, names: list[bytes]) -> int:
        count = 0
        for name in names:
            if name not in self._seen:
                break
            count += 1
        return count * CHUNK_CHARACTERS

    def add(self, names: list[bytes]) -> None:
        for name in names:
            self._seen[name] = None
            self._seen.move_to_end(name)
        while len(self._seen) > self._most:
            self._seen.popitem(last=False)

    def clear(self) -> None:
        """The replica is another process now."""
        self._seen.clear()
