"""What the native structs say, as the values of ports.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from valved.machine import cards
from valved.machine.ports import ClientView, Gap, GpuInfo, WakeLook, WakeRule
from valved.model.figures import MOST_OPEN, plausible
from valved.model.ids import GpuIndex
from valved.native._gate import ffi


def native_rule(rule: WakeRule) -> dict[str, int]:
    return asdict(rule)


def look(native: Any) -> WakeLook:
    return WakeLook(
        holds=bool(native.holds),
        action=native.action,
        reason=native.reason,
        is_hinted=bool(native.hinted),
        quiet_ns=native.quiet_ns,
        leaked=native.leaked,
    )


def view(native: Any) -> ClientView:
    """What is only compared stays as it is; what is added up or shown is cut to what can be."""
    gaps = (native.gaps[i] for i in range(native.gap_count))
    return ClientView(
        is_filled=bool(native.filled),
        submitted=native.submitted,
        idle_submitted=native.idle_submitted,
        idle_ns=native.idle_ns,
        busy=bool(native.busy),
        launch_ns=native.launch_ns,
        rings=plausible(native.rings),
        watcher_ns=native.watcher_ns,
        open_requests=plausible(native.open_requests, MOST_OPEN),
        hint_ns=native.hint_ns,
        requests_started=plausible(native.requests_started),
        requests_ended=plausible(native.requests_ended),
        useful_tokens=plausible(native.useful_tokens),
        self_stops=plausible(native.self_stops),
        order_done=native.order_done,
        order_status=native.order_status,
        gaps=tuple(Gap(end_ns=gap.end_ns, gap_ns=gap.gap_ns) for gap in gaps),
    )


def gpu_info(index: GpuIndex, native: Any, known: Mapping[bytes, cards.CardName]) -> GpuInfo:
    uuid = bytes(ffi.buffer(native.uuid))
    card = known.get(uuid, cards.CardName(name=f"GPU {index}", total_bytes=0))
    return GpuInfo(
        index=index,
        minor=native.minor,
        gpu_id=native.gpu_id,
        device_instance=native.device_instance,
        uuid=uuid,
        name=card.name,
        total_bytes=card.total_bytes,
    )


def text(native: Any) -> str:
    value: bytes = ffi.string(native)
    return value.decode(errors="replace")
