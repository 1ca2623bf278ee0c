"""A cache of stock PyTorch in the shim's bracket, moved under a CUDA graph: the program of experiment C15.

`--role offline` has a cache of Valve's memory, writes its number into every block, and replays a graph that reads every
page while valved takes blocks and gives them back. `--role online` makes valved do that: it wants blocks, for a while.
The hook's own link and table are used, so what is believed here is what an engine would believe. One JSON line at the
end.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from valve_hook.link import Attach, BlockLayout, Tensor, process_link
from valve_hook.shim import shim_call
from valve_hook.wire import Mode

sys.path.insert(0, str(Path(__file__).resolve().parent))  # runs where nothing of the lab is installed
from bracket_memory import BracketMemory, DriverMemory  # type: ignore[import-not-found]

BLOCK_TOKENS = 16
ATTACH_S = 60.0
DRAWN_S = 60.0  # at most, for memory that was asked for
LOOK_S = 0.01
LEAST_REPLAYS = 8


class Cache:
    """Blocks with an owner's word each, and the table that says which of them have memory."""

    def __init__(self, memory: Any, blocks: int, block_bytes: int) -> None:
        self.memory, self.blocks = memory, blocks
        self.steps = self.replays = self.wrong_pages = self.taken = self.returned = 0
        self.session: Any = None
        self.word = np.zeros(blocks, dtype=np.int64)
        """What each block must hold; where it has no memory, zero."""
        self.between_steps = shim_call("valve_kv_step")
        self.backed = np.ones(blocks, dtype=bool)
        if memory.is_valves:
            self._attach(block_bytes)

    def _attach(self, block_bytes: int) -> None:
        link = process_link()
        assert link is not None, "no valved"
        tensor = Tensor(base=self.memory.base, block_stride=block_bytes, block_bytes=block_bytes)
        link.register_layout(BlockLayout(blocks=self.blocks, block_tokens=BLOCK_TOKENS, tensors=[tensor], pinned=()))
        wanted = Attach(
            engine="lab", mode=Mode.FULL, blocks=self.blocks, block_tokens=BLOCK_TOKENS, rows=1, row_blocks=1, ranks=1
        )
        self.session = link.attach(wanted, ATTACH_S)
        assert self.session is not None, link.said
        change = self.session.table.begin(np.zeros(self.blocks, dtype=bool))
        self.backed = change.backed
        self.session.table.accept(change)
        self.session.book.acknowledge(change.epoch)

    def publish(self, used: int, wanted: int) -> None:
        if self.session is not None:
            self.session.book.write_gauges(Mode.FULL, used, wanted, self.steps)

    def step(self) -> None:
        """What an engine does between two steps, and the next one: only what stood before it is judged."""
        if self.between_steps is not None:
            self.between_steps()
        self.heed()
        before, backed = self.word.copy(), self.backed.copy()
        pages = self.memory.replay()
        self.replays += 1
        self.heed()
        sound = backed & self.backed & (self.word == before)
        self.wrong_pages += wrong(pages, before, sound)
        for block in np.flatnonzero(self.backed & (self.word == 0)).tolist():
            self.word[block] = block + 1
            self.memory.write(block, block + 1)

    def heed(self) -> None:
        if self.session is None or not self.session.table.has_news:
            return
        change = self.session.table.read()
        lost = change.lost.astype(np.int64)
        self.taken += int((self.backed[lost] & ~change.backed[lost]).sum())
        self.returned += int((~self.backed[lost] & change.backed[lost]).sum())
        self.backed = change.backed
        self.word[lost] = 0
        self.session.table.accept(change)
        self.session.book.acknowledge(change.epoch)

    def read_all(self) -> int:
        """Pages that do not hold what they must, read past the graph; a page without memory must be readable."""
        self.heed()
        return wrong(self.memory.read(), self.word, self.backed)


def wrong(pages: Any, words: Any, judged: Any) -> int:
    """Pages of judged blocks in which any word is another's."""
    return int((pages[judged] != words[judged][:, None, None]).any(axis=2).sum())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--role", choices=("offline", "online"), required=True, help="The side that this process plays."
    )
    parser.add_argument(
        "--blocks", type=int, default=64, help="The number of blocks of the cache. Default: %(default)s."
    )
    parser.add_argument("--block-mib", type=int, default=2, help="The size of a block in MiB. Default: %(default)s.")
    parser.add_argument(
        "--allocator",
        choices=("native", "expandable", "async"),
        default="native",
        help="The allocator of PyTorch to use. Default: %(default)s.",
    )
    parser.add_argument(
        "--driver", action="store_true", help="Use driver calls instead of PyTorch (for the emulated GPU)."
    )
    parser.add_argument(
        "--want", type=int, default=24, help="The number of blocks that the online side wants. Default: %(default)s."
    )
    options = parser.parse_args()
    size = options.block_mib << 20
    blocks = options.blocks
    memory = DriverMemory(blocks, size, options.allocator) if options.driver else BracketMemory(blocks, size)
    cache = Cache(memory, options.blocks, size)
    (offline if options.role == "offline" else online)(cache, options.want)
    return 0


def offline(cache: Cache, _: int) -> None:
    """Until told to stop. An engine that has made no step is given memory at once: only then may kernels begin."""
    deadline = time.monotonic() + DRAWN_S
    while not cache.backed.all() and time.monotonic() < deadline:
        cache.publish(0, cache.blocks)
        cache.heed()
        time.sleep(LOOK_S)
    stopped: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: stopped.append(number))
    while not stopped or cache.replays < LEAST_REPLAYS:
        cache.steps += 1
        cache.publish(int((cache.word > 0).sum()), cache.blocks)
        cache.step()
    tell(cache)


def online(cache: Cache, want: int) -> None:
    """Wants blocks until it has them, or the time is over."""
    deadline = time.monotonic() + DRAWN_S
    while int(cache.backed.sum()) < want and time.monotonic() < deadline:
        cache.publish(1, want)
        process_link().need(want)  # type: ignore[union-attr]
        time.sleep(LOOK_S)
        cache.heed()
    tell(cache)


def tell(cache: Cache) -> None:
    print(
        json.dumps(
            {
                "is_valves": bool(cache.memory.is_valves),
                "replays": cache.replays,
                "taken": cache.taken,
                "returned": cache.returned,
                "backed": int(cache.backed.sum()),
                "wrong_pages_in_graph": cache.wrong_pages,
                "wrong_pages_read": cache.read_all(),
            }
        ),
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
