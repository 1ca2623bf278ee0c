"""Reads the rendered charts of tests/helm/golden: one whole, others as their difference from it (`diff -u`)."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).resolve().parents[2] / "helm/golden"
BASE = "default"
WITHOUT_CRDS = ("airgapped",)  # a difference from the default without its CRDs
_OBJECTS = re.compile(r"^(?=---$)", re.MULTILINE)
_HUNK = re.compile(r"^@@ -(\d+)(?:,(\d+))? \+\d+(?:,\d+)? @@")


def golden(name: str) -> str:
    """The chart as rendered with ci/NAME-values.yaml."""
    base = (FOLDER / f"{BASE}.yaml").read_text()
    if name == BASE:
        return base
    if name in WITHOUT_CRDS:
        base = "".join(
            one for one in _OBJECTS.split(base) if not one.startswith("---\n# Source: valve/templates/crds.yaml\n")
        )
    return "".join(patched(base.splitlines(True), (FOLDER / f"{name}.diff").read_text().splitlines(True)))


def dashboard() -> dict[str, Any]:
    """What Grafana reads, from the ConfigMap that carries it."""
    for found in yaml.load_all(golden(BASE), Loader=yaml.CSafeLoader):
        if found and found["metadata"]["name"] == "valve-dashboard":
            read: dict[str, Any] = json.loads(found["data"]["valve.json"])
            return read
    raise LookupError("the chart has no dashboard")


def patched(base: list[str], difference: list[str]) -> list[str]:
    """`base` after a unified diff. Lines that the diff shows must stand there."""
    out: list[str] = []
    at = 0
    for line in difference[2:]:
        hunk = _HUNK.match(line)
        if hunk:
            start = int(hunk[1]) - (hunk[2] != "0")
            out += base[at:start]
            at = start
        elif line.startswith("+"):
            out.append(line[1:])
        else:
            assert base[at] == line[1:], f"line {at + 1} of {BASE}.yaml is not what the difference shows"
            if line.startswith(" "):
                out.append(line[1:])
            at += 1
    return out + base[at:]
