"""Moving memory under a workload: what the calls cost, which ioctls they make, and which work while it is paused."""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass, field
from typing import Any

from valve_tools.gpu.experiment import Batch, Experiment
from valve_tools.gpu.machine import branch_of
from valve_tools.gpu.outcome import Figure, Outcome, Verdict, figures
from valve_tools.gpu.probe import Probe
from valve_tools.gpu.rig import Rig, Workload
from valve_tools.gpu.steps.pause import engine_of
from valve_tools.gpu.talk import Talk, TooLate

REMAP = ("unmap", "map", "access")
SLOTS = 8
WATCHDOG_S = 2.0
LATE_S = 10.0
COST = ("create_us", "map_us", "access_us", "unmap_us", "release_us")
MAP_EXTERNAL = 33


def c8(rig: Rig) -> Outcome:
    shown, words, answers = {}, [], {}
    with rig.workload("idle", 120_000, helper=True) as work:
        for mib in (2, 16, 64, 128):
            total = max(rig.effort.mib(1024), mib)
            cost = work.helper().ask_json(f"cost {mib} {total}", patience_s=90)
            if cost["error"]:
                return Outcome(verdict=Verdict.BAD, detail=f"{mib} MiB handles: CUDA error {cost['error']}")
            part = figures(cost, *COST, prefix=f"{mib}mib_")
            shown.update(part)
            each = sum(part[f"{mib}mib_{call}_us"].at(0.5) for call in REMAP)
            gib = {"each_ms": each * 1024 / mib / 1e3, "batch_ms": cost["batch_us"] * 1024 / total / 1e3}
            answers[f"{mib}mib_remap_ms_per_gib"] = {name: round(value, 2) for name, value in gib.items()}
            words.append(
                f"{mib} MiB: remap {each:.0f} us, {gib['each_ms']:.1f} ms per GiB ({gib['batch_ms']:.1f} in one go)"
            )
        rig.stop(work)
    return Outcome(verdict=Verdict.OK, detail="; ".join(words), figures=shown, answers=answers)


def lines_since(work: Workload, seen: int) -> list[dict[str, Any]]:
    """What the tracer wrote after line `seen`."""
    return [json.loads(line) for line in work.trace.read_text().splitlines()[seen:]]


def call_name(line: dict[str, Any]) -> str:
    """A driver call in short: uvm 33, alloc 0x40, control 0x3d05."""
    if line["call"] == "uvm":
        return f"uvm {line['request']}"
    if line.get("op") == "alloc":
        return f"alloc {line['class']:#x}"
    if line.get("op") == "control":
        return f"control {line['cmd']:#x}"
    return str(line.get("op") or f"{line['call']} {line.get('nr', '')}".strip())


def c2(rig: Rig) -> Outcome:
    found: dict[str, list[str]] = {}
    with rig.workload("idle", 60_000, helper=True, trace=True) as work:
        for call in ("reserve", "create", *REMAP, "release", "alloc", "free"):
            seen = len(work.trace.read_text().splitlines())
            answer = work.helper().ask_json(f"vmm {call} 0 0")
            if answer["error"]:
                return Outcome(verdict=Verdict.BAD, detail=f"{call}: CUDA error {answer['error']}")
            found[call] = [call_name(line) for line in lines_since(work, seen)]
        rig.stop(work)
    return Outcome(
        verdict=Verdict.OK,
        detail="; ".join(f"{call}: {', '.join(calls) or 'none'}" for call, calls in found.items()),
        answers=found,
    )


class Hang(Exception):
    """A call did not return while the channels were off."""

    def __init__(self, call: str, after_ms: float) -> None:
        super().__init__(
            f"{call} hung, and returned {after_ms:.1f} ms after the channels were on" if after_ms >= 0 else call
        )
        self.call = call
        self.after_ms = after_ms


@dataclass
class Gated:
    """The timings of one kind of calls, gated and not."""

    us: dict[str, list[float]] = field(default_factory=dict)
    parts: int = 0
    frozen: int = 0
    wrong: int = 0


