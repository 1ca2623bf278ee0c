"""The product on the card: valved and two engines, latencies against running alone, what a preemption takes, what the
shim costs. The same code runs tools/demo's engines on the emulated GPU."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from valve_tools.gpu.engines.choice import EnginePrograms, engine_of, need_product
from valve_tools.gpu.errors import LabError
from valve_tools.gpu.experiment import ExperimentBatch, experiment
from valve_tools.gpu.outcome import Figure, LabOutcome, LabVerdict, figures
from valve_tools.gpu.probe import CYCLE
from valve_tools.gpu.rig import READY_S, Rig
from valve_tools.gpu.steps.calls import CALLS
from valve_tools.gpu.talk import Talk

if TYPE_CHECKING:
    from valve_tools.demo.figures import DemoRun
    from valve_tools.gpu.product_node import LabNode

CONDITIONS = ("alone", "ungated", "valve")


@contextmanager
def product(rig: Rig) -> Iterator[LabNode]:
    need_product()
    from valve_tools.gpu.product_node import LabNode

    folder = rig.spins.next_base("product")
    folder.mkdir()
    with LabNode(folder, emulated=rig.machine.is_dry) as node:
        yield node


def runs_of(rig: Rig) -> list[DemoRun]:
    """The same arrivals alone, beside ungated offline work, and under Valve. Made once for the experiments that ask."""
    need_product()
    from valve_tools.demo.rounds import RoundsDemo, RoundsPlan

    @dataclass(frozen=True, slots=True, kw_only=True)
    class EnginePlan(RoundsPlan):
        engine: EnginePrograms

        def online(self) -> list[str]:
            return self.engine.online(self.seconds)

        def offline(self) -> list[str]:
            return self.engine.offline()

    if "runs" not in rig.shared:
        dry = rig.effort.dry
        plan = EnginePlan(seconds=2.0 if dry else 25.0, rounds=1 if dry else 2, engine=engine_of(rig))
        with product(rig) as node:
            demo = RoundsDemo(node, plan, say=lambda _: None)
            demo.offline_rate(0.5 if dry else 8.0)
            rig.shared["runs"] = [demo.run(condition) for condition in plan.conditions()]
    found: list[DemoRun] = rig.shared["runs"]
    return found


def latencies(runs: list[DemoRun], condition: str) -> dict[str, Figure]:
    requests = [request for run in runs if run.condition == condition for request in run.requests]
    ttft = tuple(request.ttft_ms for request in requests)
    tpot = tuple(request.tpot_ms for request in requests if request.out_tokens > 1)
    return {f"{condition}_ttft_ms": Figure(samples=ttft), f"{condition}_tpot_ms": Figure(samples=tpot)}


@experiment(
    "P1", seconds=260, decides="promise P5; the engine is PyTorch with random weights, VALVE_LAB_SHAPE=1b, 3b or 8b"
)
def p1(rig: Rig) -> LabOutcome:
    """TTFT and TPOT: alone, beside offline work, under Valve"""
    runs = runs_of(rig)
    from valve_tools.bench.demo import P5_PERCENT
    from valve_tools.demo.figures import pooled, spread

    alone, noise = pooled(runs, "alone"), spread(runs, "alone")
    over = {name: pooled(runs, name).over(alone) for name in CONDITIONS}
    kept = all(over["valve"][name] <= max(bound, noise[name]) for name, bound in P5_PERCENT.items())
    sound = all(run.offline_ok is not False for run in runs)
    words = [f"{name} " + ", ".join(f"{key} {value:+.1f} %" for key, value in over[name].items()) for name in over]
    values = ", ".join(f"{name} {value:.1f} ms" for name, value in alone.values.items())
    return LabOutcome(
        verdict=LabVerdict.DIFFERS if not sound else LabVerdict.OK if kept else LabVerdict.PART,
        detail=f"engine {engine_of(rig).name}; alone {values}; against it: {'; '.join(words[1:])}; offline output "
        f"{'as undisturbed' if sound else 'DIFFERS'}",
        figures={name: figure for each in CONDITIONS for name, figure in latencies(runs, each).items()},
        answers={"over_alone_percent": over, "noise_percent": noise, "offline_ok": sound},
    )


@experiment("C11", seconds=5, decides="promise P1: p99 under 1 ms, and our share of it")
def c11(rig: Rig) -> LabOutcome:
    """How long from the first launch to offline stopped?"""
    gates = [gate for run in runs_of(rig) for gate in run.gates]
    if not gates:
        return LabOutcome(verdict=LabVerdict.BLIND, detail="no preemption was recorded")
    own, total = Figure(samples=tuple(g.own_us for g in gates)), Figure(samples=tuple(g.total_ms * 1e3 for g in gates))
    most = [run.most_per_request for run in runs_of(rig) if run.most_per_request is not None]
    return LabOutcome(
        verdict=LabVerdict.OK if total.at(0.99) < 1000 else LabVerdict.SLOW,
        detail=f"{len(gates)} preemptions; launch to driver call {own.words()} us; launch to stopped "
        f"{total.words()} us; most of any one request: {max(most, default=0)}",
        figures={"own_us": own, "total_us": total},
        answers={"most_per_request": max(most, default=None)},
    )


def call_costs(rig: Rig, node: LabNode, role: str) -> dict[str, Figure]:
    """What calls cost in a workload, with the shim (a role) or without it ("")."""
    base = rig.spins.next_base(f"costs{role}")
    sock = base.with_suffix(".helper")
    argv = [*rig.spins.argv("idle", 60_000, base), "--sock", str(sock)]
    child = node.run(role, argv, name="costs", out=base.with_suffix(".out"))
    node.wait_for(sock.exists, "the workload is up", READY_S)
    with Talk(sock) as helper:
        cost = helper.ask_json(f"calls {400 if rig.effort.dry else 4000}", patience_s=60)
    rig.beat_at(base).stop()
    child.wait(READY_S)
    if cost["error"]:
        raise LabError(f"calls: CUDA error {cost['error']}")
    return figures(cost, *(f"{name}_us" for name in CALLS))


@experiment("P3", seconds=40, decides="promise P9")
def p3(rig: Rig) -> LabOutcome:
    """What does the shim add to a launch and to a graph launch?"""
    with product(rig) as node:
        node.start_valved()
        without, with_shim = call_costs(rig, node, ""), call_costs(rig, node, "online")
    added = {name: (with_shim[f"{name}_us"].at(0.5) - without[f"{name}_us"].at(0.5)) * 1e3 for name in CALLS[:2]}
    shown = {f"without_{name}": figure for name, figure in without.items()}
    return LabOutcome(
        verdict=LabVerdict.OK if max(added.values()) < 50 else LabVerdict.SLOW,
        detail="added by the shim at the median: " + ", ".join(f"{name} {ns:+.0f} ns" for name, ns in added.items()),
        figures={**shown, **{f"shim_{name}": figure for name, figure in with_shim.items()}},
        answers={"added_ns": {name: round(ns, 1) for name, ns in added.items()}},
    )


def summary_of(path: Path) -> dict[str, Any]:
    """The summary line of an offline engine."""
    lines = [line for line in path.read_text(errors="replace").splitlines() if line.startswith('{"summary"')]
    if not lines:
        raise LabError(f"no summary: {path.read_text(errors='replace')[-400:]}")
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def traced_engine(rig: Rig, units: int, cycles: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """So many units of the offline engine under the tracer, with `cycles` random pauses: (its summary, the pauses)."""
    base, engine, paused = rig.spins.next_base("engine"), engine_of(rig), {"n": 0}
    argv = [*engine.offline(), "--units", str(units), "--report", "0.1"]
    out = base.with_suffix(".out")
    with out.open("wb") as sink:
        child = subprocess.Popen(argv, env=rig.spins.traced(base), stdin=subprocess.DEVNULL, stdout=sink, stderr=sink)
    try:
        rig.wait(lambda: b'"units"' in out.read_bytes() or child.poll() is not None, "the engine works", 180)
        if cycles:
            with rig.probe(path=rig.path or "a") as probe:
                probe.do(f"attach {base.with_suffix('.table')} - {base.with_suffix('.tracer')}")
                paused = probe.cycles(cycles, pause_us=(500, 3000), gap_us=(500, 4000), limit_s=60)
        child.wait(300)
    finally:
        if child.poll() is None:
            rig.enable_all()
            child.terminate()
            child.wait(60)
    return summary_of(out), paused


@experiment("P4", seconds=90, decides="promise P4")
def p4(rig: Rig) -> LabOutcome:
    """Is the offline output bit-identical after a thousand random pauses?"""
    rig.reach()
    units = 400 if rig.effort.dry else rate_of(rig, seconds=12)
    undisturbed, _ = traced_engine(rig, units, 0)
    disturbed, paused = traced_engine(rig, units, rig.effort.cycles(1000))
    same = undisturbed["checksum"] == disturbed["checksum"] and disturbed["ok"]
    return LabOutcome(
        verdict=LabVerdict.OK
        if same and paused["frozen"] == paused["n"] > 0
        else LabVerdict.DIFFERS
        if not same
        else LabVerdict.PART,
        detail=f"{engine_of(rig).name}: {units} units, {paused['n']} random pauses ({paused['note']}); output "
        f"{'bit-identical' if same else 'DIFFERS'}",
        figures=figures(paused, *CYCLE[:2]),
        answers={"pauses": paused["n"], "same": same},
    )


def rate_of(rig: Rig, *, seconds: float) -> int:
    """Units that the offline engine does in so many seconds."""
    base = rig.spins.next_base("rate")
    with base.with_suffix(".out").open("wb") as sink:
        argv = [*engine_of(rig).offline(), "--duration", "4"]
        subprocess.run(argv, env=rig.machine.environment(), stdout=sink, stderr=sink, check=False, timeout=300)
    done = summary_of(base.with_suffix(".out"))
    return max(4, round(seconds * float(done["units"]) / float(done["wall_s"])))


@experiment("C10", seconds=60, decides="whether the shim may be preloaded everywhere")
def c10(rig: Rig) -> LabOutcome:
    """Does the shim change what a framework computes, or how fast?"""
    units = 200 if rig.effort.dry else rate_of(rig, seconds=8)
    found: dict[str, dict[str, Any]] = {}
    with product(rig) as node:
        node.start_valved()
        for role in ("", "offline"):
            out = node.folder / f"c10{role}.out"
            start = time.monotonic()
            node.run(role, [*engine_of(rig).offline(), "--units", str(units)], name="c10", out=out).wait(300)
            found[role] = {**summary_of(out), "all_s": time.monotonic() - start}
    same = found[""]["checksum"] == found["offline"]["checksum"]
    slower = found["offline"]["wall_s"] / found[""]["wall_s"] - 1
    return LabOutcome(
        verdict=LabVerdict.OK if same and slower < 0.02 else LabVerdict.DIFFERS if not same else LabVerdict.SLOW,
        detail=f"{engine_of(rig).name}, {units} units with and without the shim: output "
        f"{'identical' if same else 'DIFFERS'}, {slower:+.1%} time",
        answers={"same": same, "slower": round(slower, 4)},
    )


BATCH = ExperimentBatch(name="product", about="valved, the shim and two engines", experiments=(p1, c11, p3, p4, c10))
