"""What the services need from the machine, as protocols. The services know these and nothing behind them.

The gate in one paragraph. An online service *holds* its GPUs while it is busy or cooling down. A GPU's offline
channels are off while at least one service holds it. The gate word of a service (in the control page of each of its
clients) is even while it holds, odd while it does not: an odd word asks the next launch to ring. A ring makes the
native listener take the hold, store the closed word, and disable the channels of those of its GPUs that nobody held
before, all without Python; the event comes out of the ring of stamps afterwards. The other edge is native, too, while
Python permits it: the listener looks at the service's clients, opens the word, fences, re-reads the counters, and
either drops the hold (enabling the GPUs that nobody else holds) or goes on because a launch slipped in. Python gives
the permission, with the numbers that it has learned, and takes it back before anything stands in the way.
Services hold from birth, so that no launch precedes its gate.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple, Protocol, TypeVar
from uuid import UUID

from valved.machine.stamps import Stamp
from valved.model.ids import ChannelRef, ClientId, GpuIndex, ProcessId, Reach, Role, ServiceId

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class WakeRule:
    """Leave for the native side to wake a service by itself, with the numbers of its decision (policy/wake.py)."""

    cooldown_ns: int
    learn_ns: int  # a longer gap inside a hold is asked about first
    watch_since_ns: int
    looking_since_ns: int  # gaps that began earlier prove nothing
    watcher_lease_ns: int
    dead_look_ns: int
    hint_lease_ns: int
    refused_backoff_ns: int
    leak_ns: int
    leak_cooldowns: int
    look_share: int
    look_least_ns: int
    look_most_ns: int


class WakeLook(NamedTuple):
    """What the native side found when it last looked at a service. Action and reason as gate.h counts them."""

    holds: bool
    action: int
    reason: int
    is_hinted: bool
    quiet_ns: int
    leaked: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientFds:
    """What a new client is sent, in the order of the WELCOME message."""

    control: int
    region: int
    doorbell: int
    order: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """A stretch without GPU work inside or between requests, as the client's watcher saw it."""

    end_ns: int
    gap_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientView:
    """One consistent look into a client's region. Everything in it is the client's claim."""

    is_filled: bool  # its process has taken the region and written there; else all of this is zero and proves nothing
    submitted: int  # sum over its slots
    idle_submitted: int  # everything up to here is proven done
    idle_ns: int
    busy: bool
    launch_ns: int
    rings: int
    watcher_ns: int
    open_requests: int
    hint_ns: int
    requests_started: int
    requests_ended: int
    useful_tokens: int
    self_stops: int
    order_done: int
    order_status: int
    gaps: tuple[Gap, ...]  # new ones since somebody last asked for gaps

    @classmethod
    def untouched(cls, *, is_filled: bool = False) -> ClientView:
        """A region of which its process has made no use yet."""
        numbers = {field.name: 0 for field in fields(cls) if field.name not in ("is_filled", "busy", "gaps")}
        return cls(**numbers, is_filled=is_filled, busy=False, gaps=())

    @property
    def is_idle(self) -> bool:
        """Nothing was submitted since the watcher last proved the GPU drained."""
        return self.is_filled and self.submitted == self.idle_submitted


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuInfo:
    """A card as the driver names it."""

    index: GpuIndex  # NVML order of this node
    minor: int
    gpu_id: int
    device_instance: int
    uuid: bytes  # 16 bytes, as UVM uses them
    name: str
    total_bytes: int

    @property
    def uuid_text(self) -> str:
        """As the driver, device plugins and placements write it."""
        return f"GPU-{UUID(bytes=self.uuid)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmResult:
    """What became of a channel that an offline client reported."""

    status: int  # 0, or an RM status: the channel could not be verified or reached
    reach: Reach
    want_fd: bool  # path B is the next rung and the client's nvidiactl fd is needed for it
    gated: bool  # the channel is off now
    is_known: bool = True  # to the driver, under the number that the shim was given


class WakeOutcome(enum.Enum):
    """What the native side did with a proposal to wake."""

    WOKEN = "woken"
    REFUSED = "refused"  # a launch slipped in: the service holds on
    NOT_HOLDING = "not-holding"


