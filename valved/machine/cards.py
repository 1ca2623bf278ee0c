"""Names and memory sizes of the cards, which NVML knows and the Resource Manager's own lists do not carry."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import struct
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from valved.machine.helpers import Helpers, Worker

log = logging.getLogger("valved")

NAMES_S = 2.0  # how long a start waits for names
SILENT_S = 10.0  # NVML takes milliseconds: what takes so long is worth a line


@dataclass(frozen=True, slots=True, kw_only=True)
class CardName:
    """What a person wants to read about a GPU."""

    name: str
    total_bytes: int


def by_uuid() -> Mapping[bytes, CardName]:
    """All cards by their 16-byte UUID; empty where NVML is missing or does not answer. It is filled later where NVML is
    slow: beside a card in trouble it may never answer, and nobody waits for a name."""
    found: dict[bytes, CardName] = {}
    reader = threading.Thread(target=_read_names, args=(found,), name="valved-nvml", daemon=True)
    with contextlib.suppress(RuntimeError):  # no thread can be had
        reader.start()
        reader.join(NAMES_S)
    return found


def _read_names(found: dict[bytes, CardName]) -> None:
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:
        return
    try:
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            name, uuid = pynvml.nvmlDeviceGetName(handle), pynvml.nvmlDeviceGetUUID(handle)
            total = int(pynvml.nvmlDeviceGetMemoryInfo(handle).total)
            found[UUID(uuid.removeprefix("GPU-")).bytes] = CardName(name=name, total_bytes=total)
    except (pynvml.NVMLError, ValueError):
        pass  # a card that vanished half way, or says nonsense: the others keep their names
    finally:
        pynvml.nvmlShutdown()


@dataclass(frozen=True, slots=True, kw_only=True)
class CardUse:
    """How a card is used at this moment, by all processes."""

    total_bytes: int
    used_bytes: int
    by_pid: Mapping[int, int]  # compute processes and their bytes; 0 where the driver does not say
    is_mig: bool
    read_ns: int = field(default=sys.maxsize, compare=False)  # CLOCK_MONOTONIC: not before. No part of what was read


_PROCESS = struct.Struct("=I4xQII")  # nvmlProcessInfo_v2_t, which _v3 calls fill, too; a test compares the two
_UNKNOWN_BYTES = (1 << 64) - 1


class CardReader:
    """NVML, kept open: asking costs a fraction of opening it. A call takes milliseconds, beside a card in trouble for
    ever: neither the loop nor the end of valved waits for it."""

    def __init__(self) -> None:
        self._thread = Helpers("valved-nvml", 1)
        self._is_open = False
        self._handles: list[tuple[Any, bytes]] = []  # of each card, and its UUID: until NVML fails, or counts others
        self._room = ctypes.create_string_buffer(32 * _PROCESS.size)

    async def read(self) -> dict[bytes, CardUse]:
        """`look`, in a thread of its own. Whoever waits for it can give up at any time."""
        answer = Worker(asyncio.get_running_loop(), self._thread).result_of(self.look)
        done, _ = await asyncio.wait({answer}, timeout=SILENT_S)
        if not done:
            log.warning("the cards do not answer", extra={"facts": {"asked": "NVML", "seconds": SILENT_S}})
        return await answer

    def leave(self) -> None:
        """`close`, once a look that is under way has ended."""
        self._thread.do(self.close)

    def look(self) -> dict[bytes, CardUse]:
        """All cards by UUID; empty where NVML is missing or does not answer."""
        import pynvml

        try:
            if not self._is_open:
                pynvml.nvmlInit()
                self._is_open = True
            if (count := pynvml.nvmlDeviceGetCount()) != len(self._handles):
                self._handles = [_identity(pynvml.nvmlDeviceGetHandleByIndex(index)) for index in range(count)]
            return {uuid: self._card(handle) for handle, uuid in self._handles}
        except (pynvml.NVMLError, AttributeError, ValueError):  # an NVML from before this call, or nonsense
            self.close()
            return {}

    def close(self) -> None:
        """Let go of the driver: it cannot be replaced while a process holds it."""
        import pynvml

        self._handles = []
        if self._is_open:
            self._is_open = False
            with contextlib.suppress(pynvml.NVMLError):
                pynvml.nvmlShutdown()

    def _card(self, handle: Any) -> CardUse:
        import pynvml

        read_ns = time.monotonic_ns()
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
        total = int(memory.total)
        try:
            is_mig = pynvml.nvmlDeviceGetMigMode(handle)[0] == pynvml.NVML_DEVICE_MIG_ENABLE
        except pynvml.NVMLError:  # a card that cannot
            is_mig = False
        return CardUse(
            total_bytes=total,
            used_bytes=min(total, int(memory.used)),
            by_pid={pid: min(total, held) for pid, held in self._processes(handle).items()},
            is_mig=is_mig,
            read_ns=read_ns,
        )

    def _processes(self, handle: Any) -> Mapping[int, int]:
        """Into the room of the last answer, with one call: pynvml asks twice, and makes an object of each process."""
        import pynvml

        while True:
            count = ctypes.c_uint(len(self._room) // _PROCESS.size)
            status = pynvml.nvmlLib.nvmlDeviceGetComputeRunningProcesses_v3(handle, ctypes.byref(count), self._room)
            if status == pynvml.NVML_SUCCESS:
                told = _PROCESS.iter_unpack(memoryview(self._room)[: count.value * _PROCESS.size])
                return {pid: 0 if held == _UNKNOWN_BYTES else held for pid, held, _, _ in told}
            if status != pynvml.NVML_ERROR_INSUFFICIENT_SIZE:
                raise pynvml.NVMLError(status)
            self._room = ctypes.create_string_buffer(2 * max(len(self._room), count.value * _PROCESS.size))


def _identity(handle: Any) -> tuple[Any, bytes]:
    import pynvml

    return handle, UUID(pynvml.nvmlDeviceGetUUID(handle).removeprefix("GPU-")).bytes