def one_call(work: Workload, probe: Probe, engine: str, call: str, text: str, found: Gated, *, gated: bool) -> None:
    """One call in the helper. When it is late the channels go on first, and only then is the answer waited for."""
    helper = work.helper()
    try:
        answer = helper.ask_json(text, patience_s=WATCHDOG_S if gated else 30)
    except TooLate:
        probe.do(f"on {engine}")
        start = time.monotonic()
        try:
            helper.hear(LATE_S)
        except TooLate:
            raise Hang(call, -1.0) from None
        raise Hang(call, (time.monotonic() - start) * 1e3) from None
    if answer["error"]:
        raise OSError(f"{text}: CUDA error {answer['error']}")
    found.us.setdefault(f"{'gated' if gated else 'free'}_{call}_us", []).append(answer["us"])


def sequence(
    work: Workload, probe: Probe, engine: str, kind: str, slots: range, found: Gated, *, quarantine: bool, gated: bool
) -> None:
    if kind == "alloc":
        for call in ("alloc", "free"):
            one_call(work, probe, engine, call, f"vmm {call} 0 0", found, gated=gated)
        return
    for slot in slots:  # ends only between slots, where there is no hole
        for call in REMAP:
            one_call(work, probe, engine, call, f"vmm {call} {slot} {int(quarantine)}", found, gated=gated)


def gated_part(
    work: Workload, probe: Probe, engine: str, kind: str, slots: range, found: Gated, *, quarantine: bool
) -> None:
    probe.do(f"off {engine} 8000")
    time.sleep(0.002)
    mark = work.beat.mark
    sequence(work, probe, engine, kind, slots, found, quarantine=quarantine, gated=True)
    found.parts += 1
    found.frozen += work.beat.mark == mark
    probe.do(f"on {engine}")
    if not work.moves() and not work.beat.is_done:
        raise OSError("the workload did not go on after the calls")


def gated_calls(rig: Rig, mode: str, kind: str, n: int, found: Gated) -> None:
    """Calls by a helper thread inside a paused workload. touch: its kernels read the very range that is remapped."""
    engine, touch = engine_of(mode), kind == "touch"
    with rig.workload(mode, 60_000, helper=True) as work, rig.probe(work, path=rig.reach()) as probe:
        for i in range(n):
            slots = range(SLOTS) if touch else range(i % SLOTS, i % SLOTS + 1)
            gated_part(work, probe, engine, kind, slots, found, quarantine=True)
            if touch:  # the way back while paused, too: a hole under a running kernel would be a fault
                gated_part(work, probe, engine, kind, slots, found, quarantine=False)
            elif kind == "remap":
                sequence(work, probe, engine, kind, slots, found, quarantine=False, gated=False)
                found.wrong += not work.helper().ask_json(f"read {slots.start}")["own"]
            else:
                sequence(work, probe, engine, kind, slots, found, quarantine=False, gated=False)
        rig.stop(work)


def c4(rig: Rig) -> Outcome:
    shown: dict[str, Figure] = {}
    words, hang = [], ""
    worst = Verdict.OK
    # The likely hang (free waits for the device) comes last, so that it does not cost the figures of the others.
    for mode, kind in (("alu", "remap"), ("copy", "remap"), ("touch", "touch"), ("flood", "remap"), ("alu", "alloc")):
        found = Gated()
        try:
            gated_calls(rig, mode, kind, rig.effort.cycles(25), found)
        except Hang as error:
            hang = f"{mode} {kind}: {error}"
        part = {name: Figure(samples=tuple(values)) for name, values in found.us.items()}
        shown.update({f"{mode}_{kind}_{name}": figure for name, figure in part.items()})
        slow = any(figure.at(0.99) > 10_000 for name, figure in part.items() if name.startswith("gated"))
        if hang:
            worst = Verdict.PART if kind == "alloc" else Verdict.HANG  # nobody needs to allocate while paused
        elif found.wrong or found.frozen < found.parts:
            worst = Verdict.PART
        elif slow and worst is Verdict.OK:
            worst = Verdict.SLOW
        times = "; ".join(f"{name[6:-3]} {figure.words()}" for name, figure in part.items() if name.startswith("gated"))
        words.append(f"{mode} {kind} {found.frozen}/{found.parts} frozen, {found.wrong} wrong: {times}")
        if hang:
            words.append(hang)
            break
    return Outcome(
        verdict=worst,
        detail=" | ".join(words),
        figures=shown,
        answers={"hang": hang, "remap_works_while_off": worst not in {Verdict.HANG, Verdict.BAD}},
    )


