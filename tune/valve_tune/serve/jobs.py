"""Commands about a job of one's own: run, ls, watch, pause, resume, cancel, checkpoints."""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from valve_tune.serve import flags, metrics, registry
from valve_tune.serve.control import FolderControl
from valve_tune.serve.folder import GO, PAUSE, STOP, FolderError, JobFolder
from valve_tune.serve.receipt import TrainedTokens, process_link
from valve_tune.serve.recorder import Recorder, duration
from valve_tune.serve.runner import MakesTrainer, carry_out, real_trainer, rows_of
from valve_tune.train.report import End

INTERRUPTED = 130
LOOK_S = 0.2
ENDS = {"succeeded": 0, "failed": 1, "cancelled": 1, "stopped": 1}


def run(options: argparse.Namespace) -> int:
    values = flags.values(options)
    for name in ("model", "data", "out", "eval_data", "share_weights"):
        path = Path(values.get(name) or "").expanduser()
        if values.get(name) and (name != "share_weights" or len(path.parts) > 1 or path.exists()):
            values[name] = str(path.absolute())  # else a service is named
    return train(values, options.num_train_epochs)


def train(
    values: dict[str, Any],
    passes: float | None,
    controls: Callable[[JobFolder], FolderControl] = FolderControl,
    make: MakesTrainer = real_trainer,
) -> int:
    """The same command with the same --out goes on where it was. 0 when the adapter is done."""
    spec, rows = rows_of(values, flags.DEFAULT_PASSES if passes is None else passes)
    folder = JobFolder(spec.out)
    with folder.claimed(spec):
        folder.want(GO)
        registry.remember(folder)
        control = controls(folder)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: control.stop())
        begin = f"{rows.examples} examples, {rows.tokens:,} tokens, {len(rows)} rows, {spec.max_steps} steps"
        print("\n".join([begin, *(f"note: {note}" for note in rows.notes)]), flush=True)
        trained = TrainedTokens(process_link()).add
        recorder = Recorder(folder, spec, waited=lambda: control.waited_s, out=sys.stdout, trained=trained)
        outcome = carry_out(folder, spec, rows, control, recorder, make)
        return ended(folder, outcome.end, outcome.step, outcome.message)


def ended(folder: JobFolder, end: End, step: int, message: str) -> int:
    if end is End.DONE:
        print(f"done: {folder.path}\nloss curve: {folder.page}")
        return 0
    if end is End.STOPPED:
        print(f"stopped at step {step}; the same command goes on from the last checkpoint")
        return INTERRUPTED
    print(f"valve tune: failed at step {step}: {message}", file=sys.stderr)
    kept = folder.checkpoints()
    if kept:
        print(f"valve tune: {kept[-1][1]} is whole; the same command begins there", file=sys.stderr)
    return 1


def state_of(folder: JobFolder) -> str:
    """What the folder says, unless there is no process to make it true."""
    state = folder.status().state
    return "dead" if state in ("running", "paused") and not folder.is_worked_on() else state


def ls(_: argparse.Namespace) -> int:
    folders = registry.known()
    if not folders:
        print("no jobs; begin one with: valve tune run --model DIR --data FILE --out DIR")
    width = max((len(folder.path.name) for folder in folders), default=0)
    for folder in folders:
        done = metrics.steps(folder.metrics)
        loss = f"loss {done[-1]['loss']:.4f}" if done and "loss" in done[-1] else ""
        step = f"{folder.status().step}/{folder.spec().max_steps}"
        print(f"{folder.path.name:{width}}  {state_of(folder):9}  step {step:13}  {loss:12}  {folder.path}")
    return 0


def watch(options: argparse.Namespace) -> int:
    """Shows each step until the job ends; ends itself where no process works on it."""
    folder, shown, told = registry.find(options.job), 0, ""
    last = folder.spec().max_steps
    while True:
        status, state = folder.status(), state_of(folder)
        for line in metrics.steps(folder.metrics):
            if line["step"] > shown:
                shown = line["step"]
                harvested = f"  harvested {line['harvested']:.0%}" if "harvested" in line else ""
                print(f"step {shown}/{last}  loss {line.get('loss', float('nan')):.4f}{harvested}", flush=True)
        if state not in ("running", "paused"):
            age = f", {duration(time.time() - status.updated)} ago" if status.updated else ""
            print(f"{state} at step {status.step}{age}{f': {status.message}' if status.message else ''}")
            return ENDS.get(state, 1)
        if status.message not in ("", told):  # what holds it up
            print(status.message, flush=True)
        told = status.message
        time.sleep(LOOK_S)


def pause(options: argparse.Namespace) -> int:
    return tell(options.job, PAUSE, "stops between two tiles and keeps its place; go on with: valve tune resume")


def cancel(options: argparse.Namespace) -> int:
    return tell(options.job, STOP, "ends between two tiles; its last checkpoint stays")


def resume(options: argparse.Namespace) -> int:
    """A paused job goes on where it waits; one whose process is gone goes on here."""
    folder = registry.find(options.job)
    if folder.is_worked_on():
        folder.want(GO)
        print(f"{folder.path.name} goes on")
        return 0
    if folder.fleet:
        raise FolderError(
            f"{folder.path}: is a part of the fleet job {folder.fleet}, and its process is gone; it goes on with the "
            "command that began it (valve tune fleet ...)"
        )
    from dataclasses import asdict

    return train({**asdict(folder.spec()), "out": str(folder.path)}, None)


def tell(job: str, word: bytes, what: str) -> int:
    folder = registry.find(job)
    if not folder.is_worked_on():
        raise FolderError(f"{folder.path.name}: no process works on this job (it is {state_of(folder)})")
    folder.want(word)
    print(f"{folder.path.name} {what}")
    return 0


def checkpoints(options: argparse.Namespace) -> int:
    folder = registry.find(options.job)
    losses = {line["step"]: line.get("loss") for line in metrics.steps(folder.metrics)}
    for step, path in folder.checkpoints():
        loss = losses.get(step)
        print(f"{step:8}  {'' if loss is None else f'loss {loss:.4f}':14}  {path}")
    return 0
