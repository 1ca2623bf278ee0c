"""The KV_ messages of proto/abi/link.h and kv.h as values. link.py knows their numbers, this file their bodies.

Entries travel as one numpy array: a reclaim of a GiB in 2 MiB handles is 512 of them, none worth a Python object.
"""

from __future__ import annotations

from math import prod
from typing import Any

import msgspec
import numpy as np
import valve_abi
from numpy.typing import NDArray
from valve_abi import KV_ABI, KvHow, KvMode, KvOp
from valve_abi import KV_CREATE as CREATE
from valve_abi import KV_ELASTIC as ELASTIC
from valve_abi import KV_HEEDED as HEEDED
from valve_abi import KV_ZERO as ZERO

from valved.abi.codec import Malformed, Plain
from valved.model.memory import KvTensor, LayoutRefused

__all__ = ["CREATE", "ELASTIC", "HEEDED", "KV_ABI", "ZERO", "KvHow", "KvMode", "KvOp"]  # the headers' own

MAX_ENTRIES = valve_abi.KV_ENTRIES
MAX_TENSORS = valve_abi.KV_TENSORS
MAX_REPEATS = valve_abi.KV_REPEATS
MAX_PINNED = 8
MAX_RUNS = valve_abi.KV_RUNS
ENTRY = np.dtype(valve_abi.KV_ENTRY.dtype())
RUN = np.dtype(valve_abi.KV_RUN.dtype())
MOST_TOUCHED = 1 << 18  # 64 Ki handles of planes apart are 72 Ki; these take a thread a second and 30 MB


