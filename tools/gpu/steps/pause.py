"""What a pause does: is anything lost, how soon does each kind of work stop, what does an online service see."""

from __future__ import annotations

import struct
import threading
import time

from valve_tools.gpu.errors import LabRefused
from valve_tools.gpu.experiment import ExperimentBatch, experiment
from valve_tools.gpu.outcome import Figure, LabOutcome, LabVerdict, figures
from valve_tools.gpu.probe import CYCLE
from valve_tools.gpu.rig import Rig, Workload
from valve_tools.gpu.steps.contact import judge_cycles

GET_CTXSW_MODES = 0x20801235
MODES = {0: "WFI", 1: "CTA", 2: "CILP"}


def engine_of(mode: str) -> str:
    """Copies run on the copy engines: pausing them means pausing every channel."""
    return "all" if mode == "copy" else "gr"


@experiment("D5", seconds=110, decides="whether pausing is safe at all; if not, nothing else matters")
def d5(rig: Rig) -> LabOutcome:
    """Does work come out the same after a thousand random pauses?"""
    path, parts, words = rig.reach(), {}, []
    for mode in ("alu", "graph", "copy"):
        with rig.workload(mode, rig.effort.ms(2500)) as work:
            undisturbed = rig.finish(work)
        with rig.workload(mode, rig.effort.ms(2500), held=True) as work:
            with rig.probe(work, path=path) as probe:
                work.go()
                done = probe.cycles(1000, engine=engine_of(mode), pause_us=(500, 3000), gap_us=(500, 4000), limit_s=25)
            paused = rig.finish(work)
        same = paused["checksum"] == undisturbed["checksum"]
        parts[mode] = {"pauses": done["n"], "frozen": done["frozen"], "same": same, "error": paused["error"]}
        words.append(f"{mode}: {done['n']} pauses, {done['frozen']} frozen, checksum {'equal' if same else 'DIFFERS'}")
    all_same = all(part["same"] and not part["error"] for part in parts.values())
    all_frozen = all(part["frozen"] == part["pauses"] > 0 for part in parts.values())
    verdict = LabVerdict.DIFFERS if not all_same else LabVerdict.OK if all_frozen else LabVerdict.PART
    return LabOutcome(verdict=verdict, detail="; ".join(words), answers=parts)


def preemption_mode(rig: Rig, work: Workload) -> str:
    """How the compute context is preempted, asked with the workload's own client."""
    try:
        with rig.probe(work, path="b") as probe:
            compute = next(c for c in probe.do("list")["channels"] if c["compute"])
            params = struct.pack("<6I", compute["channel"], 0, 0, 0, 0, 0)
            status, after = probe.control("theirs", "sub", GET_CTXSW_MODES, params)
    except (LabRefused, StopIteration) as error:
        return f"unknown ({error})"
    return MODES.get(struct.unpack("<6I", after)[4], "?") if status == 0 else f"unknown (status {status:#x})"


@experiment("D6", seconds=100, decides="promise P1: under 1 ms for every kind of work, or only for short kernels")
def d6(rig: Rig) -> LabOutcome:
    """How soon does each kind of work stop?"""
    path, words, good, mode_word = rig.reach(), [], True, ""
    shown: dict[str, Figure] = {}
    for mode in ("alu", "one", "many", "graph", "copy", "long"):
        with rig.workload(mode, rig.effort.ms(8000 if mode != "long" else 2000), held=True) as work:
            mode_word = mode_word or preemption_mode(rig, work)
            with rig.probe(work, path=path) as probe:
                work.go()
                done = probe.cycles(rig.effort.cycles(60), engine=engine_of(mode), gap_us=(2000, 6000), limit_s=8)
        part = judge_cycles(done, path, name=f"{mode} ")
        good = good and (part.verdict is LabVerdict.OK or (mode == "long" and done["frozen"] == done["n"]))
        shown.update(part.figures)
        seen = part.figures.get(f"{mode}_last_seen_us")
        words.append(f"{mode} {done['frozen']}/{done['n']} {seen.words() if seen else '-'}")
    return LabOutcome(
        verdict=LabVerdict.OK if good and mode_word == "CILP" else LabVerdict.PART,
        detail=f"preemption mode {mode_word}; last seen after the call [us]: {'; '.join(words)}",
        figures=shown,
        answers={"preemption_mode": mode_word},
    )


def duty(rig: Rig, *more: str) -> Figure:
    """What an online stand-in sees: latencies of 1 ms kernels at half load."""
    with rig.workload("duty", rig.effort.ms(3000), *more) as work:
        result = rig.finish(work)
    return Figure(samples=tuple(result["latency_us"]))


def beside(rig: Rig, *, paused: bool) -> Figure:
    """The duty beside full-occupancy work, running or paused."""
    with rig.workload("alu", rig.effort.ms(20000), held=True) as work:
        if not paused:
            work.go()
            found = duty(rig)
        else:
            with rig.probe(work, path=rig.reach()) as probe:
                work.go()
                probe.do("off gr 60000")
                found = duty(rig)
                probe.do("on gr")
    return found


