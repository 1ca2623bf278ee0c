"""First contact: what machine this is, what a CUDA process looks like from outside, and whether its channels stop."""

from __future__ import annotations

import json
import os
import struct
from collections import Counter
from typing import Any

from valve_tools.gpu.errors import LabRefused
from valve_tools.gpu.experiment import ExperimentBatch, experiment
from valve_tools.gpu.outcome import LabOutcome, LabVerdict, figures
from valve_tools.gpu.probe import CYCLE, Probe
from valve_tools.gpu.rig import NOBODY, Rig, first_refusal

CHANNEL_IDS = 0x20801124
IDS = struct.Struct("<128I128II128I")


@experiment(
    "D0", seconds=20, decides="whether the answers hold for the fleet: open modules, GSP firmware, Default mode, no MIG"
)
def d0(rig: Rig) -> LabOutcome:
    """What machine is this?"""
    facts = dict(rig.machine.facts())
    unknown = [name for name, value in facts.items() if value in {"?", "unknown"}]
    return LabOutcome(
        verdict=LabVerdict.PART if unknown else LabVerdict.OK,
        detail="; ".join(f"{name}: {value}" for name, value in facts.items()),
        answers=facts,
    )


def channel_words(channels: list[dict[str, Any]]) -> str:
    """Channels by engine and class, as "8 x class 0xc86f on engine 1"."""
    kinds = Counter((channel["engine"], channel["class"]) for channel in channels)
    return ", ".join(f"{n} x class {cls:#x} on engine {engine}" for (engine, cls), n in sorted(kinds.items()))


@experiment(
    "D1", seconds=30, decides="how channels are learnt: UVM registration or allocation, TSG by engine, which class"
)
def d1(rig: Rig) -> LabOutcome:
    """Which objects and driver calls make a CUDA process?"""
    with rig.workload("alu", rig.effort.ms(2000), held=True, trace=True) as work, rig.probe(work) as probe:
        work.go()
        seen = probe.do("list")
    text = work.trace.read_text()
    calls = [json.loads(line) for line in text.splitlines()]
    keep_trace(rig, text)
    channels = seen["channels"]
    gr = [channel for channel in channels if 1 <= channel["engine"] <= 8]
    commands = Counter(call["cmd"] for call in calls if call.get("op") == "control")
    forms = Counter(call["size"] for call in calls if call.get("op") == "alloc")
    answers = {
        "channels": len(channels),
        "compute_channels": len(gr),
        "gpfifo_class": f"{gr[0]['class']:#x}" if gr else "",
        "uvm_registered": sum(channel["uvm"] for channel in channels),
        "cid_nonzero": sum(channel["cid"] != 0 for channel in channels),
        "own_disables": seen["app_disables"],
        "schedules": seen["app_schedules"],
        "preempts": seen["app_preempts"],
        "incomplete": seen["incomplete"],
        "calls": seen["calls"],
        "alloc_sizes": {str(size): n for size, n in forms.items()},
        "controls": {f"{command:#x}": n for command, n in commands.most_common(40)},
    }
    complete = not seen["incomplete"] and answers["uvm_registered"] == len(channels)
    verdict = LabVerdict.BLIND if not gr else LabVerdict.OK if complete else LabVerdict.PART
    return LabOutcome(
        verdict=verdict,
        detail=f"{channel_words(channels)}; {answers['uvm_registered']} registered with UVM, "
        f"{answers['cid_nonzero']} with a cid; libcuda itself disabled {seen['app_disables']} times",
        answers=answers,
    )


def keep_trace(rig: Rig, text: str) -> None:
    """The golden trace of this machine: what the emulator's answers can be compared with (valve gpu-lab replay)."""
    name = "trace.dry.jsonl" if rig.machine.is_dry else "trace.jsonl"
    (rig.out / name).write_text(text)


@experiment(
    "D2", seconds=10, decides="whether valved needs nothing but the device nodes, and must keep the GPU's node open"
)
def d2(rig: Rig) -> LabOutcome:
    """Can a process build its own driver client by raw calls?"""
    with bare_probe(rig) as probe:
        opened = probe.do("open")
    with bare_probe(rig) as probe:
        without = probe.do("open bare")
    device = next(step for step in without["steps"] if step["name"] == "alloc device")
    us = sum(step["us"] for step in opened["steps"])
    return LabOutcome(
        verdict=LabVerdict.OK
        if opened["ok"] and device["status"] == 0x1B
        else LabVerdict.PART
        if opened["ok"]
        else LabVerdict.BAD,
        detail=f"own client: {first_refusal(opened)}, {us:.0f} us; without the node open: device status "
        f"{device['status']:#x}",
        answers={"ok": opened["ok"], "device_status_without_node": device["status"]},
    )


def bare_probe(rig: Rig) -> Probe:
    """A probe that has opened nothing yet."""
    argv = [rig.spins.programs.path("probe"), str(rig.spins.guard_path)]
    return Probe(argv, rig.machine.environment(), rig.enable_all)


