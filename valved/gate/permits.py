"""Gives the native side leave to wake a service by itself, with the numbers of its decision, and takes it back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from valved.gate.doubt import COOLDOWNS, LEAST_NS
from valved.gate.online import OnlineService
from valved.gate.records import GateRecords, reason_of
from valved.machine.clock import Clock, Ticker
from valved.machine.ports import ClientView, GatePort, WakeLook, WakeRule
from valved.model.ids import GpuIndex, Role, ServiceId
from valved.policy.breaker import BreakerSettings
from valved.policy.cooldown import CooldownSettings
from valved.policy.wake import WakeAction, WakeDecision, WakeReason, WakeSettings
from valved.state.registry import Books, ClientEntry
from valved.state.stats import GpuAccount

TICK_NS = 250_000_000  # how often stamps of ordinary edges are read when no call asks for them
SELDOM_NS = 20 * TICK_NS  # between looks at a service of short holds: a mark ages by 4 % meanwhile
QUIET_TICKS = 4  # without a stamp and without a hold: then the native side rings for the next stamp, ...
REST_NS = 8 * TICK_NS  # ... and this looks for changed settings alone
LEAST_CHANGE = 50  # a cooldown that has shrunk by less than this part is not worth telling

# As enum valve_wake_action of native/gate.h counts them.
ACTIONS = (WakeAction.HOLD, WakeAction.WAIT, WakeAction.WAKE)


@dataclass(slots=True, kw_only=True)
class GateSettings:
    """The policies' settings in force. SetPolicy replaces the cooldown's while running."""

    cooldown: CooldownSettings
    wake: WakeSettings
    breaker: BreakerSettings
    by_arrivals: bool = False


@dataclass(eq=False, repr=False)
class Permits:
    """Looks at each online service: after what changed, and a few times a second while one is permitted. At rest, when
    nothing happens for a second and no permitted service holds, it reads no stamps: the next one rings.

    `online` and `gpus` are the gate's own books; `drain` brings them up to this moment; `want_prompt` has stamps ring.
    """

    _gate: GatePort
    _books: Books
    _clock: Clock
    _settings: GateSettings
    _records: GateRecords
    _online: Mapping[ServiceId, OnlineService]
    _gpus: Mapping[GpuIndex, GpuAccount]
    _drain: Callable[[], None]
    _want_prompt: Callable[[str, bool], None]

    def __post_init__(self) -> None:
        self._is_braked = False
        self._askers: set[str] = set()
        self._cooldown = self._settings.cooldown  # that all permissions rest on
        self._ticker = Ticker(self._clock, self._tick_over, on_beat=True)
        self._quiet_ticks = 0
        self._is_at_rest = False

    @property
    def is_braked(self) -> bool:
        """Paused, off or draining: no service is woken."""
        return self._is_braked

    @is_braked.setter
    def is_braked(self, on: bool) -> None:
        self._is_braked = on
        for online in self._online.values() if on else ():
            self.withdraw(online)

    def ask_idleness(self, asker: str, on: bool) -> None:
        """A report asks how idle GPUs are, although there is no offline work that could run."""
        (self._askers.add if on else self._askers.discard)(asker)
        self.look_at_all()

    def look_at_all(self) -> None:
        for online in list(self._online.values()):
            self.look_soon(online)

    def look_soon(self, online: OnlineService) -> None:
        self._arm(online, self._clock.now_ns())

    def _arm(self, online: OnlineService, when_ns: int) -> None:
        if online.timer is not None:
            online.timer.cancel()
        online.timer = self._clock.call_at_ns(when_ns, lambda: self._look(online))

    def _look(self, online: OnlineService) -> None:
        try:
            self._look_once(online)
        except Exception:  # it is looked at for what changed alone, so nobody else may do it for hours
            self._arm(online, self._clock.now_ns() + REST_NS)
            raise

    def _look_once(self, online: OnlineService) -> None:
        """Learn from the clients' regions; permit, or not; note what the last answer was."""
        if online.timer is not None:
            online.timer.cancel()
            online.timer = None
        self._drain()
        if online.id not in self._online:
            return
        now_ns, before = self._clock.now_ns(), online.decision
        obstacle = self._obstacle(online, now_ns)
        self._set_watch(online, obstacle is None)
        if online.holding:
            online.looked_ns = now_ns
            views = self._views(online.id)
            online.observe(views, now_ns, self._settings.cooldown, self._settings.by_arrivals)
            if online.open_requests and online.rule is not None:
                cooldown_ns, since_ns = online.cooldown.cooldown_ns, online.book.since_ns
                online.doubt.look(views, online.open_requests, since_ns, cooldown_ns, now_ns)
            elif online.doubt.held_since_ns:
                online.doubt.end()
        else:
            online.read_cooldown(self._settings.cooldown)
        if obstacle is None:
            self._permit(online)
            online.decision = decision_of(self._gate.look(online.id), before)
        else:
            self.withdraw(online)
            online.decision = no_permit(obstacle, before)
        if self.is_resting(online, now_ns):
            self._arm(online, online.breaker.open_until_ns)
        if online.holding and online.decision is not None:
            self._records.change(online, before, online.decision)

    def _obstacle(self, online: OnlineService, now_ns: int) -> WakeReason | None:
        """What stands in the way that the native side does not know of."""
        if self._is_braked or online.away or self.is_resting(online, now_ns):
            return WakeReason.BRAKED
        return None if self._has_offline(online) else WakeReason.NO_OFFLINE

    def _permit(self, online: OnlineService) -> None:
        rule = rule_of(online, self._settings.wake)
        if is_news(online.rule, rule):
            online.rule = rule
            self._gate.permit(online.id, rule)
        if online.holding:
            self.stir()
        self._ticker.start(REST_NS if self._is_at_rest else TICK_NS)

    def withdraw(self, online: OnlineService) -> None:
        """Whatever is to hold from here on is said to the native side before anything else."""
        if online.rule is not None:
            online.rule = None
            self._gate.permit(online.id, None)

    def stir(self) -> None:
        """Something happened: a stamp came, or a permitted service holds."""
        self._quiet_ticks = 0
        if not self._is_at_rest:
            return
        self._is_at_rest = False
        self._want_prompt("at rest", False)
        if self._ticker.runs:
            self._ticker.stop()
            self._ticker.start(TICK_NS)

    def _rest(self) -> None:
        self._is_at_rest = True
        self._want_prompt("at rest", True)
        self._ticker.start(REST_NS)
        self._drain()  # what was stamped before that rang for nobody

    def _tick_over(self) -> None:
        """Read what happened, and look at the busy services."""
        self._drain()
        is_new, self._cooldown = self._cooldown is not self._settings.cooldown, self._settings.cooldown
        permitted = [online for online in self._online.values() if online.rule is not None]
        if not permitted:
            self._ticker.stop()
        now_ns = self._clock.now_ns()
        for online in permitted:
            if is_new or (online.holding and is_due(online, now_ns)):
                self._look(online)
        self._quiet_ticks = 0 if any(online.holding for online in permitted) else self._quiet_ticks + 1
        if permitted and self._quiet_ticks >= QUIET_TICKS and not self._is_at_rest:
            self._rest()

    def _has_offline(self, online: OnlineService) -> bool:
        return bool(self._askers) or any(self._gpus[gpu].channels for gpu in online.gpus)

    def is_resting(self, online: OnlineService, now_ns: int) -> bool:
        return now_ns < online.breaker.open_until_ns

    def _set_watch(self, online: OnlineService, on: bool) -> None:
        if online.book.watching == on:
            return
        online.watch(on, self._clock.now_ns())
        for client in self._books.clients_of(online.id):
            if client.role is Role.ONLINE:
                self._gate.set_watch(client.id, on)

    def _views(self, service: ServiceId) -> list[tuple[ClientEntry, ClientView]]:
        clients = self._books.clients_of(service)
        return [(client, self._gate.view(client.id, with_gaps=True)) for client in clients]


