"""The binding of cells.c. It takes and gives arrays of numpy, and knows of no book."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from valved.cells._cells import ffi, lib
from valved.model.ids import GpuIndex

Ints = NDArray[np.int64]
RUN_BYTES = 24  # struct valve_kv_run
MAX_CUTS = 3
LARGEST = (1 << 63) - 1
NONE = np.empty(0, np.int64)


Taken = tuple[Ints, Ints, bytes]
"""Cells that are taken together, by range and slot, and their runs."""


class CellRuns:
    """The cells of an engine in one process on one GPU. The arrays are read where they are, as long as this lives."""

    def __init__(self, columns: int, rows: Ints, numbers: Sequence[int], cells: tuple[Ints, Ints, Ints, Ints]) -> None:
        """`columns` of the engine, what stands at all its places, the client's number of each range. `cells`: column,
        place, range and slot of each."""
        count = len(cells[0])
        for values, most in zip(cells, (columns, len(rows), len(numbers)), strict=False):
            _check_below(values, most)
        self._of, self._slot, runs = (np.empty(size, np.int64) for size in (count, count, 3 * count))
        self._kept = [_ints(one) for one in (*cells, np.array(numbers, np.int64), rows)]
        self._kept += [ffi.new("uint8_t[]", columns), _ints(self._of), _ints(self._slot), _ints(runs)]
        self._cells = ffi.new("struct valve_cells *", [count, columns, *self._kept])
        self._runs = self._cells.out_runs
        self._ends = ffi.new("int64_t[]", 2 * (MAX_CUTS + 1))

    def take(self, columns: Ints, cuts: tuple[float, ...], cut_from: int) -> list[Taken]:
        """What has a handle in these columns, stage by stage."""
        ends, wanted = self._ends, ffi.from_buffer("int64_t[]", columns)
        stages = lib.valve_cells_runs(
            self._cells, wanted, len(wanted), _cuts(cuts), len(cuts), cut_from, ends, ends + MAX_CUTS + 1
        )
        found: list[Taken] = []
        if _checked(stages) == 0:
            return found
        of, slots = self._of[: ends[stages - 1]].copy(), self._slot[: ends[stages - 1]].copy()
        slot = run = 0
        for stage in range(stages):
            last, upto = ends[stage], ends[MAX_CUTS + 1 + stage]
            raw = ffi.buffer(self._runs + 3 * run, RUN_BYTES * (upto - run))[:]
            found.append((of[slot:last], slots[slot:last], raw))
            slot, run = last, upto
        return found

    def slots(self, columns: Ints, lowest: int, highest: int) -> tuple[Ints, Ints]:
        """Where so much stands in these columns, by range and slot."""
        wanted = ffi.from_buffer("int64_t[]", columns)
        count = _checked(lib.valve_cells_slots(self._cells, wanted, len(wanted), lowest, highest))
        return self._of[:count].copy(), self._slot[:count].copy()


def runs_of(of: Ints, slots: Ints, names: Ints, numbers: Sequence[int], flags: int = 0) -> bytes:
    """As they stand in a packet. `names`: none, or one for each slot; `numbers`: the client's, of each range."""
    count = len(slots)
    kept = [_ints(of), _ints(slots), _ints(names) if len(names) else ffi.NULL, ffi.new("int64_t[]", numbers)]
    if len(of) != count or len(names) not in (0, count):
        raise IndexError(f"{len(of)} ranges and {len(names)} names for {count} slots")
    out = ffi.new("int64_t[]", 3 * count)
    runs = lib.valve_slots_runs(ffi.new("struct valve_slots *", [count, *kept, flags, out]), len(numbers))
    raw: bytes = ffi.buffer(out, RUN_BYTES * _checked(runs))[:]
    return raw


def spans_of(of: Ints, slots: Ints, bases: Sequence[int], size: int) -> list[tuple[int, int]]:
    """Address and bytes: neighbours are one span. `bases`: of each range; `size`: of a slot."""
    if len(of) != len(slots):
        raise IndexError(f"{len(of)} ranges for {len(slots)} slots")
    out = ffi.new("uint64_t[]", 2 * len(slots))
    count = lib.valve_slots_spans(_ints(of), _ints(slots), len(slots), bases, len(bases), size, out)
    words = iter(ffi.unpack(out, 2 * _checked(count)))
    return list(zip(words, words, strict=True))


