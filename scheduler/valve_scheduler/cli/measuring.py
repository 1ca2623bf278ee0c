"""`valve cluster measure`: a workload run by hand at several memory limits, and the profile that comes of it.

The command is the workload's own benchmark on a GPU without other work. `{mib}` and `{share}` in it become the limit
in MiB and as a share of the card; what it prints is searched for its tokens per second. Where it fails it did not fit.
"""

import asyncio
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from valve_kube import names
from valve_kube.client import Json
from valve_kube.errors import SchedulerError

from valve_scheduler.controller.profiling import Level, measured_spec

PATTERN = r"([0-9][0-9_,]*(?:\.[0-9]+)?) *(?:total |output )?(?:tokens/s|tok/s|tokens per second)"
# What one run counts for when a dip is averaged with its neighbour: all alike.
_WEIGHT_S = 1.0


class NothingMeasured(SchedulerError):
    """No limit gave a figure; the text has the end of what was printed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run. tokens_per_s None: it failed, `said` tells how it ended."""

    limit_mib: float
    tokens_per_s: float | None
    said: str


def command_at(command: Sequence[str], limit_mib: float, full_mib: float) -> list[str]:
    share = f"{limit_mib / full_mib:.3f}"
    return [word.replace("{mib}", f"{limit_mib:.0f}").replace("{share}", share) for word in command]


def read_speed(output: str, pattern: str) -> float | None:
    """The last figure that the pattern finds; benchmarks print progress first and the result at the end."""
    found = re.findall(pattern, output)
    return float(re.sub("[_,]", "", found[-1])) if found else None


async def measure(command: Sequence[str], limits_mib: Sequence[float], pattern: str) -> list[Run]:
    """One run per limit, from the largest down, as what does not fit there fits nowhere."""
    full_mib, runs = max(limits_mib), []
    for limit_mib in sorted(limits_mib, reverse=True):
        words = command_at(command, limit_mib, full_mib)
        print(f"valve cluster measure: {limit_mib:.0f} MiB: {' '.join(words)}", file=sys.stderr)
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(*words, stdout=pipe, stderr=asyncio.subprocess.STDOUT)
        raw, _ = await process.communicate()
        output = raw.decode(errors="replace")
        speed = read_speed(output, pattern) if process.returncode == 0 else None
        runs.append(Run(limit_mib=limit_mib, tokens_per_s=speed, said=output[-2000:]))

    return runs


def profile_of(name: str, namespace: str, runs: Sequence[Run], workload: dict[str, Any]) -> Json:
    """The OfflineProfile; raises NothingMeasured when no run gave a figure."""
    fitting = sorted((run for run in runs if run.tokens_per_s), key=lambda run: run.limit_mib)
    if not fitting:
        raise NothingMeasured(f"no run printed tokens per second (see --pattern); the last one said:\n{runs[-1].said}")
    levels = [
        Level(limit_mib=run.limit_mib, tokens=(run.tokens_per_s or 0.0) * _WEIGHT_S, runnable_s=_WEIGHT_S)
        for run in fitting
    ]
    return {
        "apiVersion": names.API_VERSION,
        "kind": "OfflineProfile",
        "metadata": {"name": name, "namespace": namespace},
        "spec": measured_spec(workload, levels),
    }
