"""The policy of what offline work leaves for online services, and the memory of what they had."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from valved.model.ids import GpuIndex
from valved.policy.keeping import MemoryUse, OnlineNeed, keep
from valved.state.peaks import MOST_NAMES, Peaks
from valved.state.saved import SavedPeak

GPU = GpuIndex(0)
SECOND = 1_000_000_000
sizes = st.integers(0, 1 << 40)
uses = st.builds(MemoryUse, plain_bytes=sizes, kv_bytes=sizes)
services = st.lists(st.builds(OnlineNeed, had=uses, has=uses, bare_bytes=sizes), max_size=4)


def use(plain=0, kv=0):
    return MemoryUse(plain_bytes=plain, kv_bytes=kv)


@given(services, sizes)
def test_too_little_is_never_kept(online, stated):
    kept = keep(online, stated)
    has = sum(one.has.plain_bytes + one.has.kv_bytes for one in online)

    assert kept.plain_bytes >= sum(max(0, one.had.plain_bytes - one.has.plain_bytes) for one in online)
    assert kept.kv_bytes >= sum(max(0, one.had.kv_bytes - one.has.kv_bytes) for one in online)
    assert has + kept.plain_bytes + kept.kv_bytes >= stated


@given(services, sizes)
def test_nothing_is_kept_beyond_what_was_had_or_stated(online, stated):
    kept = keep(online, stated)
    missing = keep(online, 0)
    has = sum(one.has.plain_bytes + one.has.kv_bytes for one in online)
    most = max(missing.plain_bytes + missing.kv_bytes, stated - has)

    assert kept.plain_bytes + kept.kv_bytes <= max(0, most)


def test_what_a_range_will_hold_is_never_taken_for_weights():
    [one] = [OnlineNeed(had=use(), has=use(plain=10), bare_bytes=20)]

    assert keep([one], 40) == use(plain=10, kv=20)
    assert keep([one], 25) == use(kv=15)
    assert keep([one], 10) == use()


def test_a_peak_counts_until_it_was_not_reached_for_so_long():
    peaks = Peaks(10 * SECOND)
    peaks.see(GPU, {"chat": use(plain=5)}, 1 * SECOND)
    peaks.see(GPU, {"chat": use(plain=3)}, 11 * SECOND)
    assert peaks.of(GPU, 11 * SECOND) == {"chat": use(plain=5)}

    peaks.see(GPU, {"chat": use(plain=3)}, 12 * SECOND)
    assert peaks.of(GPU, 12 * SECOND) == {"chat": use(plain=3)}
    peaks.see(GPU, {}, 23 * SECOND)
    assert peaks.of(GPU, 23 * SECOND) == {}


def test_a_card_that_answers_no_more_never_makes_a_peak_count_for_ever():
    peaks = Peaks(10 * SECOND)
    peaks.see(GPU, {"chat": use(plain=5)}, 1 * SECOND)

    assert peaks.of(GPU, 11 * SECOND) == {"chat": use(plain=5)}
    assert peaks.of(GPU, 12 * SECOND) == {"chat": use()}


def test_nothing_is_remembered_where_it_is_switched_off():
    peaks = Peaks(0)
    peaks.see(GPU, {"chat": use(plain=5)}, SECOND)

    assert (peaks.of(GPU, SECOND), peaks.saved()) == ({}, [])


def test_names_without_end_never_fill_the_books():
    peaks = Peaks(10 * SECOND)
    for number in range(2 * MOST_NAMES):
        peaks.see(GPU, {f"chat-{number}": use(plain=5)}, number)

    names = peaks.of(GPU, 2 * MOST_NAMES)
    assert len(names) == MOST_NAMES
    assert f"chat-{2 * MOST_NAMES - 1}" in names


def test_a_file_that_makes_no_sense_never_keeps_a_card_empty():
    """Of another boot, or by a hand."""
    peaks = Peaks(10 * SECOND)
    later, absurd, negative, good = (
        SavedPeak(gpu=0, name="later", plain=(5, 9 * SECOND), kv=(0, 0)),
        SavedPeak(gpu=0, name="absurd", plain=(1 << 60, SECOND), kv=(0, 0)),
        SavedPeak(gpu=0, name="negative", plain=(5, SECOND), kv=(0, 0), last=(-(1 << 40), 0)),
        SavedPeak(gpu=0, name="good", plain=(5, SECOND), kv=(0, 0)),
    )

    peaks.restore([later, absurd, negative, good], 2 * SECOND)

    assert peaks.of(GPU, 2 * SECOND) == {"good": use(plain=5)}
