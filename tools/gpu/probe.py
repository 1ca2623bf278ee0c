"""Drives one probe process (native/probe.c): one command a line, one JSON object back."""

from __future__ import annotations

import json
import os
import select
import subprocess
from collections.abc import Callable
from typing import Any

from valve_tools.gpu.errors import LabRefused, StopRule

CALL_LIMIT_S = 10.0  # the stop rule for one driver call
CYCLE = ("off_us", "on_us", "last_beat_us", "last_seen_us", "resume_us")


class Probe:
    """Use as a context manager. Leaving it enables what it left off."""

    def __init__(self, argv: list[str], environment: dict[str, str], on_trouble: Callable[[], None]) -> None:
        self._process = subprocess.Popen(argv, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._on_trouble = on_trouble
        self._rest = b""

    @property
    def pid(self) -> int:
        return self._process.pid

    def kill(self) -> None:
        """SIGKILL, whatever it left off: the guard is the net under it."""
        self._process.kill()
        self._process.wait()

    def do(self, command: str, patience_s: float = 0.0) -> dict[str, Any]:
        """One command. An answer that does not come is a stop rule: a call is stuck in the driver."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{command}\n".encode())
        self._process.stdin.flush()
        line = self._line(patience_s + CALL_LIMIT_S + 5)
        if line is None:
            self._on_trouble()
            raise StopRule(f"the probe does not return from: {command[:60]}")
        answer: dict[str, Any] = json.loads(line)
        if answer.get("slow"):
            self._on_trouble()
            raise StopRule(f"a driver call took over {CALL_LIMIT_S:.0f} s: {command[:60]}")
        if answer.get("note") in {"stuck", "resumed only after the guard"}:
            raise StopRule(f"the workload did not resume by itself: {answer['note']}")
        if "error" in answer:
            raise LabRefused(f"{command.split(maxsplit=1)[0]}: {answer['error']}")
        return answer

    def _line(self, patience_s: float) -> bytes | None:
        assert self._process.stdout is not None
        fd = self._process.stdout.fileno()
        while b"\n" not in self._rest:
            if not select.select([fd], [], [], patience_s)[0]:
                return None
            more = os.read(fd, 1 << 16)
            if not more:
                raise LabRefused(f"the probe ended with code {self._process.wait()}")
            self._rest += more
        line, _, self._rest = self._rest.partition(b"\n")
        return line

    def cycles(
        self,
        n: int,
        *,
        engine: str = "gr",
        pause_us: tuple[int, int] = (1500, 1500),
        gap_us: tuple[int, int] = (2000, 2000),
        limit_s: int = 30,
    ) -> dict[str, Any]:
        """`n` pauses; the columns of CYCLE hold one number each."""
        spans = f"{pause_us[0]} {pause_us[1]} {gap_us[0]} {gap_us[1]}"
        return self.do(f"cycles {n} {engine} {spans} {limit_s}", patience_s=limit_s + 10)

    def control(self, whose: str, target: str, command: int, params: bytes = b"") -> tuple[int, bytes]:
        """Any driver control but the disable call: (status, parameters afterwards)."""
        answer = self.do(f"control {whose} {target} {command:x} {params.hex()}")
        if answer["errno"]:
            raise LabRefused(f"control {command:#x}: {os.strerror(answer['errno'])}")
        return int(answer["status"]), bytes.fromhex(answer["params"])

    def __enter__(self) -> Probe:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(CALL_LIMIT_S + 5)
        except subprocess.TimeoutExpired:  # stuck in the driver: a signal would not help, the guard enables
            self._on_trouble()
        if self._process.stdout is not None:
            self._process.stdout.close()
