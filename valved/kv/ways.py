"""By which way memory is taken from each engine: what the setting allows, and what is known to work with it."""

from __future__ import annotations

import errno

from valved.abi.kv_link import KvHow
from valved.kv.books import KvBooks
from valved.kv.engines import Engine
from valved.kv.journey import all_of
from valved.kv.orders import Order
from valved.kv.outside import Outside
from valved.kv.slots import KvRangeBook
from valved.machine.ports import GatePort
from valved.model.events import EventKind
from valved.model.ids import TRIED_FIRST, ClientId, Reach, Remap
from valved.state.journal import Journal

HUNG = "a mapping order has not come back"
STOPS = Reach.CHANNEL_OWN, Reach.CHANNEL_FD, Reach.CHANNEL_SELF  # ways that really stop a kernel


class Ways:
    def __init__(self, books: KvBooks, outside: Outside, gate: GatePort, journal: Journal) -> None:
        self.unsafe: set[ClientId] = set()
        self._books = books
        self._outside = outside
        self._gate = gate
        self._journal = journal
        setting = books.settings.remap
        self.usual = Remap.SPARSE if setting in TRIED_FIRST else setting  # where nothing speaks against it

    def way_of(self, engines: list[Engine]) -> Remap:
        """One for all of these: they are stopped, or asked, together."""
        for engine in engines:
            if self._way_of(engine) is Remap.COOPERATIVE:
                return Remap.COOPERATIVE
        return self.usual

    def _way_of(self, engine: Engine) -> Remap:
        """The usual one, or the only other: no process is treated in a way of its own."""
        if not self.unsafe.isdisjoint(engine.ranks):
            return Remap.COOPERATIVE
        for gpu in engine.gpus:
            if self._gate.channels.reach(gpu)[0] not in STOPS:
                return Remap.COOPERATIVE
        if self.usual is Remap.SPARSE:
            for book in engine.places:
                if self.best(book) is Remap.COOPERATIVE:
                    return Remap.COOPERATIVE
        return self.usual

    def best(self, book: KvRangeBook) -> Remap:
        return self._outside.best(book.key.client, book.gpu) if self.usual is Remap.SPARSE else self.usual

    def why_not(self, engine: Engine) -> str:
        """Why memory is not taken from it by the usual way; empty if it is."""
        return self._outside.why_not(engine) if self.usual is Remap.SPARSE else ""

    def order_ns(self, how: Remap) -> int:
        """The longest that an order may take."""
        settings = self._books.settings
        return round((settings.step_s if how is Remap.COOPERATIVE else settings.order_s) * 1e9)

    def mark_unsafe(self, late: list[Order]) -> None:
        """Their processes launch nothing until the orders have come back, and are asked between steps from then on."""
        for client in sorted({order.client for order in late}):
            self.unsafe.add(client)
            self._hold(client, [order for order in late if order.client == client])
            self._journal.emit(
                EventKind.REMAP_UNSAFE,
                service=self._books.service_of(client),
                client=client,
                reason=f"a mapping order took longer than {self._books.settings.order_s:g} s",
            )

    def _hold(self, client: ClientId, late: list[Order]) -> None:
        """One that stands behind orders for the place between two steps has not begun: that step must end first."""
        first = min(order.number for order in late)
        under_way = self._books.orders.under_way(client)
        ahead = [order for order in under_way if order.how is KvHow.AT_STEP and order.number < first]
        back = all_of([order.settled for order in late])

        def hold() -> None:
            if not back.is_set and not any(order.status == errno.ECONNRESET for order in ahead):
                self._books.holds.hold(client, HUNG)
                back.then(lambda: self._books.holds.release(client, HUNG))

        all_of([order.settled for order in ahead]).then(hold)
