"""Says where offline work may run again; books how long each GPU was open or stopped.

The native side closes gates by itself, and opens them while it is permitted to (gate/permits.py). What it did is booked
from its stamps (gate/edges.py): a few times a second, and at each reading of the books. Only a service's birth
(held by contract) and its end are booked directly. Nothing here waits: everything is a call from the loop, a timer or a
registration.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from valved.abi.link import Feature
from valved.gate.accounts import book_hold, held_by
from valved.gate.edges import Edges
from valved.gate.listener import GateListener
from valved.gate.online import OnlineService, born
from valved.gate.permits import GateSettings, Permits
from valved.gate.records import GateRecords
from valved.machine.clock import Clock
from valved.machine.ports import GatePort
from valved.model.ids import GpuIndex, ProcessId, Reach, Role, ServiceId
from valved.state.journal import Journal
from valved.state.registry import MEMORY_SERVICE, STANDING, Books, ClientEntry
from valved.state.stats import GpuAccount, NodeCounters


class GateService:
    def __init__(
        self,
        gate: GatePort,
        books: Books,
        journal: Journal,
        clock: Clock,
        settings: GateSettings,
        counters: NodeCounters,
    ) -> None:
        self.settings = settings
        self.counters = counters
        self.online: dict[ServiceId, OnlineService] = {}
        self.gpus: dict[GpuIndex, GpuAccount] = {
            info.index: GpuAccount(since_ns=clock.now_ns(), standing=STANDING) for info in gate.gpus()
        }
        self.listener = GateListener()
        self._records = records = GateRecords(journal)
        shared = self.online, self.gpus
        self.permits = Permits(gate, books, clock, settings, records, *shared, self.drain, self.want_prompt)
        self.edges = Edges(
            gate, books, clock, settings, counters, records, self.permits, lambda: self.listener, *shared
        )
        self._waiting: set[str] = set()  # who wants each stamp at once
        self._is_reading = False
        self._lost = 0  # stamps, as the port counts
        self._owes_look = False  # at every service: stamps were lost or could not be booked, or the last look failed
        self._let: frozenset[GpuIndex] = frozenset()
        self._unbooked: tuple[frozenset[GpuIndex], int] = frozenset(), 0  # held for memory that moves, since then
        self._gate = gate
        self._books = books
        self._clock = clock

    # Services come, change and go

    def add_service(self, service: ServiceId, gpus: frozenset[GpuIndex]) -> OnlineService:
        """Create an online service: it holds from birth."""
        online = self.online[service] = born(service, self._clock.now_ns(), self.settings.cooldown)
        try:
            self.set_gpus(service, gpus)
        except Exception:  # else the books would name a service that the native side does not hold
            del self.online[service]
            raise
        return online

    def set_gpus(self, service: ServiceId, gpus: frozenset[GpuIndex]) -> None:
        """The GPUs of a service changed. New ones are held from now on, and so is the service."""
        now_ns = self._clock.now_ns()
        online = self.online[service]
        self.permits.withdraw(online)
        self._gate.put_service(service, gpus)
        self.drain()
        held = held_by(self.gpus, service)
        for gpu in held - gpus:
            self.gpus[gpu].release(service, now_ns)
        online.gpus = gpus
        if gpus - held and not online.holding:
            online.begin_hold(now_ns)
        if online.holding:
            book_hold(self.gpus, service, gpus, now_ns)
        self.drain()
        self.permits.look_soon(online)
        if held - gpus:
            self._tell_opened()

    def remove_service(self, service: ServiceId) -> None:
        now_ns = self._clock.now_ns()
        self.drain()
        online = self.online.pop(service)
        self._books.touch()
        if online.timer is not None:
            online.timer.cancel()
        self._gate.remove_service(service)
        for account in self.gpus.values():
            account.release(service, now_ns)
        self.drain()
        self._tell_opened()

    def client_joined(self, client: ClientEntry) -> None:
        """A new client of an online service finds its gate word as the service has it: odd, and its launches ring."""
        self.listener.clients_changed()
        online = self.online.get(client.service)
        if online is None:
            return
        if client.process in online.away:  # a predecessor's: the service is not braked on its account any more
            online.away.discard(client.process)
            online.back_ns = self._clock.now_ns()
        if client.role is Role.ONLINE:
            self._gate.set_watch(client.id, online.book.watching)
        elif client.features & Feature.HINT:
            self._gate.set_hints(client.id)
        self.permits.look_soon(online)

    def client_left(self, client: ClientEntry, is_gone: Callable[[ProcessId], bool]) -> None:
        online = self.online.get(client.service)
        if online is not None:
            online.forget(client, is_gone)
            self.permits.look_soon(online)

    def is_stopped(self, gpu: GpuIndex) -> bool:
        """Offline channels are to be off here. After a wake the driver may need another moment to say so itself."""
        self.drain()
        return bool(self.gpus[gpu].holders) and self._gate.is_gated(gpu)

    def set_offline_channels(self, gpu: GpuIndex, channels: int) -> None:
        """Offline work came to this GPU or left it."""
        self.drain()
        account = self.gpus[gpu]
        came_or_went = (channels > 0) != (account.channels > 0)
        account.set_channels(channels, self._clock.now_ns())
        if came_or_went:
            self.permits.look_at_all()

    def shared(self) -> frozenset[GpuIndex]:
        """GPUs that online services use."""
        return frozenset[GpuIndex]().union(*(online.gpus for online in self.online.values()))

    def set_moving(self, gpus: frozenset[GpuIndex]) -> None:
        """GPUs on which memory moves right now. A service waits for it: the books hear of it as they are read next."""
        self.want_prompt("moving", bool(gpus))
        held = self._unbooked[0] or held_by(self.gpus, MEMORY_SERVICE)
        if held and gpus != held:
            self.set_standing(MEMORY_SERVICE, gpus)
        elif gpus != held:  # asked several times a reclaim; no stamp changes it
            self._hold(MEMORY_SERVICE, gpus)
            self._unbooked = gpus, self._clock.now_ns()

    def is_held(self, gpus: Iterable[GpuIndex]) -> bool:
        self.drain()
        return any(self.gpus[gpu].holders for gpu in gpus)

    def client_ends(self, client: ClientEntry, number: int, then: Callable[[], None]) -> None:
        """A signal ends it: `then`, unless channels of it are off, or will be, or are not all on again."""
        may_be_off = any(self.is_held((gpu,)) or self._gate.is_gated(gpu) for gpu in client.gpus())
        if client.role is Role.OFFLINE and may_be_off:
            self.listener.client_ends(client, number)
        else:
            then()

    def may_let(self, gpus: Iterable[GpuIndex]) -> bool:
        """Something is stopped here, and by online services alone: no brake, no guard, no mapping under the gate."""
        return any(map(self.is_stopped, gpus)) and all(self.gpus[gpu].holders <= self.online.keys() for gpu in gpus)

    def let(self, gpus: frozenset[GpuIndex]) -> None:
        """Offline work runs there, and nowhere else, though services hold it: a hit for requests open at its end."""
        ended, self._let = self._let - gpus, gpus
        self.want_prompt("letting", bool(gpus))
        self._gate.let(gpus)
        for online in self.online.values():
            if online.holding and online.gpus & ended:
                online.hit_requests(self._books.clients_of(online.id), self._gate.view, None)

    def is_proven_stopped(self, gpu: GpuIndex) -> bool:
        """Nothing of offline runs here: the disable came back, and came back well. Its stamp may not be booked yet: a
        service waits for what follows, and the stamp rings for itself."""
        return self._gate.is_stopped(gpu)

    def reach(self, gpu: GpuIndex) -> Reach:
        return self._gate.channels.reach(gpu)[0]

    def ungated(self) -> frozenset[GpuIndex]:
        """GPUs that are held, and on which offline work may run all the same: the driver refuses, or hangs. All of one
        moment: the stamps read between two single questions would change the answer to the first. One may ask this."""
        self.drain()
        held = [gpu for gpu, account in self.gpus.items() if account.holders or gpu in self._unbooked[0]]
        return frozenset(gpu for gpu in held if not self._gate.is_stopped(gpu))

    def set_standing(self, service: ServiceId, gpus: frozenset[GpuIndex]) -> None:
        """One of STANDING, a service without clients, holds these GPUs and no others, until told differently."""
        self.drain()
        now_ns = self._clock.now_ns()
        held = held_by(self.gpus, service)
        if gpus == held:
            return
        if gpus:
            self._hold(service, gpus)
        else:
            self._gate.remove_service(service)
        for gpu in held - gpus:
            self.gpus[gpu].release(service, now_ns)
        book_hold(self.gpus, service, gpus, now_ns)
        self.drain()
        if service is MEMORY_SERVICE:  # a permission rests on nothing that a move of memory changes
            self._tell_opened()
            return
        self.permits.look_at_all()
        self._tell_opened()
        self.listener.standing_changed()

    def _hold(self, service: ServiceId, gpus: frozenset[GpuIndex]) -> None:
        if self._let & gpus:
            self.let(self._let - gpus)
        self._gate.put_service(service, gpus)

    # Stamps: what the native side did

    def drain(self) -> None:
        """Bring the books up to this moment: stamps of ordinary edges wait until the books are read."""
        if self._is_reading:  # what a stamp sets off reads the books as they are
            return
        self._is_reading = True
        try:
            errors = self.edges.take_all(stamps) if (stamps := self._gate.drain_stamps()) else []
            (moving, since_ns), self._unbooked = self._unbooked, (frozenset(), 0)
            book_hold(self.gpus, MEMORY_SERVICE, moving, since_ns)
        finally:
            self._is_reading = False
        lost = self._gate.stamps_lost() - self._lost
        self._owes_look |= lost > 0 or bool(errors)
        if lost > 0:
            self._lost += lost
            self.counters.stamps_lost += lost
            self._records.lost(lost)
        if stamps:
            self.permits.stir()
            self.listener.drained()
        if errors:
            raise errors[0]

    def _tell_opened(self) -> None:
        """Not while stamps are read: the books may lack the hold that follows a wake. `drained` comes at the end."""
        if not self._is_reading:
            self.listener.opened()

    def want_prompt(self, asker: str, on: bool) -> None:
        """A caller waits for a stop or a wake, or nobody reads by the clock: what happens is read at once."""
        (self._waiting.add if on else self._waiting.discard)(asker)
        self._gate.set_prompt(bool(self._waiting))

    def resync(self, *, is_thorough: bool = True) -> None:
        """Find a hold or a wake whose stamp was lost (the ring is bounded): else its offline work would never be woken,
        or a caller that waits for the wake would wait on. `is_thorough`: also where no stamp is known to be missing."""
        self.drain()
        self._owes_look |= is_thorough
        gated = frozenset(filter(self._gate.is_gated, self.gpus))
        for online in self.online.values() if self._owes_look else ():
            if online.holding:
                if not self._gate.look(online.id).holds:
                    for gpu in online.gpus:
                        self.gpus[gpu].release(online.id, self._clock.now_ns())
                    online.end_hold(self._clock.now_ns())
                continue
            closed = online.gpus & gated
            if closed and not any(self.gpus[gpu].holders for gpu in closed):
                online.begin_hold(self._clock.now_ns())
                book_hold(self.gpus, online.id, online.gpus, self._clock.now_ns())
                self.permits.look_soon(online)
        self._owes_look = False
        self._tell_opened()
