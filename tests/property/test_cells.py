"""What C says of an engine's cells is what numpy says, for any layout and any books: slots, packets, table, counts."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from valved.abi.kv_files import KvTable
from valved.abi.kv_link import RUN, KvLayoutPart
from valved.cells.taking import BlockPlaces, CellRuns, Handles, runs_of, spans_of
from valved.kv.columns import Columns, Rank
from valved.kv.moves import CUT_FROM, CUTS
from valved.kv.slots import CLAIMED, NO_HANDLE, NOTHING, STRANGE, KvRangeBook, RangeKey, RangeSlots
from valved.model.ids import ClientId, GpuIndex
from valved.model.memory import KvTensor

HANDLE = 48
BASE = 1 << 40


@st.composite
def engines(draw: st.DrawFn) -> Columns:
    """Ranks on GPUs of their own or shared ones, ranges with numbers of their own, blocks that straddle or do not."""
    stride = draw(st.sampled_from([HANDLE // 4, HANDLE, 20, 36]))
    blocks, planes = draw(st.integers(1, 40)), draw(st.integers(1, 4))
    slots = -(-blocks * stride // HANDLE)
    ranks = []
    for client in range(draw(st.integers(1, 3))):
        gpus = draw(st.lists(st.integers(0, 2), min_size=planes, max_size=planes))
        numbers = draw(st.lists(st.integers(0, 1 << 31), min_size=planes, max_size=planes, unique=True))
        books = [
            KvRangeBook(
                key=RangeKey(ClientId(client), number),
                gpu=GpuIndex(gpu),
                base=BASE + (plane << 30),
                handle_bytes=HANDLE,
                is_elastic=True,
                at=np.full(slots, NO_HANDLE, np.int64),
            )
            for plane, (gpu, number) in enumerate(zip(gpus, numbers, strict=True))
        ]
        tensors = tuple(KvTensor(base_addr=book.base, block_stride_bytes=stride, block_bytes=stride) for book in books)
        told = KvLayoutPart(blocks=blocks, block_tokens=16, total=planes, first=0, pinned=(), tensors=tensors)
        ranks.append(Rank.of(ClientId(client), ClientId(100 + client), books, told))
    engine = Columns()
    engine.lay(ranks)
    stands = st.sampled_from([0, 0, 0, NO_HANDLE, CLAIMED, STRANGE])
    for rank in ranks:
        for book in rank.books:
            found = draw(st.lists(stands, min_size=slots, max_size=slots))
            where = np.arange(slots)
            RangeSlots.of_range(book, where).put(np.where(np.array(found) < 0, found, where))
    return engine


def some(draw_from: st.DataObject, engine: Columns) -> np.ndarray:
    order = draw_from.draw(st.permutations(range(engine.columns)))
    return np.array(order[: draw_from.draw(st.integers(0, engine.columns))], np.int64)


def runs_in_numpy(slots: RangeSlots, names: np.ndarray = NOTHING, flags: int = 0) -> bytes:
    """One run for neighbours in a range, by neighbouring names where names count."""
    is_first = np.ones(len(slots), np.bool_)
    is_first[1:] = (np.diff(slots.slots) != 1) | (np.diff(slots.of) != 0)
    if names.size:
        is_first[1:] |= np.diff(names) != 1
    first = np.flatnonzero(is_first)
    runs = np.zeros(len(first), RUN)
    runs["handle"] = names[first] if names.size else 0
    runs["range"] = np.array([book.key.number for book in slots.books])[slots.of][first]
    runs["slot"], runs["flags"] = slots.slots[first], flags
    runs["count"] = np.diff([*first.tolist(), len(slots)])
    return runs.tobytes()


def cells_in_numpy(engine: Columns, columns: np.ndarray, *, backed: bool) -> list[RangeSlots]:
    found = []
    for part in engine.parts:
        standing = engine._at.rows[part.place]
        is_so = standing >= 0 if backed else standing == NO_HANDLE
        chosen = np.flatnonzero(np.isin(part.column, columns) & is_so)
        found += [part.slots[chosen]] if chosen.size else []
    return found


def said(cells: list[RangeSlots]) -> list[tuple[RangeKey, list[int], list[int]]]:
    return [(slots.owner.key, slots.of.tolist(), slots.slots.tolist()) for slots in cells]


def in_numpy(slots: RangeSlots, cuts: tuple[float, ...]) -> list[tuple[list[int], list[int], bytes]]:
    count = len(slots)
    cuts = cuts if count >= CUT_FROM else ()
    edges = [0, *(edge for cut in cuts if (edge := round(count * cut)) < count), count]
    stages = [slots[first:last] for first, last in pairwise(edges)]
    return [(one.of.tolist(), one.slots.tolist(), runs_in_numpy(one)) for one in stages]


@settings(max_examples=80)
@given(engine=engines(), cuts=st.sampled_from(list(CUTS.values())), data=st.data())
def test_the_slots_and_packets_of_a_reclaim_never_differ_from_those_of_numpy(engine, cuts, data):
    for columns in some(data, engine), some(data, engine):  # twice: nothing of the first is left
        expected = {slots.owner.key: in_numpy(slots, cuts) for slots in cells_in_numpy(engine, columns, backed=True)}
        taken = {part.slots.owner.key: part.runs.take(columns, cuts, CUT_FROM) for part in engine.parts}
        found = {
            owner: [(of.tolist(), slots.tolist(), raw) for of, slots, raw in stages]
            for owner, stages in taken.items()
            if stages
        }
        assert found == expected
        for stages in taken.values():
            for _, slots, raw in stages:
                assert int(np.frombuffer(raw, RUN)["count"].sum()) == len(slots)


@settings(max_examples=80)
@given(engine=engines(), data=st.data())
def test_the_slots_and_packets_of_a_move_never_differ_from_those_of_numpy(engine, data):
    """What is given has names, and what is made sparse has addresses."""
    columns = some(data, engine)
    for backed in True, False:
        cells = engine.cells(columns, backed=backed)
        assert said(cells) == said(cells_in_numpy(engine, columns, backed=backed))
        for slots in cells:
            count = len(slots)
            shuffled = slots[np.array(data.draw(st.permutations(range(count))), np.int64)]
            names = np.array(data.draw(st.lists(st.integers(1, 12), min_size=count, max_size=count)), np.int64)
            for one in slots, shuffled:
                assert one.runs(names, 5) == runs_in_numpy(one, names, 5)
                assert one.runs() == runs_in_numpy(one)
            in_order = slots[np.lexsort((slots.slots, slots.of))]
            runs = np.frombuffer(runs_in_numpy(in_order), RUN)
            bases = {book.key.number: book.base for book in slots.books}
            spans = [(bases[int(run["range"])] + int(run["slot"]) * HANDLE, int(run["count"]) * HANDLE) for run in runs]
            assert shuffled.spans() == spans


@settings(max_examples=80)
@given(engine=engines(), data=st.data())
def test_what_a_table_says_is_lost_never_differs_from_what_numpy_says(engine, data):
    blocks = len(engine._block_ptr) - 1
    tables = [KvTable(blocks, 16) for _ in range(2)]
    try:
        for now_ns in 5, 9:
            columns = some(data, engine)
            are_out = np.ones(engine.columns, np.bool_)
            are_out[columns] = False
            tables[0].record(np.flatnonzero(~engine.are_whole(are_out)), False, now_ns)
            tables[1].lose(engine.block_places, columns, now_ns)
            assert tables[0]._memory[:] == tables[1]._memory[:]
            assert tables[0].backed_blocks == tables[1].backed_blocks
            assert tables[0].epoch == tables[1].epoch == int(tables[1]._head["epoch"][0])
    finally:
        for table in tables:
            table.close()


@settings(max_examples=80)
@given(engine=engines(), missing=st.dictionaries(st.integers(0, 3), st.integers(1, 60)), data=st.data())
def test_how_far_handles_reach_never_differs_from_what_numpy_says(engine, missing, data):
    columns = some(data, engine)
    missing = {gpu: count for gpu, count in missing.items() if gpu in engine.gpus}
    gains = {gpu: engine.handles_of(gpu)[columns] for gpu in missing}
    brings = np.zeros(len(columns) + 1, np.bool_)
    for gpu, gain in gains.items():
        brings[:-1] |= (gain > 0) & (gain.cumsum() - gain < missing[gpu])
    taken = int(brings.argmin())
    freed = sum(int(gain[:taken].sum()) for gain in gains.values())
    assert engine.gains.reach(columns, missing) == (taken, freed)

    bare = {gpu: np.zeros(engine.columns, np.int64) for gpu in engine.gpus}
    for column in range(engine.columns):
        for slots in cells_in_numpy(engine, np.array([column]), backed=False):
            bare[slots.owner.gpu][column] += len(slots)
    assert engine.lacking(columns) == {gpu: int(bare[gpu][columns].sum()) for gpu in engine.gpus}
    room = {gpu: data.draw(st.integers(0, 20)) for gpu in engine.gpus}
    fits = [int(bare[gpu][columns].cumsum().searchsorted(room[gpu], side="right")) for gpu in engine.gpus]
    assert engine.fitting(columns, room) == min([*fits, len(columns)])


@pytest.mark.parametrize("column", [-1, 2, 1 << 62, -(1 << 62)])
def test_a_column_that_is_none_is_never_looked_up(column):
    """An index of another layout would write where nothing of the engine is."""
    here, none = np.arange(2), np.array([0, column])
    cells = CellRuns(2, here, [0], (here, here, np.zeros(2, np.int64), here))
    handles = Handles(2, {GpuIndex(0): np.ones(2, np.int64)})
    table = KvTable(2, 16)
    for refuses in (
        lambda: cells.take(none, (), 8),
        lambda: cells.take(here, (0.2, 0.4, 0.6, 0.8), 1),
        lambda: cells.slots(none, 0, 9),
        lambda: runs_of(none, here, NOTHING, [0, 0]),
        lambda: spans_of(none, here, [0, 0], HANDLE),
        lambda: runs_of(here[:1], here, NOTHING, [0, 0]),
        lambda: runs_of(here, here, here[:1], [0, 0]),
        lambda: spans_of(here[:1], here, [0, 0], HANDLE),
        lambda: table.lose(BlockPlaces(2, here, np.arange(3)), none, 1),
        lambda: handles.reach(none, {GpuIndex(0): 5}),
        lambda: handles.fitting(GpuIndex(0), none, 5),
        lambda: handles.sum(none),
    ):
        with pytest.raises(IndexError):
            refuses()
    assert [slots.tolist() for _, slots, _ in cells.take(here, (), 8)] == [[0, 1]]
    assert table.epoch == 0
    table.close()
    with pytest.raises(IndexError):
        table.lose(BlockPlaces(2, here, np.arange(3)), here, 1)


def test_a_layout_of_another_table_is_never_written():
    """What stands behind the entries would be overwritten."""
    here, table = np.arange(8), KvTable(2, 16)
    before = table._memory[:]

    with pytest.raises(IndexError):
        table.lose(BlockPlaces(8, here, np.arange(9)), here, 1)

    assert table._memory[:] == before
    table.close()


@pytest.mark.parametrize("broken", [-1, 2, 1 << 62])
@pytest.mark.parametrize("which", range(3))
def test_a_layout_that_points_outside_of_its_arrays_is_never_taken(broken, which):
    here, bad = np.arange(2), np.array([0, broken])
    cells = [here, here, np.zeros(2, np.int64), here]
    cells[which] = bad

    with pytest.raises(IndexError):
        CellRuns(2, here, [0, 0], tuple(cells))
    with pytest.raises(IndexError):
        BlockPlaces(2, bad, np.arange(3))
    with pytest.raises(IndexError):
        BlockPlaces(2, here, np.array([0, 2, 4]))
