"""From registered KV tensors to columns: which handles back which blocks, by interval arithmetic on real strides.

Called once per registration by kv/reclaim; the result is immutable. Never "blocks per page": an MLA block of
73,728 bytes straddles handles, and then it belongs to both columns, since losing either loses the block.

A handle belongs to exactly one column. Each plane (one layer's K, say) is cut at the same block numbers, one handle
apart in the plane with the smallest stride; a handle joins the column that its middle byte falls in. With equal
strides, the usual case, column j is simply the j-th handle of every plane.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from valved.model.memory import (
    BlockSpan,
    Column,
    ColumnId,
    HandleIndex,
    KvLayout,
    KvRange,
    KvTensor,
    LayoutRefused,
)

Ints = NDArray[np.int64]
MAX_PLANES = 4096
"""128 layers x K and V x 16 parts: above it the registration is broken or hostile, not large."""
MAX_BLOCKS = 1 << 22
"""4M blocks of 16 tokens are 67M tokens, beyond any card; bounds what a hostile registration can cost the daemon."""
MAX_HANDLES = 1 << 18
"""512 GiB in 2 MiB handles."""
MAX_GAP = 2 << 20
"""An allocator rounds what it is asked for: less than this between tensors is that, more is a layout told in part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plane:
    """One arithmetic run of blocks inside a range: block b covers [base + b*stride, base + b*stride + bytes)."""

    base_addr: int
    stride_bytes: int
    block_bytes: int

    def blocks_hit(self, first: int, stop: int, blocks: int) -> BlockSpan | None:
        """Blocks with a byte in addresses [first, stop)."""
        low = max(0, (first - self.base_addr - self.block_bytes) // self.stride_bytes + 1)
        high = min(blocks, -((self.base_addr - stop) // self.stride_bytes))
        return BlockSpan(first=low, stop=high) if low < high else None

    def end_addr(self, blocks: int) -> int:
        return self.base_addr + (blocks - 1) * self.stride_bytes + self.block_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnMap:
    """All columns of one engine on one GPU, with the arrays that eviction gathers from."""

    columns: tuple[Column, ...]
    blocks: int
    block_tokens: int
    block_column_ptr: Ints
    """Columns of block b are block_columns[ptr[b]:ptr[b + 1]]; one each unless blocks straddle handles."""
    block_columns: Ints
    handles_of_column: Ints
    is_reclaimable: NDArray[np.bool_]

    @property
    def has_straddling(self) -> bool:
        return len(self.block_columns) != self.blocks

    def blocks_lost(self, columns: tuple[ColumnId, ...]) -> tuple[int, ...]:
        """Block ids that lose content when these columns go: what the engine must be told."""
        spans = [span for column in columns for span in self.columns[column].blocks]
        return tuple(sorted({block for span in spans for block in range(span.first, span.stop)}))


def columns_of(layout: KvLayout) -> ColumnMap:
    """Check the registration, then cut it into columns; raises LayoutRefused and changes nothing when it is wrong."""
    planes = _checked_planes(layout)
    _check_gaps(layout, planes)
    pitch = min(plane.stride_bytes for plane, _ in planes)
    handles: dict[int, list[HandleIndex]] = defaultdict(list)
    hit: dict[int, list[BlockSpan]] = defaultdict(list)
    bad: set[int] = set()
    for index, first, stop, its_planes in _handles_with_planes(layout, planes):
        spans = [plane.blocks_hit(first, stop, layout.blocks) for plane in its_planes]
        if not any(spans):
            continue
        column = _column_of(first, stop, its_planes, pitch)
        handles[column].append(index)
        hit[column].extend(span for span in spans if span)
        if any(span.first < stop and first < span.stop for span in layout.unreclaimable):
            bad.add(column)
    pinned = sorted(layout.pinned_blocks)
    columns = []
    for new_id, old in enumerate(sorted(handles)):
        spans_of = _merged(hit[old])
        touches = any(span.first <= block < span.stop for span in spans_of for block in pinned)
        columns.append(
            Column(
                column_id=ColumnId(new_id),
                handles=tuple(handles[old]),
                blocks=spans_of,
                is_reclaimable=not touches and old not in bad,
            )
        )
    return _with_arrays(tuple(columns), layout)


def uniform_columns(columns: int, blocks_per_column: int, block_tokens: int = 16, pinned: int = 0) -> ColumnMap:
    """The aligned textbook case without addresses: for simulation, benches and tests. The first `pinned` stay."""
    made = tuple(
        Column(
            column_id=ColumnId(i),
            handles=(HandleIndex(i),),
            blocks=(BlockSpan(first=i * blocks_per_column, stop=(i + 1) * blocks_per_column),),
            is_reclaimable=i >= pinned,
        )
        for i in range(columns)
    )
    layout = KvLayout(ranges=(), tensors=(), blocks=columns * blocks_per_column, block_tokens=block_tokens)
    return _with_arrays(made, layout)


def _checked_planes(layout: KvLayout) -> list[tuple[Plane, KvRange]]:
    _check_ranges(layout)
    planes = [(plane, _home(plane, layout)) for tensor in layout.tensors for plane in _planes_of(tensor)]
    if not 0 < len(planes) <= MAX_PLANES:
        raise LayoutRefused("tensors", f"{len(planes)} planes of KV were registered, need 1 to {MAX_PLANES}")
    _check_overlap([plane for plane, _ in planes], layout.blocks)
    return planes


def _check_ranges(layout: KvLayout) -> None:
    if not 0 < layout.blocks <= MAX_BLOCKS or layout.block_tokens <= 0:
        raise LayoutRefused("blocks", f"{layout.blocks} blocks of {layout.block_tokens} tokens, need 1 to {MAX_BLOCKS}")
    if sum(kv.handles for kv in layout.ranges) > MAX_HANDLES:
        raise LayoutRefused("ranges", f"more than {MAX_HANDLES} handles: register with larger ones")
    for block in layout.pinned_blocks:
        if not 0 <= block < layout.blocks:
            raise LayoutRefused("pinned_blocks", f"block {block} is outside 0..{layout.blocks - 1}")
    for kv in layout.ranges:
        if kv.handle_bytes <= 0 or kv.handles <= 0:
            raise LayoutRefused("ranges", f"range at {kv.base_addr:#x} has no bytes")
    for left, right in itertools.pairwise(sorted(layout.ranges, key=lambda kv: kv.base_addr)):
        if right.base_addr < left.end_addr:
            raise LayoutRefused("ranges", f"range at {right.base_addr:#x} starts inside the one at {left.base_addr:#x}")


def _planes_of(tensor: KvTensor) -> Iterator[Plane]:
    if tensor.block_bytes <= 0 or tensor.block_stride_bytes < tensor.block_bytes:
        raise LayoutRefused(
            "block_stride_bytes",
            f"{tensor.block_stride_bytes} is shorter than a block of {tensor.block_bytes} bytes: blocks would overlap",
        )
    count = 1
    for times, stride in tensor.repeats:
        count *= times
        if times <= 0 or stride <= 0 or count > MAX_PLANES:
            raise LayoutRefused("repeats", f"({times}, {stride}) is not a repeat of at most {MAX_PLANES} planes")
    steps = [range(0, times * stride, stride) for times, stride in tensor.repeats]
    for offsets in itertools.product(*steps):
        yield Plane(
            base_addr=tensor.base_addr + sum(offsets),
            stride_bytes=tensor.block_stride_bytes,
            block_bytes=tensor.block_bytes,
        )


def _home(plane: Plane, layout: KvLayout) -> KvRange:
    for kv in layout.ranges:
        if kv.base_addr <= plane.base_addr and plane.end_addr(layout.blocks) <= kv.end_addr:
            return kv
    end = plane.end_addr(layout.blocks)
    raise LayoutRefused("tensors", f"blocks at {plane.base_addr:#x}..{end:#x} exceed every registered range")


def _check_overlap(planes: list[Plane], blocks: int) -> None:
    """Planes may interleave (layers inside a block), with one stride and disjoint places inside it; nothing else. A
    quarter of the stride may be padding; what leaves more is a layout told in part.
    """
    group: list[Plane] = []
    end = 0
    for plane in sorted(planes, key=lambda one: one.base_addr):
        if group and plane.base_addr >= end:
            _check_interleaving(group)
            group = []
        group.append(plane)
        end = max(end, plane.end_addr(blocks))
    _check_interleaving(group)


def _check_interleaving(group: list[Plane]) -> None:
    stride, origin = group[0].stride_bytes, group[0].base_addr
    placed = sorted((((plane.base_addr - origin) % stride, plane) for plane in group), key=lambda pair: pair[0])
    ends = [shift + plane.block_bytes for shift, plane in placed]
    limits = [shift for shift, _ in placed[1:]] + [stride]
    covered = sum(plane.block_bytes for plane in group)
    if len({plane.stride_bytes for plane in group}) == 1 and 4 * (stride - covered) > stride:
        raise LayoutRefused("tensors", f"{covered} of each {stride} bytes from {origin:#x} on belong to a block")
    for (_, plane), end, limit in zip(placed, ends, limits, strict=True):
        if end > limit or plane.stride_bytes != stride:
            raise LayoutRefused("tensors", f"blocks at {plane.base_addr:#x} share bytes with those of another tensor")


def _check_gaps(layout: KvLayout, planes: list[tuple[Plane, KvRange]]) -> None:
    """Bytes that no block is said to cover belong to no column, so they would never have memory, or lose it unseen."""
    for kv in layout.ranges:
        inside = sorted((plane for plane, home in planes if home is kv), key=lambda one: one.base_addr)
        end = kv.base_addr
        for plane in inside:
            if plane.base_addr - end >= MAX_GAP:
                raise LayoutRefused("tensors", f"{plane.base_addr - end} bytes from {end:#x} on belong to no block")
            end = max(end, plane.end_addr(layout.blocks))
        left = kv.end_addr - end
        if left >= max(kv.handle_bytes, MAX_GAP):
            raise LayoutRefused(
                "tensors", f"the last {left} bytes of the range at {kv.base_addr:#x} belong to no block"
            )


def _handles_with_planes(
    layout: KvLayout, planes: list[tuple[Plane, KvRange]]
) -> Iterator[tuple[HandleIndex, int, int, list[Plane]]]:
    start = 0
    for kv in layout.ranges:
        by_handle: dict[int, list[Plane]] = defaultdict(list)
        for plane, home in planes:
            if home is kv:
                low = (plane.base_addr - kv.base_addr) // kv.handle_bytes
                high = (plane.end_addr(layout.blocks) - 1 - kv.base_addr) // kv.handle_bytes
                for handle in range(low, high + 1):
                    by_handle[handle].append(plane)
        for handle in sorted(by_handle):
            first = kv.base_addr + handle * kv.handle_bytes
            yield HandleIndex(start + handle), first, first + kv.handle_bytes, by_handle[handle]
        start += kv.handles


def _column_of(first: int, stop: int, planes: list[Plane], pitch: int) -> int:
    """The column that the middle of the handle's largest share of one plane falls in, counted in handles of pitch."""
    plane = max(planes, key=lambda one: min(stop, one.base_addr + (stop - first)) - max(first, one.base_addr))
    middle = max(0, 2 * (first - plane.base_addr) + (stop - first))
    return middle * pitch // (2 * plane.stride_bytes * (stop - first))


def _merged(spans: list[BlockSpan]) -> tuple[BlockSpan, ...]:
    merged: list[BlockSpan] = []
    for span in sorted(spans, key=lambda one: (one.first, one.stop)):
        if merged and span.first <= merged[-1].stop:
            merged[-1] = BlockSpan(first=merged[-1].first, stop=max(merged[-1].stop, span.stop))
        else:
            merged.append(span)
    return tuple(merged)


def _with_arrays(columns: tuple[Column, ...], layout: KvLayout) -> ColumnMap:
    ids: list[Ints] = []
    owners: list[Ints] = []
    for column in columns:
        for span in column.blocks:
            ids.append(np.arange(span.first, span.stop))
            owners.append(np.full(span.stop - span.first, column.column_id, dtype=np.int64))
    block, owner = np.concatenate(ids), np.concatenate(owners)
    order = np.argsort(block, kind="stable")
    pointers = np.concatenate([[0], np.cumsum(np.bincount(block, minlength=layout.blocks))])
    return ColumnMap(
        columns=columns,
        blocks=layout.blocks,
        block_tokens=layout.block_tokens,
        block_column_ptr=pointers.astype(np.int64),
        block_columns=owner[order],
        handles_of_column=np.array([len(column.handles) for column in columns], dtype=np.int64),
        is_reclaimable=np.array([column.is_reclaimable for column in columns], dtype=np.bool_),
    )
