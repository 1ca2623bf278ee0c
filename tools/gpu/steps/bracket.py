"""C15: stock PyTorch through the shim's bracket with each of its allocators, a graph replayed across remaps, every page
read.

On the emulated GPU, where PyTorch has no CUDA, the same programs make the driver calls that torch would make; what a
card must say is whether torch makes those calls, and whether a graph of its kernels stands a remap.
"""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from typing import Any

from valve_tools.gpu.engines.choice import HERE, need_product, python_with_torch
from valve_tools.gpu.experiment import ExperimentBatch, experiment
from valve_tools.gpu.outcome import LabOutcome, LabVerdict
from valve_tools.gpu.rig import Rig
from valve_tools.gpu.steps.product import product

PROGRAM = HERE / "torch_bracket.py"
ALLOCATORS = {"native": "", "expandable": "expandable_segments:True", "async": "backend:cudaMallocAsync"}
BLOCKS, WANTED = 64, 24
CONFIG = "[memory]\nhandle_mib = 2\npool_mib = 136\nspare_mib = 0\nheadroom_min_mib = 4\nheadroom_max_mib = 8\n"
PATIENCE_S = 240.0


@experiment(
    "C15", seconds=240, decides="whether engines on PyTorch may share their KV cache, and with which allocator settings"
)
def c15(rig: Rig) -> LabOutcome:
    """Does stock PyTorch's cache become Valve's memory (three allocators), and does a graph stand a remap?"""
    need_product()
    found = {name: ask_allocator(rig, name) for name in ALLOCATORS}
    bad = {name: why for name, one in found.items() if (why := complaint(name, one))}
    shared = [name for name, one in found.items() if one["is_valves"]]
    words = [
        f"{name}: {'Valve memory' if one['is_valves'] else 'ordinary memory, and said so'}, {one['replays']} replays, "
        f"{one['taken']} blocks taken and {one['returned']} returned, "
        f"{one['wrong_pages_in_graph'] + one['wrong_pages_read']} wrong pages"
        for name, one in found.items()
    ]
    told = "; ".join([*words, *(f"{name}: {why}" for name, why in bad.items())])
    return LabOutcome(
        verdict=LabVerdict.OK if not bad else LabVerdict.DIFFERS,
        detail=told,
        answers={"allocators": found, "shared": shared, "rung": sorted({str(one["rung"]) for one in found.values()})},
    )


def complaint(name: str, one: dict[str, Any]) -> str:
    """What is wrong; empty if nothing is."""
    if one["wrong_pages_in_graph"] or one["wrong_pages_read"]:
        return "a page held what it must not"
    if name == "native" and not (one["is_valves"] and one["taken"] and one["returned"]):
        return "no block was taken and given back"
    if not one["is_valves"] and not one["was_said"]:
        return "memory was silently not Valve's"
    return ""


def ask_allocator(rig: Rig, name: str) -> dict[str, Any]:
    with product(rig) as node:
        node.config += CONFIG
        node.start_valved()
        python = sys.executable if rig.machine.is_dry else python_with_torch()
        argv = [python, str(PROGRAM), "--blocks", str(BLOCKS), "--allocator", name]
        argv += ["--want", str(WANTED), *(["--driver"] if rig.machine.is_dry else [])]
        env = {"PYTORCH_CUDA_ALLOC_CONF": ALLOCATORS[name]} if ALLOCATORS[name] else {}
        out = node.folder / "offline.out"
        offline = node.run("offline", [*argv, "--role", "offline"], name="batch", env=env, out=out)
        node.wait_for(lambda: offline.poll() is not None or backed(node, 2) == BLOCKS or is_ordinary(out), "it stands")
        if backed(node, 2):
            online = [*argv, "--role", "online", "--allocator", "native"]
            node.run("online", online, name="chat", out=node.folder / "online.out").wait(PATIENCE_S)
            node.wait_for(lambda: backed(node, 2) == BLOCKS, "the memory is back")
        rung = next((trial.rung for trial in node.status().memory.trials), "")
        offline.send_signal(signal.SIGTERM)
        offline.wait(PATIENCE_S)
        lines = [line for line in out.read_text().splitlines() if line.startswith("{")]
        told = json.loads(lines[-1]) if lines else {}
        return {**told, "rung": rung, "was_said": is_ordinary(out)}


def backed(node: Any, role: int) -> int:
    """Blocks that the engine of this role has, 0 without one."""
    return next((int(one.backed_blocks) for one in node.status().memory.engines if one.role == role), 0)


def is_ordinary(out: Path) -> bool:
    return "ordinary memory" in out.read_text(errors="replace")


BATCH = ExperimentBatch(name="torch", about="stock PyTorch's KV cache in Valve's memory", experiments=(c15,))