class Handles:
    """A number of handles for each column, on each of some GPUs."""

    def __init__(self, columns: int, of_gpu: Mapping[GpuIndex, Ints]) -> None:
        self._all, self._gpus = columns, tuple(of_gpu)
        self._values = _ints(np.concatenate([NONE, *of_gpu.values()]))
        self._of_gpu = {gpu: self._values + self._all * number for number, gpu in enumerate(of_gpu)}
        self._left, self._sum = ffi.new("int64_t[]", len(of_gpu)), ffi.new("int64_t *")

    def reach(self, columns: Ints, missing: Mapping[GpuIndex, int]) -> tuple[int, int]:
        """How many of these are needed, from the first on, and how many handles they bring where any are missing."""
        lacks = [missing.get(gpu, 0) for gpu in self._gpus]
        self._left[0 : len(lacks)] = lacks
        these = ffi.from_buffer("int64_t[]", columns)
        count = lib.valve_columns_reach(self._values, self._all, len(lacks), these, len(these), self._left)
        brought = sum(before - left for before, left in zip(lacks, self._left, strict=True) if before > 0)
        return _checked(count), brought

    def fitting(self, gpu: GpuIndex, columns: Ints, most: int) -> int:
        """How many of these take no more than so many, from the first on."""
        these = ffi.from_buffer("int64_t[]", columns)
        return _checked(lib.valve_columns_fit(self._of_gpu[gpu], self._all, these, len(these), most, self._sum))

    def sum(self, columns: Ints) -> dict[GpuIndex, int]:
        """Of all of these, on each GPU."""
        these, found = ffi.from_buffer("int64_t[]", columns), {}
        for gpu in self._gpus:
            _checked(lib.valve_columns_fit(self._of_gpu[gpu], self._all, these, len(these), LARGEST, self._sum))
            found[gpu] = self._sum[0]
        return found


class BlockPlaces:
    """In which columns the blocks of an engine lie."""

    def __init__(self, columns: int, column: Ints, ptr: Ints) -> None:
        _check_below(column, columns)
        _check_below(ptr, len(column) + 1)
        self.blocks = len(ptr) - 1
        self._kept = [_ints(column), _ints(ptr), ffi.new("uint8_t[]", columns)]
        self._blocks = ffi.new("struct valve_blocks *", [self.blocks, columns, *self._kept])

    def lose(self, table: Any, columns: Ints, now_ns: int) -> int:
        wanted = ffi.from_buffer("int64_t[]", columns)
        return _checked(lib.valve_table_lose(table, self._blocks, wanted, len(wanted), now_ns))


def read_spans(fd: int, at: Ints, sizes: Ints) -> NDArray[np.uint8]:
    """What the file has there, end to end. Where it has no page none is made, as a look into a mapping would: whoever
    makes a page pays for it as long as anybody keeps the file."""
    out = np.empty(int(sizes.sum()), np.uint8)
    if lib.valve_read_spans(fd, _ints(at), _ints(sizes), len(at), ffi.from_buffer("uint8_t[]", out)):
        raise OSError(ffi.errno, "a shared file cannot be read")
    return out


def table_at(memory: Any) -> Any:
    return ffi.from_buffer(memory, require_writable=True)


@cache
def _cuts(cuts: tuple[float, ...]) -> Any:
    if len(cuts) > MAX_CUTS:
        raise IndexError(f"{len(cuts)} cuts, {MAX_CUTS} have room")
    return ffi.new("double[]", cuts)


def _checked(found: int) -> int:
    if found < 0:
        raise IndexError("a column or a range that is none")
    return found


def _check_below(values: Ints, most: int) -> None:
    """Once for each layout: C trusts its own arrays."""
    if values.size and not 0 <= values.min() <= values.max() < most:
        raise IndexError(f"{values.min()} to {values.max()} are not all below {most}")


def _ints(values: Ints) -> Any:
    assert values.dtype == np.int64
    return ffi.from_buffer("int64_t[]", values)
