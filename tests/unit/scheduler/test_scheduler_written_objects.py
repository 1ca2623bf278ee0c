"""Everything the controller writes is taken by the API server: judged by the schemas of our CRDs, at maximum sizes."""

import asyncio
import functools
from pathlib import Path
from typing import Any

import jsonschema
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from reports import NOW_S, harvest_node, pod, uuids
from valve_kube import names
from valve_kube.client import ApiError
from valve_kube.policies import node_spec, read_policies
from valve_scheduler.controller.accounts import Entry, charge
from valve_scheduler.controller.conditions import Told, event, time_text
from valve_scheduler.controller.monitor import MonitorSettings, Owner, Sample, Track, Verdict
from valve_scheduler.controller.profiling import Level, measured_spec, to_profile
from valve_scheduler.controller.rounds import Controller, ControllerSettings
from valve_scheduler.controller.shadows import standing
from valve_scheduler.controller.shadows import status_of as shadow_status
from valve_scheduler.controller.workloads import new_workload, owner_of, status_of, workload_name
from valve_scheduler.placement.reach import Beyond

Json = dict[str, Any]
CRDS = Path(__file__).parents[3] / "helm/valve/files/crds"
SETTINGS = MonitorSettings()
LONG_NODE = "n" * 240


def schema(kind: str) -> Json:
    crd = yaml.safe_load((CRDS / f"{kind}.yaml").read_text())
    found: Json = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    return strict(found)


def strict(node: Any) -> Any:
    """The API server drops a field that the schema does not name: for us that is an error, too."""
    if isinstance(node, list):
        return [strict(one) for one in node]
    if not isinstance(node, dict):
        return node
    found = {key: strict(value) for key, value in node.items()}
    if found.get("type") == "object" and isinstance(found.get("properties"), dict):
        found.setdefault("additionalProperties", False)
    return found


@functools.cache
def judge(kind: str, part: str) -> jsonschema.Draft202012Validator:
    """The schema itself is judged once."""
    judged = schema(kind)["properties"][part]
    jsonschema.Draft202012Validator.check_schema(judged)
    return jsonschema.Draft202012Validator(judged)


def check(kind: str, **parts: Any) -> None:
    for part, value in parts.items():
        judge(kind, part).validate(value)


def owner_with(evictions: list[float], nodes: int) -> Owner:
    avoid = {f"{LONG_NODE}{number}": NOW_S + 1.0 + number for number in range(nodes)}
    return Owner(evicted_at_s=tuple(sorted(evictions)), avoid_until_s=avoid)


@settings(max_examples=60, deadline=None)
@given(
    ages=st.lists(st.floats(0.0, SETTINGS.forget_s), max_size=40),
    at_once=st.integers(1, 100),
    nodes=st.sampled_from([0, 1, 64, 65, 256, 257, 5_000]),
    verdict=st.sampled_from(Verdict),
    achieved=st.none() | st.floats(0.0, 1e6),
    is_beyond=st.booleans(),
)
def test_no_owner_grows_out_of_its_schema(
    ages: list[float], at_once: int, nodes: int, verdict: Verdict, achieved: float | None, is_beyond: bool
) -> None:
    owner = owner_with([NOW_S - age for age in ages for _ in range(at_once)], nodes)
    sample = Sample(
        pod_uid="u" * 36,
        owner_uid="o" * 36,
        node=LONG_NODE,
        sla=0.5,
        standalone_tokens_per_s=1.0,
        runtime_s=0.0,
        demand_s=0.0,
        tokens=0.0,
    )
    track = Track(sample=sample, verdict=verdict, achieved=achieved)
    why = Beyond(reason="FleetTooBusy", message="m" * 500) if is_beyond else None

    status = status_of(owner, [track], {}, NOW_S, SETTINGS, why)

    check("offlineworkloads", status=status)
    back = owner_of({"status": status})
    assert len(back.rounds(NOW_S, SETTINGS)) == min(192, len({int(at) for at in owner.rounds(NOW_S, SETTINGS)}))


