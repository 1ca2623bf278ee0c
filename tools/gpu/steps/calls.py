"""Where the shim stands in a process, and what single calls cost."""

from __future__ import annotations

import os
import struct
import time
from typing import Any

from valve_tools.gpu.errors import LabRefused
from valve_tools.gpu.experiment import ExperimentBatch, experiment
from valve_tools.gpu.outcome import LabOutcome, LabVerdict, figures
from valve_tools.gpu.rig import NOBODY, Rig

SET_TIMESLICE, GET_TIMESLICE = 0xA06C0103, 0xA06C0104
CALLS = (
    "launch",
    "graph_launch",
    "event_record",
    "event_query",
    "stream_query",
    "ctx_record_event",
    "stream_write_value",
    "launch_host_func",
)


@experiment("C1", seconds=15, decides="whether a preload alone is enough to learn channels")
def c1(rig: Rig) -> LabOutcome:
    """Does libcuda reach the driver where a preload can see it?"""
    with rig.workload("idle", 60_000, helper=True) as work:
        a = work.helper().ask_json("pointers")
        with rig.probe(work) as probe:
            seen = probe.do("list")
    channels = len(seen["channels"])
    return LabOutcome(
        verdict=LabVerdict.BLIND if not channels else LabVerdict.OK if a["found"] == a["asked"] else LabVerdict.PART,
        detail=f"a preload saw {seen['calls']} driver calls and {channels} channels; of {a['asked']} entry points "
        f"{a['found']} found by cuGetProcAddress, {a['equal']} of them at the exported address",
        answers={"channels": channels, **a},
    )


@experiment("C5", seconds=30, decides="whether the watcher may probe with cuCtxRecordEvent")
def c5(rig: Rig) -> LabOutcome:
    """What do the calls cost that could prove a context idle?"""
    with rig.workload("idle", 60_000, helper=True) as work:
        cost = work.helper().ask_json(f"calls {400 if rig.effort.dry else 4000}", patience_s=60)
    shown = figures(cost, *(f"{name}_us" for name in CALLS))
    probe = shown.get("ctx_record_event_us")
    good = not cost["error"] and probe is not None
    return LabOutcome(
        verdict=LabVerdict.BAD if not good else LabVerdict.OK if probe and probe.at(0.5) < 2 else LabVerdict.SLOW,
        detail="host time of one call [us], p50: "
        + ", ".join(f"{name[:-3]} {figure.at(0.5):.2f}" for name, figure in shown.items()),
        figures=shown,
        answers={"error": cost["error"]},
    )


def still_moves(rig: Rig, engine: str, path: str) -> tuple[bool, int]:
    """Whether copies go on while `engine` is off, and how many channels the process has."""
    with rig.workload("copy", rig.effort.ms(20000), held=True) as work, rig.probe(work, path=path) as probe:
        work.go()
        channels = probe.do("list")["channels"]
        probe.do(f"off {engine} 10000")
        time.sleep(0.05)
        moves = work.moves(0.5)
        probe.do(f"on {engine}")
    return moves, len(channels)


@experiment("C12", seconds=30, decides="what to gate for a compute pause, and what before memory moves")
def c12(rig: Rig) -> LabOutcome:
    """Which channels carry copies?"""
    path = rig.reach()
    compute_off, channels = still_moves(rig, "gr", path)
    all_off, _ = still_moves(rig, "all", path)
    return LabOutcome(
        verdict=LabVerdict.OK if not all_off else LabVerdict.PART,
        detail=f"{channels} channels; copies {'go on' if compute_off else 'stop'} while only compute is off, and "
        f"{'GO ON' if all_off else 'stop'} while all are",
        answers={"copies_run_beside_gated_compute": compute_off, "copies_run_with_all_off": all_off},
    )


def timeslice(rig: Rig, uid: int | None) -> tuple[int, int, int]:
    """(status of get, slice in us, status of setting it to 1 ms) on the workload's descriptor, by this user."""
    with rig.workload("alu", rig.effort.ms(8000), held=True) as work, rig.probe(work, path="b", uid=uid) as probe:
        tsg = next(c["tsg"] for c in probe.do("list")["channels"] if 1 <= c["engine"] <= 8)
        got, raw = probe.control("theirs", str(tsg), GET_TIMESLICE, bytes(8))
        (us,) = struct.unpack("<Q", raw)
        put, _ = probe.control("theirs", str(tsg), SET_TIMESLICE, struct.pack("<Q", 1000))
        if got == 0 and put == 0:
            probe.control("theirs", str(tsg), SET_TIMESLICE, struct.pack("<Q", us))
    return got, us, put


@experiment("C14", seconds=30, decides="the fallback below channel control")
def c14(rig: Rig) -> LabOutcome:
    """Can the time slice of a group be set without privilege?"""
    users = {"this user": None, **({"nobody": NOBODY} if os.getuid() == 0 else {})}
    answers: dict[str, Any] = {}
    for name, uid in users.items():
        try:
            got, us, put = timeslice(rig, uid)
        except LabRefused as error:
            answers[name] = {"refused": str(error)}
            continue
        answers[name] = {"get": got, "us": us, "set": put}
    good = [name for name, answer in answers.items() if answer.get("set") == 0]
    words = [
        f"{name}: get {a['get']:#x} ({a['us']} us), set {a['set']:#x}" if "get" in a else f"{name}: {a['refused']}"
        for name, a in answers.items()
    ]
    return LabOutcome(verdict=LabVerdict.OK if good else LabVerdict.REFUSED, detail="; ".join(words), answers=answers)


BATCH = ExperimentBatch(
    name="calls", about="where the shim stands in a process, and what single calls cost", experiments=(c1, c5, c12, c14)
)
