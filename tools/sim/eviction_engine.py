"""An offline engine with a paged KV pool that loses and regains columns, fast enough for a grid of experiments.

Continuous batching in steps of a second: within a step the batch decodes at its own pace and chunked prefill takes
its share of the iterations; completions, admissions, growth and preemption happen at the step's end. The backlog never
runs dry. Timings are those of facts on an 8B model and an H100; every number is a field.

A reclaim calls the product's own selection and hands out blocks by the product's own free list, or by a stock one.
"""

from __future__ import annotations

import enum
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from valve_tools.sim.eviction_rivals import ColumnAges
from valve_tools.sim.traces import TraceError

from valved.model.memory import ColumnId, ReclaimDecision
from valved.policy.columns import ColumnMap
from valved.policy.eviction import BlockTables
from valved.policy.handout import ColumnFreeList

Lengths = Sequence[tuple[int, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """The modelled engine: 8B in bf16 on one H100 (measured tables of Vidur; attention from FLOP counts)."""

    step_s: float = 1.0
    decode_base_ms: float = 6.0
    decode_per_sequence_ms: float = 0.011
    decode_per_token_ms: float = 52e-6
    prefill_token_us: float = 21.0
    attention_ns_per_pair: float = 1.3
    chunk_tokens: int = 2048
    max_sequences: int = 256
    watermark: float = 0.01
    """Share of the pool that admission leaves free for the growth of running requests."""

    pins_prefix: bool = True
    """The plugin holds the valid prefix of an interrupted request while others run; False: it is a cache that makes
    room for the first in line. Pinning wins wherever memory comes back soon."""

    def prefill_s(self, done: float, target: float) -> float:
        linear = self.prefill_token_us * 1e-6 * (target - done)
        return linear + self.attention_ns_per_pair * 0.5e-9 * (target * target - done * done)


class FreeList(Protocol):
    def __len__(self) -> int: ...

    def take(self, count: int, last_block: int | None = None) -> list[int]: ...

    def give(self, blocks: Iterable[int]) -> None: ...

    def withhold_all(self, columns: Sequence[int]) -> None: ...

    def restore_all(self, columns: Sequence[int]) -> None: ...


class AffineFreeList(ColumnFreeList):
    """The product's list."""

    def withhold_all(self, columns: Sequence[int]) -> None:
        for column in columns:
            self.withhold(column)

    def restore_all(self, columns: Sequence[int]) -> None:
        for column in columns:
            self.restore(column)


class StockFreeList:
    """A queue as in vLLM: blocks are taken at the head and come back, last block first, at the tail."""

    def __init__(self, column_of_block: Sequence[int], reserved: Iterable[int] = ()) -> None:
        kept = frozenset(reserved)
        self._column_of = tuple(column_of_block)
        self._queue = deque(block for block in range(len(self._column_of)) if block not in kept)
        self._withheld: set[int] = set()
        self._parked: dict[int, list[int]] = {}

    def __len__(self) -> int:
        return len(self._queue)

    def take(self, count: int, last_block: int | None = None) -> list[int]:
        if count > len(self._queue):
            raise ValueError(f"{count} blocks wanted, {len(self._queue)} are free")
        return [self._queue.popleft() for _ in range(count)]

    def give(self, blocks: Iterable[int]) -> None:
        for block in reversed(list(blocks)):
            column = self._column_of[block]
            if column in self._withheld:
                self._parked[column].append(block)
            else:
                self._queue.append(block)

    def withhold_all(self, columns: Sequence[int]) -> None:
        self._withheld.update(columns)
        self._parked.update((column, []) for column in columns)
        queue, self._queue = self._queue, deque()
        for block in queue:
            column = self._column_of[block]
            (self._parked[column] if column in self._withheld else self._queue).append(block)

    def restore_all(self, columns: Sequence[int]) -> None:
        for column in columns:
            self._withheld.discard(column)
            self._queue.extend(self._parked.pop(column))


@dataclass(slots=True)
class Sequence_:
    """One request: `target` tokens are to be prefilled, then it decodes up to `end`."""

    prompt: int
    end: int
    target: int
    done: float = 0.0
    """Tokens with KV."""
    best: float = 0.0
    """Most tokens it ever had: what is below is computed again and counts for nothing."""
    blocks: list[int] = field(default_factory=list)


class Loss(enum.Enum):
    """What a request keeps when a block of it is taken."""

    ALL = "all"
    """Nothing: it is computed again from its first token (the paper's baselines)."""
    BEHIND = "behind"
    """The valid prefix (the product)."""
    NOTHING = "nothing"
    """Everything, as if it could be copied back in no time: what is lost then is capacity alone, a bound for all."""


Select = Callable[[ColumnMap, BlockTables, ColumnAges, int], ReclaimDecision]


class EvictionEngine:
    """The batch, the queue and the pool; `useful_tokens` counts every prompt and output token once."""

    def __init__(
        self, settings: EngineSettings, column_map: ColumnMap, free: FreeList, lengths: Lengths, loss: Loss
    ) -> None:
        self.settings = settings
        self.column_map = column_map
        if not any(self._fits(prompt + output) for prompt, output in lengths):
            raise TraceError(f"no request fits a pool of {column_map.blocks} blocks")
        self.free = free
        self.loss = loss
        self.useful_tokens = 0.0
        self.lost_tokens = 0.0
        self.refused = 0
        self._lengths = lengths
        self._next_length = 0
        self._column_of = column_map.block_columns
        self._waiting: deque[Sequence_] = deque()
        self._prefilling: deque[Sequence_] = deque()
        self._decoding: list[Sequence_] = []
        columns = len(column_map.columns)
        self._held: NDArray[np.int64] = np.zeros(columns, dtype=np.int64)
        self._first_given = np.zeros(columns, dtype=np.int64)
        self._last_given = np.zeros(columns, dtype=np.int64)
        self._taken: list[int] = []
        self._given: list[int] = []
        self._steps = 0

    def step(self) -> None:
        """One step: prefill and decode share it as chunked iterations do."""
        self._admit()
        one = self.settings
        context = sum(seq.done for seq in self._decoding)
        decode_s = 1e-3 * (
            one.decode_base_ms + one.decode_per_sequence_ms * len(self._decoding) + one.decode_per_token_ms * context
        )
        chunk_s = one.prefill_s(0, one.chunk_tokens)
        prefill_share = chunk_s / (chunk_s + decode_s)
        prefill_s = self._prefill(one.step_s * prefill_share)
        mixed_s = prefill_s / prefill_share
        self._decode(mixed_s / (chunk_s + decode_s) + max(0.0, one.step_s - mixed_s) / decode_s)
        self._age()

    def reclaim(self, select: Select, needed_handles: int) -> tuple[ColumnId, ...]:
        """Take the columns that the policy chooses; requests that lose blocks wait again, first in line."""
        holders = [seq for seq in self._holders() if seq.blocks]
        lengths = np.array([len(seq.blocks) for seq in holders], dtype=np.int64)
        tables = BlockTables(
            ptr=np.concatenate([[0], np.cumsum(lengths)]),
            blocks=np.fromiter(itertools.chain.from_iterable(seq.blocks for seq in holders), np.int64, lengths.sum()),
            tokens=np.array([int(seq.done) for seq in holders], dtype=np.int64),
        )
        ages = ColumnAges(first_given=self._first_given, last_given=self._last_given)
        columns = select(self.column_map, tables, ages, needed_handles).columns
        self._invalidate(holders, tables, columns)
        self.free.withhold_all(columns)
        self._age()
        return columns

    def restore(self, columns: tuple[ColumnId, ...]) -> None:
        self.free.restore_all(columns)

    def start_counting(self) -> None:
        self.useful_tokens = self.lost_tokens = 0.0

    def check_integrity(self) -> None:
        held = sorted(block for seq in self._holders() for block in seq.blocks)
        if len(held) != len(set(held)):
            raise AssertionError("a block has two owners")
        counts = np.bincount(self._column_of[held], minlength=len(self._held)) if held else np.zeros_like(self._held)
        if (counts != self._held).any():
            raise AssertionError("the count of held blocks is wrong")
        if isinstance(self.free, ColumnFreeList):
            self.free.check_integrity(held)

    def _holders(self) -> Iterator[Sequence_]:
        return itertools.chain(self._decoding, self._prefilling, self._waiting)

    def _admit(self) -> None:
        """First in line first; prefixes kept by requests behind it make room as `pins_prefix` says."""
        reserve = int(self.settings.watermark * self.column_map.blocks)
        while len(self._decoding) + len(self._prefilling) < self.settings.max_sequences:
            if not self._waiting:
                self._waiting.append(self._arrival())
            seq = self._waiting[0]
            wanted = self._blocks_for(seq.target) - len(seq.blocks)
            is_alone = not self._decoding and not self._prefilling
            if wanted > len(self.free) - (0 if is_alone else reserve):
                may_drop = is_alone or not self.settings.pins_prefix
                if may_drop and self._drop_a_prefix(is_alone):
                    continue
                break
            self._waiting.popleft()
            self._extend(seq, wanted)
            self._prefilling.append(seq)

    def _arrival(self) -> Sequence_:
        while True:
            prompt, output = self._lengths[self._next_length % len(self._lengths)]
            self._next_length += 1
            if self._fits(prompt + output):
                return Sequence_(prompt=prompt, end=prompt + output, target=prompt)
            self.refused += 1

    def _fits(self, tokens: int) -> bool:
        return self._blocks_for(tokens) < self.column_map.blocks

    def _drop_a_prefix(self, may_be_first: bool) -> bool:
        """The last in line with a kept prefix gives it up; the first in line only when nothing else is left."""
        for position in range(len(self._waiting) - 1, -1 if may_be_first else 0, -1):
            seq = self._waiting[position]
            if seq.blocks:
                self.lost_tokens += seq.done
                self._release(seq)
                return True
        return False

    def _prefill(self, budget_s: float) -> float:
        spent = 0.0
        while self._prefilling and spent < budget_s:
            seq = self._prefilling[0]
            whole_s = self.settings.prefill_s(seq.done, seq.target)
            if spent + whole_s > budget_s:
                share = (budget_s - spent) / whole_s
                self._progress(seq, seq.done + share * (seq.target - seq.done))
                return budget_s
            spent += whole_s
            self._progress(seq, seq.target)
            self._decoding.append(self._prefilling.popleft())
        return spent

    def _decode(self, tokens: float) -> None:
        block_tokens = self.column_map.block_tokens
        finished = []
        for seq in list(self._decoding):
            if not seq.blocks:
                continue  # preempted meanwhile
            after = min(seq.done + tokens, seq.end)
            wanted = -int(-after // block_tokens) - len(seq.blocks)
            if wanted > 0 and not self._make_room(seq, wanted):
                continue
            self._progress(seq, after)
            if after >= seq.end:
                finished.append(seq)
        if finished:
            done = set(map(id, finished))
            self._decoding = [seq for seq in self._decoding if id(seq) not in done]
            for seq in finished:
                self._release(seq)

    def _make_room(self, seq: Sequence_, wanted: int) -> bool:
        """Grow, if need be by preempting the request admitted last; False when that is the request itself."""
        while wanted > len(self.free):
            last = self._prefilling.pop() if self._prefilling else self._decoding.pop()
            self._send_back(last, 0)
            if last is seq:
                return False
        self._extend(seq, wanted)
        return True

    def _invalidate(self, holders: list[Sequence_], tables: BlockTables, columns: tuple[ColumnId, ...]) -> None:
        is_lost = np.zeros(self.column_map.blocks, dtype=np.bool_)
        is_lost[list(self.column_map.blocks_lost(columns))] = True
        hits = np.flatnonzero(is_lost[tables.blocks])
        owners, firsts = np.unique(np.searchsorted(tables.ptr, hits, side="right") - 1, return_index=True)
        hit = {id(holders[owner]): int(hits[i] - tables.ptr[owner]) for owner, i in zip(owners, firsts, strict=True)}
        affected = [seq for seq in holders if id(seq) in hit]
        self._decoding = [seq for seq in self._decoding if id(seq) not in hit]
        self._prefilling = deque(seq for seq in self._prefilling if id(seq) not in hit)
        self._waiting = deque(seq for seq in self._waiting if id(seq) not in hit)
        for seq in reversed(affected):
            before = seq.done
            self._send_back(seq, hit[id(seq)] if self.loss is Loss.BEHIND else 0, self.loss is Loss.NOTHING)
            self.lost_tokens += before - seq.done

    def _send_back(self, seq: Sequence_, kept_blocks: int, keeps_tokens: bool = False) -> None:
        seq.target = max(seq.prompt, int(seq.best))
        if not keeps_tokens:
            seq.done = min(seq.done, float(kept_blocks * self.column_map.block_tokens))
        self._return(seq.blocks[kept_blocks:])
        del seq.blocks[kept_blocks:]
        self._waiting.appendleft(seq)

    def _progress(self, seq: Sequence_, done: float) -> None:
        seq.done = done
        if done > seq.best:
            self.useful_tokens += done - seq.best
            seq.best = done

    def _extend(self, seq: Sequence_, count: int) -> None:
        if count > 0:
            new = self.free.take(count, seq.blocks[-1] if seq.blocks else None)
            seq.blocks += new
            self._taken += new

    def _release(self, seq: Sequence_) -> None:
        self._return(seq.blocks)
        seq.blocks = []
        seq.done = 0.0

    def _return(self, blocks: list[int]) -> None:
        self.free.give(blocks)
        self._given += blocks

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.column_map.block_tokens)

    def _age(self) -> None:
        """Bring the columns' ages up to date: first given counts from when the column was last empty."""
        self._steps += 1
        columns = len(self._held)
        taken = np.bincount(self._column_of[self._taken], minlength=columns) if self._taken else None
        if self._given:
            self._held -= np.bincount(self._column_of[self._given], minlength=columns)
        if taken is not None:
            self._first_given[(self._held <= 0) & (taken > 0)] = self._steps
            self._last_given[taken > 0] = self._steps
            self._held += taken
        self._taken, self._given = [], []
