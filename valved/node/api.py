"""What others may ask of this node, one method per question. The gRPC servicer calls these and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import KW_ONLY, dataclass, field, replace

from valved.clients.consents import Consents
from valved.clients.register import Register
from valved.errors import InvalidRequest, NotFound, NotNow
from valved.gate.wake import GateService
from valved.model.consent import SILENT, Said, check
from valved.model.events import EventKind
from valved.model.ids import Mode, Role
from valved.model.plain import plain
from valved.model.states import Explanation, NodeState, PolicyState
from valved.node.brake import Brake
from valved.node.handover import Handover
from valved.node.status import Reporter
from valved.policy.cooldown import CooldownSettings
from valved.state.journal import Journal, Watcher

ANSWER_NS = 1_000_000_000  # who was not answered by then reads in the status that it is not written
CLAIM_NS = 100_000_000  # a service that starts waits for its claim, and no longer
UNNAMED = "an unnamed caller"
WATCH_QUEUE = 1024  # events a slow watcher may lag behind


@dataclass(eq=False, repr=False)
class Node:
    _gating: GateService
    _register: Register
    _brake: Brake
    _reporter: Reporter
    _handover: Handover
    _journal: Journal
    _consents: Consents
    _: KW_ONLY
    lease_ns: int
    stop: Callable[[], None]
    troubles: list[str] = field(default_factory=list)  # that the start met, for as long as this daemon runs

    def status(self) -> NodeState:
        unwritten = (*self._handover.unwritten(), *self._brake.unwritten(), *self._journal.unwritten())
        lack = self._register.admission.deaf.lack
        return replace(self._reporter.status(), unwritten=unwritten, troubles=tuple(self.troubles), lack=lack)

    def save(self, then: Callable[[bool], None]) -> None:
        """`then`, soon: whether all is in the state file that could be read here up to now."""
        self._handover.save()
        self.when_saved(then)

    def when_saved(self, then: Callable[[bool], None], within_ns: int = ANSWER_NS) -> None:
        """The same of what was ordered or claimed up to now: no caller of the API is answered before."""
        self._handover.when_saved(then, within_ns)

    @property
    def epoch(self) -> int:
        return self._journal.epoch

    def watch(
        self, kinds: Iterable[str], wake: Callable[[], None], since_seq: int | None = None, epoch: int | None = None
    ) -> Watcher:
        known = {kind.value for kind in EventKind}
        unknown = sorted(set(kinds) - known)
        if unknown:
            raise InvalidRequest(
                f"unknown kind of event: {', '.join(unknown)}",
                field="kinds",
                next_step=f"known: {', '.join(sorted(known))}",
            )
        return self._journal.watch(kinds, WATCH_QUEUE, wake, since_seq, epoch)

    def unwatch(self, watcher: Watcher) -> None:
        self._journal.unwatch(watcher)

    def launch(self, pid: int, start_time: int, role: Role, name: str, said: Said = SILENT) -> int:
        if role not in (Role.ONLINE, Role.OFFLINE):
            raise InvalidRequest("a process can be claimed as online or offline only", field="role")
        if pid <= 0:
            raise InvalidRequest(f"pid {pid} is no process", field="pid")
        self._check_words(role, said)
        if role is Role.OFFLINE and self._brake.refusal:
            raise NotNow(self._brake.refusal, field="role", next_step=self._brake.next_step)
        if role is Role.OFFLINE and self._register.claimed.is_above_valved(pid):
            raise InvalidRequest(f"valved runs below process {pid}: a drain would end it as well", field="pid")
        claim = self._register.claimed.claim(pid, start_time, role, plain(name))
        if claim is None:
            raise NotFound(
                f"process {pid} that started at {start_time} does not exist",
                field="start_time",
                next_step="pass field 22 of /proc/PID/stat, and call while the process lives",
            )
        if role is Role.ONLINE:
            self._consents.say(claim.service, said)
            self._handover.save()  # however suddenly this valved ends, the process comes back as what it is
        return int(claim.service)

    @staticmethod
    def _check_words(role: Role, said: Said) -> None:
        if said != SILENT and role is not Role.ONLINE:
            raise InvalidRequest("only an online service can state a target or consent", field="slo")
        try:
            check(said)
        except ValueError as error:
            text = str(error)
            raise InvalidRequest(text, field=text.partition(":")[0], next_step="see docs/finetuning.md") from None

    def policy(self) -> PolicyState:
        cooldown = self._gating.settings.cooldown
        return PolicyState(
            mode=self._brake.mode,
            cooldown_start_ns=cooldown.start_ns,
            cooldown_floor_ns=cooldown.floor_ns,
            cooldown_ceiling_ns=cooldown.ceiling_ns,
            cooldown_factor=cooldown.factor,
            cooldown_window_ns=cooldown.window_ns,
            lease_ns=self.lease_ns,
        )

    def set_policy(
        self, mode: Mode | None, changes: dict[str, int | float], lease_ns: int, by: str = UNNAMED
    ) -> PolicyState:
        """Fields left at zero keep their value. Everything is checked before anything changes."""
        if lease_ns not in (0, self.lease_ns):
            raise InvalidRequest(
                "the lease is fixed while valved runs", field="lease_ns", next_step="set lease_ms in the configuration"
            )
        before = self._gating.settings.cooldown
        try:
            after = replace(before, **changes)  # type: ignore[arg-type]
        except ValueError as error:
            raise InvalidRequest(
                str(error).replace("_ns", ""), field="cooldown", next_step="valve policy shows these settings, in ms"
            ) from None
        if after != before:
            self._set_cooldown(after, changes, by)
        if mode is not None:
            self._brake.set_mode(mode, by)
            self._handover.keep(mode=mode)
        self._handover.save()  # who was answered reads no other setting after a crash
        return self.policy()

    def _set_cooldown(self, settings: CooldownSettings, changes: dict[str, int | float], by: str) -> None:
        self._gating.settings.cooldown = settings
        self._handover.keep(
            cooldown=(settings.start_ns, settings.floor_ns, settings.ceiling_ns, settings.factor, settings.window_ns),
        )
        detail = {name: value if isinstance(value, int) else f"{value:g}" for name, value in changes.items()}
        self._journal.put(EventKind.POLICY, 0, 0, (), "cooldown", 0, {**detail, "by": by})

    def pause(self, by: str) -> None:
        self._brake.pause(by)

    def resume(self, by: str = UNNAMED) -> None:
        self._brake.resume(by)

    @property
    def is_sure(self) -> bool:
        """The files say what is ordered; False: their disk has not answered yet."""
        return not self._brake.is_unsure

    def look(self) -> None:
        self._brake.look_at_file()

    def drain(self, by: str, *, stop: bool) -> None:
        """Returns at once: offline processes may take their time to end."""
        self._brake.drain(by, self.stop if stop else None)

    def explain(self, subject: str, number: int) -> Explanation:
        explainers = {
            "gpu": self._reporter.explain_gpu,
            "pid": self._reporter.explain_pid,
            "service": self._reporter.explain_service,
            "reclaim": self._reporter.explain_reclaim,
        }
        if subject not in explainers:
            raise InvalidRequest("name a GPU, a process, a service or a reclaim", field="subject")
        answer = explainers[subject](number)
        if answer is None:
            raise self._nothing_known(subject, number)
        return answer

    def _nothing_known(self, subject: str, number: int) -> NotFound:
        text, step = f"valved knows no {subject} {number}", "see: valve status"
        if subject == "gpu":
            there = ", ".join(f"gpu{gpu}" for gpu in sorted(self._gating.gpus))
            text, step = f"there is no GPU {number} here", f"there are: {there or 'none (valve doctor says why)'}"
        if subject == "reclaim":
            step = "see: valve explain reclaims"
        return NotFound(text, field=subject, next_step=step)
