"""What people are shown: the worth of a fleet by the model, pods as their nodes report them, accounts in hours."""

from datetime import datetime, timezone
from typing import Any

import pytest
from reports import NOW_S, harvest_node, pod, uuids
from valve_kube import names
from valve_scheduler.cli.coverage import coverage
from valve_scheduler.cli.overview import fleet_row, fleet_text, node_row, pod_rows, usage_rows

Json = dict[str, Any]


def test_a_node_is_worth_its_idle_time_while_memory_is_free() -> None:
    row = node_row(harvest_node(idle=0.25, cards=4), NOW_S)

    assert (row["gpus"], row["harvestable"], row["idle"]) == (4, 4, 0.25)
    assert row["worth_gpus"] == pytest.approx(1.0, abs=0.02)


def test_a_stale_node_and_an_unreadable_one_are_worth_nothing() -> None:
    stale, broken = harvest_node(age_s=91), harvest_node()
    broken["status"]["alignment"] = [2.0]

    assert node_row(stale, NOW_S)["worth_gpus"] == 0.0
    assert (node_row(broken, NOW_S)["worth_gpus"], node_row(broken, NOW_S)["report_age_s"]) == (0.0, None)


@pytest.mark.parametrize(("ahead_s", "text"), [(-120.0, "120 s behind"), (120.0, "120 s ahead")])
def test_a_node_whose_clock_is_off_is_named_and_never_shown_as_silent(ahead_s: float, text: str) -> None:
    node, is_off = harvest_node(), {"type": "ClockSkew", "status": "True"}
    written = datetime.fromtimestamp(NOW_S - 5.0, timezone.utc).isoformat(timespec="seconds")
    node["metadata"]["managedFields"] = [{"manager": "valved", "subresource": "status", "time": written}]
    node["status"]["observedAt"] = datetime.fromtimestamp(NOW_S - 5.0 + ahead_s, timezone.utc).isoformat()

    row = node_row({**node, "status": {**node["status"], "conditions": [is_off]}}, NOW_S)

    assert (row["clock"], row["report_age_s"]) == (text, 5.0)
    assert row["worth_gpus"] == pytest.approx(4.0, abs=0.1)
    assert node_row(node, NOW_S)["clock"] == ""


def test_the_fleet_says_what_the_switch_to_harvest_would_add() -> None:
    rows = [node_row(harvest_node("n1", idle=0.5), NOW_S), node_row(harvest_node("n2", phase="Observing"), NOW_S)]

    fleet = fleet_row(rows)

    assert (fleet["harvesting_worth_gpus"], fleet["observed_worth_gpus"]) == (4.0, 4.0)
    assert fleet_text(fleet) == (
        "2 nodes (1 Harvesting, 1 Observing), 16 GPUs. Harvesting is worth 4.0 GPUs now. "
        "Nodes that do not harvest would add 4.0 GPUs (mode: harvest)."
    )


def test_an_observing_node_is_worth_what_nothing_but_its_mode_speaks_against() -> None:
    node = harvest_node(idle=0.5, cards=2, phase="Observing")
    for gpu in node["status"]["gpus"]:
        gpu["harvestable"] = False
    assert node_row(node, NOW_S)["worth_gpus"] == pytest.approx(1.0, abs=0.02)

    node["status"]["gpus"][0]["reason"] = "an online process runs without the shim"

    assert node_row(node, NOW_S)["worth_gpus"] == pytest.approx(0.5, abs=0.02)


def test_the_mode_shown_is_the_one_in_force() -> None:
    node = harvest_node()

    assert node_row(node, NOW_S)["mode"] == "default"
    node["status"]["mode"] = "observe"  # the daemon's own word, where nobody set one
    assert node_row(node, NOW_S)["mode"] == "observe"
    assert node_row(node | {"spec": {"resolved": {"mode": "observe"}}}, NOW_S)["mode"] == "observe"
    assert node_row(node | {"spec": {"mode": "off", "resolved": {"mode": "observe"}}}, NOW_S)["mode"] == "off"


def test_offline_pods_show_what_their_node_reports_of_them() -> None:
    running = pod("p1", node="n1", held=uuids("n1")[0], phase="Running")
    reported = {"podUID": "uid-p1", "harvestSeconds": 30.04, "demandSeconds": 60.0, "usefulTokens": 600.0}
    node = harvest_node(offline=[reported])

    rows = pod_rows([pod("waits"), running, pod("done", phase="Succeeded")], [node])

    assert [row["pod"] for row in rows] == ["default/p1", "default/waits"]
    assert (rows[0]["harvest_s"], rows[0]["tokens_per_s"]) == (30.0, 10.0)
    assert (rows[1]["node"], rows[1]["tokens_per_s"]) == ("", None)


def test_an_account_is_shown_in_gpu_hours() -> None:
    metadata = {"namespace": "batch", "name": "usage", "creationTimestamp": "2026-01-01T00:00:00Z"}
    status = {"offline": {"harvestSeconds": 7200.0, "savedSeconds": 3600.0}, "online": {"lentSeconds": 900.0}}

    (row,) = usage_rows({"metadata": metadata, "status": status}, "namespace")

    assert (row["namespace"], row["since"]) == ("batch", "2026-01-01")
    assert (row["harvested_gpu_h"], row["saved_gpu_h"], row["lent_gpu_h"], row["tokens_lost"]) == (2.0, 1.0, 0.25, 0)


def test_an_account_is_shown_by_owner_and_by_service() -> None:
    owners = [{"name": "", "harvestSeconds": 36.0}, {"name": "nightly", "harvestSeconds": 7200.0, "usefulTokens": 5}]
    services = [{"name": "chat", "lentSeconds": 900.0, "delaySeconds": 0.25}]
    account = {"metadata": {"namespace": "n"}, "status": {"owners": owners, "services": services}}

    by_owner, by_service = usage_rows(account, "owner"), usage_rows(account, "service")

    assert [(row["owner"], row["harvested_gpu_h"], row["tokens"]) for row in by_owner] == [
        ("others", 0.01, 0),
        ("nightly", 2.0, 5),
    ]
    assert [(row["service"], row["lent_gpu_h"], row["delay_s"]) for row in by_service] == [("chat", 0.25, 0.25)]


def online(name: str, **annotations: str) -> Json:
    found = pod(name, node="n1", phase="Running", annotations={names.ROLE: names.ONLINE, **annotations})
    found["metadata"]["labels"] = {}
    found["spec"]["containers"][0]["resources"] = {"limits": {names.ONLINE_RESOURCE: "1"}}

    return found


def test_pods_without_a_shim_or_with_an_old_one_are_named_before_an_upgrade() -> None:
    pods = [
        online("fresh", **{names.INJECTION: "ok", names.SHIM: "0.10.0"}),
        online("old", **{names.INJECTION: "ok", names.SHIM: "0.9.1"}),
        online("opted-out", **{names.INJECTION: "skipped-opt-out"}),
        online("unseen"),
        pod("offline", node="n1", phase="Running"),
    ]

    found = {one.pod.partition("/")[2]: one.why for one in coverage(pods, "0.10")}

    assert list(found) == ["old", "opted-out", "unseen", "fresh"]
    assert found["fresh"] == ""
    assert "0.9.1 is older than 0.10" in found["old"]
    assert "skipped-opt-out" in found["opted-out"]
    assert "did not see it" in found["unseen"]


def test_without_a_target_version_every_injected_pod_counts_as_covered() -> None:
    assert [one.covered for one in coverage([online("old", **{names.INJECTION: "ok"})])] == [True]
