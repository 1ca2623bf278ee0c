"""`valve demo tune`: a tiny model is trained in the idle time of an online service on the emulated GPU, paused, killed
with SIGKILL, resumed; its adapter is compared with that of an undisturbed run, byte for byte.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from valve_kube.options import option, whole
from valve_tools.demo import tune_served
from valve_tools.demo.endings import performed
from valve_tools.demo.node import EmulatedNode, NodeError, demo_folder
from valve_tools.demo.rounds import ONLINE

PROGRAM = Path(__file__).resolve().parent / "tune_program.py"
SPIN_US = 4000  # of each tile, on the emulated GPU
PAUSED_S = 3.0
PATIENCE_S = 3600.0  # only ends a hung demo
ADAPTER = "adapter_model.safetensors"
Line = dict[str, Any]


class TuneDemo:
    """One node, one service, one job."""

    def __init__(self, node: EmulatedNode, folder: Path, python: str, steps: int) -> None:
        self.node, self.folder, self.python, self.steps = node, folder, python, steps
        self.out = folder / "adapter"
        self._count = 0

    def steps_done(self) -> list[Line]:
        """The last line of each step: a resumed job repeats some."""
        try:
            lines = [
                json.loads(line) for line in (self.out / "metrics.jsonl").read_text().splitlines() if line[-1:] == "}"
            ]
        except OSError:
            return []
        return list({line["step"]: line for line in lines if line["kind"] == "step"}.values())

    def start(self) -> subprocess.Popen[bytes]:
        self._count += 1
        argv = [self.python, PROGRAM, "train", self.folder, self.out, self.steps, SPIN_US]
        log = self.folder / f"training-{self._count}.log"
        env = {"XDG_STATE_HOME": str(self.folder / "state")}
        return self.node.run("offline", [str(part) for part in argv], name="valve-tune", env=env, out=log)

    def until_step(self, step: int, child: subprocess.Popen[bytes]) -> None:
        def look() -> bool:
            if child.poll() not in (None, 0):
                raise NodeError((self.folder / f"training-{self._count}.log").read_text()[-2000:])
            return len(self.steps_done()) >= step

        self.node.wait_for(look, f"step {step}", PATIENCE_S)

    def tell(self, command: str) -> None:
        argv = [self.python, "-m", "valve_tune.serve", command, str(self.out)]
        performed(argv, env=self.node.environment())

    def play(self) -> None:
        child = self.start()
        self.until_step(self.steps // 4, child)
        say(f"step {len(self.steps_done())}: paused between two tiles")
        self.tell("pause")
        self.node.wait_for(lambda: '"paused"' in (self.out / "status.json").read_text(), "paused")
        before = len(self.steps_done())
        time.sleep(PAUSED_S)
        say(f"{len(self.steps_done()) - before} steps in {PAUSED_S:g} s; resumed")
        self.tell("resume")
        self.until_step(self.steps // 2, child)
        say(f"step {len(self.steps_done())}: killed with SIGKILL")
        child.kill()
        child.wait()
        child = self.start()
        self.until_step(self.steps, child)
        child.wait()
        if child.returncode:
            raise NodeError((self.folder / f"training-{self._count}.log").read_text()[-2000:])
        resumed = [line for line in (self.folder / "training-2.log").read_text().splitlines() if "resumed" in line]
        say(f"{resumed[0] if resumed else 'began anew'}; done at step {self.steps}")

    def undisturbed(self) -> Path:
        """The same job without service, pause or kill."""
        out = self.folder / "undisturbed"
        argv = [self.python, str(PROGRAM), "train", str(self.folder), str(out), str(self.steps)]
        performed(argv, env=self.node.environment())
        return out


def say(text: str) -> None:
    print(f"  {text}", flush=True)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="valve demo tune", description=__doc__)
    option(parser, "--python", ".venv-tune/bin/python", "The Python of the environment that can train.")
    option(parser, "--steps", 40, "The number of optimizer steps.", type=whole(4))
    parser.add_argument(
        "--engines",
        type=Path,
        default=".venv-engines",
        help="The folder in which vLLM is installed, if it is. Default: %(default)s.",
    )
    parser.add_argument("--keep", type=Path, help="Leave everything in this folder. Default: keep nothing.")
    options = parser.parse_args(argv)
    python = str(Path(options.python).absolute())
    if not Path(python).exists():
        print(f"valve demo tune: no {options.python}: make demo-tune sets it up", file=sys.stderr)
        return 2
    with demo_folder(options.keep) as folder:
        code = perform(folder, python, options.steps)
        if code or not tune_served.is_installed(options.engines):
            return code
        return 0 if tune_served.serve(options.engines, python, folder, folder / "adapter") else 1


def perform(folder: Path, python: str, steps: int) -> int:
    performed([python, str(PROGRAM), "make", str(folder)])
    print("a Llama of four layers with random weights is the base; training runs on the")
    print("CPU, each of its tiles as a kernel on the emulated GPU, as offline work beside")
    print("an online service")
    with EmulatedNode(folder) as node:
        node.start_valved()
        service = [str(ONLINE), "--duration", "3600", "--rate", "1", "--out-tokens", "20", "--quiet"]
        node.run("online", service, name="chat", out=folder / "chat.log")
        demo = TuneDemo(node, folder, python, steps)
        began = time.monotonic()
        demo.play()
        took = time.monotonic() - began
        chat = next(each for each in node.status().services if each.name == "chat")
        print(f"the service stopped the job {chat.preemptions} times in {took:.0f} s")
        return report(demo, demo.undisturbed())


def report(demo: TuneDemo, undisturbed: Path) -> int:
    losses = [line["loss"] for line in sorted(demo.steps_done(), key=lambda line: int(line["step"]))]
    few = max(1, len(losses) // 10)
    first, last = sum(losses[:few]) / few, sum(losses[-few:]) / few
    harvested = [line["harvested"] for line in demo.steps_done() if "harvested" in line][-1]
    ours, theirs = ((folder / ADAPTER).read_bytes() for folder in (demo.out, undisturbed))
    is_same, falls = ours == theirs, last < first
    print(f"loss: {first:.3f} in the first {few} steps, {last:.3f} in the last {few}")
    print(f"harvested since the restart: {harvested:.0%} of the time (else: stopped, or no core was free)")
    print(f"adapter: {len(ours)} bytes, sha256 {hashlib.sha256(ours).hexdigest()[:16]}")
    print(f"the undisturbed run's adapter is {'the same, byte for byte' if is_same else 'DIFFERENT'}")
    return 0 if is_same and falls else 1
