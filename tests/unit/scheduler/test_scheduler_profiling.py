"""Curves: measured ones rise with memory whatever the noise, and a wrong file is refused before anything is stored."""

import asyncio
from datetime import datetime, timezone
from typing import Any

import pytest
from controller_world import World
from hypothesis import given
from hypothesis import strategies as st
from reports import NOW_S, pod, uuids
from valve_kube import names
from valve_kube.client import ApiError, Unreachable
from valve_kube.errors import InvalidObject
from valve_kube.objects import workload_profile
from valve_scheduler.controller.belief import SETTLED_S
from valve_scheduler.controller.profiling import (
    MEASURED,
    Level,
    curve_of,
    is_enough,
    is_measured,
    levels_of,
    measured_spec,
    read_by_hand,
    store_by_hand,
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


class Taken(World):
    """An API server where the tenant's own profile of the name stands already."""

    async def request(self, method: str, path: str, *, body: Any = None, **_: str) -> dict[str, Any]:
        if method == "GET":
            return await super().request(method, path)
        self.calls.append((method, path, body))
        if (method, path.rpartition("/")[2]) == ("POST", "offlineprofiles"):
            raise ApiError(409, "AlreadyExists", "it stands")
        return dict(body)


def measured_by(world: World) -> list[tuple[str, str, Any]]:
    """What the controller writes once a pod has shown enough."""
    levels = [{"limitMiB": mib, "usefulTokens": mib, "runnableSeconds": 100.0} for mib in (1, 2, 3)]
    world.pods.sink.put(pod(annotations={names.PROFILE: "m"}, node="n1", held=uuids("n1")[0], phase="Running"))
    world.report(offline=[{"podUID": "uid-p1", "levels": levels}])
    asyncio.run(world.controller.measuring.store())
    return world.calls


def test_a_profile_that_a_tenant_made_first_is_never_called_measured() -> None:
    world = Taken()

    assert [method for method, _, _ in measured_by(world)] == ["POST"]


def test_a_profile_that_changed_since_it_was_made_is_never_called_measured() -> None:
    """The tenant may patch between the two writes; the version makes the second one fail."""
    world = World()
    world.refusals["status"] = ApiError(409, "Conflict", "changed meanwhile")

    (_, _, made), (_, path, told) = measured_by(world)

    assert (made["kind"], path.endswith("/offlineprofiles/m/status")) == ("OfflineProfile", True)
    assert told["metadata"] == {"resourceVersion": "1"}
    assert told["status"]["source"] == MEASURED
    assert world.events() == []


def test_a_spec_by_hand_never_stands_under_the_word_of_the_node() -> None:
    """Said to be Manual before it changes: an admission policy refuses it otherwise, and a reader would believe it."""
    world = Taken()

    asyncio.run(store_by_hand(world, BY_HAND))  # type: ignore[arg-type]

    steps = [(method, path.rpartition("/")[2], body.get("status")) for method, path, body in world.calls]
    assert steps == [
        ("POST", "offlineprofiles", None),
        ("PATCH", "status", {"source": "Manual"}),
        ("PATCH", "llama", None),
        ("PATCH", "status", {"phase": "Ready", "source": "Manual"}),
    ]


@pytest.mark.parametrize(("source", "believed"), [("MeasuredByNode", True), ("Measured", False), ("Manual", False)])
def test_what_anybody_could_write_under_a_former_release_is_never_believed(source: str, believed: bool) -> None:
    assert is_measured({"status": {"source": source}}) is believed


@pytest.mark.parametrize("age_s", [1e6, -59.0])
def test_a_profile_that_somebody_called_measured_before_the_policy_stood_is_never_believed(age_s: float) -> None:
    """Between CRD and policy of an upgrade, or after a rollback: what was written then still stands afterwards."""
    world = World()
    world.guarded_s = NOW_S
    asyncio.run(world.controller._belief.look())
    world.profile("MeasuredByNode", made_s=NOW_S - age_s)
    (profile,) = world.controller.caches.profiles.items.values()

    assert not world.controller._belief.covers(profile)


@pytest.mark.parametrize(
    ("answer", "believed"),
    [
        (None, True),
        (ApiError(503, "", "busy"), True),
        (Unreachable("gone"), True),
        (ApiError(403, "", "no"), False),
        ({}, False),
        ({"metadata": {}}, False),
    ],
)
def test_a_measured_profile_is_believed_as_long_as_the_policy_stands(answer: Any, believed: bool) -> None:
    """An API server that does not answer has taken no policy away."""
    world = World()
    belief = world.controller._belief
    world.profile("MeasuredByNode")
    (profile,) = world.controller.caches.profiles.items.values()
    assert not belief.covers(profile)  # nobody has looked yet

    asyncio.run(belief.look())
    assert belief.covers(profile)
    world.policy_answer = answer
    asyncio.run(belief.look())

    assert belief.covers(profile) is believed


def test_nothing_is_called_measured_while_the_policy_may_not_be_in_force_everywhere() -> None:
    world = World()
    world.guarded_s = world.now_s - SETTLED_S + 1.0
    assert measured_by(world) == []

    world.now_s += 1.0

    assert [method for method, _, _ in measured_by(world)][:2] == ["POST", "PATCH"]


def test_a_profile_that_would_never_be_believed_is_never_stored() -> None:
    """A clock ahead of the API server's stored one from before the policy counted, and nothing measures it anew."""
    world = World()
    world.ahead_s = 2 * SETTLED_S
    world.guarded_s = world.now_s - SETTLED_S
    assert measured_by(world) == []

    world.now_s += 2 * SETTLED_S

    assert [method for method, _, _ in measured_by(world)][:2] == ["POST", "PATCH"]
