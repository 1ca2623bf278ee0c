"""Curves: measured ones rise with memory whatever the noise, and a wrong file is refused before anything is stored."""

from datetime import datetime, timezone
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from reports import NOW_S, pod
from valve_kube import names
from valve_kube.errors import InvalidObject
from valve_kube.objects import workload_profile
from valve_scheduler.controller.profiling import (
    Level,
    curve_of,
    is_enough,
    levels_of,
    measured_spec,
    read_by_hand,
    to_profile,
)

BY_HAND = """
kind: OfflineProfile
metadata: {name: llama}
spec:
  workload: {model: llama}
  standaloneTokensPerSecond: 100
  curve: [{freeMiB: 1000, tokensPerSecond: 40}, {freeMiB: 2000, tokensPerSecond: 100}]
"""


def level(limit_mib: float, tokens_per_s: float, runnable_s: float = 100.0) -> Level:
    return Level(limit_mib=limit_mib, tokens=tokens_per_s * runnable_s, runnable_s=runnable_s)


def test_a_curve_is_the_speed_at_each_limit() -> None:
    assert curve_of([level(10, 1), level(20, 5), level(30, 6)]) == [(10, 1), (20, 5), (30, 6)]


def test_a_dip_is_averaged_with_its_neighbour_by_the_time_measured() -> None:
    assert curve_of([level(10, 4, 300), level(20, 2, 100), level(30, 6)]) == [(10, 3.5), (20, 3.5), (30, 6)]


@given(st.lists(st.tuples(st.floats(0, 1e4), st.floats(60, 1e4)), min_size=1, max_size=12))
def test_no_curve_falls_and_none_invents_tokens(speeds: list[tuple[float, float]]) -> None:
    levels = [level(10.0 * (index + 1), speed, seconds) for index, (speed, seconds) in enumerate(speeds)]

    found = [speed for _, speed in curve_of(levels)]

    assert found == sorted(found)
    made, told = (
        sum(one.tokens for one in levels),
        sum(speed * one.runnable_s for speed, one in zip(found, levels, strict=True)),
    )
    assert told == pytest.approx(made, rel=1e-3, abs=1e-3 * sum(one.runnable_s for one in levels))


def test_levels_that_hardly_ran_are_left_out() -> None:
    entry = {
        "levels": [
            {"limitMiB": 20, "usefulTokens": 10, "runnableSeconds": 100},
            {"limitMiB": 10, "usefulTokens": 10, "runnableSeconds": 5},
        ]
    }

    assert [found.limit_mib for found in levels_of(entry)] == [20]
    assert not is_enough(levels_of(entry))


def test_a_measured_profile_is_one_the_scheduler_reads() -> None:
    levels = [level(10_000, 0), level(20_000, 50), level(40_000, 80)]

    spec = measured_spec({"model": "m", "gpuModel": "H100"}, levels)
    profile = workload_profile({"metadata": {"name": "m"}, "spec": spec, "status": {"phase": "Ready"}})

    assert profile is not None
    assert (profile.standalone_tokens_per_s, profile.fit_mib, profile.gpu_model) == (80, 10_000, "H100")


def test_a_profile_by_hand_goes_where_it_says_unless_told_otherwise() -> None:
    assert read_by_hand(BY_HAND)["metadata"] == {"name": "llama", "namespace": "default"}
    assert read_by_hand(BY_HAND, "batch")["metadata"]["namespace"] == "batch"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (("kind: OfflineProfile", "kind: Job"), "must be one OfflineProfile"),
        (("{name: llama}", "{}"), "metadata.name is missing"),
        (("tokensPerSecond: 100}", "tokensPerSecond: 30}"), "curve must rise"),
        (("standaloneTokensPerSecond: 100", "standaloneTokensPerSecond: 0"), "must have measured something"),
        (("curve:", "curves:"), "spec.curve is missing"),
        (("spec:", "spec: ["), "no YAML"),
    ],
)
def test_a_wrong_file_is_refused_with_what_is_wrong(change: tuple[str, str], why: str) -> None:
    with pytest.raises(InvalidObject, match=why):
        read_by_hand(BY_HAND.replace(*change))


def placed(name: str, age_s: float, node: str = "n1", profile: str = "llama", **more: str) -> dict[str, Any]:
    notes = {names.PROFILE: profile, **{f"valve.gpu/{key}": value for key, value in more.items()}}
    found = pod(name, node=node, held=f"GPU-{name}", annotations=notes)
    made_at = datetime.fromtimestamp(NOW_S - age_s, timezone.utc).isoformat()
    found["metadata"]["creationTimestamp"] = made_at
    return found


def test_of_the_pods_that_ask_for_a_missing_profile_the_oldest_is_measured() -> None:
    pods = [placed("a", 10), placed("b", 20, "n2"), placed("c", 5, "n2", "qwen")]

    assert to_profile(pods, {}, NOW_S) == {"n2": ["uid-b", "uid-c"]}


@pytest.mark.parametrize(
    "other",
    [
        placed("had-its-hour", 3601),
        placed("promised", 20, **{"sla-throughput": "0.3"}),
        placed("names-none", 20, profile=""),
        placed("is-known", 20, profile="known"),
        pod("waits", annotations={names.PROFILE: "llama"}),
        {**placed("is-done", 20), "status": {"phase": "Succeeded"}},
    ],
    ids=lambda one: one["metadata"]["name"],
)
def test_who_is_not_measured(other: dict[str, Any]) -> None:
    assert to_profile([other, placed("a", 10)], {("default", "known")}, NOW_S) == {"n1": ["uid-a"]}