def test_of_too_many_avoided_nodes_those_avoided_for_longest_are_kept() -> None:
    owner = owner_with([], 1_000)

    kept = owner_of({"status": status_of(owner, [], {}, NOW_S, SETTINGS)}).avoid_until_s

    latest = sorted(owner.avoid_until_s.items(), key=lambda pair: -pair[1])[: len(kept)]
    assert len(kept) == 256
    assert set(kept) == {node for node, _ in latest}


def test_the_object_of_any_owner_fits() -> None:
    one = pod("p" * 253, owner="u" * 36)
    one["metadata"]["ownerReferences"][0] |= {"apiVersion": "batch/v1", "kind": "Job", "name": "j" * 253}

    check("offlineworkloads", spec=new_workload(one, 1.0)["spec"])
    assert len(workload_name("u" * 36)) <= 253


def test_what_policies_say_of_a_node_fits() -> None:
    both = {"startMilliseconds": 1, "minMilliseconds": 1, "maxMilliseconds": 2}
    all_of_it = {
        "mode": "off",
        "alignmentThreshold": 0.8,
        "allowCrowded": True,
        "slotsPerGPU": 1,
        "cooldown": both,
        "drain": True,
    }
    spec = {**all_of_it, "namespaces": [{"name": f"{number:063d}", "mode": "off"} for number in range(1_000)]}
    policies = [{"metadata": {"name": "p" * 253}, "spec": spec}]
    policies.append({"metadata": {"name": "q"}, "spec": {"namespaces": [{"name": "one-more", "mode": "off"}]}})

    made = {"creationTimestamp": time_text(NOW_S)}
    pods = [
        pod(f"p{number}", node="n1", held="GPU-1", annotations={names.PROFILE: f"m{number}"}) for number in range(500)
    ]
    for one in pods:
        one["metadata"] |= made
    profile = to_profile(pods, {}, NOW_S)

    wanted = node_spec(read_policies(policies), {}, profile["n1"])

    check("gpuharvestnodes", spec=wanted)
    assert (len(wanted["resolved"]["profile"]), len(wanted["resolved"]["namespaces"])) == (64, 1_000)


def test_what_is_said_of_a_policy_fits() -> None:
    spec = {"mode": "off", "namespaces": [{"name": f"{number:063d}", "mode": "off"} for number in range(1_000)]}
    items = [{"metadata": {"name": f"{number:0253d}"}, "spec": spec} for number in range(4)]
    found = standing(items[-1], read_policies(items), {f"{LONG_NODE}{n}": {} for n in range(50)}, {})

    check("harvestpolicies", status=shadow_status(items[-1], found, NOW_S))


def test_a_measured_profile_fits() -> None:
    levels = [Level(limit_mib=float(step), tokens=float(step), runnable_s=60.0) for step in range(1, 33)]
    workload = {"model": "m" * 253, "gpuModel": "g" * 64, "tensorParallel": 8}

    check("offlineprofiles", spec=measured_spec(workload, levels))


def test_an_account_fits() -> None:
    counters = {"harvestSeconds": 1.0, "usefulTokens": 5.0}
    entries = [
        Entry(pod_uid=f"{number:036d}", online=False, counters=counters, name=f"{number:0253d}")
        for number in range(1_000)
    ]

    check("harvestaccounts", status=charge({}, entries))


def test_the_name_of_an_event_is_one_that_the_api_server_takes() -> None:
    """Labels of a name begin and end with a letter or a figure; names are cut to make room."""
    for name in ("a" * 199 + "-" + "b" * 40, "a" * 199 + "." + "b" * 40, "p"):
        told = event(pod(name), Told.SLA_MISSED, "n" * 5_000, NOW_S)

        assert len(told["metadata"]["name"]) <= 253
        assert all(part[0].isalnum() and part[-1].isalnum() for part in told["metadata"]["name"].split("."))
        assert len(told["note"]) <= 1024


