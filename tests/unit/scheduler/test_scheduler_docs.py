"""docs/cluster.md says what the code does: its examples work, and its tables are complete."""

import re
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from valve_kube import names
from valve_kube.objects import offline_pod, workload_profile
from valve_scheduler.controller.conditions import Told
from valve_scheduler.controller.monitor import MonitorSettings, Verdict
from valve_scheduler.controller.shadows import Shadow
from valve_scheduler.placement.promise import TEXTS, YOUNG_TEXT
from valve_scheduler.placement.reach import CLOSED, NEVER, PEAKS, TOO_BUSY
from valve_scheduler.webhook.admission import AdmissionSettings, mutate_offline

ROOT = Path(__file__).resolve().parents[3]
MANUAL = (ROOT / "docs/cluster.md").read_text()


def example(kind: str) -> dict[str, Any]:
    blocks = [yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", MANUAL, re.S)]
    return next(block for block in blocks if block.get("kind") == kind)


@pytest.mark.parametrize("text", [*TEXTS.values(), YOUNG_TEXT])
def test_every_reason_is_explained(text: str) -> None:
    assert f"| {text.removeprefix('valve: ')} |" in MANUAL


def test_every_error_of_the_extender_is_explained() -> None:
    room = ROOT / "scheduler/valve_scheduler"
    files = ("extender/decide.py", "placement/namespace_rule.py", "placement/undecided.py")
    source = "".join((room / file).read_text() for file in files)
    texts = re.findall(r'(?:return|raise NoPlace\(|raise NotReady\()\s*\(?\s*f?"([a-z][^"]+ [^"]+)"', source)

    unexplained = [
        text
        for text in texts
        if not re.search(rf"^\| {'.+'.join(map(re.escape, re.split(r'{[^}]*}', text)))} \|", MANUAL, re.M)
    ]

    assert len(texts) == 7
    assert unexplained == []


def test_the_manuals_know_the_limits_of_evictions() -> None:
    settings = MonitorSettings()

    assert f"{settings.max_rounds} such rounds" in MANUAL
    assert f"After {settings.max_rounds} rounds within a day" in (ROOT / "docs/troubleshooting.md").read_text()
    assert settings.avoid_s == 6 * 3600
    assert "avoid the node for six hours" in MANUAL


@pytest.mark.parametrize("word", [*Told, *Verdict])
def test_every_event_and_every_verdict_is_explained(word: Told | Verdict) -> None:
    (tables,) = re.findall(r"^## Events and conditions\n(.*?)^## ", MANUAL, re.M | re.S)

    assert re.search(rf"\b{word.value}\b", tables)


@pytest.mark.parametrize("reason", [shadow.value for shadow in Shadow])
def test_every_reason_of_a_shadow_is_explained(reason: str) -> None:
    assert f"| {reason} |" in MANUAL


def test_no_reason_of_a_condition_of_an_owner_is_left_out_of_the_manual_and_none_is_made_up() -> None:
    """TooManyEvictions stood in the code, and in no table."""
    room = ROOT / "scheduler/valve_scheduler"
    source = (room / "controller/workloads.py").read_text()
    written = re.findall(r'condition\(\s*"(\w+)", "True", "(\w+)"', source)
    made = re.findall(r"reason=([A-Z_]+)", (room / "placement/reach.py").read_text())
    reach = {"NEVER": NEVER, "PEAKS": PEAKS, "TOO_BUSY": TOO_BUSY, "CLOSED": CLOSED}
    (table,) = re.findall(r"has no event:\n\n\| reason .*?\n\n", MANUAL, re.S)
    (row,) = re.findall(r"^\| OfflineWorkload \|.*$", MANUAL, re.M)

    assert set(made) == set(reach)
    out_of_reach = {reason for kind, reason in written if kind == "SLAUnreachable"} | set(reach.values())
    assert set(re.findall(r"^\| ([A-Z]\w+) \|", table, re.M)) == out_of_reach
    others = [(kind, reason) for kind, reason in written if kind != "SLAUnreachable"]
    assert len(others) == 2
    assert [pair for pair in others if f"{pair[0]} ({pair[1]})" not in row] == []


def test_every_condition_of_a_node_is_named() -> None:
    _, _, conditions = (ROOT / "valved/kube/status.py").read_text().partition("def conditions_of")
    kinds = re.findall(r'(?:kind=|\(\s+|^ {8}\()"([A-Z]\w+)"', conditions, re.MULTILINE)
    row = re.search(r"^\| GPUHarvestNode \| (.*?);", MANUAL, re.MULTILINE)

    assert len(kinds) == 10
    assert row
    assert sorted(row[1].split(", ")) == sorted(kinds)


def test_every_injection_mark_is_explained() -> None:
    room = ROOT / "scheduler/valve_scheduler"
    marks = re.findall(r'raise Skipped\("(.*?)"\)', (room.parent / "valve_kube" / "injection.py").read_text())
    marks += re.findall(r'hidden = "(.+?)"', (room / "webhook/admission.py").read_text())

    assert len(marks) == 8
    assert [mark for mark in marks if f"`skipped-{mark}`" not in MANUAL] == []


def test_the_example_job_is_valid_and_passes_the_webhook() -> None:
    job = example("Job")
    template = job["spec"]["template"]
    pod = {
        "metadata": {"name": "p", "namespace": "default", "uid": "u", **template["metadata"]},
        "spec": template["spec"],
    }

    kubernetes_validate.validate(job, "1.36", strict=True)
    admitted = offline_pod(mutate_offline(pod, AdmissionSettings()))

    assert (admitted.gpus, admitted.sla, admitted.profile) == (1, 0.3, "llama-8b")


def test_the_example_profile_can_be_used_once_it_is_ready() -> None:
    profile = workload_profile(example("OfflineProfile") | {"status": {"phase": "Ready"}})

    assert profile is not None
    assert profile.gpu_model == "H100 80GB HBM3"


def test_the_domain_of_the_manual_is_the_one_of_the_code() -> None:
    assert f"{names.DOMAIN}/harvested-gpu" in MANUAL
