"""Names and memory sizes of the cards, which NVML knows and the Resource Manager's own lists do not carry."""

from __future__ import annotations

from dataclasses import dataclass
from uuid import UUID


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """What a person wants to read about a GPU."""

    name: str
    total_bytes: int


def by_uuid() -> dict[bytes, Card]:
    """All cards by their 16-byte UUID; empty where NVML is missing or does not answer."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:
        return {}
    found: dict[bytes, Card] = {}
    try:
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            name, uuid = pynvml.nvmlDeviceGetName(handle), pynvml.nvmlDeviceGetUUID(handle)
            total = int(pynvml.nvmlDeviceGetMemoryInfo(handle).total)
            found[UUID(uuid.removeprefix("GPU-")).bytes] = Card(name=name, total_bytes=total)
    except pynvml.NVMLError:
        pass  # a card that vanished half way: the others keep their names
    finally:
        pynvml.nvmlShutdown()
    return found
