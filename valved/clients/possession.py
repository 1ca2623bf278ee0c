"""Which process owns which RM client: no channel counts before its sender has shown the file that owns it.

A channel is a pair of numbers that anybody can say. RM binds a client to the nvidiactl file it was made on, so
valved believes a process that passes that file (RM_CLIENT) and has a subdevice on the card in question: the process
itself, or a child that inherited the file. What comes before the proof waits, in no book. Its
sender learns nothing from the answer but that a proof is missing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from valved.abi.link import RmClient
from valved.clients.accounts import LinkAccount, account_of
from valved.machine.clock import Clock, TimerHandle
from valved.machine.ports import GpuInfo, ProverPort
from valved.model.ids import ChannelRef, ClientId, GpuIndex
from valved.state.registry import ClientEntry

PATIENCE_NS = 1_000_000_000  # how long an ACK waits for a proof: half of what the shim waits for the ACK
OFFERS = 64  # of one client, not yet looked at

Take = Callable[[int], None]  # takes over a descriptor that was found to be its sender's


@dataclass(slots=True, kw_only=True)
class _Offer:
    gpu: GpuInfo
    h_client: int
    h_subdevice: int
    fd: int
    take: Take | None
    account: LinkAccount


@dataclass(slots=True, kw_only=True)
class _Waiter:
    channel: ChannelRef
    proven: Callable[[], None]
    late: Callable[[], None] | None
    timer: TimerHandle | None = None

    def give_up(self) -> None:
        """It is answered once; what it waits for may still come."""
        late, self.late = self.late, None
        if late is not None:
            late()


@dataclass(slots=True)
class _Client:
    proven: set[tuple[int, GpuIndex]] = field(default_factory=set)
    offers: deque[_Offer] = field(default_factory=deque)
    waiters: dict[tuple[int, int], _Waiter] = field(default_factory=dict)  # by channel
    is_letting_in: bool = False
    moved_ns: int = 0  # when it last offered a file, or one of them was judged, or a channel was let in


class Possession:
    def __init__(self, prover: ProverPort, clock: Clock, most: int, on_proof: Callable[[ClientId, int], None]) -> None:
        self._prover = prover
        self._clock = clock
        self._most = most  # RM clients and waiting channels of one process
        self._clients: dict[ClientId, _Client] = {}
        self._owners: dict[int, set[ClientId]] = {}
        self._on_proof = on_proof

    def is_proven(self, client: ClientId, h_client: int, gpu: GpuIndex) -> bool:
        known = self._clients.get(client)
        return known is not None and (h_client, gpu) in known.proven

    def is_offered(self, client: ClientId, h_client: int) -> bool:
        known = self._clients.get(client)
        return known is not None and any(offer.h_client == h_client for offer in known.offers)

    def owners(self, h_client: int) -> list[ClientId]:
        """Clients that have shown it: more than one only where a file was inherited or a number came again."""
        return list(self._owners.get(h_client, ()))

    def are_quiet(self, clients: Iterable[ClientId], for_ns: int) -> bool:
        """Nothing that they offered is still being judged, and nothing was offered or judged lately."""
        before_ns = self._clock.now_ns() - for_ns
        known = [self._clients[client] for client in clients if client in self._clients]
        return all(not one.offers and one.moved_ns <= before_ns for one in known)

    def waiting(self, client: ClientId) -> int:
        known = self._clients.get(client)
        return len(known.waiters) if known is not None else 0

    def is_waiting(self, client: ClientId, h_client: int, h_channel: int) -> bool:
        known = self._clients.get(client)
        return known is not None and (h_client, h_channel) in known.waiters

    def is_judging(self, client: ClientId) -> bool:
        """A channel of this client waits for its proof, and its answer with it."""
        known = self._clients.get(client)
        return known is not None and any(waiter.late is not None for waiter in known.waiters.values())

    def offer(self, entry: ClientEntry, gpu: GpuInfo, body: RmClient, fd: int, take: Take | None = None) -> None:
        """A descriptor that should own this RM client. It is ours from here on."""
        account = account_of(entry.uid, entry.cgroup)
        known = self._clients.setdefault(entry.id, _Client())
        if len(known.offers) >= OFFERS:
            self._prover.drop(fd, account)
            return
        known.moved_ns = self._clock.now_ns()
        known.offers.append(
            _Offer(gpu=gpu, h_client=body.h_client, h_subdevice=body.h_subdevice, fd=fd, take=take, account=account)
        )
        if len(known.offers) == 1:
            self._look(entry.id, known)

    def wait(
        self, client: ClientId, channel: ChannelRef, proven: Callable[[], None], late: Callable[[], None] | None
    ) -> None:
        """`proven` once the client has shown its RM client, however late; `late` when that takes too long."""
        known = self._clients.setdefault(client, _Client())
        before = known.waiters.get((channel.h_client, channel.h_channel))
        self.forget_channel(client, channel.h_client, channel.h_channel)
        if before is not None:
            before.give_up()  # told of twice: the first is answered, too
        waiter = _Waiter(channel=channel, proven=proven, late=late)
        if late is not None:
            waiter.timer = self._clock.call_at_ns(self._clock.now_ns() + PATIENCE_NS, waiter.give_up)
        known.waiters[channel.h_client, channel.h_channel] = waiter

    def forget_channel(self, client: ClientId, h_client: int, h_channel: int) -> None:
        known = self._clients.get(client)
        waiter = known.waiters.pop((h_client, h_channel), None) if known is not None else None
        if waiter is not None and waiter.timer is not None:
            waiter.timer.cancel()

    def revoke(self, client: ClientId, h_client: int) -> None:
        """The number is another's now: what this client showed was an RM client that is gone."""
        known = self._clients[client]
        known.proven = {pair for pair in known.proven if pair[0] != h_client}
        self._disown(client, h_client)
        for waiter in [one for one in known.waiters.values() if one.channel.h_client == h_client]:
            waiter.give_up()  # its timer may be over already

    def forget(self, client: ClientId) -> None:
        known = self._clients.pop(client, None)
        if known is None:
            return
        for waiter in known.waiters.values():
            if waiter.timer is not None:
                waiter.timer.cancel()
        for h_client, _ in known.proven:
            self._disown(client, h_client)
        for offer in list(known.offers)[1:]:  # the first is being looked at
            self._prover.drop(offer.fd, offer.account)

    def _disown(self, client: ClientId, h_client: int) -> None:
        owners = self._owners.get(h_client, set())
        owners.discard(client)
        if not owners:
            self._owners.pop(h_client, None)

    def _look(self, client: ClientId, known: _Client) -> None:
        offer = known.offers[0]

        def answered(is_own: bool, fd: int) -> None:
            self._answered(client, known, is_own, fd)

        keep = offer.take is not None
        self._prover.check(offer.fd, offer.gpu, offer.h_client, offer.h_subdevice, keep, answered, offer.account)

    def _answered(self, client: ClientId, known: _Client, is_own: bool, fd: int) -> None:
        if self._clients.get(client) is not known:  # it left meanwhile
            if fd >= 0:
                self._prover.drop(fd, known.offers[0].account)
            return
        offer = known.offers.popleft()
        known.moved_ns = self._clock.now_ns()
        if is_own and len(known.proven) < self._most:
            known.proven.add((offer.h_client, offer.gpu.index))
            self._owners.setdefault(offer.h_client, set()).add(client)
            self._on_proof(client, offer.h_client)
        if fd >= 0 and offer.take is not None:
            offer.take(fd)
        for waiter in _due(known):
            if waiter.timer is not None:
                waiter.timer.cancel()  # its proof is here
        if not known.is_letting_in:
            self._let_in(client, known)
        if known.offers:
            self._look(client, known)

    def _let_in(self, client: ClientId, known: _Client) -> None:
        """One channel whose proof is here, and the next in the loop's next turn: each costs calls of the driver, and
        its sender decides how many there are."""
        if self._clients.get(client) is not known:
            return
        waiter = next(_due(known), None)
        known.is_letting_in = waiter is not None
        if waiter is None:
            return
        known.moved_ns = self._clock.now_ns()
        self.forget_channel(client, waiter.channel.h_client, waiter.channel.h_channel)
        self._clock.call_at_ns(known.moved_ns, lambda: self._let_in(client, known))
        waiter.proven()


def _due(known: _Client) -> Iterator[_Waiter]:
    return (one for one in known.waiters.values() if (one.channel.h_client, one.channel.gpu) in known.proven)
