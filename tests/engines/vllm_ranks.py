"""Reclaims in the workers of a tensor-parallel vLLM, for `vllm_campaign.py` with `"ranks"` in its plan.

The fake node lives beside the scheduler. Every rank draws the same lots and spoils its share of the blocks; the first
one says what it takes, and waits until the node has told it.
"""

from __future__ import annotations

import os
import threading
from multiprocessing.connection import Client, Listener
from pathlib import Path
from typing import Any

import vllm_campaign

ENV_ASYNC = "VALVE_TEST_ASYNC"
if os.environ.get(ENV_ASYNC):
    vllm_campaign.force_async()


class Silent:
    """On the other ranks."""

    def take(self, blocks: list[int]) -> None:
        pass

    def give(self, blocks: list[int]) -> None:
        pass


class FarNode:
    """On the first rank: the node of the scheduler's process."""

    def __init__(self, place: str) -> None:
        self._connection = Client(place)

    def take(self, blocks: list[int]) -> None:
        self._ask("take", blocks)

    def give(self, blocks: list[int]) -> None:
        self._ask("give", blocks)

    def _ask(self, verb: str, blocks: list[int]) -> None:
        self._connection.send((verb, blocks))
        self._connection.recv()


class InjectedWorker:
    """What vLLM mixes into its Worker (`worker_extension_cls`), so that all ranks can be called by name."""

    rank: int
    model_runner: Any

    def valve_inject(self, place: str, ranks: int) -> None:
        node = FarNode(place) if self.rank == 0 else Silent()
        self.injector = vllm_campaign.Injector(self.model_runner, node, slice(self.rank, None, ranks))

    def valve_start(self, seed: int, options: dict[str, Any]) -> None:
        self.injector.start(seed, **options)

    def valve_stop(self) -> tuple[int, int]:
        self.injector.stop()
        return self.injector.events, self.injector.step


class Injectors:
    """`vllm_campaign.Injector` of all ranks."""

    def __init__(self, llm: Any, node: Any, folder: Path, ranks: int) -> None:
        self._llm, self._node = llm, node
        self.events = self.step = 0
        place = str(folder / "node.rpc")
        self._listener = Listener(place)
        threading.Thread(target=self._serve, daemon=True).start()
        llm.collective_rpc("valve_inject", args=(place, ranks))

    def start(self, seed: int, **options: Any) -> None:
        self._llm.collective_rpc("valve_start", args=(seed, options))

    def stop(self) -> None:
        self.events, self.step = self._llm.collective_rpc("valve_stop")[0]

    def _serve(self) -> None:
        with self._listener.accept() as first_rank:
            while True:
                try:
                    verb, blocks = first_rank.recv()
                except EOFError:
                    return
                getattr(self._node, verb)(blocks)
                first_rank.send(None)
