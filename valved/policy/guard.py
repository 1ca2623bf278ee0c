"""On which GPUs may offline work run at all? Only where valved sees every other process that may use the GPU. Pure.

An online process without the shim launches unheard: nobody would stop offline work for it. So a GPU is harvested only
if each container that holds it has a live registration, and no process outside of one uses it. A GPU in doubt is held
by the guard: what runs there stops until the doubt is gone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from valved.model.ids import GpuIndex, ProcessId

LENDS_NOTHING = ("off", "observe")


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardSettings:
    harvest_unallocated: bool = False  # a GPU nobody holds may be given to an online pod at any moment, memory and all


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """A container that was given GPUs to itself."""

    name: str  # namespace/pod/container
    gpus: frozenset[GpuIndex]
    is_heard: bool  # a process of its pod runs with the shim and is registered
    is_injected: bool = True  # or nobody knows better: it will be heard from its first CUDA call on
    mode: str = ""  # of its pod or namespace; off and observe lend nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Stranger:
    """A process that uses a GPU and is not heard there."""

    name: str
    gpu: GpuIndex
    process: ProcessId | None = None
    offline_uid: str = ""  # of its pod, where that is known to be offline work
    how: str = "without the shim"


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """What the card itself says. `obstacle` is a mode in which nothing can be harvested, such as MIG."""

    gpu: GpuIndex
    obstacle: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuVerdict:
    gpu: GpuIndex
    reason: str  # why it is not harvested; empty when it is
    is_guarded: bool  # offline work that is there already must stop, too
    is_heard: bool  # every process that uses it runs with the shim
    online: tuple[str, ...]  # the services that hold it
    risk: str = ""  # a process that will never be heard: no memory can be given back to it in time

    @property
    def is_harvestable(self) -> bool:
        return not self.reason


def judge(
    cards: Sequence[Card], holders: Sequence[Holder], strangers: Sequence[Stranger], settings: GuardSettings
) -> tuple[GpuVerdict, ...]:
    """One verdict per GPU, the gravest reason first."""
    return tuple(
        _judge(
            card,
            [holder for holder in holders if card.gpu in holder.gpus],
            [stranger for stranger in strangers if stranger.gpu == card.gpu],
            settings,
        )
        for card in cards
    )


def _judge(card: Card, holders: list[Holder], strangers: list[Stranger], settings: GuardSettings) -> GpuVerdict:
    unheard = [holder.name for holder in holders if not holder.is_heard]
    mute = [holder.name for holder in holders if not (holder.is_heard or holder.is_injected)]
    kept = [holder for holder in holders if holder.mode in LENDS_NOTHING]
    reason = ""
    if strangers:
        reason = f"{strangers[0].name} uses the GPU {strangers[0].how}"
    elif unheard:
        reason = f"{unheard[0]} holds the GPU, and no process of that pod runs with the shim"
    elif kept:
        reason = f"mode {kept[0].mode} for {kept[0].name}"
    elif card.obstacle:
        reason = card.obstacle
    elif not holders and not settings.harvest_unallocated:
        reason = "no online pod holds it"
    return GpuVerdict(
        gpu=card.gpu,
        reason=reason,
        is_guarded=bool(strangers or unheard or kept),
        is_heard=not (strangers or unheard),
        online=tuple(sorted({holder.name.rpartition("/")[0] for holder in holders})),
        risk=f"{mute[0]} runs without the shim" if mute else "",
    )
