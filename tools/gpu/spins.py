"""Says how a workload is started on this card: its command line, its units, its environment."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from valve_tools.gpu.build import Programs, cubin
from valve_tools.gpu.errors import LabError
from valve_tools.gpu.machine import Machine, branch_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """What the workload's units take on this card."""

    iterations_ms: float
    one_iterations_ms: float
    copy_us: float
    multiprocessors: int


class Spins:
    def __init__(self, machine: Machine, programs: Programs, folder: Path) -> None:
        self.machine = machine
        self.programs = programs
        self.folder = folder
        self.guard_path = folder / "guard.sock"
        self._count = 0
        self._calibration: Calibration | None = None
        self._environment: dict[str, str] = {}

    def next_base(self, name: str) -> Path:
        self._count += 1
        return self.folder / f"{self._count}-{name}"

    def argv(self, mode: str, ms: int, base: Path, more: Sequence[str] = ()) -> list[str]:
        argv = [self.programs.path("spin"), "--mode", mode, "--ms", str(ms), "--beat", str(base.with_suffix(".beat"))]
        argv += ["--image", str(self.programs.image), "--copy-mib", "1" if self.machine.is_dry else "64"]
        if mode != "calibrate":
            c = self.calibration()
            argv += ["--iterations-ms", f"{c.iterations_ms}", "--one-iterations-ms", f"{c.one_iterations_ms}"]
            argv += ["--copy-us", f"{c.copy_us}"]
        return [*argv, *more]

    def traced(self, base: Path, *, log: bool = False) -> dict[str, str]:
        """The environment of a program under the tracer, which stands in front of every other preload. Only with `log`
        does it write every call down: that costs microseconds, and some experiments time those very calls."""
        env = self.machine.environment()
        others = env.get("LD_PRELOAD", "")
        env["LD_PRELOAD"] = ":".join(filter(None, [self.programs.path("libtrace.so"), others]))
        env["VALVE_LAB_TABLE"] = str(base.with_suffix(".table"))
        env["VALVE_LAB_SOCK"] = str(base.with_suffix(".tracer"))
        env["VALVE_LAB_GUARD"] = str(self.guard_path)
        env.update(self._environment)
        if log:
            env["VALVE_LAB_TRACE"] = str(base.with_suffix(".trace.jsonl"))
        env["VALVE_LAB_BRANCH"] = str(branch_of(self.machine.driver) or 580)
        return {**env, **self._cubin()}

    @contextmanager
    def also_in_environment(self, more: dict[str, str]) -> Iterator[None]:
        """Workloads started in the body see these variables, too."""
        self._environment = more
        try:
            yield
        finally:
            self._environment = {}

    def calibration(self) -> Calibration:
        if self._calibration is None:
            done = self._calibrate()
            if done.returncode and not self.machine.is_dry and not self.programs.cubin:
                self.programs = replace(self.programs, cubin=cubin(self.programs.folder))
                done = self._calibrate()
            if done.returncode:
                why = done.stderr.strip() or done.stdout
                raise LabError(f"the workload does not run on this GPU: {why[:600]}")
            said = json.loads(done.stdout)
            self._calibration = Calibration(**{name: said[name] for name in Calibration.__slots__})
        return self._calibration

    def _calibrate(self) -> subprocess.CompletedProcess[str]:
        argv = self.argv("calibrate", 0, self.next_base("calibrate"))
        env = {**self.machine.environment(), **self._cubin()}
        return subprocess.run(argv, env=env, capture_output=True, text=True, timeout=120, check=False)

    def _cubin(self) -> dict[str, str]:
        return {"VALVE_LAB_CUBIN": str(self.programs.cubin)} if self.programs.cubin else {}
