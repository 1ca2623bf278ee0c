"""C16: the card lane of training inside an engine: shares of the processors, low priority, two tiles in flight."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from valve_tools.gpu.engines.choice import HERE
from valve_tools.gpu.errors import LabError
from valve_tools.gpu.experiment import ExperimentBatch, experiment
from valve_tools.gpu.outcome import Figure, LabOutcome, LabVerdict
from valve_tools.gpu.rig import Rig

PROGRAM = HERE / "green_tiles.py"
PATIENCE_S = 100.0


@experiment("C16", seconds=60, decides='whether a job inside an engine on a card still has to say "untried"')
def c16(rig: Rig) -> LabOutcome:
    """Do tiles in a green context stay on their processors, and what does a step beside them take?"""
    argv = [sys.executable, str(PROGRAM), "--image", str(rig.spins.programs.image)]
    argv += ["--steps", str(rig.effort.cycles(300))]
    try:
        done = subprocess.run(
            argv, env=rig.machine.environment(), capture_output=True, text=True, timeout=PATIENCE_S, check=False
        )
    except subprocess.TimeoutExpired:
        return LabOutcome(verdict=LabVerdict.HANG, detail=f"no answer within {PATIENCE_S:g} s")
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        raise LabError(f"{PROGRAM.name}: {done.stderr[-2000:]}")
    return judged(json.loads(lines[-1]))


def judged(found: dict[str, Any]) -> LabOutcome:
    if found["refused"]:
        return LabOutcome(verdict=LabVerdict.REFUSED, detail=found["refused"])
    alone = Figure(samples=tuple(found["alone_us"]))
    figures, words, verdict = {"alone_us": alone}, [f"steps of 1 ms alone {alone.words()}"], LabVerdict.OK
    for one in found["shares"]:
        beside = figures[f"beside_{one['sms']}_us"] = Figure(samples=tuple(one["step_us"]))
        figures[f"tile_{one['sms']}_ms"] = Figure(samples=tuple(one["tiles_ms"]))
        if one["ran_on"] > one["sms"] or one["most_in_flight"] > 2:
            verdict = LabVerdict.DIFFERS
        words.append(
            f"{one['sms']} processors: a tile ran on {one['ran_on']} in {one['tile_alone_ms']:.1f} ms, "
            f"{one['most_in_flight']} in flight at most, steps beside {beside.words()}"
        )
    figures["change_us"] = Figure(samples=tuple(found["change_us"]))
    return LabOutcome(
        verdict=verdict,
        detail="; ".join(
            [*words, f"made in {found['start_us'] / 1e3:.1f} ms, freed in {found['end_us'] / 1e3:.1f} ms"]
        ),
        figures=figures,
        answers={
            "ran_on": {str(one["sms"]): one["ran_on"] for one in found["shares"]},
            "slower_p50": {
                str(one["sms"]): round(figures[f"beside_{one['sms']}_us"].at(0.5) / alone.at(0.5), 3)
                for one in found["shares"]
            },
        },
    )


BATCH = ExperimentBatch(name="green", about="training inside an engine on a card", experiments=(c16,))
