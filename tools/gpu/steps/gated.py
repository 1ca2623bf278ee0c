"""Which calls that move memory work while a workload is paused: by a helper thread inside it, and from outside."""

from __future__ import annotations

import time
from typing import Any

from valve_tools.gpu.experiment import experiment
from valve_tools.gpu.outcome import Figure, LabOutcome, LabVerdict
from valve_tools.gpu.probe import Probe
from valve_tools.gpu.rig import Rig, Workload
from valve_tools.gpu.steps.pause import engine_of
from valve_tools.gpu.talk import TooLate

REMAP = ("unmap", "map", "access")
SLOTS = 8
WATCHDOG_S = 2.0
LATE_S = 10.0
SPARSE_BY = ("owner", "passed", "passed_while_off")


class Hang(Exception):
    """A call did not return while the channels were off."""

    def __init__(self, call: str, after_ms: float | None) -> None:
        late = "did not return" if after_ms is None else f"returned {after_ms:.1f} ms after the channels were on"
        super().__init__(f"{call} hung, and {late}")


class GatedCalls:
    """Calls made by the helper thread of one paused workload, and what they took."""

    def __init__(self, work: Workload, probe: Probe, engine: str, kind: str) -> None:
        self.work = work
        self.probe = probe
        self.engine = engine
        self.kind = kind  # remap: one slot; touch: all of them, which its kernels read; alloc: allocate and free
        self.us: dict[str, list[float]] = {}
        self.parts = self.frozen = self.wrong = 0

    def round(self, i: int) -> None:
        """Quarantine while paused, then the way back; the kernels of touch must not meet a hole on it either."""
        slots = range(SLOTS) if self.kind == "touch" else range(i % SLOTS, i % SLOTS + 1)
        self._paused(slots, quarantine=True)
        if self.kind == "touch":
            self._paused(slots, quarantine=False)
            return
        self._sequence(slots, quarantine=False, paused=False)
        if self.kind == "remap":
            self.wrong += not self.work.helper().ask_json(f"read {slots.start}")["own"]

    def _paused(self, slots: range, *, quarantine: bool) -> None:
        self.probe.do(f"off {self.engine} 8000")
        time.sleep(0.002)
        mark = self.work.beat.mark
        self._sequence(slots, quarantine=quarantine, paused=True)
        self.parts += 1
        self.frozen += self.work.beat.mark == mark
        self.probe.do(f"on {self.engine}")
        if not self.work.moves() and not self.work.beat.is_done:
            raise OSError("the workload did not go on after the calls")

    def _sequence(self, slots: range, *, quarantine: bool, paused: bool) -> None:
        if self.kind == "alloc":
            for call in ("alloc", "free"):
                self._one(call, f"vmm {call} 0 0", paused=paused)
            return
        for slot in slots:  # ends only between slots, where there is no hole
            for call in REMAP:
                self._one(call, f"vmm {call} {slot} {int(quarantine)}", paused=paused)

    def _one(self, call: str, text: str, *, paused: bool) -> None:
        try:
            answer = self.work.helper().ask_json(text, patience_s=WATCHDOG_S if paused else 30)
        except TooLate:
            raise self._hang(call) from None
        if answer["error"]:
            raise OSError(f"{text}: CUDA error {answer['error']}")
        self.us.setdefault(f"{'paused' if paused else 'free'}_{call}_us", []).append(answer["us"])

    def _hang(self, call: str) -> Hang:
        """The channels go on first, and only then is the late answer waited for."""
        self.probe.do(f"on {self.engine}")
        start = time.monotonic()
        try:
            self.work.helper().hear(LATE_S)
        except TooLate:
            return Hang(call, None)
        return Hang(call, (time.monotonic() - start) * 1e3)

    def figures(self) -> dict[str, Figure]:
        return {name: Figure(samples=tuple(values)) for name, values in self.us.items()}

    def verdict(self, hang: Hang | None) -> LabVerdict:
        if hang:
            return LabVerdict.PART if self.kind == "alloc" else LabVerdict.HANG  # an allocation may wait for the pause
        if self.wrong or self.frozen < self.parts:
            return LabVerdict.PART
        slow = any(figure.at(0.99) > 10_000 for name, figure in self.figures().items() if name.startswith("paused"))
        return LabVerdict.SLOW if slow else LabVerdict.OK

    def words(self, mode: str, hang: Hang | None) -> str:
        times = [f"{name[7:-3]} {f.words()}" for name, f in self.figures().items() if name.startswith("paused")]
        end = f"; {hang}" if hang else ""
        return f"{mode} {self.kind} {self.frozen}/{self.parts} frozen, {self.wrong} wrong: {'; '.join(times)}{end}"


