"""The edges of the disable call, and of memory: wrong lists, minutes of pause, new objects while paused, a hole."""

from __future__ import annotations

import time
from typing import Any

from valve_tools.gpu.errors import StopRule
from valve_tools.gpu.experiment import ExperimentBatch, experiment
from valve_tools.gpu.outcome import Figure, LabOutcome, LabVerdict
from valve_tools.gpu.probe import Probe
from valve_tools.gpu.rig import Rig, Workload
from valve_tools.gpu.talk import TooLate

BOGUS = 0xDEAD0001
GID_INFO = 0x2080014A  # asked by a bystander: harmless, but it takes the driver's locks
NEW = ("stream", "priority", "module", "graph", "context")


def text_of(pairs: list[tuple[int, int]]) -> str:
    return ",".join(f"{client}:{channel}" for client, channel in pairs) or "-"


def edge(
    probe: Probe,
    work: Workload,
    full: list[tuple[int, int]],
    off: list[list[tuple[int, int]]],
    on: list[list[tuple[int, int]]],
    flags: int = 0,
) -> dict[str, Any]:
    """Disable with these lists, look; enable with those, look; then the full list, whatever happened."""
    answer: dict[str, Any] = {}
    for pairs in off:
        answer["off"] = probe.do(f"raw off {flags} {text_of(pairs)} 5000")["status"]
    time.sleep(0.002)
    answer["runs_while_off"] = probe.do("watch 30")["changes"] > 0
    for pairs in on:
        answer["on"] = probe.do(f"raw on 0 {text_of(pairs)}")["status"]
    answer["runs_after"] = probe.do("watch 50")["changes"] > 0
    answer["last"] = probe.do(f"raw on 0 {text_of(full)}")["status"]
    if not work.moves() and not work.beat.is_done:
        raise StopRule("the workload stands although the full list was enabled")
    return answer


