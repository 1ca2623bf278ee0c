"""What a process publishes of its time in the driver, and how it adds up over processes."""

from __future__ import annotations

import struct

import pytest
from rm_process import RmProcess, grow_tree
from valve_tools.emulator.client import Emulator
from valve_tools.emulator.process import inside_ns, union_ns


def test_overlapping_calls_count_once_and_only_inside_the_stretch() -> None:
    calls = [(0, 10), (5, 20), (30, 40), (32, 35), (90, 200)]

    assert union_ns(calls, 0, 100) == 20 + 10 + 10
    assert union_ns(calls, 8, 33) == 12 + 3
    assert union_ns([], 0, 100) == 0


def test_calls_of_two_processes_are_seen_together(emulator: Emulator, process: RmProcess, another: RmProcess) -> None:
    for one in (process, another):
        grow_tree(one, channels=1)
    pages = [emulator.process(one.pid) for one in (process, another)]
    calls = [call for page in pages for call in page.intervals()]
    begin, end = min(call.begin_ns for call in calls), max(call.end_ns for call in calls)

    assert {call.kind for call in calls} == {"other ioctl"}
    assert sum(page.spent()["other ioctl"].count for page in pages) == len(calls)
    assert 0 < inside_ns(pages, begin, end) <= sum(call.end_ns - call.begin_ns for call in calls)
    assert inside_ns(pages, begin, end, lambda call: call.thread == 1) == 0


def test_calls_that_are_no_longer_known_are_not_passed_over(emulator: Emulator, process: RmProcess) -> None:
    """Given more calls than are kept, then asking for all of them is an error, and asking for the last ones is not."""
    grow_tree(process)
    path = emulator.directory / f"process-{process.pid}"
    first = emulator.process(process.pid).intervals()[0]
    with path.open("r+b") as file:
        file.seek(16 + 16 * 32 + 32 * 56)  # the count of calls, then the calls
        row = struct.pack("<QQII", first.end_ns + 1, first.end_ns + 2, 0, 1)
        file.write(struct.pack("<Q", 20_000) + row * 16_384)
    page = emulator.process(process.pid)

    assert len(page.intervals(first.end_ns + 2)) == 0
    with pytest.raises(LookupError, match="more than 16384 calls"):
        page.intervals(first.begin_ns)


def test_the_page_of_a_dead_process_stays(emulator: Emulator, process: RmProcess) -> None:
    grow_tree(process)
    before = emulator.process(process.pid).spent()["other ioctl"].count
    process.kill()

    assert emulator.process(process.pid).spent()["other ioctl"].count == before > 0


def test_time_asleep_in_the_driver_never_counts_as_time_of_a_core(emulator: Emulator, process: RmProcess) -> None:
    """Each call waits for the answer of the server: the own time of the thread is less than what passes, and not 0."""
    grow_tree(process)
    spent = emulator.process(process.pid).spent()["other ioctl"]

    assert 0 < spent.cpu_ns < spent.wall_ns
