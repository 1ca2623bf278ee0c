"""An online service: open-loop arrivals, continuous batching, TTFT and TPOT where the user stands.

Prints the lines of tools/demo/online.c: one a request, and a summary.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))  # runs where nothing is installed
from torch_model import SHAPES, Decoder, Stepper, wait  # type: ignore[import-not-found]


@dataclass
class TorchRequest:
    name: int
    arrival_s: float
    prompt: int
    answer: int
    first_s: float = 0.0
    made: int = 0


def draw(options: argparse.Namespace) -> list[TorchRequest]:
    """Bursty arrivals (gaps of squared variation 4) with lognormal lengths, as the demo's generator draws them."""
    dice, at = random.Random(options.seed), 0.0
    found: list[TorchRequest] = []
    while True:
        at += dice.gammavariate(0.25, 4.0 / options.rate)
        if at >= options.duration:
            return found
        prompt = min(options.room // 2, max(1, round(options.in_tokens * dice.lognormvariate(0, 0.7))))
        answer = min(options.room // 2 - 1, max(2, round(options.out_tokens * dice.lognormvariate(0, 0.5))))
        found.append(TorchRequest(name=len(found), arrival_s=at, prompt=prompt, answer=answer))


class TorchService:
    def __init__(self, options: argparse.Namespace) -> None:
        self.device = options.device
        self.model = Decoder(SHAPES[options.shape], slots=options.slots, room=options.room, device=options.device)
        self.step = Stepper(self.model, graphs=not options.eager)
        self.free = list(range(options.slots))
        self.active: dict[int, TorchRequest] = {}
        self.hint = getattr(ctypes.CDLL(None), "valve_hint_open_requests", None)
        self.start_s = 0.0

    def now(self) -> float:
        return time.monotonic() - self.start_s

    def tell(self, open_requests: int) -> None:
        """An engine tells how many requests it has open where the hook is loaded."""
        if self.hint is not None:
            self.hint(ctypes.c_uint32(open_requests))

    def admit(self, request: TorchRequest) -> None:
        slot = self.free.pop()
        prompt = torch.arange(request.prompt, device=self.device) % SHAPES["tiny"].vocabulary
        self.model.prefill(slot, prompt)
        wait(self.device)
        request.first_s, request.made = self.now(), 1
        self.active[slot] = request

    def decode(self) -> list[TorchRequest]:
        """One token for every open request; those that are complete."""
        self.step()
        wait(self.device)
        done = []
        for slot, request in list(self.active.items()):
            request.made += 1
            if request.made >= request.answer:
                done.append(self.active.pop(slot))
                self.free.append(slot)
        return done

    def serve(self, arrivals: list[TorchRequest]) -> int:
        """All of them, in order of arrival; how many tokens were made."""
        waiting, finished = list(arrivals), 0
        self.start_s = time.monotonic()
        while finished < len(arrivals):
            while waiting and self.free and waiting[0].arrival_s <= self.now():
                arrived = sum(each.arrival_s <= self.now() for each in waiting)
                self.tell(arrived + len(self.active))
                self.admit(waiting.pop(0))
            if self.active:
                for request in self.decode():
                    finished += 1
                    show(request, self.now())
                self.tell(len(self.active) + sum(each.arrival_s <= self.now() for each in waiting))
            elif waiting:
                time.sleep(max(0.0, waiting[0].arrival_s - self.now()))
        return sum(each.made for each in arrivals)


def show(request: TorchRequest, done_s: float) -> None:
    tpot = (done_s - request.first_s) * 1e3 / max(1, request.made - 1)
    record = {"request": request.name, "arrival_s": request.arrival_s, "in": request.prompt, "out": request.made}
    print(json.dumps({**record, "ttft_ms": (request.first_s - request.arrival_s) * 1e3, "tpot_ms": tpot}), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--shape", choices=list(SHAPES), default="1b", help="The shape of the model. Default: %(default)s."
    )
    parser.add_argument("--device", default="cuda", help="The device of PyTorch. Default: %(default)s.")
    parser.add_argument(
        "--duration", type=float, default=20.0, help="Take arrivals for this many seconds. Default: %(default)g."
    )
    parser.add_argument("--rate", type=float, default=1.5, help="The requests a second. Default: %(default)g.")
    parser.add_argument(
        "--in-tokens", type=float, default=400, help="The mean tokens of a prompt. Default: %(default)g."
    )
    parser.add_argument(
        "--out-tokens", type=float, default=40, help="The mean tokens of an answer. Default: %(default)g."
    )
    parser.add_argument("--seed", type=int, default=1, help="The seed of the drawn requests. Default: %(default)s.")
    parser.add_argument(
        "--slots", type=int, default=16, help="The number of requests that decode together. Default: %(default)s."
    )
    parser.add_argument(
        "--room", type=int, default=2048, help="The tokens that a request may have. Default: %(default)s."
    )
    parser.add_argument("--eager", action="store_true", help="Run without CUDA graphs.")
    options = parser.parse_args()
    with torch.inference_mode():
        service = TorchService(options)
        service.admit(
            TorchRequest(name=-1, arrival_s=0, prompt=8, answer=2)
        )  # warm up: the first call of each kind is slow
        service.decode()
        arrivals = draw(options)
        tokens = service.serve(arrivals)
    wall_s = time.monotonic() - service.start_s
    summary = {"summary": "online", "requests": len(arrivals), "finished": len(arrivals), "tokens": tokens}
    print(json.dumps({**summary, "start_s": service.start_s, "wall_s": wall_s}), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
