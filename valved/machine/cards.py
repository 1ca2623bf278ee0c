"""Names and memory sizes of the cards, which NVML knows and the Resource Manager's own lists do not carry."""

from __future__ import annotations

import contextlib
import ctypes
import struct
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from uuid import UUID


@dataclass(frozen=True, slots=True, kw_only=True)
class CardName:
    """What a person wants to read about a GPU."""

    name: str
    total_bytes: int


def by_uuid() -> dict[bytes, CardName]:
    """All cards by their 16-byte UUID; empty where NVML is missing or does not answer."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:
        return {}
    found: dict[bytes, CardName] = {}
    try:
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            name, uuid = pynvml.nvmlDeviceGetName(handle), pynvml.nvmlDeviceGetUUID(handle)
            total = int(pynvml.nvmlDeviceGetMemoryInfo(handle).total)
            found[UUID(uuid.removeprefix("GPU-")).bytes] = CardName(name=name, total_bytes=total)
    except pynvml.NVMLError:
        pass  # a card that vanished half way: the others keep their names
    finally:
        pynvml.nvmlShutdown()
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class CardUse:
    """How a card is used at this moment, by all processes."""

    total_bytes: int
    used_bytes: int
    by_pid: Mapping[int, int]  # compute processes and their bytes; 0 where the driver does not say
    is_mig: bool
    read_ns: int = sys.maxsize  # CLOCK_MONOTONIC: not before


_PROCESS = struct.Struct("=I4xQII")  # nvmlProcessInfo_v2_t, which _v3 calls fill, too; a test compares the two
_UNKNOWN_BYTES = (1 << 64) - 1


class CardReader:
    """NVML, kept open: asking costs a fraction of opening it. Calls may block for milliseconds: not for the loop."""

    def __init__(self) -> None:
        self._is_open = False
        self._handles: list[tuple[Any, bytes]] = []  # of each card, and its UUID: until NVML fails, or counts others
        self._room = ctypes.create_string_buffer(32 * _PROCESS.size)

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
        except (pynvml.NVMLError, AttributeError):  # an NVML from before this call
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
        try:
            is_mig = pynvml.nvmlDeviceGetMigMode(handle)[0] == pynvml.NVML_DEVICE_MIG_ENABLE
        except pynvml.NVMLError:  # a card that cannot
            is_mig = False
        return CardUse(
            total_bytes=int(memory.total),
            used_bytes=int(memory.used),
            by_pid=self._processes(handle),
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
