"""Tiles in shares of a card's processors beside steps of an engine, in one process: the program of experiment C16.

Tiles go by the product's own card lane (`valve_hook.cotrain.card`): green contexts, streams of low priority, at most
two in flight. A step is a kernel of 1 ms on a stream of the highest priority. One JSON line at the end.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import sys
import threading
import time
from collections.abc import Callable
from ctypes import byref, c_char_p, c_float, c_int, c_uint, c_uint64, c_void_p
from functools import partial
from pathlib import Path
from typing import Any

if not __package__:  # runs from a bare checkout, too
    try:
        import valve_hook.cotrain.card.driver  # noqa: F401
    except ImportError:
        import types

        _package = types.ModuleType("valve_hook")
        _package.__path__ = [str(Path(__file__).resolve().parents[3] / "patches" / "hook")]
        sys.modules["valve_hook"] = _package

from valve_hook.cotrain.card.driver import CardDriver, CardRefused
from valve_hook.cotrain.card.flight import TilesInFlight, open_flight
from valve_hook.cotrain.card.shares import CardShare

BLOCK, SLOTS, FIRST_ITERATIONS = 256, 512, 20_000
STEP_MS, TILE_MS = 1.0, 5.0
STUCK_S = 30.0
HOST_LAUNCH_PRIORITY = -100  # clamped to the highest there is


class Kernels:
    """`burn` of the lab's kernels: it marks, in `slot`, each processor that it ran on."""

    def __init__(self, image: bytes, sms: int) -> None:
        self.library = ctypes.CDLL("libcuda.so.1")
        self.grid = 4 * sms
        module, self.function = c_void_p(), c_void_p()
        self.call("cuModuleLoadData", byref(module), c_char_p(image))
        self.call("cuModuleGetFunction", byref(self.function), module, c_char_p(b"burn"))
        self.state = c_uint64()
        self.call("cuMemAlloc_v2", byref(self.state), ctypes.c_size_t(4 * BLOCK * self.grid))
        self.call("cuMemsetD8_v2", self.state, ctypes.c_ubyte(7), ctypes.c_size_t(4 * BLOCK * self.grid))
        self.beat, self.slot = self._pinned(16), self._pinned(8 * SLOTS)
        self.marks = (c_uint64 * SLOTS).from_address(self.slot.value or 0)
        self.stream, first, last = c_void_p(), c_void_p(), c_void_p()
        self.call("cuStreamCreateWithPriority", byref(self.stream), c_uint(1), c_int(HOST_LAUNCH_PRIORITY))
        for event in (first, last):
            self.call("cuEventCreate", byref(event), c_uint(0))
        self._first, self._last = first, last
        self.run(FIRST_ITERATIONS)
        self.a_ms = max(1, int(FIRST_ITERATIONS / self.run(FIRST_ITERATIONS)))

    def call(self, name: str, *arguments: Any) -> None:
        if code := getattr(self.library, name)(*arguments):
            raise OSError(f"{name}: CUDA error {code}")

    def _pinned(self, size: int) -> c_void_p:
        out = c_void_p()
        self.call("cuMemHostAlloc", byref(out), ctypes.c_size_t(size), c_uint(0))
        ctypes.memset(out, 0, size)
        return out

    def launch(self, iterations: int, stream: int | c_void_p) -> None:
        values = [self.state, c_uint(iterations), self.beat, self.slot, c_uint(0xFFFF), c_uint(0xFF)]
        pointers = (c_void_p * len(values))(*[ctypes.addressof(value) for value in values])
        shape = [c_uint(self.grid), c_uint(1), c_uint(1), c_uint(BLOCK), c_uint(1), c_uint(1), c_uint(0)]
        handle = c_void_p(stream) if isinstance(stream, int) else stream
        self.call("cuLaunchKernel", self.function, *shape, handle, pointers, None)

    def run(self, iterations: int) -> float:
        """ms of one kernel on the engine's stream, as the card says."""
        took = c_float()
        self.call("cuEventRecord", self._first, self.stream)
        self.launch(iterations, self.stream)
        self.call("cuEventRecord", self._last, self.stream)
        self.call("cuStreamSynchronize", self.stream)
        self.call("cuEventElapsedTime", byref(took), self._first, self._last)
        return max(took.value, 1e-6)


