"""Rights, values and the manual agree: each right is used by the program that has it and stands in the manual."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from goldens import golden
from valve_kube import names
from valve_scheduler.controller.belief import PARTS
from valve_scheduler.placement import views

Json = dict[str, Any]
ROOT = Path(__file__).resolve().parents[2]
SCHEDULER = ROOT / "scheduler"
MANUAL = (ROOT / "docs/cluster.md").read_text()
VALUES = ROOT / "helm/valve/values.yaml"
OBJECTS = [found for found in yaml.load_all(golden("default"), Loader=yaml.CSafeLoader) if found]
KINDS = "gpuharvestnodes, harvestaccounts, harvestpolicies, offlineprofiles, offlineworkloads"
# By account: its roles, the sources of the program that runs as it, and which of the shared watches that program has.
LEASE = ("valve_kube/lease.py",)
PROGRAMS: dict[str, tuple[tuple[str, ...], tuple[str, ...], str]] = {
    "valve-daemon": (("valve-daemon",), ("../valved/kube/*.py",), ""),
    "valve-scheduler": (
        ("valve-extender", "valve-scheduler"),
        ("valve_scheduler/extender/*.py", "valve_scheduler/placement/served.py", *LEASE),
        "pods nodes profiles workloads policies",
    ),
    "valve-controller": (
        ("valve-controller",),
        ("valve_scheduler/controller/*.py", *LEASE),
        "pods nodes profiles workloads policies grounds",
    ),
    "valve-webhook": (("valve-webhook",), ("valve_scheduler/webhook/*.py",), ""),
    "valve-drain": (("valve-drain",), ("valve_scheduler/cli/drain.py",), ""),
}
LOOKING = ("commands", "coverage", "overview", "reporting")  # what a viewer's commands read with


def granted(roles: tuple[str, ...]) -> set[str]:
    found = [one for one in OBJECTS if one["kind"] in ("ClusterRole", "Role") and one["metadata"]["name"] in roles]
    assert found, roles
    return {resource for role in found for rule in role["rules"] for resource in rule["resources"]}


def source(files: tuple[str, ...], watches: str) -> str:
    """What counts is the path of a request: a slash stands before each resource."""
    texts = [path.read_text() for pattern in files for path in sorted(SCHEDULER.glob(pattern))]
    assert len(texts) >= len(files)
    texts += [inspect.getsource(getattr(views, f"{watch}_view")) for watch in watches.split()]
    whole = "\n".join(texts)
    for name in ("WEBHOOKS_PATH", "ADMISSION_PATH", "API_PATH"):
        whole = whole.replace(f"{{names.{name}}}", getattr(names, name))
    return whole.replace("{part}", " /".join(PARTS))


def asked(text: str, resource: str) -> bool:
    """Of `/pods/NAME/eviction` the pods are no more than a part of the path."""
    if "/" in resource:
        return f"/{resource.partition('/')[2]}" in text
    return re.search(rf"/{resource}\b(?!/\{{[^}}]*\}}/[a-z])", text) is not None


@pytest.mark.parametrize("account", PROGRAMS)
def test_no_program_has_a_right_that_it_never_uses(account: str) -> None:
    roles, files, watches = PROGRAMS[account]
    text = source(files, watches)

    assert {resource for resource in granted(roles) if not asked(text, resource)} == set()


@pytest.mark.parametrize("account", PROGRAMS)
def test_no_program_asks_for_what_its_role_does_not_give(account: str) -> None:
    roles, files, watches = PROGRAMS[account]
    text = source(files, watches)
    known = set().union(*(granted(roles) for roles, _, _ in PROGRAMS.values()))

    assert {resource for resource in known if "/" not in resource and asked(text, resource)} - granted(roles) == set()


def test_a_viewer_can_read_whatever_the_commands_that_look_ask_for() -> None:
    text = source(tuple(f"valve_scheduler/cli/{name}.py" for name in LOOKING), "pods nodes profiles workloads policies")
    known = set().union(*(granted(roles) for roles, _, _ in PROGRAMS.values()))
    wanted = {resource for resource in known if "/" not in resource and asked(text, resource)}

    assert {"pods", "nodes", "gpuharvestnodes"} <= wanted <= granted(("valve-viewer",))
    assert granted(("valve-viewer",)) == granted(("valve-explain",))


def rights() -> dict[str, str]:
    """Rows of the manual's table, by account."""
    (section,) = re.findall(r"^## Who may do what\n(.*?)^## ", MANUAL, re.M | re.S)
    return dict(re.findall(r"^\| (valve-[a-z]+)\b(.*)$", section, re.M))


@pytest.mark.parametrize("account", PROGRAMS)
def test_the_manual_names_every_right_of_an_account(account: str) -> None:
    said = rights()[account].lower().replace("all of valve's kinds", KINDS)
    for resource in granted(PROGRAMS[account][0]):
        word = resource.partition("/")[2] if resource.partition("/")[2] not in ("", "status") else resource
        one = re.sub(r"(ie)?s$", "", word.partition("/")[0])
        assert one in said, resource


def test_the_manual_names_every_role_for_people_and_no_other() -> None:
    accounts = {one["metadata"]["name"] for one in OBJECTS if one["kind"] == "ServiceAccount"}
    roles = {one["metadata"]["name"] for one in OBJECTS if one["kind"] == "ClusterRole"}
    people = {"valve-viewer", "valve-operator", "valve-explain"}

    assert set(rights()) == accounts - {"valve-test"} | people
    assert people <= roles
    assert "bind `valve-viewer` to" in MANUAL


def lines_of(text: str) -> Iterator[tuple[str, bool, bool]]:
    """(dotted path, whether it or something above it has a comment, whether it is a leaf) of each value."""
    above, stack = False, []
    for line in text.splitlines():
        if not line.strip() or line.lstrip().startswith("#"):
            above = bool(line.strip())
            continue
        found = re.match(r"( *)([\w-]+):(.*)", line)
        if found:
            indent = len(found[1])
            stack = [one for one in stack if one[0] < indent]
            stack.append((indent, found[2], "#" in line or above))
            path = ".".join(name for _, name, _ in stack)
            yield path, any(has for *_, has in stack), found[3].partition("#")[0].strip() != ""
        above = False


def test_no_value_of_the_chart_is_without_a_word_on_it() -> None:
    found = list(lines_of(VALUES.read_text()))
    values = yaml.safe_load(VALUES.read_text())

    assert {path.partition(".")[0] for path, _, _ in found} == set(values)
    assert [path for path, has_comment, is_leaf in found if is_leaf and not has_comment] == []


def test_no_manual_names_a_value_that_the_chart_has_not() -> None:
    values = yaml.safe_load(VALUES.read_text())
    missing, seen = [], 0
    for page in [*sorted((ROOT / "docs").glob("*.md")), *ROOT.glob("*.md"), ROOT / "helm/valve/README.md"]:
        for named in re.findall(r"`([a-zA-Z]+(?:\.[a-zA-Z]+)+)(?:=[^`]*)?`", page.read_text()):
            first, *parts = named.split(".")
            if first not in values or first == "sla":
                continue
            seen += 1
            inner = values[first]
            for part in parts:
                inner = inner.get(part) if isinstance(inner, dict) else None
            if inner is None:
                missing.append((page.name, named))

    assert seen > 15
    assert missing == []
