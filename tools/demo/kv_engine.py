"""An engine without a model that shares its KV memory: the hook of the real engines over blocks that tell their owner.

Both KV workloads are made of it. What a loss means for a request is their business.
"""

from __future__ import annotations

import argparse
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import numpy as np
from valve_hook.ledger import Ledger
from valve_hook.link import Attach, BlockLayout, Link, process_link
from valve_hook.reconciler import Reconciler
from valve_hook.shared import Blocks
from valve_hook.shim import shim_call
from valve_hook.wire import Mode
from valve_kube.options import option
from valve_tools.demo.kv_memory import BLOCK_TOKENS, KvSequence, TaggedMemory, blocks_for
from valve_tools.emulator.device import Device

ATTACH_S = 60.0  # for a valved that took the call: it may own the cache already, and what is written there is lost then


def kv_options(parser: argparse.ArgumentParser, prefill_us: float) -> None:
    option(parser, "--kv-blocks", 512, "The number of blocks of the KV cache.")
    option(parser, "--kv-planes", 4, "The pieces of a block: layers x (K, V).")
    option(parser, "--block-kib", 64, "The number of KiB that a block has in each plane.")
    option(parser, "--tag-kib", 4, "The KiB from one page that is written and checked to the next.")
    option(parser, "--prefill-us", prefill_us, "The GPU time per prompt token, in microseconds.")
    option(parser, "--duration", 0.0, "The seconds after which no new request is begun. 0 stands for no limit.")


class KvEngine(ABC):
    """`valve_hook.reconciler.EngineAdapter`: blocks that are used, and blocks that are withheld, by number."""

    def __init__(self, name: str, options: argparse.Namespace, rows: int) -> None:
        self.options = options
        self.device = Device()
        self.blocks: int = options.kv_blocks
        self.memory = TaggedMemory(
            self.device,
            blocks=self.blocks,
            planes=options.kv_planes,
            block_kib=options.block_kib,
            tag_kib=options.tag_kib,
        )
        self.used = np.zeros(self.blocks, dtype=bool)
        self.used[0] = True  # the null block, for padding
        self.withheld = np.zeros(self.blocks, dtype=bool)
        self.arrange(np.zeros(self.blocks, dtype=np.uint32))
        self.held: dict[str, KvSequence] = {}
        self.stopped = False
        self.step_ended = shim_call("valve_kv_step")
        signal.signal(signal.SIGTERM, self._stop)
        signal.signal(signal.SIGINT, self._stop)
        self.link = process_link() or Link(build="no valved", path=Path())
        self.hook = Reconciler(
            link=self.link, engine=self, ledger=Ledger(block_tokens=BLOCK_TOKENS), blocks=self.blocks, mode=Mode.FULL
        )
        self._attach(name, rows)
        self.start_s = time.monotonic()

    def _stop(self, *_: object) -> None:
        self.stopped = True

    def _attach(self, name: str, rows: int) -> None:
        self.link.register_layout(
            BlockLayout(blocks=self.blocks, block_tokens=BLOCK_TOKENS, tensors=self.memory.tensors)
        )
        wanted = Attach(
            engine=name,
            mode=Mode.FULL,
            blocks=self.blocks,
            block_tokens=BLOCK_TOKENS,
            rows=rows,
            row_blocks=self.blocks,
            ranks=1,
        )
        if process_link() is not None:
            self.link.attach(wanted, ATTACH_S)
        self.hook.sync()

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self.start_s

    @property
    def tables(self) -> int:
        """How many valveds it was attached to, so far."""
        return self.hook.session.number if self.hook.session is not None else 0

    # ---- a request's blocks ----

    def begin(self, name: str, number: int, tokens: int, most: int) -> KvSequence | None:
        """Blocks for `most` tokens, of which `tokens` are there from the first step on; None: there is no room."""
        free = self.order[~(self.used | self.withheld)[self.order]]
        count = blocks_for(most)
        if count > len(free):
            return None
        sequence = self.held[name] = KvSequence(name=name, id=number, tokens=tokens, blocks=free[:count])
        self.used[sequence.blocks] = True
        self.hook.ledger.admit(name, sequence.blocks.tolist())
        return sequence

    def end(self, sequence: KvSequence) -> None:
        del self.held[sequence.name]
        self.hook.ledger.dismiss(sequence.name)
        self.used[sequence.blocks] = False

    def held_blocks(self) -> int:
        return sum(len(each.blocks) for each in self.held.values())

    def publish(self) -> None:
        """After a step was chosen: what valved reads."""
        self.hook.ledger.turn_rows()
        self.hook.publish()

    def lose(self, sequence: KvSequence) -> None:
        """Its blocks are gone, and it holds none any more. Of an engine that recomputes what it lost."""
        raise RuntimeError(f"blocks of {sequence.name} were taken from an engine that cannot lose any")

    # ---- what the hook asks ----

    def discard(self, running: Mapping[str, int], left: Collection[str]) -> dict[str, Sequence[int]]:
        hit = [self.held[name] for name in running]
        self._given_back = {block for each in hit for block in each.blocks.tolist()}
        for each in hit:
            self.end(each)
            self.lose(each)
        return {each.name: () for each in hit}

    def forget(self, blocks: Blocks) -> int:
        """No block is cached without a request: the blocks that held content were just given back."""
        return len(self._given_back.intersection(blocks.tolist()))

    def withhold(self, blocks: Blocks) -> None:
        self.withheld[blocks] = True

    def release(self, blocks: Blocks) -> None:
        self.withheld[blocks] = False

    def reset(self) -> int:
        return len(self.discard(dict.fromkeys(self.held, 0), ()))

    def abandon(self) -> int:
        return self.reset()

    def arrange(self, column_of: Blocks) -> None:
        """A request fills one column before it takes another."""
        self.column_of = column_of
        self.order = np.argsort(column_of, kind="stable")

    def free_columns(self) -> Sequence[int]:
        """The last first."""
        free = self.column_of[~(self.used | self.withheld)]
        found: list[int] = np.setdiff1d(free, self.column_of[self.used])[::-1].tolist()
        return found

    @abstractmethod
    def gauges(self) -> tuple[int, int, int, int]: ...
