"""Finetuning goes where its base is served, if nodes are about equal; a word that Valve does not know is refused."""

from typing import Any

import pytest
from reports import NOW_S, harvest_node, pod
from valve_kube import names
from valve_kube.errors import InvalidObject
from valve_kube.objects import node_report, offline_pod
from valve_scheduler.controller.workloads import new_workload
from valve_scheduler.extender.decide import Extender
from valve_scheduler.placement.rank import PlacementSettings
from valve_scheduler.placement.served import ServedBases
from valve_scheduler.placement.state import ClusterState
from valve_scheduler.webhook.admission import AdmissionSettings, PodRefused, mutate_offline

Json = dict[str, Any]
FINETUNE = {names.KIND: names.FINETUNE, names.BASE: "llama-8b"}


def service(name: str, node: str, base: str = "llama-8b") -> Json:
    return {"metadata": {"name": name, "uid": name, "labels": {names.BASE: base}}, "spec": {"nodeName": node}}


def ranked(served: ServedBases, idle: dict[str, float], annotations: dict[str, str]) -> tuple[list[str], list[str]]:
    """(nodes that pass filter, those with the most points)"""
    state = ClusterState(PlacementSettings())
    for node, share in idle.items():
        state.put_report(node_report(harvest_node(node, idle=share)), NOW_S)
    extender = Extender(state, None, now_s=lambda: NOW_S, can_answer=lambda: True, served=served)  # type: ignore[arg-type]
    asked = pod("p1", annotations=annotations)
    passed = extender.filter({"Pod": asked, "Nodes": None, "NodeNames": list(idle)})["NodeNames"]
    points = {each["Host"]: each["Score"] for each in extender.prioritize({"Pod": asked, "NodeNames": passed})}
    return passed, [node for node, score in points.items() if score == max(points.values())]


@pytest.mark.parametrize("annotations", [FINETUNE, {names.KIND: names.FINETUNE}, {}])
def test_finetuning_goes_to_the_node_that_serves_its_base_and_other_work_does_not_care(
    annotations: dict[str, str],
) -> None:
    served = ServedBases()
    served.put(service("s", "n2"))
    _, best = ranked(served, {"n1": 0.62, "n2": 0.6}, annotations)
    assert best == (["n2"] if names.BASE in annotations else ["n1"])


def test_a_base_never_outweighs_idle_time_that_differs_by_more_than_a_tenth() -> None:
    served = ServedBases()
    served.put(service("s", "n2"))
    assert ranked(served, {"n1": 0.7, "n2": 0.6}, FINETUNE)[1] == ["n1"]


def test_a_node_with_the_base_is_never_left_out_of_a_large_fleet_of_equals() -> None:
    served = ServedBases()
    served.put(service("s", "n149"))
    passed, best = ranked(served, {f"n{number}": 0.6 for number in range(150)}, FINETUNE)
    assert len(passed) == 64
    assert best == ["n149"]


def test_a_node_whose_service_is_gone_or_serves_another_base_is_never_preferred() -> None:
    served = ServedBases()

    def prefers(node: str) -> bool:
        return ranked(served, {"n1": 0.62, "n2": 0.6}, FINETUNE)[1] == [node]

    served.put(service("s", "n2", base="other"))
    assert prefers("n1")
    served.put(service("s", "n2"))
    served.put(service("t", "n2"))
    served.drop(service("s", "n2"))
    assert prefers("n2")
    served.put({**service("t", "n2"), "metadata": {**service("t", "n2")["metadata"], "deletionTimestamp": "now"}})
    assert prefers("n1")
    served.put(service("t", "n2"))
    served.replace([service("u", "n1", base="other"), service("v", "")])
    assert prefers("n1")


@pytest.mark.parametrize(
    ("annotations", "said"),
    [
        ({names.KIND: "finetuning"}, "must be batch or finetune"),
        ({names.BASE: "llama-8b"}, "is for pods with"),
        ({**FINETUNE, names.BASE: "meta/llama"}, "no label"),
    ],
)
def test_a_kind_or_base_that_cannot_be_is_refused_by_name(annotations: dict[str, str], said: str) -> None:
    bad = pod("p", annotations=annotations)
    with pytest.raises(InvalidObject, match=said):
        offline_pod(bad)
    with pytest.raises(PodRefused, match=said):
        mutate_offline(bad, AdmissionSettings())


def test_the_kind_stands_in_the_workload_of_its_owner() -> None:
    assert new_workload(pod("p", annotations=FINETUNE), 0.0)["spec"]["kind"] == names.FINETUNE
    assert new_workload(pod("p"), 0.0)["spec"]["kind"] == names.BATCH
    assert new_workload(pod("p", annotations={names.KIND: "other"}), 0.0)["spec"]["kind"] == names.BATCH
