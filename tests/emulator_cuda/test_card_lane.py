"""The card lane of training inside an engine, on the emulated GPU: turns, green contexts, two tiles in flight.

The engine's thread makes steps on a stream of its own; tiles are kernels of the emulated GPU. No torch is needed.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext
from ctypes import byref, c_int, c_uint, c_void_p
from pathlib import Path
from typing import Any

from cuda_driver import Cuda, wait_until, word
from emulated import on_gpu

TUNE = Path(__file__).resolve().parents[2] / "tune"
ENOUGH_S = 200.0  # ends only a hung test
NEVER_S = 3600.0  # of quiet, so that only the engine's thread gives turns


def asks() -> None:
    """Nobody ends the job."""


class Engine:
    """Its thread is the test's; the trainer's runs `tiles`."""

    def __init__(self, cuda: Cuda, **more: Any) -> None:
        sys.path.insert(0, str(TUNE))
        from valve_tune.engine.card import open_card
        from valve_tune.tiles.grid import Phase

        self.cuda, self.phase = cuda.start(), Phase.FORWARD
        self.stream = cuda.stream()
        self.seen: list[int] = []
        self.error: BaseException | None = None
        self.turns, self._inside = open_card(
            lambda share: nullcontext(self.seen.append(share.stream)),
            quiet_s=NEVER_S,
            **{"stuck_s": ENOUGH_S, "reserve_mib": 0, **more},
        )
        self._thread: threading.Thread | None = None

    def train(self, *tiles: Callable[[int], None]) -> None:
        """Each tile gets the stream of its turn."""

        def all_of() -> None:
            try:
                with self._inside():
                    for tile in tiles:
                        self.turns.run(self.phase, asks, lambda tile=tile: tile(self.seen[-1]))
                    self.turns.settle()
            except BaseException as error:
                self.error = error
            finally:
                self.turns.stop()
                self.turns.close()

        self._thread = threading.Thread(target=all_of)
        self._thread.start()

    def step(self, tickets: int = 1 << 20, share: float = 1.0) -> None:
        self.turns.step(tickets, share)
        self.cuda.launch(self.cuda.kernel("emu_spin"), 200, stream=self.stream)
        self.cuda.cuStreamSynchronize(self.stream)
        self.turns.stepped()

    def join(self) -> None:
        assert self._thread is not None
        self._thread.join(ENOUGH_S)
        assert not self._thread.is_alive()

    def steps_until(self, holds: Callable[[], bool], **how: Any) -> None:
        def one() -> bool:
            self.step(**how)
            return holds()

        wait_until(one, "the trainer goes on beside the steps")


def is_primary_alive(cuda: Cuda) -> bool:
    active = c_int()
    cuda.cuDevicePrimaryCtxGetState(0, byref(c_uint()), byref(active))
    return bool(active.value)


def green_of(cuda: Cuda, stream: int) -> int | None:
    green = c_void_p()
    cuda.cuStreamGetGreenCtx(stream, byref(green))
    return green.value


@on_gpu()
def test_tiles_run_beside_steps_in_their_order_in_the_share_of_the_plan_and_nothing_is_left(cuda: Cuda) -> None:
    engine = Engine(cuda)
    address = cuda.alloc(4096)
    fill = cuda.kernel("emu_fill")
    values = iter(range(1, 41))

    def tile(stream: int) -> None:
        cuda.launch(fill, address, 4096, next(values), stream=stream)

    engine.train(*[tile] * 40)
    engine.steps_until(lambda: len(engine.seen) > 20, tickets=2, share=0.5)
    engine.steps_until(lambda: len(engine.seen) >= 41, tickets=2, share=0.25)
    engine.join()
    last = cuda.read(address, 8)
    cuda.cuCtxSetCurrent(0)
    cuda.cuDevicePrimaryCtxRelease_v2(0)

    assert engine.error is None
    assert int.from_bytes(last, "little") == 40
    assert len(set(engine.seen[1:])) == 2  # the first is the thread's own
    assert engine.turns.count.beside == 40
    assert engine.turns.tile_s(engine.phase) > 0
    assert not is_primary_alive(cuda)


@on_gpu()
def test_the_streams_of_tiles_are_of_low_priority_in_green_contexts_and_the_engines_own_is_not(cuda: Cuda) -> None:
    engine = Engine(cuda)
    found: list[tuple[int, int | None]] = []

    def tile(stream: int) -> None:
        priority = c_int(-9)
        cuda.cuStreamGetPriority(stream, byref(priority))
        found.append((priority.value, green_of(cuda, stream)))

    engine.train(tile)
    engine.steps_until(lambda: bool(found))
    engine.join()
    least = c_int(-9)
    cuda.cuCtxGetStreamPriorityRange(byref(least), 0)

    assert found[0][0] == least.value
    assert found[0][1] is not None
    assert green_of(cuda, engine.stream) is None


@on_gpu()
def test_a_third_tile_is_never_on_the_card_with_the_first_two_and_the_engine_never_waits_for_them(cuda: Cuda) -> None:
    engine = Engine(cuda)
    page = cuda.pinned(4096)
    begun: list[str] = []
    heartbeat, spin = cuda.kernel("emu_heartbeat"), cuda.kernel("emu_spin")

    def held(stream: int) -> None:
        begun.append("held")
        cuda.launch(heartbeat, page, 500, 0, stream=stream)

    def free(stream: int) -> None:
        begun.append("free")
        cuda.launch(spin, 10, stream=stream)

    engine.train(held, free, free)
    engine.steps_until(lambda: word(page) > 0 and len(begun) == 2)
    for _ in range(20):
        engine.step()
    before = len(begun)
    ctypes.c_uint64.from_address(page + 16).value = 1
    engine.steps_until(lambda: len(begun) == 3)
    engine.join()

    assert before == 2
    assert engine.error is None


@on_gpu()
def test_a_tile_that_never_ends_ends_the_job_and_never_a_step_of_the_engine(cuda: Cuda) -> None:
    engine = Engine(cuda, stuck_s=0.2)
    page = cuda.pinned(4096)
    heartbeat = cuda.kernel("emu_heartbeat")

    def held(stream: int) -> None:
        cuda.launch(heartbeat, page, 500, 0, stream=stream)

    engine.train(held, held, held)
    engine.steps_until(lambda: engine.error is not None)
    engine.join()
    for _ in range(20):
        engine.step()
    ctypes.c_uint64.from_address(page + 16).value = 1

    assert type(engine.error).__name__ == "TileStuck"
    assert green_of(cuda, engine.seen[-1]) is not None  # what the tile holds is left to it
    cuda.cuCtxSynchronize()


@on_gpu(gpu_bytes=1 << 30)
def test_memory_that_the_engine_needs_is_never_taken_by_a_tile(cuda: Cuda) -> None:
    engine = Engine(cuda, reserve_mib=256)
    taken = cuda.alloc(cuda.free_bytes() - (200 << 20))
    ran: list[int] = []
    engine.train(ran.append)
    engine.steps_until(lambda: engine.error is not None)
    engine.join()
    engine.step()
    cuda.cuMemFree_v2(taken)

    assert "stay with the engine" in str(engine.error)
    assert ran == []


@on_gpu()
def test_tiles_of_a_pause_have_the_whole_card_and_the_engine_waits_no_longer_than_planned(cuda: Cuda) -> None:
    engine = Engine(cuda)
    spin = cuda.kernel("emu_spin")
    engine.train(*[lambda stream: cuda.launch(spin, 500, stream=stream)] * 8)
    wait_until(lambda: engine.turns.pause(0.05) < ENOUGH_S and engine.turns.count.tiles == 8, "all tiles ran in pauses")
    engine.join()

    assert engine.error is None
    assert engine.turns.count.in_pauses == 8
    assert len(set(engine.seen[1:])) == 1
    assert engine.seen[1] != engine.seen[0]
