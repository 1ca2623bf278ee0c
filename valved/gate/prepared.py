"""PreparedPort over the native gate: keeps what stands ready for the next reclaim where native/prepared.c finds it."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from valved.fds import Fds
from valved.machine.prepared import PreparedTake
from valved.native._gate import ffi, lib


class NativePrepared:
    def __init__(self, gate: Any, account: Callable[[], int]) -> None:
        """`account`: the native service that holds GPUs on which memory moves."""
        self._gate = gate
        self._account = account
        self._all = ffi.new("struct valve_prepared[]", 0)
        self._keep: list[Any] = []  # what it points to
        self._links: list[int] = []  # ours: a number that its owner closes is the next stranger's
        self._begun = -1

    def listen(self, link: int) -> bool:
        return bool(lib.valve_prepared_listen(self._gate, link) == 0)

    def put(self, takes: Sequence[PreparedTake]) -> None:
        with Fds() as fds:
            links = [fds.own(os.dup(link)) for take in takes for link, _ in take.packets]
            fds.keep()
        left = iter(links)
        keep: list[Any] = []
        native = ffi.new("struct valve_prepared[]", len(takes))
        for one, take in zip(native, takes, strict=True):
            packets = ffi.new("struct valve_prepared_packet[]", len(take.packets))
            blocks = ffi.from_buffer("uint32_t[]", take.blocks)
            table, wanted = ffi.from_buffer(take.table), ffi.from_buffer("uint32_t[]", take.wanted)
            one.mode = mode = ffi.from_buffer("uint32_t[]", take.mode)
            for packet, (_, raw) in zip(packets, take.packets, strict=True):
                at = ffi.new("uint8_t[]", raw)
                packet.fd, packet.at, packet.bytes = next(left), at, len(raw)
                keep.append(at)
            keep += [packets, blocks, table, wanted, mode]
            one.wanted, one.had, one.table, one.blocks = wanted, take.had, table, blocks
            one.gpus = sum(1 << gpu for gpu in take.gpus)
            one.block_count, one.backed = len(blocks), take.backed
            one.packet, one.packet_count = packets, len(packets)
        lib.valve_prepared_put(self._gate, native, len(takes))
        before, self._links = self._links, links
        self._all, self._keep = native, keep
        for link in before:
            os.close(link)

    def rest(self) -> None:
        lib.valve_prepared_rest(self._gate, self._account())

    def wake(self) -> int:
        self._begun = lib.valve_prepared_wake(self._gate)
        return self._begun

    def end(self, *, go: bool) -> tuple[int, int]:
        sent: int = lib.valve_prepared_end(self._gate, go)
        return sent, self._all[self._begun].told_ns if sent >= 0 else 0
