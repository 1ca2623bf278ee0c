"""Which HarvestPolicy is overruled, by what, and that its author is told once."""

from typing import Any

import pytest
from reports import NOW_S
from valve_kube.policies import read_policies
from valve_scheduler.controller.monitor import MonitorSettings, with_policy
from valve_scheduler.controller.shadows import PolicyStanding, Shadow, is_news, standing, status_of

Json = dict[str, Any]
NODES = {"n1": {"pool": "a"}, "n2": {"pool": "a", "zone": "1"}, "n3": {"pool": "b"}}


def policy(name: str, **spec: Any) -> Json:
    return {"metadata": {"name": name, "uid": f"uid-{name}"}, "spec": spec}


def judged(*items: Json, modes: dict[str, str] | None = None) -> dict[str, PolicyStanding]:
    policies = read_policies(items)
    return {item["metadata"]["name"]: standing(item, policies, NODES, modes or {}) for item in items}


def test_a_policy_is_shadowed_on_the_nodes_that_a_more_specific_one_rules() -> None:
    found = judged(
        policy("pool-a", nodeSelector={"pool": "a"}, mode="harvest"),
        policy("corner", nodeSelector={"pool": "a", "zone": "1"}, mode="off"),
    )

    assert (found["pool-a"].nodes, found["pool-a"].in_force, found["pool-a"].reason) == (2, 1, Shadow.OTHER_POLICY)
    assert found["pool-a"].message == "HarvestPolicy corner rules 1 of its 2 nodes (n2)"
    assert (found["corner"].in_force, found["corner"].reason) == (1, Shadow.NONE)


def test_of_two_alike_the_second_by_name_is_told_that_it_holds_nowhere() -> None:
    found = judged(policy("a", reclaimsPerHour=5), policy("b", mode="harvest"))

    assert (found["a"].reason, found["b"].reason) == (Shadow.NONE, Shadow.OTHER_POLICY)
    assert found["b"].in_force == 0
    assert found["b"].message == "HarvestPolicy a rules 3 of its 3 nodes (n1, n2, n3)"


@pytest.mark.parametrize(
    "spec",
    [{"paused": True}, {"drain": True}, {"namespaces": [{"name": "x"}]}, {"eviction": {"budgetPercent": 1}}],
)
def test_what_says_nothing_of_nodes_overrules_nobody_and_is_overruled_by_nobody(spec: Json) -> None:
    """A pause or a cap must not take the mode from the policy beside it."""
    items = policy("a", **spec), policy("b", mode="harvest")

    found = judged(*items)

    assert (found["a"].reason, found["b"].reason) == (Shadow.NONE, Shadow.NONE)
    assert read_policies(items).of_node({})["mode"] == "harvest"


def test_a_mode_that_a_person_set_on_a_node_is_named() -> None:
    found = judged(policy("all", mode="harvest"), modes={"n1": "off", "n2": "harvest"})

    assert (found["all"].reason, found["all"].in_force) == (Shadow.NODE_MODE, 3)
    assert found["all"].message == "spec.mode of the GPUHarvestNode holds on 1 of its 3 nodes (n1)"


def test_parts_that_are_read_elsewhere_are_named() -> None:
    found = judged(
        policy("a", namespaces=[{"name": "web"}], eviction={"budgetPercent": 7}),
        policy("b", namespaces=[{"name": "web"}, {"name": "lab"}], eviction={"budgetPercent": 9}),
        policy("c", nodeSelector={"pool": "a"}, mode="off", namespaces=[{"name": "web"}]),
    )

    assert found["b"].shadows == (
        (Shadow.EARLIER_POLICY, "HarvestPolicy a has namespace web"),
        (Shadow.EARLIER_POLICY, "HarvestPolicy a has eviction"),
    )
    assert found["c"].shadows == ((Shadow.HAS_SELECTOR, "namespaces: read from policies without a nodeSelector only"),)


def test_the_eviction_budget_is_that_of_the_first_policy_that_has_one() -> None:
    found = read_policies([policy("a", mode="off"), policy("b", eviction={"budgetPercent": 7})])

    assert with_policy(MonitorSettings(), found.of_cluster()).budget_share == 0.07


def test_a_policy_whose_labels_no_node_has_is_told_so() -> None:
    found = judged(policy("typo", nodeSelector={"pol": "a"}, mode="off"))

    assert (found["typo"].nodes, found["typo"].reason) == (0, Shadow.NO_NODE)


def test_it_is_news_when_it_begins_and_when_something_else_does_it() -> None:
    one = policy("b", mode="off")
    by_policy = status_of(one, PolicyStanding(nodes=1, in_force=0, shadows=((Shadow.OTHER_POLICY, "x"),)), NOW_S)
    by_node = status_of(one, PolicyStanding(nodes=1, in_force=1, shadows=((Shadow.NODE_MODE, "y"),)), NOW_S)
    free = status_of(one, PolicyStanding(nodes=1, in_force=1), NOW_S)

    assert is_news(one, by_policy)
    assert not is_news({**one, "status": by_policy}, by_policy)
    assert is_news({**one, "status": by_policy}, by_node)
    assert not is_news(one, free)
    assert free["conditions"][0]["status"] == "False"
