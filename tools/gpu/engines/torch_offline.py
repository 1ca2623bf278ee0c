"""An offline batch job: full batches of prompts, decoded greedily; a digest of every unit's tokens.

A unit is one batch. Batches come from a few seeds in turn, so a unit can be compared with an undisturbed one of the
same seed: `--digests FILE` writes them where the file is missing, else compares. Prints the lines of
tools/demo/offline.c.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # must stand before CUDA starts: sums in a fixed order
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))  # runs where nothing is installed
from torch_model import SHAPES, Decoder, Stepper  # type: ignore[import-not-found]

SEEDS = 4
PROMPT = 32


class TorchJob:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        room = PROMPT + options.tokens + 1
        self.model = Decoder(SHAPES[options.shape], slots=options.slots, room=room, device=options.device)
        self.step = Stepper(self.model, graphs=not options.eager)
        self.stopped = False

    def prompt(self, seed: int, slot: int) -> torch.Tensor:
        words = torch.arange(PROMPT, device=self.options.device) * (seed + 3) + slot * 7
        return words % SHAPES["tiny"].vocabulary

    def unit(self, seed: int) -> str:
        """One batch from start to end; the digest of its tokens."""
        made = []
        for slot in range(self.options.slots):
            self.model.prefill(slot, self.prompt(seed, slot))
        for _ in range(self.options.tokens):
            self.step()
            made.append(self.model.tokens.clone())
        return hashlib.sha256(torch.cat(made).cpu().numpy().tobytes()).hexdigest()[:16]

    def stop(self, *_: object) -> None:
        self.stopped = True


def run(job: TorchJob, known: dict[str, str]) -> tuple[int, float, str, bool]:
    """(units, seconds, digest over all of them, whether every unit came out as known)."""
    options, whole, same = job.options, hashlib.sha256(), True
    start = reported = time.monotonic()
    units = 0
    while not job.stopped and (not options.units or units < options.units):
        if options.duration and time.monotonic() - start >= options.duration:
            break
        digest = job.unit(units % SEEDS)
        whole.update(digest.encode())
        same = same and known.setdefault(str(units % SEEDS), digest) == digest
        units += 1
        now = time.monotonic()
        if options.report and now - reported >= options.report:
            reported = now
            print(json.dumps({"t_s": now - start, "now_s": now, "units": units}), flush=True)
    return units, time.monotonic() - start, whole.hexdigest()[:16], same


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--shape", choices=list(SHAPES), default="1b", help="The shape of the model. Default: %(default)s."
    )
    parser.add_argument("--device", default="cuda", help="The device of PyTorch. Default: %(default)s.")
    parser.add_argument(
        "--units",
        type=int,
        default=0,
        help="The number of batches to run. 0 stands for no end until the process is told to stop. Default: "
        "%(default)s.",
    )
    parser.add_argument(
        "--duration",
        type=float,
        default=0.0,
        help="End after this many seconds. 0 stands for no limit. Default: %(default)g.",
    )
    parser.add_argument(
        "--report",
        type=float,
        default=0.0,
        help="Print a progress line every so many seconds. 0 stands for none. Default: %(default)g.",
    )
    parser.add_argument("--slots", type=int, default=32, help="The number of prompts in a batch. Default: %(default)s.")
    parser.add_argument("--tokens", type=int, default=32, help="The tokens of each answer. Default: %(default)s.")
    parser.add_argument(
        "--digests", type=Path, help="Write the digests to this file, or compare with it where it exists."
    )
    parser.add_argument("--eager", action="store_true", help="Run without CUDA graphs.")
    options = parser.parse_args()
    torch.use_deterministic_algorithms(True, warn_only=True)
    known: dict[str, str] = {}
    if options.digests and options.digests.exists():
        known = json.loads(options.digests.read_text())
    with torch.inference_mode():
        job = TorchJob(options)
        signal.signal(signal.SIGTERM, job.stop)
        signal.signal(signal.SIGINT, job.stop)
        units, wall_s, digest, same = run(job, known)
    if options.digests:
        options.digests.write_text(json.dumps(known))
    summary = {"summary": "offline", "units": units, "wall_s": wall_s, "checksum": digest, "ok": same}
    print(json.dumps(summary), flush=True)
    return 0 if same else 1


if __name__ == "__main__":
    raise SystemExit(main())
