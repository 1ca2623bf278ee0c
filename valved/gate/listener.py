"""What the gate's room reports to the rooms above: one listener for all of it."""

from __future__ import annotations

from collections.abc import Callable

from valved.machine.stamps import Stamp
from valved.model.ids import ChannelRef
from valved.state.registry import ClientEntry


class GateListener:
    """Does nothing. The daemon's (node/news.py) overrides each of these."""

    def drained(self) -> None:
        """Stamps were read, all of them: a GPU may have stopped, or opened."""

    def opened(self) -> None:
        """A GPU may have opened."""

    def stop_failed(self, stamp: Stamp) -> None:
        """Offline work on this GPU may run on."""

    def breaker_tripped(self) -> None:
        """A service rests. A successor must know for how long."""

    def standing_changed(self) -> None:
        """Other holds than those of services and of moving memory."""

    def clients_changed(self) -> None:
        """Clients or consents changed. Called before any of them is answered."""

    def places_changed(self) -> None:
        """An offline process uses another set of GPUs, or is never stopped. As early."""

    def client_ends(self, client: ClientEntry, number: int) -> None:
        """A signal has come that ends this offline process, and some of its channels may be off."""

    def channel_came(self, client: ClientEntry, channel: ChannelRef) -> None:
        """One of an offline process more, on a GPU where it has others. Before it is answered."""

    def channel_gone(self, client: ClientEntry, channel: ChannelRef) -> None:
        """One less of any process, or its number means another one now."""

    def time_passed(self) -> None:
        """Every few seconds. For what changes without a word, and for what could not be told at the time."""

    def about_to_freeze(self, then: Callable[[], None]) -> None:
        """Processes get a stop signal by `then`. A successor must know of them: only valved lets them go."""
        then()

    def frozen_changed(self) -> None:
        """Fewer processes are frozen."""
