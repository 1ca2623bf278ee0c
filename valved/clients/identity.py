"""Says which process a peer is and which role it may have: from the kernel's credentials and from claims alone.

A claimed process (or one started by it, or living in its control group) has the role of the claim, whatever it asks
for. An unclaimed one may be offline work, never online: else any program could stop everybody else's.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final, Protocol

from valved.abi.link import Refusal
from valved.clients.accounts import LinkAccount, account_of
from valved.machine.ports import ProcessPort
from valved.model.ids import ProcessId, Role, ServiceId
from valved.state.registry import Books, ServiceEntry


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """A connected process, as the kernel describes it."""

    process: ProcessId
    uid: int
    chain: tuple[ProcessId, ...]  # itself, its parent, and so on
    cgroup: str
    comm: str
    could_end_us: bool = False  # so what it could do beside that is no harm more

    @property
    def account(self) -> LinkAccount:
        return account_of(self.uid, self.cgroup)

    @property
    def turn(self) -> tuple[LinkAccount, int]:
        return self.account, self.process.pid


@dataclass(frozen=True, slots=True, kw_only=True)
class Admitted:
    """What a peer is given. `service` None: a new service of its own."""

    role: Role
    service: ServiceId | None


@dataclass(frozen=True, slots=True, kw_only=True)
class NotAdmitted:
    code: Refusal
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PodClaim:
    """What the annotations of a peer's pod say: a claim on all that lives in the pod's control group."""

    role: Role
    name: str
    cgroup: str


class Silence(enum.Enum):
    """No claim, and why."""

    NO_CLAIM = "no-claim"  # not a pod's process, or a pod that wants nothing of us
    NOT_YET = "not-yet"  # a pod's process, but nobody has told us of that pod so far: ask again


NO_CLAIM: Final = Silence.NO_CLAIM
NOT_YET: Final = Silence.NOT_YET


class ClaimSource(Protocol):
    """Where roles come from on a Kubernetes node, beside the launcher."""

    def claim_of(self, peer: Peer) -> PodClaim | Silence: ...

    def name_of(self, cgroup: str) -> str:
        """Namespace and name of the pod that has this control group; empty: it is none that is known."""
        ...

    def trust_of(self, namespace: str) -> str:
        """The namespaces that this one trusts, as its administrator says; empty: only itself."""
        ...


def identify(pid: int, uid: int, processes: ProcessPort) -> Peer | None:
    """None: the process is gone already."""
    chain = processes.ancestors(pid) if pid > 0 else ()
    if not chain or chain[0].pid != pid:
        return None
    return Peer(
        process=chain[0],
        uid=uid,
        chain=tuple(chain),
        cgroup=processes.cgroup(pid) or "",
        comm=processes.comm(pid),
        could_end_us=processes.could_end_us(pid, uid),
    )


def own_cgroup(pid: int, processes: ProcessPort) -> str:
    """The control group of a process if it was put into one of its own (a scope, a container), else nothing.

    A group shared with its parent is a login session or a shell: the other processes in it belong to no service.
    """
    chain = processes.ancestors(pid, 2)
    mine = processes.cgroup(pid) or ""
    parents = processes.cgroup(chain[1].pid) or "" if len(chain) > 1 else ""
    return mine if mine not in ("", "/") and mine != parents else ""


def trust_domain(peer: Peer, service: ServiceEntry, pods: ClaimSource | None) -> str:
    """The domain within which memory may pass between this process and others: one user, or in a cluster one namespace,
    or all namespaces with the same label. It counts as it stood when the process joined.

    In a cluster a claimed service is called NAMESPACE/POD. A process of no pod that we know could call itself anything,
    so it trusts its own control group alone.
    """
    if pods is None:
        return f"user {peer.uid}"
    namespace, slash, _ = service.name.partition("/")
    if not slash or service.root is None:
        return f"group {peer.cgroup}"
    label = pods.trust_of(namespace)
    return f"label {label}" if label else f"namespace {namespace}"


def place(wanted: Role, peer: Peer, books: Books) -> Admitted | NotAdmitted:
    """The role and service of a peer, whatever the mode: offline work that is not ours runs beside online work."""
    claim = books.find_claim(peer.chain, peer.cgroup)
    if wanted is Role.HOOK:
        return _place_hook(peer, books, claim.service if claim is not None else None)
    if claim is not None:
        role, service = claim.role, claim.service
    elif wanted is Role.OFFLINE:
        role, service = Role.OFFLINE, None
    elif wanted is Role.ONLINE:
        return NotAdmitted(code=Refusal.ROLE, text="an online process needs a claim: start it with valve run --online")
    else:
        return NotAdmitted(code=Refusal.ROLE, text="no claim names this process: start it with valve run")
    return Admitted(role=role, service=service)


def _place_hook(peer: Peer, books: Books, claimed: ServiceId | None) -> Admitted | NotAdmitted:
    if claimed is not None:
        return Admitted(role=Role.HOOK, service=claimed)
    shim = books.client_of_process(peer.chain)
    if shim is not None and shim.uid == peer.uid:
        return Admitted(role=Role.HOOK, service=shim.service)
    return NotAdmitted(
        code=Refusal.ROLE, text="valved knows no service to which this engine belongs: start it with valve run"
    )