@experiment(
    "D8", seconds=60, decides="whether gating compute channels is enough, or something else of the neighbour still runs"
)
def d8(rig: Rig) -> LabOutcome:
    """What does an online service see beside a running and a paused neighbour?"""
    rig.reach()
    found = {"alone": duty(rig), "beside_running": beside(rig, paused=False), "beside_paused": beside(rig, paused=True)}
    ratio = found["beside_paused"].at(0.5) / found["alone"].at(0.5)
    return LabOutcome(
        verdict=LabVerdict.OK if ratio <= 1.02 else LabVerdict.PART,
        detail="1 ms kernels [us]: " + "; ".join(f"{name} {figure.words()}" for name, figure in found.items()),
        figures={f"{name}_us": figure for name, figure in found.items()},
        answers={"paused_over_alone": round(ratio, 4)},
    )


@experiment("D11", seconds=25, decides="whether valved's client must live on elsewhere during an upgrade")
def d11(rig: Rig) -> LabOutcome:
    """Does a pause outlive the process that asked for it?"""
    path = rig.reach()
    with rig.workload("alu", rig.effort.ms(30000), held=True) as work:
        with rig.probe(work, path=path) as probe:
            work.go()
            answer = probe.do("off gr 20000")
            probe.kill()
        with rig.probe(work, path=path) as probe:
            stays = probe.do(f"watch {rig.effort.ms(3000)}", patience_s=5)["changes"] == 0
            enabled = probe.do("on gr")
        moves = work.moves()
    words = "stays off" if stays else "runs again by itself"
    return LabOutcome(
        verdict=LabVerdict.OK if moves else LabVerdict.BAD,
        detail=f"disabled (status {answer['status']:#x}), the disabler killed: {words}; a new client enables with "
        f"status {enabled['status']:#x}, {'and it runs' if moves else 'AND IT STANDS'}",
        answers={"stays_off": stays, "new_client_status": enabled["status"]},
    )


def storm(work: Workload, over: threading.Event) -> None:
    """Maps and unmaps all the time: every call of it takes the driver's locks for writing."""
    while not over.is_set():
        work.helper().ask_json("cost 2 32", patience_s=60)


@experiment("D14", seconds=80, decides="whether reclaim must be scheduled around a pending preemption")
def d14(rig: Rig) -> LabOutcome:
    """How much slower is a disable beside a process that maps memory?"""
    path, over = rig.reach(), threading.Event()
    with (
        rig.workload("alu", rig.effort.ms(40000), held=True) as work,
        rig.workload("idle", 120_000, helper=True) as mapper,
        rig.probe(work, path=path) as probe,
    ):
        work.go()
        quiet = probe.cycles(rig.effort.cycles(300), gap_us=(1000, 3000))
        thread = threading.Thread(target=storm, args=(mapper, over))
        thread.start()
        try:
            busy = probe.cycles(rig.effort.cycles(1500), gap_us=(1000, 3000), limit_s=20)
        finally:
            over.set()
            thread.join()
    shown = {**figures(quiet, *CYCLE, prefix="quiet_"), **figures(busy, *CYCLE, prefix="mapping_")}
    return LabOutcome(
        verdict=LabVerdict.OK if busy["frozen"] == busy["n"] else LabVerdict.PART,
        detail=f"disable call [us]: quiet {shown['quiet_off_us'].words()}; beside a process that maps all the time "
        f"{shown['mapping_off_us'].words()}",
        figures=shown,
        answers={"quiet_p99_us": shown["quiet_off_us"].at(0.99), "mapping_p99_us": shown["mapping_off_us"].at(0.99)},
    )


def settled_launches(work: Workload, still_s: float) -> int:
    """The launch counter once it has stood for a while."""
    last, since = work.beat.launches, time.monotonic()
    while time.monotonic() - since < still_s:
        time.sleep(0.005)
        if work.beat.launches != last:
            last, since = work.beat.launches, time.monotonic()
    return last


@experiment("C13", seconds=50, decides="how long an offline engine's threads stay responsive while gated")
def c13(rig: Rig) -> LabOutcome:
    """After how many launches does a paused channel block the CPU?"""
    with rig.workload("flood", 8000) as work:
        with rig.probe(work, path=rig.reach()) as probe:
            probe.do("off gr 20000")
            before = work.beat.launches
            stood = settled_launches(work, 0.5)
            probe.do("on gr")
        goes_on = work.moves()
    return LabOutcome(
        verdict=LabVerdict.OK if goes_on else LabVerdict.BAD,
        detail=f"launches blocked the CPU after {stood} in all, {stood - before} of them made while off",
        answers={"queued": stood, "made_while_off": stood - before},
    )


BATCH = ExperimentBatch(
    name="pause",
    about="what a pause does to the work that is paused and to its neighbours",
    experiments=(d5, d6, d8, d11, d14, c13),
)
