"""CDI devices made late: a slot's file names the GPUs of the pod that got the slot, just before its container starts.

Allocate names devices whose files do not exist yet; containerd resolves names only at the container's creation, and by
then PreStart has written them. What a GPU needs (device nodes, libraries, hooks) is copied from the description that
NVIDIA's toolkit keeps on the node.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from valve_kube import names

VERSION = "0.6.0"
KIND = f"{names.DOMAIN}/gpu"
TOOLKIT_KIND = "nvidia.com/gpu"
Json = dict[str, Any]


class NoDescription(Exception):
    """The toolkit's CDI description does not have what was asked for."""


def device(slot: str) -> str:
    """The name that Allocate gives to the runtime."""
    return f"{KIND}={slot}"


def read_toolkit(folders: Iterable[Path]) -> Json | None:
    """NVIDIA's own description of the node's GPUs; None where the toolkit made none."""
    for folder in folders:
        for path in sorted([*folder.glob("*.yaml"), *folder.glob("*.json")]):
            spec = _read(path)
            if isinstance(spec, dict) and spec.get("kind") == TOOLKIT_KIND:
                return spec
    return None


def slot_specs(slots: Sequence[str], uuids: Sequence[str], toolkit: Mapping[str, Any]) -> dict[str, Json]:
    """One description per slot of a container; its GPUs are dealt to its slots in order.

    What all GPUs share (libraries, hooks) goes with the first slot: the runtime merges all slots of a container.
    """
    devices = {entry["name"]: entry.get("containerEdits") or {} for entry in toolkit.get("devices") or []}
    missing = [uuid for uuid in uuids if uuid not in devices]
    if missing:
        raise NoDescription(f"the toolkit's CDI description has no device {missing[0]}; it has {', '.join(devices)}")
    common = toolkit.get("containerEdits") or {}
    specs = {}
    for place, slot in enumerate(slots):
        mine = [devices[uuid] for index, uuid in enumerate(uuids) if min(index, len(slots) - 1) == place]
        edits = merge([common, *mine] if place == 0 else mine)
        specs[slot] = {
            "cdiVersion": toolkit.get("cdiVersion", VERSION),
            "kind": KIND,
            "devices": [{"name": slot, "containerEdits": edits or {"env": [f"VALVE_SLOT={slot}"]}}],
        }
    return specs


def merge(edits: Iterable[Mapping[str, Any]]) -> Json:
    """Every list of every edit, one after another, entries that repeat left out."""
    merged: Json = {}
    for edit in edits:
        for key, value in edit.items():
            if isinstance(value, list):
                kept = merged.setdefault(key, [])
                kept.extend(entry for entry in value if entry not in kept)
            else:
                merged[key] = value
    return merged


def write(folder: Path, slot: str, spec: Json) -> None:
    """Whole or not at all: the runtime may read the folder at any moment."""
    path = _path(folder, slot)
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    fresh.write_text(json.dumps(spec, indent=1), encoding="utf-8")
    fresh.replace(path)


def remove(folder: Path, slot: str) -> None:
    _path(folder, slot).unlink(missing_ok=True)


def present(folder: Path) -> frozenset[str]:
    """Slots that have a file."""
    start = f"{names.DOMAIN}-"
    return frozenset(path.stem.removeprefix(start) for path in folder.glob(f"{start}*.json"))


def _path(folder: Path, slot: str) -> Path:
    return folder / f"{names.DOMAIN}-{slot}.json"


def _read(path: Path) -> Any:
    import yaml  # comes with the kubernetes client; the toolkit writes YAML, and JSON is YAML

    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError):
        return None
