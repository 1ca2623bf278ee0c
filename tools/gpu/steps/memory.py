"""Moving memory: what the calls cost, which driver calls they make, what keeps memory alive."""

from __future__ import annotations

import json
import os
import time
from typing import Any

from valve_tools.gpu.experiment import ExperimentBatch, experiment
from valve_tools.gpu.machine import branch_of
from valve_tools.gpu.outcome import LabOutcome, LabVerdict, figures
from valve_tools.gpu.replay import name_of
from valve_tools.gpu.rig import Rig, Workload
from valve_tools.gpu.steps.gated import REMAP, c4, c6
from valve_tools.gpu.talk import Talk

COST = ("create_us", "map_us", "access_us", "unmap_us", "release_us")
MAP_EXTERNAL = 33


@experiment("C8", seconds=60, decides="the pool's handle size, and how much headroom a reclaim within its time needs")
def c8(rig: Rig) -> LabOutcome:
    """What do the virtual memory calls cost, by handle size?"""
    shown, words, answers = {}, [], {}
    with rig.workload("idle", 120_000, helper=True) as work:
        for mib in (2, 16, 64, 128):
            total = max(rig.effort.mib(1024), mib)
            cost = work.helper().ask_json(f"cost {mib} {total}", patience_s=90)
            if cost["error"]:
                return LabOutcome(verdict=LabVerdict.BAD, detail=f"{mib} MiB handles: CUDA error {cost['error']}")
            part = figures(cost, *COST, prefix=f"{mib}mib_")
            shown.update(part)
            each = sum(part[f"{mib}mib_{call}_us"].at(0.5) for call in REMAP)
            gib = {"each_ms": each * 1024 / mib / 1e3, "batch_ms": cost["batch_us"] * 1024 / total / 1e3}
            answers[f"{mib}mib_remap_ms_per_gib"] = {name: round(value, 2) for name, value in gib.items()}
            words.append(
                f"{mib} MiB: remap {each:.0f} us, {gib['each_ms']:.1f} ms per GiB ({gib['batch_ms']:.1f} in one go)"
            )
    return LabOutcome(verdict=LabVerdict.OK, detail="; ".join(words), figures=shown, answers=answers)


def lines_since(work: Workload, seen: int) -> list[dict[str, Any]]:
    """What the tracer wrote after line `seen`."""
    return [json.loads(line) for line in work.trace.read_text().splitlines()[seen:]]


@experiment("C2", seconds=15, decides="what runs under which lock, and what the daemon could do by itself")
def c2(rig: Rig) -> LabOutcome:
    """Which driver calls does each of them make?"""
    found: dict[str, list[str]] = {}
    with rig.workload("idle", 60_000, helper=True, trace=True) as work:
        for call in ("reserve", "create", *REMAP, "release", "alloc", "free"):
            seen = len(work.trace.read_text().splitlines())
            answer = work.helper().ask_json(f"vmm {call} 0 0")
            if answer["error"]:
                return LabOutcome(verdict=LabVerdict.BAD, detail=f"{call}: CUDA error {answer['error']}")
            found[call] = [name_of(line) for line in lines_since(work, seen)]
    return LabOutcome(
        verdict=LabVerdict.OK,
        detail="; ".join(f"{call}: {', '.join(calls) or 'none'}" for call, calls in found.items()),
        answers=found,
    )


@experiment("C9", seconds=15, decides="whether one large handle can feed a whole column")
def c9(rig: Rig) -> LabOutcome:
    """Can part of a handle be mapped in place, with an offset?"""
    with rig.workload("idle", 60_000, helper=True, trace=True) as work:
        seen = len(work.trace.read_text().splitlines())
        for call in REMAP:
            work.helper().ask_json(f"vmm {call} 0 0")
        maps = [line for line in lines_since(work, seen) if line.get("request") == MAP_EXTERNAL]
        if not maps:
            return LabOutcome(
                verdict=LabVerdict.BLIND, detail="set access made no UVM_MAP_EXTERNAL_ALLOCATION that could be seen"
            )
        branch = branch_of(rig.machine.driver) or 580
        answer = work.helper().ask_json(f"offset 0 {maps[-1]['tail']} {branch}")
        for call in REMAP:
            work.helper().ask_json(f"vmm {call} 0 0")
        back = work.helper().ask_json("read 0")["own"]
    moved = answer["moved"] and back
    refused = answer["errno"] or answer["status"]
    return LabOutcome(
        verdict=LabVerdict.OK if moved else LabVerdict.REFUSED if refused else LabVerdict.PART,
        detail=f"second half of a handle over the first, in place: errno {answer['errno']}, status "
        f"{answer['status']:#x}, {answer['us']:.0f} us, bytes {'moved' if answer['moved'] else 'did not move'}, "
        f"put back {back}",
        answers={**answer, "put_back": back},
    )


