"""Names and memory sizes of the cards, which NVML knows and the Resource Manager's own lists do not carry."""

from __future__ import annotations

import contextlib
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


class CardReader:
    """NVML, kept open: asking costs a fraction of opening it. Calls may block for milliseconds: not for the loop."""

    def __init__(self) -> None:
        self._is_open = False

    def look(self) -> dict[bytes, CardUse]:
        """All cards by UUID; empty where NVML is missing or does not answer."""
        import pynvml

        try:
            if not self._is_open:
                pynvml.nvmlInit()
                self._is_open = True
            handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
            return dict(self._card(handle) for handle in handles)
        except pynvml.NVMLError:
            self.close()
            return {}

    def close(self) -> None:
        """Let go of the driver: it cannot be replaced while a process holds it."""
        import pynvml

        if self._is_open:
            self._is_open = False
            with contextlib.suppress(pynvml.NVMLError):
                pynvml.nvmlShutdown()

    def _card(self, handle: Any) -> tuple[bytes, CardUse]:
        import pynvml

        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
        processes = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
        try:
            is_mig = pynvml.nvmlDeviceGetMigMode(handle)[0] == pynvml.NVML_DEVICE_MIG_ENABLE
        except pynvml.NVMLError:  # a card that cannot
            is_mig = False
        uuid = UUID(pynvml.nvmlDeviceGetUUID(handle).removeprefix("GPU-")).bytes
        return uuid, CardUse(
            total_bytes=int(memory.total),
            used_bytes=int(memory.used),
            by_pid={process.pid: int(process.usedGpuMemory or 0) for process in processes},
            is_mig=is_mig,
        )
