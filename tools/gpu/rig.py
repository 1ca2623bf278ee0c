"""The rig of one session: the guard, the workloads it watches over, and the stop rules.

Safe by construction: only processes started here are touched; nothing is disabled that the guard has not acknowledged;
a workload is killed only after its channels are on; an Xid that no experiment announced, a driver call over ten
seconds, a dead guard or a workload with an error ends the session.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from valve_tools.gpu.beat import Beat
from valve_tools.gpu.build import Programs
from valve_tools.gpu.errors import LabError, LabRefused, StopRule
from valve_tools.gpu.machine import Machine
from valve_tools.gpu.probe import Probe
from valve_tools.gpu.spins import Spins
from valve_tools.gpu.talk import Talk, TooLate

READY_S = 40.0
FINISH_S = 25.0
LOOK_S = 0.005
NOBODY = 65534


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How much of everything: all of it on a card, a rehearsal on the emulated one."""

    dry: bool

    def cycles(self, n: int) -> int:
        return max(3, n // 25) if self.dry else n

    def ms(self, n: int) -> int:
        return max(150, n // 8) if self.dry else n

    def mib(self, n: int) -> int:
        return max(8, n // 32) if self.dry else n

    def seconds(self, n: float) -> float:
        return max(0.3, n / 60) if self.dry else n


class Workload:
    """One running spin. `helper` is there when it was started with one."""

    def __init__(self, process: subprocess.Popen[bytes], base: Path, beat: Beat, helper: Path | None) -> None:
        self.process = process
        self.base = base
        self.beat = beat
        self._helper_path = helper
        self._helper: Talk | None = None

    @property
    def table(self) -> Path:
        return self.base.with_suffix(".table")

    @property
    def tracer(self) -> Path:
        return self.base.with_suffix(".tracer")

    @property
    def trace(self) -> Path:
        return self.base.with_suffix(".trace.jsonl")

    @property
    def beat_path(self) -> Path:
        return self.base.with_suffix(".beat")

    def helper(self) -> Talk:
        assert self._helper_path is not None, "started without a helper"
        if self._helper is None:
            self._helper = Talk(self._helper_path)
        return self._helper

    def go(self) -> None:
        self.beat.go()

    def moves(self, within_s: float = 3.0) -> bool:
        """Whether the GPU beats for it."""
        before, end = self.beat.mark, time.monotonic() + within_s
        while time.monotonic() < end:
            if self.beat.mark != before:
                return True
            time.sleep(LOOK_S)
        return False

    def result(self) -> dict[str, Any]:
        """Its last line; {} while it runs or when it was killed."""
        text = self.base.with_suffix(".out").read_text(errors="replace")
        lines = [line for line in text.splitlines() if line.startswith("{")]
        try:
            answer: dict[str, Any] = json.loads(lines[-1]) if lines else {}
        except ValueError:
            return {}
        return answer

    def close(self) -> None:
        if self._helper is not None:
            self._helper.close()
        self.beat.close()


class Rig:
    """Use as a context manager; everything started through it is over afterwards."""

    def __init__(
        self, machine: Machine, programs: Programs, folder: Path, out: Path, *, limit_s: int = 900, seed: int = 1
    ) -> None:
        self.machine = machine
        self.spins = Spins(machine, programs, folder)
        self.folder = folder  # sockets and shared pages: short-lived, on tmpfs
        self.out = out  # what comes back
        self.effort = Effort(dry=machine.is_dry)
        self.random = random.Random(seed)
        self.path = ""  # how foreign channels are reached: "a", "b", "c"; found by the first experiment that needs it
        self._limit_s = limit_s
        self._guard: subprocess.Popen[bytes] | None = None
        self._running: list[Workload] = []
        self._xids = 0
        self.shared: dict[str, Any] = {}  # what one experiment measured and another judges

    # the session

    def __enter__(self) -> Rig:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.out.mkdir(parents=True, exist_ok=True)
        self._log("session").touch()
        argv = [self.spins.programs.path("guard"), str(self.spins.guard_path), str(self.out / "guard.jsonl")]
        argv += [str(os.getpid()), str(self._limit_s)]
        with self._log("session").open("ab") as log:  # none of our own pipes: it may outlive us
            env = self.machine.environment()
            self._guard = subprocess.Popen(argv, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        self.wait(self.spins.guard_path.exists, "the guard is up", 20)
        self._xids = self._count_xids()
        return self

    def __exit__(self, *_: object) -> None:
        """Everything on, workloads asked to end, then the guard."""
        self.enable_all()
        for workload in list(self._running):
            self._end(workload)
        if self._guard is not None and self._guard.poll() is None:
            with self._tolerant():
                Talk(self.spins.guard_path).say("quit")
            try:
                self._guard.wait(30)
            except subprocess.TimeoutExpired:
                self._guard.terminate()
                self._guard.wait()

    @contextmanager
    def _tolerant(self) -> Iterator[None]:
        try:
            yield
        except (OSError, TooLate, ConnectionError):
            return

    def enable_all(self) -> None:
        with self._tolerant(), Talk(self.spins.guard_path) as guard:
            guard.ask("enable-all")

    def _log(self, name: str) -> Path:
        return self.out / f"{name}.log"

    def wait(self, look: Callable[[], bool], what: str, patience_s: float) -> None:
        end = time.monotonic() + patience_s
        while not look():
            if time.monotonic() > end:
                raise StopRule(f"never happened: {what}")
            time.sleep(LOOK_S)

    # stop rules

    def _count_xids(self) -> int:
        return (self.machine.kernel_log() or "").count("NVRM: Xid")

    def allow_xids(self) -> int:
        """Forget the Xids so far, which an experiment announced; how many there were."""
        now = self._count_xids()
        new, self._xids = now - self._xids, now
        return new

    def check(self) -> None:
        """The stop rules between two steps."""
        new = self._count_xids() - self._xids
        if new > 0:
            last = [line for line in (self.machine.kernel_log() or "").splitlines() if "NVRM: Xid" in line][-1]
            raise StopRule(f"{new} Xid that no experiment announced: {last}")
        if self._guard is None or self._guard.poll() is not None:
            raise StopRule("the guard died")

    # workloads

    @staticmethod
    def beat_at(base: Path) -> Beat:
        return Beat(base.with_suffix(".beat"))

    @contextmanager
    def workload(
        self,
        mode: str,
        ms: int,
        *more: str,
        helper: bool = False,
        held: bool = False,
        may_fail: bool = False,
        trace: bool = False,
    ) -> Iterator[Workload]:
        """A spin that runs when the body begins. Afterwards it has ended; with `may_fail` perhaps with an error.

        With `held` it begins its work at `go`. Who watches it with a probe starts it so: on a busy machine the probe is
        late, and would find work that is done."""
        base = self.spins.next_base(mode)
        helper_path = base.with_suffix(".helper") if helper else None
        more = (*more, *(["--sock", str(helper_path)] if helper_path else []), *(["--held", "1"] if held else []))
        argv = self.spins.argv(mode, ms, base, more)
        with base.with_suffix(".out").open("wb") as out, self._log("session").open("ab") as log:
            process = subprocess.Popen(
                argv, env=self.spins.traced(base, log=trace), stdin=subprocess.DEVNULL, stdout=out, stderr=log
            )
        beat = self._wait_ready(process, base)
        work = Workload(process, base, beat, helper_path)
        self._running.append(work)
        try:
            yield work
        finally:
            self._end(work)
        self.check()
        if not may_fail and process.returncode != 0:
            raise StopRule(f"the workload {mode} ended with {process.returncode}: {work.result() or 'no result'}")

    def _wait_ready(self, process: subprocess.Popen[bytes], base: Path) -> Beat:
        path = base.with_suffix(".beat")
        end = time.monotonic() + READY_S
        while time.monotonic() < end:
            if path.exists() and path.stat().st_size:
                beat = Beat(path)
                if beat.is_ready:
                    return beat
                beat.close()
            if process.poll() is not None:
                break
            time.sleep(LOOK_S)
        if process.poll() is None:
            process.terminate()  # not ready: none of its channels was disabled
        code, text = process.wait(), self._log("session").read_text(errors="replace")[-300:]
        raise LabError(f"{base.name} did not become ready (code {code}): {text}")

    def finish(self, work: Workload) -> dict[str, Any]:
        """Let it do all of its work; its result."""
        try:
            work.process.wait(FINISH_S * 4)
        except subprocess.TimeoutExpired:
            raise StopRule(f"{work.base.name} does not end by itself") from None
        return work.result()

    def stop(self, work: Workload) -> dict[str, Any]:
        """Ask it to end early; its result."""
        self._end(work)
        return work.result()

    def _end(self, work: Workload) -> None:
        """Asked first; a signal only after everything was enabled."""
        if work not in self._running:
            return
        if work.process.poll() is None:
            work.beat.stop()
            try:
                work.process.wait(FINISH_S)
            except subprocess.TimeoutExpired:
                self.enable_all()
                work.process.send_signal(signal.SIGTERM)
                try:
                    work.process.wait(FINISH_S)
                except subprocess.TimeoutExpired:
                    raise StopRule(f"{work.base.name} does not end") from None
        self._running.remove(work)
        work.close()

    def kill(self, work: Workload) -> None:
        """SIGKILL. Everything is enabled first; an experiment that wants it otherwise says so by itself."""
        self.enable_all()
        work.process.kill()
        work.process.wait()

    # probes

    @contextmanager
    def probe(self, work: Workload | None = None, *, path: str = "a", uid: int | None = None) -> Iterator[Probe]:
        """A probe attached to a workload, its driver client open."""
        argv = [
            self.spins.programs.path("probe"),
            str(self.spins.guard_path),
            *(["patient"] if self.machine.is_dry else []),
        ]
        with Probe(argv, self.machine.environment(), self.enable_all) as probe:
            if work is not None:
                probe.do(f"attach {work.table} {work.beat_path} {work.tracer}")
            if uid is not None:
                probe.do(f"uid {uid}")
            if path == "a":
                opened = probe.do("open")
                if not opened["ok"]:
                    raise LabRefused(f"own client: {first_refusal(opened)}")
            probe.do(f"path {path}")
            yield probe

    def reach(self) -> str:
        """The first path by which a pause really stops work. Found once, by three pauses on each."""
        if self.path:
            return self.path
        for path in "abc":
            with self.workload("alu", self.effort.ms(4000), held=True) as work:
                try:
                    with self.probe(work, path=path) as probe:
                        work.go()
                        if probe.cycles(3)["frozen"] == 3:
                            self.path = path
                            return path
                except LabRefused:
                    continue
        raise LabRefused("no path stops a workload: see D4 and D4b")


def first_refusal(opened: dict[str, Any]) -> str:
    """The first step of `open` that failed, in words."""
    for step in opened["steps"]:
        if step["errno"] or step["status"]:
            return f"{step['name']}: errno {step['errno']}, status {step['status']:#x}"
    return "all steps good"