@experiment("D7", seconds=40, decides="how valved builds lists, and what a partial failure leaves")
def d7(rig: Rig) -> LabOutcome:
    """What does the call do at its edges?"""
    path = rig.reach()
    if path == "c":
        return LabOutcome(verdict=LabVerdict.SKIPPED, detail="raw lists need path a or b")
    with rig.workload("alu", rig.effort.ms(30000)) as work, rig.probe(work, path=path) as probe:
        channels = [c for c in probe.do("list")["channels"] if 1 <= c["engine"] <= 8]
        full = [(c["client"], c["channel"]) for c in channels]
        middle = [*full[: len(full) // 2], (full[0][0], BOGUS), *full[len(full) // 2 + 1 :]]
        first = [(full[0][0], BOGUS), *full[1:]]
        cases = {
            "plain": edge(probe, work, full, [full], [full]),
            "twice off, once on": edge(probe, work, full, [full, full], [full]),
            "twice on": edge(probe, work, full, [full], [full, full]),
            "no channels": edge(probe, work, full, [[]], [full]),
            "one of the group": edge(probe, work, full, [full[:1]], [full]),
            "wrong pair in the middle": edge(probe, work, full, [middle], [full]),
            "wrong pair first": edge(probe, work, full, [first], [full]),
            "only disable scheduling": edge(probe, work, full, [full], [full], flags=1),
            "enable with a wrong pair": edge(probe, work, full, [full], [middle]),
        }
    words = [
        f"{name}: {case['off']:#x} {'runs' if case['runs_while_off'] else 'off'}, on {case['on']:#x} "
        f"{'runs' if case['runs_after'] else 'off'}"
        for name, case in cases.items()
    ]
    plain = cases["plain"]
    good = not plain["runs_while_off"] and plain["runs_after"] and not cases["twice off, once on"]["runs_while_off"]
    return LabOutcome(verdict=LabVerdict.OK if good else LabVerdict.PART, detail="; ".join(words), answers=cases)


def make_while_off(rig: Rig, what: str, path: str) -> dict[str, Any]:
    """One new object made by a paused process: does the call return, and does anything run again?"""
    with rig.workload("alu", rig.effort.ms(30000), helper=True, may_fail=True) as work:
        with rig.probe(work, path=path) as probe:
            schedules = probe.do("list")["app_schedules"]
            probe.do("off gr 15000")
            helper, hung = work.helper(), False
            try:
                error = helper.ask_json(f"make {what}", patience_s=2.0)["error"]
            except TooLate:
                hung, error = True, None
            runs = probe.do("watch 50")["changes"] > 0
            scheduled = probe.do("list")["app_schedules"] - schedules
            probe.do("on gr")
            if hung:
                helper.hear(20)
        moves = work.moves()
    return {"error": error, "hung": hung, "runs_again": runs, "schedules": scheduled, "moves_after": moves}


@experiment("D9", seconds=80, decides="which calls the shim must hold while gated")
def d9(rig: Rig) -> LabOutcome:
    """Does a paused process wake itself by making new objects?"""
    path = rig.reach()
    found = {what: make_while_off(rig, what, path) for what in NEW}
    words = [
        f"{what}: {'hangs until enabled' if a['hung'] else 'returns'}, {a['schedules']} schedule calls"
        f"{', AND RUNS AGAIN' if a['runs_again'] else ''}"
        for what, a in found.items()
    ]
    again = [what for what, a in found.items() if a["runs_again"]]
    return LabOutcome(
        verdict=LabVerdict.PART if again else LabVerdict.OK,
        detail="; ".join(words),
        answers={**found, "re_enabled_by": again},
    )


@experiment("D10", seconds=150, decides="whether a pause must be capped")
def d10(rig: Rig) -> LabOutcome:
    """Is a pause of two minutes clean?"""
    path, span_s = rig.reach(), rig.effort.seconds(120)
    with rig.workload("alu", rig.effort.ms(4000)) as work:
        undisturbed = rig.finish(work)
    with rig.workload("alu", rig.effort.ms(4000), held=True) as work:
        with rig.probe(work, path=path) as probe:
            work.go()
            probe.do(f"off gr {int(span_s * 1000) + 20000}")
            mark = work.beat.mark
            time.sleep(span_s)
            frozen = work.beat.mark == mark
            probe.do("on gr")
        moves = work.moves()
        result = rig.finish(work)
    same = result["checksum"] == undisturbed["checksum"]
    return LabOutcome(
        verdict=LabVerdict.OK if frozen and moves and same else LabVerdict.DIFFERS if not same else LabVerdict.PART,
        detail=f"off for {span_s:g} s: {'stood still' if frozen else 'MOVED'}, then "
        f"{'went on' if moves else 'STANDS'}, checksum {'equal' if same else 'DIFFERS'}, no Xid",
        answers={"seconds": span_s, "frozen": frozen, "same": same},
    )


@experiment("C3", seconds=40, decides="what a mistake in the remap would cost, and whom")
def c3(rig: Rig) -> LabOutcome:
    """What does a read of unmapped memory end?"""
    with (
        rig.workload("alu", rig.effort.ms(20000)) as other,
        rig.workload("idle", 20_000, helper=True, may_fail=True) as offender,
    ):
        error = offender.helper().ask_json("hole", patience_s=20)["error"]
        alive = other.moves()
        rig.stop(offender)
        rig.stop(other)
        xids = rig.allow_xids()
    survived = other.result().get("error") == 0
    return LabOutcome(
        verdict=LabVerdict.OK if error and alive and survived else LabVerdict.PART,
        detail=f"a kernel that reads a hole: error {error} in its own context, {xids} Xid; the neighbour "
        f"{'is unharmed' if alive and survived else 'WAS HIT'}",
        answers={"error": error, "xids": xids, "neighbour_unharmed": alive and survived},
    )


@experiment("D15", seconds=90, decides="whether enable-before-kill is mandatory everywhere", opt_in=True)
def d15(rig: Rig) -> LabOutcome:
    """How long does the driver stall when a paused process is killed?

    The one experiment that kills a process whose channels are off: it must be named to run.
    """
    calls: list[float] = []
    gone_s: float | None = None
    path = rig.reach()
    with (
        rig.workload("flood", rig.effort.ms(20000), may_fail=True) as work,
        rig.probe() as bystander,
        rig.probe(work, path=path) as probe,
    ):
        probe.do("off gr 3000")  # the guard enables after three seconds, whatever we do
        work.process.kill()
        start = time.monotonic()
        while gone_s is None or time.monotonic() - start < rig.effort.seconds(20):
            begin = time.monotonic()
            bystander.control("own", "sub", GID_INFO, bytes([0, 0, 0, 0, 2, 0, 0, 0]) + bytes(260))
            calls.append((time.monotonic() - begin) * 1e6)
            if gone_s is None and work.process.poll() is not None:
                gone_s = time.monotonic() - start
            if time.monotonic() - start > 60:
                raise StopRule("the killed workload is not gone after 60 s")
            time.sleep(0.05)
    slow = max(calls)
    return LabOutcome(
        verdict=LabVerdict.OK if slow < 10_000 else LabVerdict.SLOW,
        detail=f"killed while off with queued work: gone within {gone_s:.1f} s; a harmless call elsewhere took up to "
        f"{slow / 1e3:.1f} ms meanwhile",
        figures={"bystander_us": Figure(samples=tuple(calls))},
        answers={"gone_s": round(gone_s, 2), "worst_call_ms": round(slow / 1e3, 2)},
    )


BATCH = ExperimentBatch(
    name="edges", about="wrong lists, long pauses, new objects while paused, a hole", experiments=(d7, d9, d10, c3)
)
LAST = ExperimentBatch(
    name="last", about="the dangerous one: killing a process whose channels are off", experiments=(d15,)
)