def is_due(online: OnlineService, now_ns: int) -> bool:
    """The service is not just passing through a short hold, or was last looked at long ago."""
    return now_ns - online.book.since_ns >= TICK_NS // 4 or now_ns - online.looked_ns >= SELDOM_NS


def rule_of(online: OnlineService, settings: WakeSettings) -> WakeRule:
    leak_ns, leak_cooldowns = settings.leak_ns, settings.leak_cooldowns
    if online.doubt.idle_ns >= leak_ns:
        leak_ns, leak_cooldowns = min(LEAST_NS, leak_ns), min(COOLDOWNS, leak_cooldowns)
    return WakeRule(
        cooldown_ns=online.cooldown.cooldown_ns,
        learn_ns=online.cooldown.gap_ns,
        watch_since_ns=online.book.watch_since_ns,
        looking_since_ns=online.book.watch_since_ns,
        watcher_lease_ns=settings.watcher_lease_ns,
        dead_look_ns=settings.dead_look_ns,
        hint_lease_ns=settings.hint_lease_ns,
        refused_backoff_ns=settings.refused_backoff_ns,
        leak_ns=leak_ns,
        leak_cooldowns=leak_cooldowns,
        look_share=settings.look_share,
        look_least_ns=settings.look_least_ns,
        look_most_ns=settings.look_most_ns,
    )


def is_news(old: WakeRule | None, new: WakeRule) -> bool:
    """Whether the native side must hear of it. A mark that ages shortens the cooldown a little at every look."""
    if old is None or old.watch_since_ns != new.watch_since_ns or old.watcher_lease_ns != new.watcher_lease_ns:
        return True
    if old.leak_ns != new.leak_ns:
        return True
    return not 0 <= old.cooldown_ns - new.cooldown_ns < old.cooldown_ns // LEAST_CHANGE


def decision_of(look: WakeLook, before: WakeDecision | None) -> WakeDecision | None:
    reason = reason_of(look.reason)
    if reason is None:
        return before
    return WakeDecision(
        action=ACTIONS[look.action],
        reason=reason,
        look_again_ns=None,
        quiet_ns=look.quiet_ns,
        is_hinted=look.is_hinted,
        leaked=look.leaked,
    )


def no_permit(reason: WakeReason, before: WakeDecision | None) -> WakeDecision:
    """The answer while the listener may not look."""
    is_hinted = before is not None and before.is_hinted
    return WakeDecision(action=WakeAction.HOLD, reason=reason, look_again_ns=None, is_hinted=is_hinted)
