"""Slots: the anonymous devices that the kubelet hands out and the scheduler counts. Pure.

One per GPU, without a GPU's name: which GPUs a pod gets is decided at its placement, not by the kubelet.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

PREFIX = "valve-slot-"


def slot_ids(count: int) -> tuple[str, ...]:
    return tuple(f"{PREFIX}{index:02d}" for index in range(count))


def health(slots: Sequence[str], in_use: Collection[str], harvestable: int) -> Mapping[str, bool]:
    """As many healthy slots as GPUs can be harvested, those in use first.

    The kubelet subtracts slots in use from the healthy ones; it never takes one back.
    """
    ordered = sorted(slots, key=lambda slot: (slot not in in_use, slot))
    healthy = set(ordered[: max(0, harvestable)])
    return {slot: slot in healthy for slot in slots}


def prefer(available: Sequence[str], must: Sequence[str], size: int, released: Mapping[str, int]) -> tuple[str, ...]:
    """The slots released longest ago: what a pod left on one has time to go. `released` rises; 0: never used."""
    rest = sorted((slot for slot in available if slot not in must), key=lambda slot: (released.get(slot, 0), slot))
    return tuple([*must, *rest][:size])