@dataclass(frozen=True, slots=True, kw_only=True)
class Grants:
    """What a service has granted since it was claimed."""

    grants: int = 0
    broken: int = 0
    granted_ns: int = 0
    until_ns: int = 0  # of the one that is open; 0: none
    refused: Mapping[str, int] = field(default_factory=dict)  # by reason, those that occurred


class GrantPort(Protocol):
    """Granted time at the native gate. Every call may be made from the one asyncio thread only."""

    def consent(self, service: ServiceId, most_ns: int, rest_ns: int) -> None:
        """The longest grant, and from one's beginning to the next. 0: none; one that is open has ended on return."""
        ...

    def set_grantable(self, gpus: frozenset[GpuIndex]) -> None:
        """Offline work there ends a grant by itself should valved be gone. Grants elsewhere have ended on return."""
        ...

    def set_sliceable(self, on: bool, gpus: frozenset[GpuIndex]) -> None:
        """Whether grants go by time slices, and where offline work has short ones. Others have ended on return."""
        ...

    def step(self, client: ClientId) -> tuple[int, int]:
        """When the last step of a hook's engine began and ended, in its own words. Zeros: it tells of none."""
        ...

    def has_file(self, client: ClientId, h_client: int) -> bool:
        """Whether its driver file for this RM client was passed, and is kept."""
        ...

    def shorten(self, client: ClientId, channel: ChannelRef, us: int) -> str:
        """Set the time slice of a channel's group by that file, and ask for it. Empty, or why not."""
        ...

    def offer(self, client: ClientId, tpot_ns: int, gap_ns: int) -> None:
        """Tell an engine's hook that its owner consents, and what was stated. 0: no consent."""
        ...

    def grants(self, service: ServiceId) -> Grants: ...


class ChannelPort(Protocol):
    """Offline channels at the native gate. Every call may be made from the one asyncio thread only."""

    def add_channel(self, client: ClientId, channel: ChannelRef) -> ArmResult:
        """Verify, arm, and disable at once if its GPU is gated. A channel that the app disabled is never enabled."""
        ...

    def remove_channel(self, client: ClientId, h_client: int, h_channel: int) -> None: ...

    def stop_again(self, client: ClientId, h_client: int) -> None:
        """Its process may have enabled channels of this RM client: those on gated GPUs are stopped once more. One call
        for all, however often a process asks."""
        ...

    def switches(self, client: ClientId) -> bool:
        """valved itself switches all of its channels; there is one at least."""
        ...

    def run_again(self, client: ClientId) -> None:
        """Some of its channels may be off by its own hand: they run with the GPU, now or after the next wake. No caller
        waits for it, and no stop."""
        ...

    def give_up(self, client: ClientId, why: str) -> None:
        """Stop none of its channels from here on; those that are off are enabled. They stay in the books, unreached."""
        ...

    def give_rm_client(
        self, client: ClientId, gpu: GpuIndex, h_client: int, h_device: int, h_subdevice: int, fd: int
    ) -> None:
        """Numbers (and, for path B, the fd, which the port now owns; -1 for none) of a workload's RM client."""
        ...

    def note_app_disabled(self, client: ClientId, h_client: int, h_channel: int, disabled: bool) -> None: ...

    def reach(self, gpu: GpuIndex) -> tuple[Reach, str]:
        """The rung in use on this GPU and why it is not a better one."""
        ...

    def enable_foreign(self, channels: Sequence[ChannelRef]) -> int:
        """Enable channels left off by a predecessor (state file). How many were at once: a refusal is tried again."""
        ...

    def enable_unless_held(self, channel: ChannelRef) -> LeftOff:
        """The same for one whose process lives."""
        ...

    def enable_at_once(self, channel: ChannelRef) -> LeftOff:
        """The same, also while its GPU is held: its process turned out to be an online service's. HELD: the driver
        refused, and the port tries again; it is to be asked again even so, for it keeps a file until then."""
        ...

    def turned_out_on(self) -> set[ChannelRef]:
        """Of processes that left while the driver hung and live on: what counted as off and is not. Told once."""
        ...

    def behind(self) -> set[ClientId]:
        """Clients that left while the driver hung: channels of theirs may be off until it answers."""
        ...


