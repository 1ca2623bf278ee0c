"""The rung of granted time without a call per pause: offline work stays enabled beside a service, with a short time
slice (valved/native/slice.c). Here those slices are set, once for each channel group, and it is said where that failed.

No card has been asked yet how well this holds, so an operator selects it by name, and names the driver for which the
probe's S2 said OK. With any other driver it is refused, and the gate rung goes on in its place.
"""

from __future__ import annotations

from valved.machine.ports import GrantPort
from valved.model.ids import ChannelRef, ClientId, GpuIndex, Role
from valved.model.rungs import Rung, SliceSettings
from valved.state.registry import Books, ClientEntry


class Slices:
    def __init__(self, port: GrantPort, books: Books, settings: SliceSettings, driver: str) -> None:
        self._port, self._books, self._settings = port, books, settings
        self.refusal = settings.refusal(driver)  # of the node
        self._short: set[tuple[ClientId, int, int]] = set()  # groups that have it; any other is asked for again
        self.missing: dict[GpuIndex, str] = {}  # where a group has no short slice, and why

    @property
    def is_on(self) -> bool:
        return self._settings.rung is Rung.TIMESLICE and not self.refusal

    @property
    def rung(self) -> Rung:
        return Rung.TIMESLICE if self.is_on else Rung.GATE

    def refresh(self, gpus: frozenset[GpuIndex]) -> None:
        """Every new group has its slice, or its GPU is given by slices no longer, on return."""
        if not self.is_on:
            return
        clients = list(self._books.with_role(Role.OFFLINE))
        self._short &= {group_of(each.id, channel) for each in clients for channel in each.channels.values()}
        self.missing = {}
        for each in clients:
            for channel in each.channels.values():
                self._look_at(each, channel)
        self._port.set_sliceable(True, gpus - self.missing.keys())

    def came(self, client: ClientEntry, channel: ChannelRef, gpus: frozenset[GpuIndex]) -> None:
        """The same for one channel more: a node has thousands."""
        if self.is_on and self._look_at(client, channel):
            self._port.set_sliceable(True, gpus - self.missing.keys())

    def gone(self, client: ClientId, channel: ChannelRef) -> None:
        """Its group may be gone with it, and the handle come again. One that is still there is asked for once more."""
        self._short.discard(group_of(client, channel))

    def _look_at(self, client: ClientEntry, channel: ChannelRef) -> bool:
        """Whether it bars its GPU."""
        why = self._shorten(client.id, channel) if channel.compute else ""
        if why:
            self.missing[channel.gpu] = f"process {client.process.pid}: {why}"
        return bool(why)

    def _shorten(self, client: ClientId, channel: ChannelRef) -> str:
        if group_of(client, channel) in self._short:
            return ""
        if not self._port.has_file(client, channel.h_client):
            return "the process has not passed its driver file"  # and may yet
        why = self._port.shorten(client, channel, self._settings.slice_us)
        if not why:
            self._short.add(group_of(client, channel))
        return why

    def words(self, gpus: frozenset[GpuIndex]) -> str:
        """For people: what stands in the way on these GPUs; empty: nothing."""
        if self.refusal:
            return self.refusal
        return next(
            (f"no short time slice on GPU {gpu}: {self.missing[gpu]}" for gpu in sorted(gpus & self.missing.keys())), ""
        )


def group_of(client: ClientId, channel: ChannelRef) -> tuple[ClientId, int, int]:
    return client, channel.h_client, channel.h_tsg
