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

from valved.fds import names_in, read_if_there

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
    """NVIDIA's own description of the node's GPUs; None where the toolkit made none. OSError: nobody knows, as one that
    could be it cannot be read."""
    problem: OSError | None = None
    for path in [folder / name for folder in folders for name in names_in(folder) if name.endswith((".yaml", ".json"))]:
        try:
            spec = _read(path)
        except OSError as error:
            problem = error
            continue
        if isinstance(spec, dict) and spec.get("kind") == TOOLKIT_KIND:
            return spec
    if problem is not None:
        raise problem
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
    start, end = f"{names.DOMAIN}-", ".json"
    files = [name for name in names_in(folder) if name.startswith(start) and name.endswith(end)]
    return frozenset(name.removeprefix(start).removesuffix(end) for name in files)


def _path(folder: Path, slot: str) -> Path:
    return folder / f"{names.DOMAIN}-{slot}.json"


def _read(path: Path) -> Any:
    import yaml  # comes with the kubernetes client; the toolkit writes YAML, and JSON is YAML

    text = read_if_there(path)
    try:
        return yaml.safe_load(text) if text is not None else None
    except (UnicodeDecodeError, yaml.YAMLError):
        return None