class LeftOff(enum.Enum):
    """What became of a channel that is off and in no plan."""

    ENABLED = "enabled"
    ENDED = "ended"  # the driver knows no such channel, or its GPU is lost
    HELD = "held"  # its GPU is held, or the driver refused now: asked again
    OUT_OF_REACH = "out of reach"  # of this valved: it has no RM client there, or may name no foreign channels


class GatePort(Protocol):
    """The native gate: regions, doorbells, issuers. Every call may be made from the one asyncio thread only."""

    def gpus(self) -> Sequence[GpuInfo]: ...

    def driver_version(self) -> str: ...

    def create_client(self, client: ClientId, role: Role, service: ServiceId, *, at_once: bool = False) -> ClientFds:
        """Create and map both memfds and both eventfds; an online client's doorbell is listened to from now on.
        `at_once`: its orders are rung by the thread that gives them, though it can make that take long."""
        ...

    def remove_client(self, client: ClientId, *, lives_on: bool = False) -> tuple[ChannelRef, ...]:
        """Forget a client, its channels and fds. Returns the channels that were off: they were enabled first, or if its
        process lives on they are off still, and nobody here remembers them."""
        ...

    def put_service(self, service: ServiceId, gpus: frozenset[GpuIndex]) -> None:
        """Create an online service (it holds from birth) or change its set of GPUs (new ones are held too)."""
        ...

    def remove_service(self, service: ServiceId) -> None:
        """Drop the service and its hold; GPUs that no other service holds are enabled."""
        ...

    def hold(self, service: ServiceId, reason: int) -> None:
        """Take the hold now, as a ring would (a brake, a missing watcher)."""
        ...

    def wake(self, service: ServiceId) -> WakeOutcome:
        """Try it now, whatever a look would say. Takes a permission back."""
        ...

    def permit(self, service: ServiceId, rule: WakeRule | None) -> None:
        """From here on the service is woken when its clients are found idle and quiet; None: no longer, from now on.

        `put_service` with other GPUs, `hold` and `wake` take a permission back."""
        ...

    def look(self, service: ServiceId) -> WakeLook: ...

    def set_prompt(self, on: bool) -> None:
        """Ordinary stamps make `stamps_fd` readable at once, and do not wait for the next regular drain."""
        ...

    def set_hints(self, client: ClientId) -> None:
        """This engine hook tells of open requests."""
        ...

    def view(self, client: ClientId, *, with_gaps: bool = False) -> ClientView:
        """Each gap is handed out once: only the part that learns from gaps asks for them."""
        ...

    def is_gated(self, gpu: GpuIndex) -> bool:
        """Channels are off, about to be, or not enabled yet."""
        ...

    def is_stopped(self, gpu: GpuIndex) -> bool:
        """The last disable of this GPU has returned, and returned well."""
        ...

    def is_turning(self) -> bool:
        """A disable is under way somewhere: no mapping work now, it would come between two of them."""
        ...

    def set_watch(self, client: ClientId, on: bool) -> None: ...

    def set_memory(self, client: ClientId, handle_bytes: int, budget_bytes: int, size_rule_bytes: int) -> None:
        """What the client's control page says about KV memory (region.h). No handle size: it is not managed."""
        ...

    def set_free(self, client: ClientId, figures: Mapping[GpuIndex, tuple[int, int]]) -> None:
        """Tell a client of each GPU how many bytes are in free handles of the pool, and how many it must leave free."""
        ...

    def hold_launches(self, client: ClientId, on: bool) -> None:
        """Keep an offline client from launching, whatever its GPUs do."""
        ...

    def set_online_registered(self, client: ClientId, on: bool) -> None: ...

    def let(self, gpus: frozenset[GpuIndex]) -> None:
        """Channels of these GPUs, and of no others, stay on though they are held. Gate words stay as they are."""

    def alive(self) -> None:
        """The loop turns. Said often; silence holds every GPU."""
        ...

    def stamps_fd(self) -> int:
        """Readable when stamps wait."""
        ...

    def drain_stamps(self) -> Sequence[Stamp]: ...

    def stamps_lost(self) -> int: ...  # so far, because nobody drained them

    @property
    def granting(self) -> GrantPort: ...

    @property
    def channels(self) -> ChannelPort: ...

    def close(self) -> None:
        """Enable every channel that this port disabled, and end."""
        ...