@experiment("C7", seconds=10, decides="which queries the shim must answer itself")
def c7(rig: Rig) -> LabOutcome:
    """What do frameworks learn about such memory?"""
    with rig.workload("idle", 60_000, helper=True) as work:
        a = work.helper().ask_json("range")
    return LabOutcome(
        verdict=LabVerdict.OK if not a["range"] and not a["type"] else LabVerdict.PART,
        detail=f"address range: {a['bytes']} bytes, {'per mapping' if a['per_mapping'] else 'the whole reservation'}; "
        f"legacy IPC capable {a['legacy_capable']}, cuIpcGetMemHandle error {a['ipc']}; RANGE_SIZE {a['range_bytes']} "
        f"(error {a['range_size']})",
        answers=a,
    )


def used(rig: Rig) -> float:
    value = rig.machine.used_mib()
    return -1.0 if value is None else value


def used_below(rig: Rig, limit: float, patience_s: float = 8.0) -> float:
    """Memory in use once it has fallen below the limit, or after the patience: teardown takes its time."""
    end = time.monotonic() + patience_s
    while (now := used(rig)) >= limit and time.monotonic() < end:
        time.sleep(0.1)
    return now


@experiment("D12", seconds=40, decides="how fast valved must close it (path B)")
def d12(rig: Rig) -> LabOutcome:
    """Does a passed descriptor keep a killed process's memory?"""
    start = used(rig)
    with rig.workload("alu", rig.effort.ms(20000), helper=True, may_fail=True) as work:
        running = used(rig)
        with Talk(work.tracer) as tracer:
            _, fd = tracer.ask("fd")
        rig.kill(work)
        killed = used_below(rig, (start + running) / 2, rig.effort.seconds(6))
        os.close(fd)
        closed = used_below(rig, (start + running) / 2)
    held = killed > (start + running) / 2
    return LabOutcome(
        verdict=LabVerdict.OK if closed < (start + running) / 2 else LabVerdict.BAD,
        detail=f"MiB in use: before {start:.0f}, running {running:.0f}, killed while we hold its descriptor "
        f"{killed:.0f}, descriptor closed {closed:.0f}",
        answers={"memory_held_by_passed_fd": held},
    )


@experiment("D13", seconds=60, decides="whether the pool's gating needs a CUDA context")
def d13(rig: Rig) -> LabOutcome:
    """Does an exported descriptor alone keep memory alive?"""
    mib, before = rig.effort.mib(2048), used(rig)
    with rig.workload("idle", 60_000, helper=True) as exporter:
        text, fd = exporter.helper().ask(f"export {mib}", patience_s=60)
    if fd < 0:
        return LabOutcome(verdict=LabVerdict.BAD, detail=f"export failed: {text}")
    held = used_below(rig, before + mib / 2, rig.effort.seconds(6))
    with rig.workload("idle", 60_000, helper=True) as importer:
        checked = importer.helper().ask_json(f"import {mib}", patience_s=60, fd=fd)
    os.close(fd)
    closed = used_below(rig, before + mib / 2)
    kept = held >= before + mib / 2
    intact = not checked["error"] and not checked["wrong"]
    return LabOutcome(
        verdict=LabVerdict.OK if kept and intact and closed < before + mib / 2 else LabVerdict.PART,
        detail=f"{mib} MiB, exporter gone: {'held' if kept else 'LOST'} ({held:.0f} MiB in use); imported elsewhere: "
        f"error {checked['error']}, {checked['wrong']} wrong words; descriptor closed: {closed:.0f} MiB in use",
        answers={"held": kept, "intact": intact},
    )


BATCH = ExperimentBatch(
    name="memory", about="moving memory under a workload", experiments=(c8, c2, c4, c6, c9, c7, d12, d13)
)