def ids_of(probe: Probe, pairs: list[tuple[int, int]]) -> tuple[int, list[int]]:
    """(status, cid of each pair) as the driver says for channels of whatever client."""
    fill = [0] * (128 - len(pairs))
    packed = IDS.pack(*[c for c, _ in pairs], *fill, *[h for _, h in pairs], *fill, len(pairs), *([0] * 128))
    status, after = probe.control("own", "sub", CHANNEL_IDS, packed)
    return status, list(IDS.unpack(after)[257 : 257 + len(pairs)])


@experiment("D3", seconds=15, decides="whether a reported channel can be verified before it is trusted")
def d3(rig: Rig) -> LabOutcome:
    """Does the driver resolve channels of other clients?"""
    with rig.workload("alu", rig.effort.ms(3000), held=True) as work, rig.probe(work) as probe:
        channels = probe.do("list")["channels"]
        pairs = [(channel["client"], channel["channel"]) for channel in channels]
        status, ids = ids_of(probe, pairs)
        wrong_channel, _ = ids_of(probe, [(pairs[0][0], 0xDEAD0001)])
        wrong_client, _ = ids_of(probe, [(0xC1DFFFF0, pairs[0][1])])
    equal = sum(channel["cid"] == cid for channel, cid in zip(channels, ids, strict=True))
    good = status == 0 and equal == len(pairs)
    return LabOutcome(
        verdict=LabVerdict.OK if good else LabVerdict.REFUSED,
        detail=f"{len(pairs)} foreign pairs: status {status:#x}, {equal} ids as allocated; a wrong channel "
        f"{wrong_channel:#x}, a wrong client {wrong_client:#x}",
        answers={"status": status, "equal": equal, "wrong_channel": wrong_channel, "wrong_client": wrong_client},
    )


def judge_cycles(done: dict[str, Any], path: str, *, name: str = "") -> LabOutcome:
    """The verdict on a run of pauses."""
    n, frozen, refused = done["n"], done["frozen"], done["refused"]
    if refused:
        verdict = LabVerdict.REFUSED
    elif n and not frozen:
        verdict = LabVerdict.SILENT
    else:
        verdict = LabVerdict.OK if n and frozen == n else LabVerdict.PART
    shown = figures(done, *CYCLE)
    why = f" (status {done['status']:#x}, errno {done['errno']})" if refused else ""
    speed = "; ".join(f"{key} {shown[key].words()}" for key in ("off_us", "last_seen_us", "resume_us") if key in shown)
    return LabOutcome(
        verdict=verdict,
        detail=f"{name}path {path}: {n} pauses, {frozen} frozen{why}; {speed or done['note']}",
        figures={f"{name.strip()}_{key}".lstrip("_"): value for key, value in shown.items()},
        answers={"path": path, "n": n, "frozen": frozen, "status": done["status"], "note": done["note"]},
    )


def paused(rig: Rig, path: str, n: int, uid: int | None = None) -> LabOutcome:
    with rig.workload("alu", rig.effort.ms(12000), held=True) as work:
        try:
            with rig.probe(work, path=path, uid=uid) as probe:
                work.go()
                return judge_cycles(probe.cycles(rig.effort.cycles(n), gap_us=(2000, 6000)), path)
        except LabRefused as error:
            return LabOutcome(
                verdict=LabVerdict.REFUSED, detail=f"path {path}: {error}", answers={"path": path, "frozen": 0}
            )


@experiment("D4", seconds=60, decides="the first rung of the reach order: valved's own client with foreign lists")
def d4(rig: Rig) -> LabOutcome:
    """Can one process stop the channels of another (path A)?"""
    outcome = paused(rig, "a", 200)
    if outcome.verdict is LabVerdict.OK:
        rig.path = "a"
    return outcome


@experiment("D4u", seconds=25, decides="the exposure that SECURITY.md states")
def d4u(rig: Rig) -> LabOutcome:
    """Can an unprivileged user do so?"""
    if os.getuid():
        return LabOutcome(verdict=LabVerdict.SKIPPED, detail="needs root, to become somebody else")
    return paused(rig, "a", 40, uid=NOBODY)


@experiment("D4b", seconds=60, decides="the next rungs of the reach order")
def d4b(rig: Rig) -> LabOutcome:
    """Do the passed descriptor (B) and the process itself (C) stop them?"""
    parts = {path: paused(rig, path, 50) for path in "bc"}
    good = [path for path, part in parts.items() if part.verdict is LabVerdict.OK]
    if good and not rig.path:
        rig.path = good[0]
    return LabOutcome(
        verdict=LabVerdict.REFUSED if not good else LabVerdict.OK if len(good) == len(parts) else LabVerdict.PART,
        detail=" | ".join(part.detail for part in parts.values()),
        figures={f"{path}_{key}": value for path, part in parts.items() for key, value in part.figures.items()},
        answers={path: part.verdict.value for path, part in parts.items()},
    )


BATCH = ExperimentBatch(
    name="contact",
    about="what a CUDA process looks like from outside, and whether its channels stop",
    experiments=(d0, d1, d2, d3, d4, d4u, d4b),
)