def sparse_once(work: Workload, probe: Probe | None) -> tuple[int, int, float]:
    """(errno, status, us) of a sparse mapping of slot 0: by the owner, or on its passed uvm descriptor."""
    if probe is None:
        answer = work.helper().ask_json("sparse 0")
    else:
        where = work.helper().ask_json("where 0")
        answer = probe.do(f"sparse {where['base']} {where['bytes']} {where['uuid']}")
    return answer["errno"], answer["status"], answer["us"]


def c6(rig: Rig) -> Outcome:
    answers: dict[str, Any] = {}
    shown: dict[str, list[float]] = {}
    engine_path = rig.reach()
    with rig.workload("alu", rig.effort.ms(60000), helper=True) as work, rig.probe(work, path=engine_path) as probe:
        for who in ("owner", "passed", "passed_while_off"):
            zero = own = 0
            for _ in range(rig.effort.cycles(20)):
                if who == "passed_while_off":
                    probe.do("off gr 8000")
                errno, status, us = sparse_once(work, None if who == "owner" else probe)
                if who == "passed_while_off":
                    probe.do("on gr")
                answers[f"{who}_errno"], answers[f"{who}_status"] = errno, status
                if errno or status:
                    break
                shown.setdefault(f"{who}_us", []).append(us)
                zero += work.helper().ask_json("read 0")["zero"]
                for call in REMAP:
                    work.helper().ask_json(f"vmm {call} 0 0")
                own += work.helper().ask_json("read 0")["own"]
            answers[who] = bool(zero) and zero == own == len(shown.get(f"{who}_us", []))
        rig.stop(work)
    good = [who for who in ("owner", "passed", "passed_while_off") if answers[who]]
    refused = any(answers[f"{who}_errno"] or answers[f"{who}_status"] for who in ("owner", "passed"))
    verdict = Verdict.OK if len(good) == 3 else Verdict.REFUSED if not good and refused else Verdict.PART
    drawn = {name: Figure(samples=tuple(values)) for name, values in shown.items()}
    return Outcome(
        verdict=verdict,
        detail=f"zeros read, no fault, put back: {', '.join(good) or 'never'}; "
        + "; ".join(f"{name} {figure.words()}" for name, figure in drawn.items()),
        figures=drawn,
        answers=answers,
    )


def c9(rig: Rig) -> Outcome:
    with rig.workload("idle", 60_000, helper=True, trace=True) as work:
        seen = len(work.trace.read_text().splitlines())
        for call in REMAP:
            work.helper().ask_json(f"vmm {call} 0 0")
        maps = [line for line in lines_since(work, seen) if line.get("request") == MAP_EXTERNAL]
        if not maps:
            return Outcome(
                verdict=Verdict.BLIND, detail="set access made no UVM_MAP_EXTERNAL_ALLOCATION that could be seen"
            )
        branch = branch_of(rig.machine.driver) or 580
        answer = work.helper().ask_json(f"offset 0 {maps[-1]['tail']} {branch}")
        for call in REMAP:
            work.helper().ask_json(f"vmm {call} 0 0")
        back = work.helper().ask_json("read 0")["own"]
        rig.stop(work)
    moved = answer["moved"] and back
    refused = answer["errno"] or answer["status"]
    return Outcome(
        verdict=Verdict.OK if moved else Verdict.REFUSED if refused else Verdict.PART,
        detail=f"second half of a handle over the first, in place: errno {answer['errno']}, status "
        f"{answer['status']:#x}, {answer['us']:.0f} us, bytes {'moved' if answer['moved'] else 'did not move'}, "
        f"put back {back}",
        answers={**answer, "put_back": back},
    )