Runs = Sequence[tuple[int, int]]
"""(address, bytes) of each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseResult:
    status: int  # 0, an RM status, or -errno
    runs: int  # done before that
    took_ns: int


class Door(Protocol):
    """The way into the memory of one process on one GPU: its uvm descriptor."""

    def make_sparse(self, runs: Runs, then: Callable[[SparseResult], None]) -> None:
        """One driver call for each run, in a thread; `then` is called in the loop."""
        ...

    def close(self) -> None:
        """Once what was begun is done."""
        ...


class OutsidePort(Protocol):
    def is_uvm(self, fd: int) -> bool:
        """Whether that is what its sender says."""
        ...

    def is_handle(self, fd: int) -> bool:
        """Whether it is of the file by which the driver exports memory. What it exports cannot be seen from here."""
        ...

    def open(self, fd: int, uuid: bytes) -> Door:
        """Takes the descriptor over. OSError: it does not."""
        ...


class CloserPort(Protocol):
    def close_in_turn(self, fds: Iterable[int]) -> None:
        """Soon, and not on the loop."""
        ...


class WorkPort(Protocol):
    def do(self, job: Callable[[], Any], then: Callable[[Any, Exception | None], None]) -> None:
        """The job in a thread; `then`, in the loop, with what it returned or raised."""
        ...


class PromptPort(Protocol):
    def do(self, job: Callable[[], Result]) -> Result:
        """What a small job on files returns or raises, after those before it. TimeoutError, an OSError: it is not done
        yet, but will be."""
        ...

    def ask(self, question: Callable[[], Result]) -> Result:
        """The same of a job that changes nothing, and need not be done later."""
        ...


class ProverPort(Protocol):
    def check(
        self,
        fd: int,
        gpu: GpuInfo,
        h_client: int,
        h_subdevice: int,
        keep: bool,
        then: Callable[[bool, int], None],
        account: Hashable,
    ) -> None:
        """Takes the descriptor over, which is of that account. `then`, in the loop: whether its file owns this RM
        client with a subdevice on that card; and the descriptor again if it does and was to be kept, else -1. May never
        answer."""
        ...

    def drop(self, fd: int, account: Hashable) -> None:
        """Close what valved does not want; that may take as long as its sender likes."""
        ...


class ProcessPort(Protocol):
    """Processes: which one is a peer, and when does it end."""

    def start_time(self, pid: int) -> int | None:
        """Field 22 of /proc/PID/stat; None for a process that is gone. OSError: it cannot be looked at now."""
        ...

    def is_gone(self, process: ProcessId) -> bool:
        """Whether nothing of it is left, or its number is another's. One that cannot be looked at is there."""

    def is_ending(self, pid: int, start_time: int) -> bool:
        """Whether it is gone, or no code of its own runs any more: all of its threads are past that, or killed."""

    def is_stopped(self, pid: int, stood: set[str] | None = None) -> bool | None:
        """Whether no thread of it runs code of its own before it is continued: a stop signal takes its time. `stood`:
        threads that were seen to stand. None: some more do, and there are others, so ask again with these."""
        ...

    def ancestors(self, pid: int, most: int = ...) -> Sequence[ProcessId]:
        """The process itself, its parent, and so on up to 1, but no zombie."""

    def could_end_us(self, pid: int, uid: int) -> bool:
        """By a signal: it is of our user and sees our number."""

    def cgroup(self, pid: int) -> str | None: ...

    def comm(self, pid: int) -> str: ...

    def open_pidfd(self, pid: int) -> int:
        """A pidfd, or -1 if the process is gone. OSError: there is none to be had now."""
        ...