def steps_us(kernels: Kernels, count: int) -> list[float]:
    found = []
    for _ in range(count):
        time.sleep(STEP_MS / 1e3)
        began = time.perf_counter()
        kernels.launch(int(STEP_MS * kernels.a_ms), kernels.stream)
        kernels.call("cuStreamSynchronize", kernels.stream)
        found.append((time.perf_counter() - began) * 1e6)
    return found


class Tiles:
    """Launched by a thread of their own until told to stop."""

    def __init__(self, flight: TilesInFlight[int], kernels: Kernels, context: int, share: float) -> None:
        self._flight, self._kernels, self._context, self._share = flight, kernels, context, share
        self.ms: list[float] = []
        self.most, self.error = 0, ""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Tiles:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            with self._flight.shares.driver.current(self._context):
                self._launch_all()
        except (CardRefused, OSError) as error:
            self.error = str(error)

    def _launch_all(self) -> None:
        number = 0
        while not self._stop.is_set():
            self.ms += [ms for _, ms in self._flight.ready(self._share)]
            self._flight.launch(number, self._tile)
            self.most = max(self.most, len(self._flight))
            number += 1
        self.ms += [ms for _, ms in self._flight.drain()]

    def _tile(self, share: CardShare) -> None:
        self._kernels.launch(int(TILE_MS * self._kernels.a_ms), share.stream)


def of_share(
    flight: TilesInFlight[int], kernels: Kernels, context: int, share: CardShare, steps: int
) -> dict[str, Any]:
    """Where one tile of a share ran, what tiles take there, and steps beside them."""
    ctypes.memset(kernels.slot, 0, 8 * SLOTS)
    flight.ready(share.share)
    flight.launch(0, lambda mine: kernels.launch(int(TILE_MS * kernels.a_ms), mine.stream))
    (_, alone_ms) = flight.drain()[0]
    ran_on = sum(1 for mark in kernels.marks if mark)
    with Tiles(flight, kernels, context, share.share) as tiles:
        beside = steps_us(kernels, steps)
    if tiles.error:
        raise CardRefused(tiles.error)
    found = {"share": round(share.share, 3), "sms": share.sms, "ran_on": ran_on, "tile_alone_ms": alone_ms}
    return {**found, "tiles_ms": tiles.ms, "step_us": beside, "most_in_flight": tiles.most}


def timed_us(action: Callable[[], Any]) -> tuple[Any, float]:
    began = time.perf_counter()
    found = action()
    return found, (time.perf_counter() - began) * 1e6


def measure(image: bytes, steps: int) -> dict[str, Any]:
    driver = CardDriver()
    driver.call("cuInit", 0)
    primary = driver.made("cuDevicePrimaryCtxRetain", 0)
    driver.call("cuCtxPushCurrent_v2", primary)
    kernels = Kernels(image, driver.processors(0).sms)
    alone = steps_us(kernels, steps)
    flight, start_us = timed_us(lambda: open_flight(driver, stuck_s=STUCK_S))
    shares = flight.shares.all
    rows = [of_share(flight, kernels, primary, share, steps) for share in shares]
    changes = [timed_us(partial(flight.ready, share.share))[1] for share in [*shares, *shares]]
    _, end_us = timed_us(flight.close)
    times = {"start_us": start_us, "end_us": end_us, "change_us": changes}
    return {"refused": "", "alone_us": alone, "shares": rows, **times}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--image", type=Path, required=True, help="The PTX of the kernels, as a file.")
    parser.add_argument("--steps", type=int, default=300, help="Decode steps of each share. Default: %(default)s.")
    options = parser.parse_args()
    try:
        print(json.dumps(measure(options.image.read_bytes() + b"\0", options.steps)))
    except CardRefused as error:
        print(json.dumps({"refused": str(error)}))


if __name__ == "__main__":
    main()
