"""Column arithmetic on the layouts that engines use, with hand-computed answers."""

from __future__ import annotations

import pytest

from valved.model.memory import BlockSpan, ByteSpan, KvLayout, KvRange, KvTensor, LayoutRefused
from valved.policy.columns import ColumnMap, columns_of

MIB = 1 << 20
BASE = 0x7EA000000000
BLOCK = 32 * 1024
"""K of 16 tokens, 8 heads x 128, bf16."""


def kv_range(handles: int, handle_bytes: int = 2 * MIB, base: int = BASE) -> KvRange:
    return KvRange(base_addr=base, handle_bytes=handle_bytes, handles=handles)


def layout(tensors: list[KvTensor], ranges: list[KvRange], blocks: int, **more: object) -> KvLayout:
    return KvLayout(tensors=tuple(tensors), ranges=tuple(ranges), blocks=blocks, block_tokens=16, **more)  # type: ignore[arg-type]


def first_blocks(columns: ColumnMap) -> list[tuple[int, int]]:
    return [(column.blocks[0].first, column.blocks[0].stop) for column in columns.columns]


def test_k_then_v_per_layer_gives_columns_of_two_handles_a_layer() -> None:
    """(2, N, ..): 64 blocks per 2 MiB handle, 2 layers x K and V = 4 handles a column."""
    blocks = 256
    half = blocks * BLOCK
    tensors = [
        KvTensor(base_addr=BASE + i * 2 * half, block_stride_bytes=BLOCK, block_bytes=BLOCK, repeats=((2, half),))
        for i in range(2)
    ]

    columns = columns_of(layout(tensors, [kv_range(16)], blocks))

    assert first_blocks(columns) == [(0, 64), (64, 128), (128, 192), (192, 256)]
    assert columns.columns[0].handles == (0, 4, 8, 12)
    assert all(len(column.blocks) == 1 for column in columns.columns)


def test_k_and_v_inside_the_block_halves_the_blocks_of_a_column() -> None:
    """(N, 2, ..): a block is K and V, 32 blocks per handle, one handle a layer."""
    blocks = 64
    size = blocks * 2 * BLOCK
    tensors = [
        KvTensor(base_addr=BASE + i * size, block_stride_bytes=2 * BLOCK, block_bytes=2 * BLOCK) for i in range(32)
    ]

    columns = columns_of(layout(tensors, [kv_range(64)], blocks))

    assert first_blocks(columns) == [(0, 32), (32, 64)]
    assert len(columns.columns[0].handles) == 32


def test_separate_k_and_v_ranges_are_joined_by_block_number() -> None:
    """SGLang: K and V buffers in ranges of their own; handles count on through the ranges."""
    other = BASE + (1 << 32)
    tensors = [KvTensor(base_addr=base, block_stride_bytes=2048, block_bytes=2048) for base in (BASE, other)]

    columns = columns_of(layout(tensors, [kv_range(2), kv_range(2, base=other)], 2048, pinned_blocks=(0,)))

    assert first_blocks(columns) == [(0, 1024), (1024, 2048)]
    assert [column.handles for column in columns.columns] == [(0, 2), (1, 3)]
    assert [column.is_reclaimable for column in columns.columns] == [False, True]


def test_mla_blocks_straddle_handles_and_stand_in_both_columns() -> None:
    """64 tokens x 576 x 2 bytes = 73,728 bytes: block 28 covers bytes 2,064,384 to 2,138,112, across 2 MiB."""
    columns = columns_of(
        layout([KvTensor(base_addr=BASE, block_stride_bytes=73_728, block_bytes=73_728)], [kv_range(3)], 80)
    )

    assert first_blocks(columns) == [(0, 29), (28, 57), (56, 80)]
    assert columns.block_columns[columns.block_column_ptr[28] : columns.block_column_ptr[29]].tolist() == [0, 1]
    assert columns.has_straddling


def test_layers_packed_in_the_block_make_a_column_of_one_handle() -> None:
    """Block-outermost: 2 MiB per block over all layers, one block per handle."""
    columns = columns_of(
        layout([KvTensor(base_addr=BASE, block_stride_bytes=2 * MIB, block_bytes=2 * MIB)], [kv_range(5)], 5)
    )

    assert [(b, b + 1) for b in range(5)] == first_blocks(columns)
    assert [(b,) for b in range(5)] == [column.handles for column in columns.columns]


def test_layers_interleaved_inside_the_block_equal_the_packed_layout() -> None:
    packed = layout([KvTensor(base_addr=BASE, block_stride_bytes=4 * BLOCK, block_bytes=4 * BLOCK)], [kv_range(2)], 32)
    split = layout(
        [KvTensor(base_addr=BASE, block_stride_bytes=4 * BLOCK, block_bytes=BLOCK, repeats=((4, BLOCK),))],
        [kv_range(2)],
        32,
    )

    assert columns_of(packed).columns == columns_of(split).columns


def test_layers_of_unequal_block_size_follow_the_smallest_stride() -> None:
    """A layer with half the bytes per block fills its handle with twice the blocks: those set the column."""
    wide = KvTensor(base_addr=BASE, block_stride_bytes=2 * BLOCK, block_bytes=2 * BLOCK)
    narrow = KvTensor(base_addr=BASE + 8 * MIB, block_stride_bytes=BLOCK, block_bytes=BLOCK)

    columns = columns_of(layout([wide, narrow], [kv_range(6)], 128))

    assert first_blocks(columns) == [(0, 64), (64, 128)]
    assert [column.handles for column in columns.columns] == [(0, 1, 4), (2, 3, 5)]


