"""Run the demo: the same arrivals alone, beside ungated offline work, and beside offline work under Valve."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from valve_tools.demo.figures import DemoRun, OnlineRun, parse_gates, parse_online, units_between
from valve_tools.demo.node import EmulatedNode, NodeError

from valved.state.trace import read_lines

WORKLOADS = Path(__file__).resolve().parent / "bin"
ONLINE, OFFLINE = WORKLOADS / "valve-demo-online", WORKLOADS / "valve-demo-offline"
LOOK_S = 0.5
UNIT_US = 2000  # GPU time of one unit of offline work


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundsPlan:
    """What a demo is made of. The defaults take about two minutes."""

    seconds: float = 10.0  # of arrivals in each run
    rounds: int = 2  # of (alone, valve), one after the other
    ungated: bool = True  # show once what happens without Valve
    order: tuple[str, ...] = ()  # the conditions one by one, instead of those two
    trace: Path | None = None
    seed: int = 1
    rate: float = 1.5  # drawn requests per second: busy for about half of the time
    out_tokens: int = 20
    timings: tuple[str, ...] = ()  # further options of the service

    def conditions(self) -> list[str]:
        if self.order:
            return list(self.order)
        return ["alone", *(["ungated"] if self.ungated else []), "valve", *["alone", "valve"] * (self.rounds - 1)]

    def online(self) -> list[str]:
        argv = [str(ONLINE), "--duration", str(self.seconds), "--seed", str(self.seed), *self.timings]
        if self.trace:
            return [*argv, "--trace", str(self.trace)]
        return [*argv, "--rate", str(self.rate), "--out-tokens", str(self.out_tokens)]

    def offline(self) -> list[str]:
        return [str(OFFLINE), "--unit-us", str(UNIT_US)]


class RoundsDemo:
    """One node on one emulated GPU, and the runs on it."""

    def __init__(self, node: EmulatedNode, plan: RoundsPlan, say: Callable[[str], None]) -> None:
        self.node = node
        self.plan = plan
        self.say = say
        self._count = 0

    def offline_rate(self, seconds: float = 2.0) -> float:
        """Units per second of the offline job with the GPU to itself."""
        out = self.node.folder / "offline-alone.out"
        argv = [*self.plan.offline(), "--duration", str(seconds)]
        self.node.run("", argv, name="offline-alone", out=out).wait()
        summary = last_summary(out)
        return float(summary["units"]) / float(summary["wall_s"])

    def run(self, condition: str) -> DemoRun:
        self.say(f"{condition}: {self.plan.seconds:g} s of requests")
        self._count += 1
        tag = f"{self._count}-{condition}"
        if condition == "valve":
            return self._under_valve(tag)
        offline = self._start_offline("", tag) if condition == "ungated" else None
        served = self._run_online("", tag)
        units, ok = self._stop_offline(offline, tag, served) if offline else (0.0, None)
        return DemoRun(condition=condition, requests=served.requests, wall_s=served.wall_s, units=units, offline_ok=ok)

    def _under_valve(self, tag: str) -> DemoRun:
        node, trace = self.node, self.node.folder / f"{tag}.trace"
        node.config = f"trace_file = {json.dumps(str(trace))}\n"
        node.start_valved()
        offline = self._start_offline("offline", tag)
        node.wait_for(lambda: any(gpu.channels for gpu in node.status().gpus), "the offline job has registered")
        seen: list[Any] = []
        served = self._run_online("online", tag, look=lambda: seen.extend(self._service(f"online-{tag}")))
        if not seen:
            raise NodeError("the service ended before valved's status was read: give it more --seconds")
        service = seen[-1]
        units, ok = self._stop_offline(offline, tag, served)
        node.stop_valved()
        return DemoRun(
            condition="valve",
            requests=served.requests,
            wall_s=served.wall_s,
            units=units,
            cooldown_s=0.0 if service.hinted else service.cooldown_ns / 1e9,
            gates=parse_gates(read_lines(trace)),
            most_per_request=service.max_preemptions_per_request if service.hinted else None,
            offline_ok=ok,
        )

    def _service(self, name: str) -> list[Any]:
        return [each for each in self.node.status().services if each.name == name]

    def _run_online(self, role: str, tag: str, look: Callable[[], None] = lambda: None) -> OnlineRun:
        """The service from start to end; `look` is called now and then, because its books leave with it."""
        out = self.node.folder / f"{tag}.online.out"
        child = self.node.run(role, self.plan.online(), name=f"online-{tag}", out=out)
        while child.poll() is None:
            look()
            time.sleep(LOOK_S)
        if child.returncode:
            raise NodeError(f"the online workload ended with {child.returncode}: {out.read_text()[-500:]}")
        served = parse_online(out.read_text().splitlines())
        if not served.requests:
            source = f" of {self.plan.trace}" if self.plan.trace else ""
            raise NodeError(f"no request came within {self.plan.seconds:g} s{source}")
        return served

    def _start_offline(self, role: str, tag: str) -> subprocess.Popen[bytes]:
        out = self.node.folder / f"{tag}.offline.out"
        argv = [*self.plan.offline(), "--report", "0.1"]
        child = self.node.run(role, argv, name=f"offline-{tag}", out=out)
        self.node.wait_for(lambda: b"units" in out.read_bytes(), "the offline job works")
        return child

    def _stop_offline(self, child: subprocess.Popen[bytes], tag: str, served: OnlineRun) -> tuple[float, bool]:
        """Units done while the online service ran, and whether the checksum says that none was lost or done twice."""
        out = self.node.folder / f"{tag}.offline.out"
        os.kill(child.pid, signal.SIGTERM)
        child.wait()
        units = units_between(out.read_text().splitlines(), served.start_s, served.start_s + served.wall_s)
        return units, bool(last_summary(out)["ok"])


def last_summary(path: Path) -> dict[str, float]:
    """The summary line of a workload's output."""
    lines = [line for line in path.read_text().splitlines() if line.startswith('{"summary"')]
    if not lines:
        raise NodeError(f"no summary in {path}: {path.read_text()[-500:]}")
    summary: dict[str, float] = json.loads(lines[-1])
    return summary