def c7(rig: Rig) -> Outcome:
    with rig.workload("idle", 60_000, helper=True) as work:
        a = work.helper().ask_json("range")
        rig.stop(work)
    return Outcome(
        verdict=Verdict.OK if not a["range"] and not a["type"] else Verdict.PART,
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


def d12(rig: Rig) -> Outcome:
    start = used(rig)
    with rig.workload("alu", rig.effort.ms(20000), helper=True, may_fail=True) as work:
        running = used(rig)
        with Talk(work.tracer) as tracer:
            _, fd = tracer.ask("fd")
        rig.kill(work)
        killed = used_below(rig, (start + running) / 2, rig.effort.seconds(60))
        os.close(fd)
        closed = used_below(rig, (start + running) / 2)
    held = killed > (start + running) / 2
    return Outcome(
        verdict=Verdict.OK if closed < (start + running) / 2 else Verdict.BAD,
        detail=f"MiB in use: before {start:.0f}, running {running:.0f}, killed while we hold its descriptor "
        f"{killed:.0f}, descriptor closed {closed:.0f}",
        answers={"memory_held_by_passed_fd": held},
    )


def d13(rig: Rig) -> Outcome:
    mib, before = rig.effort.mib(2048), used(rig)
    with rig.workload("idle", 60_000, helper=True) as exporter:
        text, fd = exporter.helper().ask(f"export {mib}", patience_s=60)
        rig.stop(exporter)
    if fd < 0:
        return Outcome(verdict=Verdict.BAD, detail=f"export failed: {text}")
    held = used_below(rig, before + mib / 2, rig.effort.seconds(60))
    with rig.workload("idle", 60_000, helper=True) as importer:
        checked = importer.helper().ask_json(f"import {mib}", patience_s=60, fd=fd)
        rig.stop(importer)
    os.close(fd)
    closed = used_below(rig, before + mib / 2)
    kept = held >= before + mib / 2
    intact = not checked["error"] and not checked["wrong"]
    return Outcome(
        verdict=Verdict.OK if kept and intact and closed < before + mib / 2 else Verdict.PART,
        detail=f"{mib} MiB, exporter gone: {'held' if kept else 'LOST'} ({held:.0f} MiB in use); imported elsewhere: "
        f"error {checked['error']}, {checked['wrong']} wrong words; descriptor closed: {closed:.0f} MiB in use",
        answers={"held": kept, "intact": intact},
    )


def _batch() -> Batch:
    def one(name: str, seconds: int, run: Any, question: str, decides: str) -> Experiment:
        return Experiment(name=name, seconds=seconds, run=run, question=question, decides=decides)

    return Batch(
        name="memory",
        about="moving memory under a workload",
        experiments=(
            one(
                "C8",
                60,
                c8,
                "What do the virtual memory calls cost, by handle size?",
                "the pool's handle size, and how much headroom a reclaim within its time needs",
            ),
            one(
                "C2",
                15,
                c2,
                "Which driver calls does each of them make?",
                "what runs under which lock, and what the daemon could do by itself",
            ),
            one(
                "C4",
                150,
                c4,
                "Do they work from a helper thread while the channels are off?",
                "remap rung (ii): a helper thread in the shim, or not",
            ),
            one(
                "C6",
                40,
                c6,
                "Does a sparse mapping quarantine a range, also on a passed descriptor?",
                "remap rung (i): one call from outside the process, without libcuda",
            ),
            one(
                "C9",
                15,
                c9,
                "Can part of a handle be mapped in place, with an offset?",
                "whether one large handle can feed a whole column",
            ),
            one(
                "C7", 10, c7, "What do frameworks learn about such memory?", "which queries the shim must answer itself"
            ),
            one(
                "D12",
                40,
                d12,
                "Does a passed descriptor keep a killed process's memory?",
                "how fast valved must close it (path B)",
            ),
            one(
                "D13",
                60,
                d13,
                "Does an exported descriptor alone keep memory alive?",
                "whether the pool's keeper needs a CUDA context",
            ),
        ),
    )


BATCH = _batch()
