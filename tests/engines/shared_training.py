"""Trains over the weights of a played weight daemon: `MODEL DATA FOLDER PID`. One line of JSON says what was seen. PID
is the daemon's, which is ended last.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from valve_tune.serve.runner import rows_of
from valve_tune.train.build import open_model, shared_base
from valve_tune.train.job import Trainer
from valve_tune.train.report import Answer, Going, Outcome
from valve_tune.train.spec import JobSpec

MODEL, DATA, FOLDER, PID = sys.argv[1], sys.argv[2], Path(sys.argv[3]), int(sys.argv[4])
FAULTS = ("tensor parallel", "pipeline", "quantized", "type", "base", "version")
OWNER = Path(os.environ["VALVE_RUN_DIR"], "weights.json")


class At(Going):
    """Does something once, at one tile."""

    def __init__(self, tile: int, act: Callable[[], None]) -> None:
        self.left, self.act = tile, act

    def answer(self) -> Answer:
        self.left -= 1
        if not self.left:
            self.act()
        return super().answer()


def values(out: str, **more: Any) -> dict[str, Any]:
    fixed = {"lora_r": 4, "lora_dropout": 0.1, "max_length": 64, "max_steps": 4, "save_steps": 2, "span": 32}
    return {"model": MODEL, "data": DATA, "out": str(FOLDER / out), **fixed, **more}


def train(out: str, control: Any = None, **more: Any) -> Outcome:
    spec, rows = rows_of(values(out, **more))
    return Trainer(spec, rows, control=control or Going()).run()


def adapter(out: str) -> bytes:
    return (FOLDER / out / "adapter_model.safetensors").read_bytes()


def refusal(fault: str) -> str:
    (FOLDER / "fault").write_text(fault)
    try:
        shared_base(JobSpec.from_values(values("never", share_weights="chat")), "cpu")
    except ValueError as error:
        return str(error)
    finally:
        (FOLDER / "fault").unlink()
    return ""


def alter() -> None:
    (FOLDER / "alter").touch()
    while (FOLDER / "alter").exists():
        time.sleep(0.01)


def withdraw() -> None:
    fresh = OWNER.with_name("fresh")
    fresh.write_text(OWNER.read_text().replace("true", "false"))
    fresh.replace(OWNER)


def killed(out: str, act: Callable[[], None]) -> str:
    """What the guard said after the trainer was killed at a tile."""
    child = os.fork()
    if not child:
        train(out, At(9, lambda: (act(), os.kill(os.getpid(), signal.SIGKILL))[0]), share_weights="chat")
        os._exit(0)
    assert os.WIFSIGNALED(os.waitpid(child, 0)[1])
    said = FOLDER / out / "shared-base.txt"
    while not said.exists() or not said.read_text().endswith("\n"):
        time.sleep(0.05)
    return said.read_text()


def end() -> None:
    os.kill(PID, signal.SIGKILL)
    while Path(f"/proc/{PID}").exists() and "Z" not in Path(f"/proc/{PID}/stat").read_text().rpartition(")")[2][:3]:
        time.sleep(0.01)


def main() -> None:
    torch.set_num_threads(1)
    said: dict[str, Any] = {"refused": {fault: refusal(fault) for fault in FAULTS}}
    train("own")
    train("shared", share_weights="chat")
    said["same bytes"] = adapter("own") == adapter("shared")
    built: Any = open_model(JobSpec.from_values(values("looked", share_weights="chat")))
    layer = built.weights.enter(1, 0)
    q, k, v = (layer[f"self_attn.{name}_proj.weight"] for name in "qkv")
    said["one matrix"] = [each.data_ptr() - q.data_ptr() for each in (k, v)] == [q.nbytes, q.nbytes + k.nbytes]
    said["in shared memory"] = mapping_of(q.data_ptr())
    before = k.clone()
    consented = OWNER.read_text()
    said["withdrawn"] = train("withdrawn", At(9, withdraw), share_weights="chat").message
    OWNER.write_text(consented)
    train("withdrawn", share_weights="chat")
    said["same bytes after it"] = adapter("withdrawn") == adapter("own")
    altered = train("altered", At(20, alter), share_weights="chat")
    said["altered"] = altered.message
    said["kept of it"] = str(altered.checkpoint)
    said["words that changed"] = int((before != k).sum())
    said["killed"], said["killed by a stray write"] = killed("killed", lambda: None), killed("stray", alter)
    said["gone on after it"] = train("stray", share_weights="chat").message
    said["dead"] = train("dead", At(9, end), share_weights="chat").message
    print(json.dumps(said))


def mapping_of(address: int) -> str:
    for line in Path("/proc/self/maps").read_text().splitlines():
        low, high = (int(each, 16) for each in line.split()[0].split("-"))
        if low <= address < high:
            return line.split(maxsplit=1)[1]
    return ""


if __name__ == "__main__":
    main()
