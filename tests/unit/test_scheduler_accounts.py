"""Accounts add up over restarts of daemons and controllers, and over the end of pods."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from valve_scheduler.controller.accounts import MOST_NAMED, Entry, Worth, charge, entries_of

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