class KvRangeMessage(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    gpu_uuid: bytes
    device_instance: int
    range: int
    base: int
    handle_bytes: int
    slots: int
    flags: int
    held: int


class KvSpan(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Body of KV_RANGE_DEL and KV_PIN."""

    range: int
    offset: int = 0
    bytes: int = 0


class KvEntries(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Body of KV_ORDER and KV_HELD. `raw` are the entries as they travel; `entries` reads them."""

    order: int
    range: int
    op: int
    how: int
    raw: bytes

    @property
    def entries(self) -> NDArray[Any]:
        return np.frombuffer(self.raw, dtype=ENTRY)


class KvRuns(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Body of KV_RUNS. `raw` as they travel; `runs` reads them."""

    order: int
    op: int
    how: int
    raw: bytes

    @property
    def runs(self) -> NDArray[Any]:
        return np.frombuffer(self.raw, dtype=RUN)


class KvDone(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    order: int
    done: int
    status: int
    cu_result: int


class KvLayoutPart(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    blocks: int
    block_tokens: int
    total: int
    first: int
    pinned: tuple[int, ...]
    tensors: tuple[KvTensor, ...]

    def touched(self, before: int, handle_bytes: int) -> int:
        """How many handles its planes meet, each counted anew by each plane, after those that were told before. Raises
        LayoutRefused where that is more than anybody may have worked out."""
        for tensor in self.tensors:
            span_bytes = self.blocks * tensor.block_stride_bytes + tensor.block_bytes
            before += prod(times for times, _ in tensor.repeats) * (span_bytes // handle_bytes + 2)
        if before > MOST_TOUCHED:
            raise LayoutRefused("tensors", f"planes meet {before} handles, at most {MOST_TOUCHED} can be worked out")
        return before


class KvAttach(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    abi_min: int
    abi_max: int
    mode: int
    blocks: int
    block_tokens: int
    rows: int
    row_blocks: int
    ranks: int
    engine: str


class KvTableMessage(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    abi: int
    table_bytes: int
    book_bytes: int


class KvNeed(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    wanted_blocks: int


class KvStep(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    range: int


class KvScratch(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    gpu_uuid: bytes
    device_instance: int
    place: int
    base: int
    bytes: int


class _Entries:
    _head = valve_abi.LINK_KV_ENTRIES.struct()
    size = valve_abi.LINK_KV_ENTRIES.size

    def read(self, packet: bytes, at: int) -> KvEntries:
        order, range_, op, how, count = self._head.unpack_from(packet, at)
        if count > MAX_ENTRIES:
            raise Malformed(f"{count} entries, at most {MAX_ENTRIES} fit")
        first = at + self._head.size
        raw = packet[first : first + count * ENTRY.itemsize]
        return KvEntries(order=order, range=range_, op=op, how=how, raw=raw)

    def write(self, body: KvEntries) -> bytes:
        head = self._head.pack(body.order, body.range, body.op, body.how, len(body.raw) // ENTRY.itemsize)
        return (head + body.raw).ljust(self.size, b"\0")


class _Runs:
    _head = valve_abi.LINK_KV_RUNS.struct()
    size = valve_abi.LINK_KV_RUNS.size

    def read(self, packet: bytes, at: int) -> KvRuns:
        order, op, how, count = self._head.unpack_from(packet, at)
        if count > MAX_RUNS:
            raise Malformed(f"{count} runs, at most {MAX_RUNS} fit")
        first = at + self._head.size
        return KvRuns(order=order, op=op, how=how, raw=packet[first : first + count * RUN.itemsize])

    def write(self, body: KvRuns) -> bytes:
        head = self._head.pack(body.order, body.op, body.how, len(body.raw) // RUN.itemsize)
        return (head + body.raw).ljust(self.size, b"\0")


class _Layout:
    _head = valve_abi.LINK_KV_LAYOUT.struct()
    _tensor = valve_abi.KV_TENSOR.struct()
    size = valve_abi.LINK_KV_LAYOUT.size

    def read(self, packet: bytes, at: int) -> KvLayoutPart:
        blocks, block_tokens, total, first, count, pinned_count, *pinned = self._head.unpack_from(packet, at)
        if count > MAX_TENSORS or pinned_count > MAX_PINNED:
            raise Malformed(f"{count} tensors and {pinned_count} pinned blocks do not fit")
        start = at + self._head.size
        tensors = (self._tensor.unpack_from(packet, start + i * self._tensor.size) for i in range(count))
        return KvLayoutPart(
            blocks=blocks,
            block_tokens=block_tokens,
            total=total,
            first=first,
            pinned=tuple(pinned[:pinned_count]),
            tensors=tuple(_read_tensor(words) for words in tensors),
        )

    def write(self, body: KvLayoutPart) -> bytes:
        counts = body.blocks, body.block_tokens, body.total, body.first, len(body.tensors), len(body.pinned)
        head = self._head.pack(*counts, *body.pinned, *[0] * (MAX_PINNED - len(body.pinned)))
        return (head + b"".join(self._tensor.pack(*_tensor_words(one)) for one in body.tensors)).ljust(self.size, b"\0")


def _read_tensor(words: tuple[int, ...]) -> KvTensor:
    repeats = tuple(zip(words[3::2], words[4::2], strict=True))
    return KvTensor(
        base_addr=words[0],
        block_stride_bytes=words[1],
        block_bytes=words[2],
        repeats=tuple(repeat for repeat in repeats if repeat[0]),
    )


def _tensor_words(tensor: KvTensor) -> list[int]:
    repeats = [word for repeat in tensor.repeats for word in repeat]
    padding = [0] * (2 * MAX_REPEATS - len(repeats))
    return [tensor.base_addr, tensor.block_stride_bytes, tensor.block_bytes, *repeats, *padding]


RANGE = Plain(KvRangeMessage, valve_abi.LINK_KV_RANGE)
SPAN = Plain(KvSpan, valve_abi.LINK_KV_SPAN)
ENTRIES = _Entries()
RUNS = _Runs()
DONE = Plain(KvDone, valve_abi.LINK_KV_DONE)
LAYOUT = _Layout()
ATTACH = Plain(KvAttach, valve_abi.LINK_KV_ATTACH)
TABLE = Plain(KvTableMessage, valve_abi.LINK_KV_TABLE)
NEED = Plain(KvNeed, valve_abi.LINK_KV_NEED)
STEP = Plain(KvStep, valve_abi.LINK_KV_STEP)
SCRATCH = Plain(KvScratch, valve_abi.LINK_KV_SCRATCH)
