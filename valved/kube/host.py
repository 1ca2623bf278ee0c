"""What the rooms of a Kubernetes node work with: the daemon's parts, and what was last heard of the GPUs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from valved.clients.consents import Consents
from valved.clients.register import Register
from valved.gate.ending import Endings
from valved.gate.freeze import Ladder
from valved.gate.wake import GateService
from valved.kube.offline import OfflineBook
from valved.kube.podresources import HeldDevices
from valved.kube.pods import PodBook
from valved.machine.cards import CardUse
from valved.machine.clock import Clock
from valved.machine.ports import GatePort, GpuInfo, ProcessPort
from valved.model.ids import GpuIndex
from valved.node.brake import Brake
from valved.node.kv import Kv
from valved.policy.guard import GpuVerdict
from valved.state.journal import Journal
from valved.state.registry import GUARD_SERVICE, Books
from valved.state.stats import GpuAccount


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """The parts of the daemon that the node's rooms work with."""

    gate: GatePort
    books: Books
    gating: GateService
    register: Register
    brake: Brake
    journal: Journal
    clock: Clock
    processes: ProcessPort
    run_dir: Path
    version: str
    ladder: Ladder
    endings: Endings
    kv: Kv | None = None
    consents: Consents | None = None

    def now_s(self) -> float:
        return self.clock.now_ns() / 1e9

    def accounts(self, gpus: Sequence[GpuInfo]) -> list[GpuAccount]:
        """Of these GPUs, up to this moment."""
        self.gating.drain()
        return [self.gating.gpus[gpu.index] for gpu in gpus]


@dataclass(frozen=True, slots=True, kw_only=True)
class KubeBooks:
    """What the cluster says of this node's pods. Older than the daemon's parts: those that need it ask it."""

    pods: PodBook
    offline: OfflineBook = field(default_factory=OfflineBook)


@dataclass(slots=True, kw_only=True)
class LastHeard:
    """What was last heard; an answer that does not come changes nothing."""

    holdings: tuple[HeldDevices, ...] = ()
    cards: Mapping[bytes, CardUse] = field(default_factory=dict)
    verdicts: tuple[GpuVerdict, ...] = ()
    has_holdings: bool = False  # the kubelet has answered once
    is_clean: bool = False  # the last reconciliation went through


class Uncounted:
    """Which GPUs' time counts neither as idle nor as lost."""

    def __init__(self, host: Host, known: LastHeard) -> None:
        self._host, self._known = host, known

    def is_unheard(self, gpu: GpuIndex) -> bool:
        """Nobody can say how idle online services are here: the brake keeps them from letting go (observing does not),
        one rests or has not come back, or somebody may use the GPU unheard."""
        gating, now_ns = self._host.gating, self._host.clock.now_ns()
        is_heard = any(verdict.gpu == gpu and verdict.is_heard for verdict in self._known.verdicts)
        return (
            gating.permits.is_braked
            or (GUARD_SERVICE in gating.gpus[gpu].holders and not is_heard)
            or any(
                gpu in one.gpus and (one.away or gating.permits.is_resting(one, now_ns))
                for one in gating.online.values()
            )
        )

    def is_by_order(self, gpu: GpuIndex) -> bool:
        """Paused, guarded, resting, or in a mode that harvests nothing: no missed promise, and no sign of one."""
        is_guarded = GUARD_SERVICE in self._host.gating.gpus[gpu].holders
        return self._host.brake.switches.is_closed or is_guarded or self.is_unheard(gpu)