def test_a_handle_shared_by_the_end_of_k_and_the_start_of_v_loses_both_ends() -> None:
    """Half tensors of 1.5 handles: the middle handle backs the last K blocks and the first V blocks."""
    half = 3 * MIB
    tensors = [KvTensor(base_addr=BASE, block_stride_bytes=BLOCK, block_bytes=BLOCK, repeats=((2, half),))]

    columns = columns_of(layout(tensors, [kv_range(3)], 96))

    middle = next(column for column in columns.columns if 1 in column.handles)
    lost = columns.blocks_lost((middle.column_id,))
    assert set(range(64, 96)) <= set(lost)
    assert set(range(32)) <= set(lost)


def test_a_column_with_an_unreclaimable_byte_is_never_offered() -> None:
    tensors = [KvTensor(base_addr=BASE, block_stride_bytes=2 * MIB, block_bytes=2 * MIB)]
    nic = ByteSpan(first=BASE + 4 * MIB - 1, stop=BASE + 4 * MIB)

    columns = columns_of(layout(tensors, [kv_range(3)], 3, unreclaimable=(nic,)))

    assert columns.is_reclaimable.tolist() == [True, False, True]


def test_adjacent_spans_are_merged() -> None:
    columns = columns_of(
        layout([KvTensor(base_addr=BASE, block_stride_bytes=BLOCK, block_bytes=BLOCK)], [kv_range(1)], 64)
    )

    assert (BlockSpan(first=0, stop=64),) == columns.columns[0].blocks


GOOD = {"base_addr": BASE, "block_stride_bytes": BLOCK, "block_bytes": BLOCK}


@pytest.mark.parametrize(
    ("field", "tensors", "ranges", "blocks", "more"),
    [
        ("tensors", [], [kv_range(1)], 64, {}),
        ("tensors", [GOOD], [kv_range(1)], 65, {}),
        ("tensors", [GOOD | {"base_addr": BASE - BLOCK}], [kv_range(1)], 8, {}),
        ("tensors", [GOOD, GOOD | {"base_addr": BASE + 10}], [kv_range(2)], 32, {}),
        ("tensors", [GOOD, GOOD | {"base_addr": BASE + BLOCK}], [kv_range(2)], 32, {}),
        ("block_stride_bytes", [GOOD | {"block_stride_bytes": BLOCK - 1}], [kv_range(1)], 8, {}),
        ("block_stride_bytes", [GOOD | {"block_stride_bytes": 0, "block_bytes": 0}], [kv_range(1)], 8, {}),
        ("repeats", [GOOD | {"repeats": ((0, BLOCK),)}], [kv_range(1)], 8, {}),
        ("repeats", [GOOD | {"repeats": ((1 << 40, BLOCK),)}], [kv_range(1)], 8, {}),
        ("ranges", [GOOD], [kv_range(1), kv_range(1, base=BASE + MIB)], 8, {}),
        ("ranges", [GOOD], [kv_range(1 << 40)], 8, {}),
        ("blocks", [GOOD], [kv_range(1)], 0, {}),
        ("blocks", [GOOD], [kv_range(1)], 1 << 40, {}),
        ("pinned_blocks", [GOOD], [kv_range(1)], 8, {"pinned_blocks": (8,)}),
    ],
    ids=str,
)
def test_a_false_registration_is_refused_by_field(
    field: str, tensors: list[dict[str, int]], ranges: list[KvRange], blocks: int, more: dict[str, object]
) -> None:
    with pytest.raises(LayoutRefused) as refused:
        columns_of(layout([KvTensor(**one) for one in tensors], ranges, blocks, **more))  # type: ignore[arg-type]

    assert field == refused.value.field


HEADS, PIECE = 8, BLOCK // 8
PARTS = {
    "one head of each layer, layers apart (LHBNC)": KvTensor(
        base_addr=BASE, block_stride_bytes=PIECE, block_bytes=PIECE, repeats=((2, 1024 * BLOCK),)
    ),
    "one head of all layers, in each block (BHLNC)": KvTensor(
        base_addr=BASE, block_stride_bytes=2 * BLOCK, block_bytes=PIECE, repeats=((2, PIECE),)
    ),
    "one of two heads, in each block": KvTensor(base_addr=BASE, block_stride_bytes=2 * BLOCK, block_bytes=BLOCK),
    "the first layer of two": KvTensor(base_addr=BASE, block_stride_bytes=BLOCK, block_bytes=BLOCK),
    "the second layer of two": KvTensor(base_addr=BASE + 1024 * BLOCK, block_stride_bytes=BLOCK, block_bytes=BLOCK),
}


@pytest.mark.parametrize("part", PARTS)
def test_bytes_of_an_engine_are_never_left_out_of_every_column(part: str) -> None:
    """They would never have memory, or lose it unseen: two layers of 1,024 blocks in 64 MiB."""
    with pytest.raises(LayoutRefused) as refused:
        columns_of(layout([PARTS[part]], [kv_range(32)], 1024))

    assert refused.value.field == "tensors"


def test_what_an_allocator_rounds_up_and_what_pads_a_block_is_not_missed() -> None:
    tensors = [
        KvTensor(base_addr=base, block_stride_bytes=BLOCK, block_bytes=BLOCK - 512)
        for base in (BASE, BASE + 64 * BLOCK + MIB)
    ]

    columns = columns_of(layout(tensors, [kv_range(3)], 64))

    assert {handle for column in columns.columns for handle in column.handles} == {0, 1, 2}
