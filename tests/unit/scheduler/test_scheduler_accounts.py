"""Accounts add up over restarts of daemons and controllers, and over the end of pods."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from valve_scheduler.cli.overview import by_namespace, usage_rows
from valve_scheduler.controller.accounts import (
    MOST_NAMED,
    MOST_SEEN,
    Entry,
    Worth,
    charge,
    entries_of,
    spread,
    total_of,
)

Json = dict[str, Any]


def offline(uid: str, name: str = "job", **counters: float) -> Entry:
    return Entry(pod_uid=uid, online=False, counters=counters, name=name, saved_per_token=0.5)


def online(uid: str, name: str = "chat", **counters: float) -> Entry:
    return Entry(pod_uid=uid, online=True, counters=counters, name=name)


def test_an_account_sums_what_its_pods_got_and_lent() -> None:
    entries = [
        offline("a", harvestSeconds=10, usefulTokens=4),
        offline("b", harvestSeconds=5),
        online("s", lentSeconds=7),
    ]

    status = charge({}, entries)

    assert status["offline"] == {"harvestSeconds": 15, "usefulTokens": 4, "savedSeconds": 2}
    assert status["online"] == {"lentSeconds": 7}


def test_owners_and_services_add_up_to_the_account() -> None:
    first = [
        offline("a", "nightly", harvestSeconds=10, usefulTokens=4),
        offline("b", "nightly", harvestSeconds=5),
        offline("c", "labels", harvestSeconds=1),
        online("s", "chat", lentSeconds=7, delaySeconds=0.1),
    ]

    status = charge(charge({}, first), [offline("a", "nightly", harvestSeconds=12, usefulTokens=6)])

    assert status["owners"] == [
        {"name": "labels", "harvestSeconds": 1},
        {"name": "nightly", "harvestSeconds": 17, "usefulTokens": 6, "savedSeconds": 3},
    ]
    assert status["services"] == [{"name": "chat", "lentSeconds": 7, "delaySeconds": 0.1}]
    assert status["offline"]["harvestSeconds"] == 18


def test_of_many_owners_those_with_the_least_are_one_row() -> None:
    """A CronJob makes a new one every hour, for years."""
    status: Json = {}
    for job in range(MOST_NAMED + 50):
        status = charge(status, [offline(f"uid-{job}", f"job-{job:03}", harvestSeconds=1 + job)])

    assert len(status["owners"]) == MOST_NAMED
    assert sum(row["harvestSeconds"] for row in status["owners"]) == status["offline"]["harvestSeconds"]
    assert [row["name"] for row in status["owners"][:2]] == ["", "job-051"]


def test_the_same_report_seen_twice_counts_once() -> None:
    once = charge({}, [offline("a", harvestSeconds=10)])

    assert charge(once, [offline("a", harvestSeconds=10)]) == once


def test_a_counter_that_starts_anew_goes_on_adding() -> None:
    before = charge({}, [offline("a", harvestSeconds=10)])

    assert charge(before, [offline("a", harvestSeconds=3)])["offline"]["harvestSeconds"] == 13


def test_a_pod_that_ended_keeps_its_share_of_the_account() -> None:
    status: Json = charge({}, [offline("a", harvestSeconds=10)])
    for _ in range(30):
        status = charge(status, [])

    owners = [{"name": "job", "harvestSeconds": 10}]
    assert status == {"offline": {"harvestSeconds": 10}, "online": {}, "owners": owners, "seen": []}


def test_a_pod_missing_from_a_few_reports_is_not_counted_anew() -> None:
    status: Json = charge({}, [offline("a", harvestSeconds=10)])
    for _ in range(5):
        status = charge(status, [])

    assert charge(status, [offline("a", harvestSeconds=11)])["offline"]["harvestSeconds"] == 11


@given(st.lists(st.lists(st.integers(0, 50), min_size=1, max_size=5), min_size=1, max_size=6))
def test_whatever_restarts_the_account_is_the_sum_of_all_growth(runs: list[list[int]]) -> None:
    """Each run is a daemon's life: its counter only rises, then the next begins at zero and is first seen lower."""
    status: Json = {}
    expected = last = 0.0
    for growth in runs:
        value = 0.0
        for step in growth:
            value += step
            expected += value - last if value >= last else value
            last = value
            status = charge(status, [offline("a", harvestSeconds=value)])

    assert status["offline"]["harvestSeconds"] == expected


def test_entries_are_filed_under_the_namespace_of_their_pod() -> None:
    node = {
        "status": {
            "offline": [{"podUID": "a", "harvestSeconds": 1}, {"podUID": "unknown", "harvestSeconds": 9}],
            "services": [{"podUID": "s", "namespace": "web", "service": "chat", "lentSeconds": 2}],
        }
    }

    found = entries_of([node], {"a": Worth(namespace="batch", owner="nightly", saved_per_token=0.5)})

    assert {namespace: [entry.pod_uid for entry in entries] for namespace, entries in found.items()} == {
        "batch": ["a"],
        "web": ["s"],
    }
    assert (found["batch"][0].name, found["batch"][0].saved_per_token) == ("nightly", 0.5)
    assert found["web"][0].name == "chat"


