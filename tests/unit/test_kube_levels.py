"""A profiling run on the node: memory in steps, upwards only, and what is counted at each."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from valved.kube.levels import LEVEL_S, REACH_S, SETTLE_S, SHARES, WARM_S, EngineMemory, LevelBook, Series

UID = "u"


def there(limit_mib: float = 1000.0) -> EngineMemory:
    return EngineMemory(limit_mib=limit_mib, short=0, can_grow=True)


def run(series: Series, seconds: float, tokens_per_s: float = 10.0, memory: EngineMemory | None = None) -> None:
    for _ in range(int(seconds)):
        series.note(memory or there(1000.0 * series.share), 1.0, int(tokens_per_s))


def test_memory_comes_in_steps_and_each_is_counted_once_it_has_settled() -> None:
    series, shares = Series(), []

    for index, share in enumerate(SHARES):
        shares.append(series.share)
        run(series, WARM_S if index == 0 else SETTLE_S, tokens_per_s=9999)  # compiling, refilling
        run(series, LEVEL_S, tokens_per_s=100 * share)

    assert shares == list(SHARES)
    assert (series.is_over, series.share) == (True, 1.0)
    assert [(level.limit_mib, level.tokens / level.runnable_s) for level in series.levels] == [
        (1000 * share, 100 * share) for share in SHARES
    ]


def test_an_engine_that_had_more_before_we_were_told_begins_higher() -> None:
    series = Series()

    series.note(EngineMemory(limit_mib=1000, short=-7, can_grow=True), 1.0, 5)
    series.note(EngineMemory(limit_mib=1000, short=-2, can_grow=True), 1.0, 5)
    run(series, WARM_S + LEVEL_S)

    assert [level.runnable_s for level in series.levels] == [0, 0, LEVEL_S, 0]


def test_what_online_work_holds_makes_the_last_level_smaller_and_ends_nothing() -> None:
    series, full = Series(), EngineMemory(limit_mib=400, short=3, can_grow=False)
    run(series, WARM_S + LEVEL_S)

    run(series, REACH_S, memory=full)
    run(series, SETTLE_S + LEVEL_S, memory=full)

    assert series.is_over
    assert [level.limit_mib for level in series.levels if level.runnable_s] == [250, 400]


def test_a_last_level_that_never_comes_ends_the_series() -> None:
    series = Series(at=len(SHARES) - 1)

    run(series, REACH_S, memory=EngineMemory(limit_mib=400, short=3, can_grow=True))

    assert series.is_over


def test_levels_are_told_when_all_is_measured() -> None:
    book = LevelBook()
    book.want([UID])
    series = book.series(UID)
    assert series is not None
    run(series, WARM_S + LEVEL_S)

    assert book.of(UID) == ()
    book.want([])

    assert [level.limit_mib for level in book.of(UID)] == [250]
    assert series.share == 1.0


def test_a_pod_known_by_name_only_is_held_back_from_its_first_second() -> None:
    """The cluster's word may come before the pod does, and then the pod must not be forgotten."""
    book = LevelBook()
    book.want([UID])
    book.keep([])

    series = book.series(UID)

    assert series is not None
    assert series.share == SHARES[0]
    assert book.series("other") is None


def test_a_pod_measured_under_a_predecessor_is_not_measured_again() -> None:
    book = LevelBook()
    levels = [{"limitMiB": 500, "usefulTokens": 70, "runnableSeconds": 75}]
    book.seed({"offline": [{"podUID": UID, "levels": levels}]})

    book.want([UID])

    assert book.series(UID) is None
    assert [(level.limit_mib, level.tokens, level.runnable_s) for level in book.of(UID)] == [(500, 70, 75)]
    book.keep([])
    assert book.of(UID) == ()


@given(
    st.lists(
        st.tuples(st.floats(0, 1e5), st.integers(-5, 5), st.booleans(), st.floats(0, 50), st.integers(0, 1000)),
        max_size=80,
    )
)
def test_the_share_never_falls(moments: list[tuple[float, int, bool, float, int]]) -> None:
    series, shares = Series(), []

    for limit_mib, short, can_grow, runnable_s, tokens in moments:
        series.note(EngineMemory(limit_mib=limit_mib, short=short, can_grow=can_grow), runnable_s, tokens)
        shares.append(series.share)

    assert shares == sorted(shares)
    assert sum(level.tokens for level in series.levels) <= sum(moment[4] for moment in moments)
