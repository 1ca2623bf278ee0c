"""Beside a trainer that could write to the weights it shares: a process (train/after.py) that looks at them once the
trainer was killed. One that ends by itself has looked.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from pathlib import Path
from types import TracebackType

from valve_tune.base.consent import NotShared
from valve_tune.base.weights import BaseChanged, FrozenWeights
from valve_tune.train.checkpoint import write_file
from valve_tune.train.spec import JobSpec

BEGUN = "shared-base.sha256"
LOOKS_AFTER = "valve_tune.train.after"


class NoGuard:
    """Nothing that the job could write belongs to another process."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        pass


class Guard(NoGuard):
    def __init__(self, spec: JobSpec, weights: FrozenWeights) -> None:
        """Also refuses weights that are not those which this job began with."""
        self._weights, begun = weights, Path(spec.out, BEGUN)
        there = begun.read_text().strip() if begun.exists() else ""
        if there and there != weights.digest:
            raise BaseChanged(
                f"share_weights: {spec.share_weights} holds other weights than when this job began: another base, "
                f"or something has written there; if it is the same base, start that service again (checksum: {begun})"
            )
        begun.parent.mkdir(parents=True, exist_ok=True)
        if not there:
            write_file(begun, f"{weights.digest}\n".encode())  # half of it would say for ever that the base changed
        argv = [sys.executable, "-m", LOOKS_AFTER]
        self._process = subprocess.Popen(argv, stdin=subprocess.PIPE, start_new_session=True)
        self._tell({"spec": spec.to_json(), "digest": weights.digest})

    def _tell(self, word: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(word).encode() + b"\n")
        self._process.stdin.flush()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            with contextlib.suppress(NotShared):  # their memory is gone: there is nothing to look at
                self._weights.check()
        finally:
            with contextlib.suppress(OSError):  # it was killed
                self._tell("looked")
            self._process.communicate()


def stand(spec: JobSpec, weights: FrozenWeights) -> NoGuard:
    return Guard(spec, weights) if weights.is_writable else NoGuard()
