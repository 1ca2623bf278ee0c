"""KV memory on the emulated card in which every block says whose it is: what is lost, shared or overwritten shows.

Both ends of every page of a block (or of one page in so many) hold a word that follows from its owner, its place among
the owner's blocks and how many tokens are in it. The word differs on every page, so that a page in the wrong place is
found, too.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from valve_hook.link import Tensor
from valve_hook.shim import shim_call
from valve_hook.wire import KV_ELASTIC
from valve_tools.emulator.device import Device, address_of

BLOCK_TOKENS = 16
PAGE = 4096
WORD = (1 << 64) - 1
Words = NDArray[np.uint64]
Places = NDArray[np.int64]
Mixed = TypeVar("Mixed", int, Words)


def mix(word: Mixed) -> Mixed:
    """64 bits of which each depends on all of `word`."""
    bits: Any = word
    bits = bits ^ (bits >> 31)
    bits = bits * 0xBF58476D1CE4E5B9 & WORD
    bits = bits ^ (bits >> 27)
    bits = bits * 0x94D049BB133111EB & WORD
    mixed: Mixed = bits ^ (bits >> 33)
    return mixed


def blocks_for(tokens: int) -> int:
    return -(-tokens // BLOCK_TOKENS)


@dataclass(slots=True, kw_only=True)
class KvSequence:
    """One request's KV: all the blocks that it may need, taken at once."""

    name: str
    id: int
    tokens: int  # that are in it after the next step
    blocks: Places
    is_fresh: bool = True  # nothing is written yet: the next step writes all of it


class TaggedMemory:
    """`planes` tensors of blocks, as an engine has one for the keys and one for the values of each layer."""

    def __init__(self, device: Device, *, blocks: int, planes: int, block_kib: int, tag_kib: int = 4) -> None:
        """`tag_kib`: how far apart the pages are that say so; what lies between is never touched."""
        if blocks < 2 or planes < 1 or tag_kib < 4 or tag_kib * 1024 % PAGE or block_kib < 4 or block_kib % tag_kib:
            raise SystemExit("kv-blocks is above 1, kv-planes above 0, block-kib a multiple of tag-kib, that one of 4")
        self._device = device
        size = block_kib * 1024
        begin, end = shim_call("valve_kv_begin"), shim_call("valve_kv_end")
        if begin is not None:
            begin(ctypes.c_uint32(KV_ELASTIC))  # as an engine with a two-line patch does it
        arrays = [device.array(blocks * size) for _ in range(planes)]
        if end is not None:
            end()
        self.tensors = [Tensor(base=address_of(array), block_stride=size, block_bytes=size) for array in arrays]
        apart = tag_kib * 1024
        words = [np.frombuffer(array, np.uint64).reshape(blocks, size // apart, apart // 8) for array in arrays]
        self._ends = [(plane[:, :, 0], plane[:, :, PAGE // 8 - 1]) for plane in words]
        self._pages = np.arange(size // apart, dtype=np.uint64) * apart

    def compute(self, sequences: Sequence[KvSequence], least_us: float) -> list[int]:
        """A step, as one kernel: writes what is new of each sequence, then looks at all of it. The words of each that
        were not its own.
        """
        counts = np.array([blocks_for(each.tokens) for each in sequences])
        starts = np.cumsum(counts) - counts
        first = np.array([0 if each.is_fresh else blocks_for(each.tokens) - 1 for each in sequences])
        index = np.arange(counts.sum()) - np.repeat(starts, counts)
        tokens = np.repeat([each.tokens for each in sequences], counts)
        filled = np.minimum(tokens - index * BLOCK_TOKENS, BLOCK_TOKENS)
        owner = np.repeat([each.id << 32 for each in sequences], counts)
        tags = mix((owner ^ index << 8 ^ filled).astype(np.uint64))
        blocks = np.concatenate([each.blocks[:count] for each, count in zip(sequences, counts, strict=True)])
        is_new = index >= np.repeat(first, counts)
        with self._device.step(int(least_us)):
            self._write(blocks[is_new], tags[is_new])
            wrong = np.add.reduceat(self._wrong(blocks, tags), starts)
        for each in sequences:
            each.is_fresh = False
        found: list[int] = wrong.tolist()
        return found

    def _write(self, blocks: Places, tags: Words) -> None:
        for plane, ends in enumerate(self._ends):
            for end in ends:
                end[blocks] = self._wanted(plane, tags)

    def _wrong(self, blocks: Places, tags: Words) -> Places:
        """Of each block, the words that are not what its tag says."""
        wrong = np.zeros(len(blocks), dtype=np.int64)
        for plane, ends in enumerate(self._ends):
            for end in ends:
                wrong += (end[blocks] != self._wanted(plane, tags)).sum(axis=1)
        return wrong

    def _wanted(self, plane: int, tags: Words) -> Words:
        wanted: Words = tags[:, None] + np.uint64(plane << 40) + self._pages
        return wanted