@experiment("C4", seconds=150, decides="remap rung (ii): a helper thread in the shim, or not")
def c4(rig: Rig) -> LabOutcome:
    """Do they work from a helper thread while the channels are off?"""
    shown: dict[str, Figure] = {}
    words, verdicts, hang = [], [], None
    # The likely hang (free waits for the device) comes last, so that it does not cost the figures of the others.
    for mode, kind in (("alu", "remap"), ("copy", "remap"), ("touch", "touch"), ("flood", "remap"), ("alu", "alloc")):
        path = rig.reach()
        with rig.workload(mode, 60_000, helper=True) as work, rig.probe(work, path=path) as probe:
            calls = GatedCalls(work, probe, engine_of(mode), kind)
            try:
                for i in range(rig.effort.cycles(25)):
                    calls.round(i)
            except Hang as error:
                hang = error
        shown.update({f"{mode}_{kind}_{name}": figure for name, figure in calls.figures().items()})
        words.append(calls.words(mode, hang))
        verdicts.append(calls.verdict(hang))
        if hang:
            break
    order = (LabVerdict.HANG, LabVerdict.PART, LabVerdict.SLOW, LabVerdict.OK)
    worst = next(verdict for verdict in order if verdict in verdicts)
    return LabOutcome(
        verdict=worst,
        detail=" | ".join(words),
        figures=shown,
        answers={"hang": str(hang or ""), "remap_works_while_off": LabVerdict.HANG not in verdicts},
    )


def sparse_once(work: Workload, probe: Probe | None) -> tuple[int, int, float]:
    """(errno, status, us) of a sparse mapping of slot 0: by the owner, or on its passed uvm descriptor."""
    if probe is None:
        answer = work.helper().ask_json("sparse 0")
    else:
        where = work.helper().ask_json("where 0")
        answer = probe.do(f"sparse {where['base']} {where['bytes']} {where['uuid']}")
    return answer["errno"], answer["status"], answer["us"]


def sparse_rounds(work: Workload, probe: Probe, who: str, n: int) -> dict[str, Any]:
    """Sparse, read zeros by a kernel, put back by the public calls, read the own bytes; until one is refused."""
    found: dict[str, Any] = {"errno": 0, "status": 0, "us": [], "zero": 0, "own": 0}
    paused = who == "passed_while_off"
    for _ in range(n):
        if paused:
            probe.do("off gr 8000")
        found["errno"], found["status"], us = sparse_once(work, None if who == "owner" else probe)
        if paused:
            probe.do("on gr")
        if found["errno"] or found["status"]:
            break
        found["us"].append(us)
        found["zero"] += work.helper().ask_json("read 0")["zero"]
        for call in REMAP:
            work.helper().ask_json(f"vmm {call} 0 0")
        found["own"] += work.helper().ask_json("read 0")["own"]
    found["works"] = bool(found["us"]) and found["zero"] == found["own"] == len(found["us"])
    return found


@experiment("C6", seconds=40, decides="remap rung (i): one call from outside the process, without libcuda")
def c6(rig: Rig) -> LabOutcome:
    """Does a sparse mapping quarantine a range, also on a passed descriptor?"""
    path, n = rig.reach(), rig.effort.cycles(20)
    with rig.workload("alu", rig.effort.ms(60000), helper=True) as work, rig.probe(work, path=path) as probe:
        found = {who: sparse_rounds(work, probe, who, n) for who in SPARSE_BY}
    good = [who for who, each in found.items() if each["works"]]
    refused = [
        f"{who} errno {e['errno']} status {e['status']:#x}" for who, e in found.items() if e["errno"] or e["status"]
    ]
    shown = {f"{who}_us": Figure(samples=tuple(each["us"])) for who, each in found.items() if each["us"]}
    times = [f"{name} {figure.words()}" for name, figure in shown.items()]
    return LabOutcome(
        verdict=LabVerdict.OK if len(good) == len(found) else LabVerdict.PART if good else LabVerdict.REFUSED,
        detail=f"zeros read, no fault, put back: {', '.join(good) or 'never'}; {'; '.join([*refused, *times])}",
        figures=shown,
        answers={who: each["works"] for who, each in found.items()},
    )