class Api:
    """Keeps what the controller writes if the schema takes it, and refuses it with 422 if not."""

    def __init__(self) -> None:
        self.evictions = 0
        self.workloads: dict[str, Json] = {}
        self.takes_status = True

    async def request(self, method: str, path: str, *, body: Any = None, **_: str) -> Json:
        if path.endswith("/eviction"):
            self.evictions += 1
        if method == "POST" and path.endswith("/offlineworkloads"):
            self.workloads[body["metadata"]["name"]] = body
        if path.endswith("/status") and "offlineworkloads" in path:
            if not self.takes_status:
                raise ApiError(422, "Invalid", "status")
            status = {key: value for key, value in body["status"].items() if value is not None}
            check("offlineworkloads", status=status)
            name = path.split("/")[-2]
            self.workloads[name] = {**self.workloads[name], "status": status}
        return dict(body or {})


class Fleet:
    """A job of many pods, each of which misses its SLA wherever it runs."""

    PODS = 160

    def __init__(self) -> None:
        self.now_s, self.api, self.round_ = NOW_S, Api(), 0
        self.controller = self._controller()

    def _controller(self) -> Controller:
        rules = MonitorSettings(window_s=600.0, windows=1, warm_up_s=0.0, min_runtime_s=0.0)
        found = Controller(self.api, ControllerSettings(monitor=rules), *[lambda: self.now_s] * 2)  # type: ignore[arg-type]
        for view in found.caches.views:
            view._listed.set()
        spec = {"standaloneTokensPerSecond": 1_000, "curve": [{"freeMiB": 0, "tokensPerSecond": 1_000}]}
        metadata = {"name": "m", "namespace": "default"}
        found.caches.views[2].sink.put({"metadata": metadata, "spec": spec, "status": {"phase": "Ready"}})
        return found

    def restart(self) -> None:
        self.controller = self._controller()
        self.controller.caches.views[3].sink.replace(list(self.api.workloads.values()))

    def pass_time(self, minutes: int) -> None:
        for _ in range(minutes // 10):
            self.now_s += 600.0
            self.round_ += 1
            for number in range(self.PODS):
                self._run(number)
            asyncio.run(self.controller.promises.round())

    def _run(self, number: int) -> None:
        node = f"n{number}-{self.round_ // 2}"  # a move every other round
        one = pod(f"p{number}", annotations={names.SLA: "0.5", names.PROFILE: "m"}, node=node, held=uuids(node)[0])
        one["metadata"]["ownerReferences"] = [
            {"apiVersion": "batch/v1", "kind": "Job", "name": "batch", "uid": "job", "controller": True}
        ]
        one["status"] = {"phase": "Running", "startTime": "2026-01-01T00:00:00Z"}
        self.controller.caches.views[0].sink.put(one)
        offline = [{"podUID": f"uid-p{number}", "demandSeconds": self.round_ * 600.0, "usefulTokens": 0.0}]
        self.controller.caches.views[1].sink.put(harvest_node(node, cards=1, offline=offline))


def test_an_owner_that_misses_everywhere_is_never_evicted_beyond_its_rounds() -> None:
    """Guards a storm of 720 evictions an hour, once more nodes were avoided than the CRD lets be written."""
    fleet = Fleet()

    fleet.pass_time(4 * 60)

    rounds = 4 * 3  # one in 20 minutes
    assert fleet.api.evictions == rounds * SETTINGS.at_once
    fleet.restart()
    fleet.pass_time(8 * 60)
    assert fleet.api.evictions == SETTINGS.max_rounds * SETTINGS.at_once


def test_nothing_is_evicted_while_evictions_cannot_be_stored() -> None:
    fleet = Fleet()
    fleet.pass_time(10)
    fleet.api.takes_status = False

    fleet.pass_time(120)

    assert fleet.api.evictions == 0
    fleet.api.takes_status = True
    fleet.pass_time(20)
    assert 0 < fleet.api.evictions <= SETTINGS.at_once