def looks(pods: int, rounds: int) -> dict[str, Any]:
    """Statuses of a namespace's objects after so many looks at so many pods, whose counters rise by one each."""
    statuses: dict[str, Any] = {}
    for number in range(1, rounds + 1):
        counters = {"harvestSeconds": float(number)}
        entries = [
            Entry(pod_uid=f"u{pod}", online=False, counters=counters, name=f"job-{pod % 3}") for pod in range(pods)
        ]
        parts = spread(statuses, entries)
        statuses = {name: charge(statuses.get(name, {}), parts.get(name, [])) for name in {*statuses, *parts}}

    return statuses


@pytest.mark.parametrize("pods", [1, MOST_SEEN, MOST_SEEN + 1, 8_000])
def test_no_namespace_is_too_large_for_its_account(pods: int) -> None:
    """Above 4,096 pods the one object was refused for good, and nothing was counted any more."""
    statuses = looks(pods, 3)

    assert len(statuses) == -(-pods // MOST_SEEN)
    assert max(len(status["seen"]) for status in statuses.values()) <= MOST_SEEN
    whole = total_of(statuses.values())
    assert whole["offline"]["harvestSeconds"] == pytest.approx(3.0 * pods)
    assert sum(row["harvestSeconds"] for row in whole["owners"]) == pytest.approx(3.0 * pods)


def test_a_pod_is_never_counted_in_two_objects() -> None:
    statuses = looks(MOST_SEEN + 5, 2)
    gone = {f"u{pod}" for pod in range(500)}
    counters = {"harvestSeconds": 3.0}
    left = [Entry(pod_uid=f"u{pod}", online=False, counters=counters) for pod in range(500, MOST_SEEN + 5)]

    parts = spread(statuses, left)

    for name, entries in parts.items():
        known = {item["podUID"] for item in statuses[name]["seen"]}
        assert {entry.pod_uid for entry in entries} == known - gone


def test_a_namespace_is_shown_as_one_however_many_objects_it_takes() -> None:
    made = "2026-01-01T00:00:00Z"
    accounts = [
        {"metadata": {"namespace": "a", "name": name, "creationTimestamp": made}, "status": status}
        for name, status in looks(MOST_SEEN + 1, 1).items()
    ]

    (row,) = [row for account in by_namespace(accounts) for row in usage_rows(account, "namespace")]

    assert row["harvested_gpu_h"] == pytest.approx((MOST_SEEN + 1) / 3600, abs=1e-3)


LOOKS = st.lists(
    st.tuples(st.floats(0, 90).map(lambda s: round(s, 3)), st.integers(0, 10**6), st.floats(1e-6, 1e6)),
    min_size=1,
    max_size=12,
)


@given(st.lists(LOOKS, min_size=1, max_size=4))
def test_saved_time_is_never_more_than_harvested_time(lives: list[list[tuple[float, int, float]]]) -> None:
    """Once a speed of 0.001 made one harvested GPU-hour 2,777,778 saved ones. Each list is a life of the daemon: its
    counters rise from 0. What a token saves is whatever the tenant last wrote."""
    status: Json = {}
    for looks in lives:
        harvested_s = tokens = 0.0
        for grown_s, more, saved_per_token in looks:
            harvested_s, tokens = round(harvested_s + grown_s, 3), tokens + more
            counters = {"harvestSeconds": harvested_s, "usefulTokens": tokens}
            entry = Entry(pod_uid="a", online=False, counters=counters, name="job", saved_per_token=saved_per_token)
            before, status = status, charge(status, [entry])
            for part in (status["offline"], *status["owners"]):
                assert part.get("savedSeconds", 0.0) <= part["harvestSeconds"]
            assert status["offline"].get("savedSeconds", 0.0) >= before.get("offline", {}).get("savedSeconds", 0.0)


def test_tokens_that_are_told_later_than_their_time_are_never_lost() -> None:
    """A batch that writes its answers at the end."""
    status = charge({}, [offline("a", harvestSeconds=100, usefulTokens=0)])
    status = charge(status, [offline("a", harvestSeconds=101, usefulTokens=180)])

    assert status["offline"]["savedSeconds"] == 90
    assert charge(status, [offline("a", harvestSeconds=101, usefulTokens=10**9)])["offline"]["savedSeconds"] == 101


def test_a_profile_slower_than_any_number_never_keeps_harvested_time_from_being_counted() -> None:
    """Nothing times infinity is no number, and no API server stores one."""
    priceless = Entry(
        pod_uid="a",
        online=False,
        counters={"harvestSeconds": 10.0, "usefulTokens": 0.0},
        name="job",
        saved_per_token=1 / 5e-324,
    )

    status = charge({}, [priceless])

    assert status["offline"]["harvestSeconds"] == 10.0
    json.dumps(status, allow_nan=False)
