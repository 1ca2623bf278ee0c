"""Knows the replicas: which are alive, what each has under way, and which one the next request goes to."""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from itertools import count
from math import inf

import numpy as np

from valve_router.adapters import HeldAdapters, PublishedAdapters
from valve_router.listing import Listing
from valve_router.plan.memory import FitVerdict, Resident, fits_memory
from valve_router.plan.profile import Measured, fit
from valve_router.plan.score import choose
from valve_router.plan.task import Task, TaskKind
from valve_router.plan.timeline import Placed, Timeline
from valve_router.prefix import SeenPrompts, chunks
from valve_router.settings import RouterSettings

log = logging.getLogger(__name__)

CHARACTERS_PER_TOKEN = 4
JUDGED = 100  # predictions over which their error counts
WORST_ERROR = 0.5  # of them, in the mean: beyond it requests go where the fewest are under way
REFIT_EVERY = 50
KEPT_S = 60.0  # what is known of one that left, and might come back
WEIGHT = 0.1  # of the newest gap between two pieces of an answer


@dataclass(slots=True)
class Replica:
    name: str
    url: str
    pod: str  # its UID, or what else tells one process from the next under an address
    timeline: Timeline
    is_alive: bool = True  # until a question says otherwise: a router that just started refuses no request
    is_drained: bool = False
    left_s: float = 0.0
    why_not: str = ""
    under_way: int = 0
    prompt_tokens: int = 0  # of what is under way
    served: int = 0
    failed: int = 0
    measured: int = 0  # requests that were alone
    adapters: HeldAdapters = field(default_factory=HeldAdapters)
    gap_s: float = 0.0  # between two pieces of an answer, lately
    prefixes: SeenPrompts = field(default_factory=SeenPrompts)
    errors: deque[float] = field(default_factory=lambda: deque(maxlen=JUDGED))
    alone: deque[Measured] = field(default_factory=lambda: deque(maxlen=200))

    @property
    def error(self) -> float:
        return sum(self.errors) / len(self.errors) if self.errors else 0.0

    def saw_gap(self, seconds: float) -> None:
        self.gap_s += WEIGHT * (seconds - self.gap_s)


@dataclass(slots=True)
class Sent:
    """One request on its way to one replica."""

    replica: Replica
    placed: Placed
    was_alone: bool
    is_open: bool = True
    is_broken: bool = False  # its replica broke off within the answer
    version: str | None = None  # what the engine was asked for; None: as it came
    losses: int = 0  # of its replica when it was asked
    is_second: bool = False  # it was sent to this replica before, for another version


class Full(Exception):
    """Every replica that is alive has as much as it may have."""


class NobodyAlive(Exception):
    """No replica answers."""


class NobodyHas(NobodyAlive):
    """No replica that answers has the published adapter."""


class Replicas:
    """`now_s`: a clock that never goes back."""

    def __init__(self, settings: RouterSettings, now_s: Callable[[], float]) -> None:
        self._settings = settings
        self._now_s = now_s
        self._numbers = count()
        self.published = PublishedAdapters(settings.newest)
        self.all: list[Replica] = []
        self.recent: deque[tuple[float, int]] = deque(maxlen=100_000)  # when requests came, and their tokens
        self._left: list[Replica] = []
        self._has_begun = False  # replicas of the start are taken to have missed nothing
        self.follow({url: url for url in settings.replicas})
        self.is_told = settings.service is None  # which they are

    def follow(self, pods: Mapping[str, str]) -> None:
        """From now on these: URL and pod. What runs in one that is left out may end there. A pod that was not ready for
        a while comes back as what it was: drained, and with what it has under way. Another pod under the same address
        begins anew, under a number of its own."""
        now_s, first, self.is_told = self._now_s(), self._settings.first_guess, True
        known = {(one.url, one.pod): one for one in (*self._left, *self.all)}
        before = self.all
        self.all = [
            known.pop((url, pod))
            if (url, pod) in known
            else Replica(name=str(next(self._numbers)), url=url, pod=pod, timeline=Timeline(first))
            for url, pod in ((url.rstrip("/"), pod) for url, pod in pods.items())
        ]
        for one in before:
            one.left_s = now_s
        there = {one.name for one in before} if self._has_begun else {one.name for one in self.all}
        for one in (*known.values(), *(one for one in self.all if one.name not in there)):
            one.adapters.away()  # one that is new later has missed what was published, as one that comes back has
        self._has_begun = self._has_begun or bool(self.all)
        self._left = [one for one in known.values() if one.under_way or one.is_drained or now_s - one.left_s < KEPT_S]
        self.published.look(self._held())

    def send(self, prompt: str, but: Collection[Replica] = (), model: str = "") -> Sent:
        """Choose a replica, and count the request there. `but`: those that have failed it already. `model`: a published
        one goes only to a replica that has it."""
        tried = {one.name for one in but}
        alive = [one for one in self.all if one.is_alive and not one.is_drained and one.name not in tried]
        if self.is_published(model):
            alive = [one for one in alive if one.adapters.asks(model) is not None]
            if not alive:
                raise NobodyHas(f"no replica has {model} now")
        if not alive:
            raise NobodyAlive("no replica answers")
        free = [one for one in alive if one.under_way < self._settings.open_per_replica]
        if not free:
            raise Full
        target_s = self._settings.tpot_target_s
        quick = [one for one in free if not target_s or one.gap_s <= target_s or not one.under_way]
        names = chunks(prompt)
        among = self._roomy(quick or free, 1 + len(prompt) // CHARACTERS_PER_TOKEN)
        try:
            sent = self._choose(among, prompt, names)
        except Exception:  # a wrong prediction never costs a request: the fewest under way
            log.exception("no replica could be chosen by prediction")
            replica = min(among, key=lambda one: one.under_way)
            sent = Sent(replica, replica.timeline.place(Task(arrival_s=self._now_s(), tokens=1)), was_alone=False)
        self.recent.append((sent.placed.task.arrival_s, sent.placed.task.tokens))
        self._begin(sent)
        sent.replica.prefixes.add(names)
        sent.replica.timeline.add(sent.placed)
        return sent

    def _roomy(self, among: list[Replica], tokens: int) -> list[Replica]:
        """Those whose KV memory would hold the prompt now; all where it is not known, or none would: it waits there."""
        most = self._settings.kv_tokens
        if not most:
            return among
        held = [Resident(name="", bytes=one.prompt_tokens, kind=TaskKind.INFERENCE, since_s=0.0) for one in among]
        fits = [fits_memory(tokens, most, [one], 0.0, inf).verdict is FitVerdict.FITS for one in held]
        return [one for one, is_fitting in zip(among, fits, strict=True) if is_fitting] or among

    def _begin(self, sent: Sent) -> None:
        sent.replica.under_way += 1
        sent.replica.prompt_tokens += sent.placed.task.tokens

    def _choose(self, among: list[Replica], prompt: str, names: list[bytes]) -> Sent:
        task = Task(arrival_s=self._now_s(), tokens=1 + len(prompt) // CHARACTERS_PER_TOKEN)
        tasks = []
        for one in among:
            shared = one.prefixes.shared_characters(names) // CHARACTERS_PER_TOKEN
            tasks.append(replace(task, cached_tokens=min(shared, task.tokens)))
        if any(len(one.errors) == JUDGED and one.error > WORST_ERROR for one in among):
            index = min(range(len(among)), key=lambda i: (among[i].under_way, -tasks[i].cached_tokens, i))
            placed = among[index].timeline.place(tasks[index])
        else:
            choice = choose([one.timeline for one in among], tasks, self._settings.score)
            index, placed = choice.index, choice.placed
        return Sent(among[index], placed, was_alone=not among[index].under_way)

    def instead_of(self, chosen: Replica, but: Collection[Replica] = (), model: str = "") -> Replica | None:
        """The replica that takes a request which `chosen` does not take. Only one: the request may kill its reader."""
        names = {chosen.name, *(one.name for one in but)}
        able = [one for one in self.all if one.is_alive and not one.is_drained and one.name not in names]
        if self.is_published(model):
            able = [one for one in able if one.adapters.asks(model) is not None]
        free = [one for one in able if one.under_way < self._settings.open_per_replica]
        return min(free, key=lambda one: one.under_way, default=None)

    def moved(self, sent: Sent, replica: Replica) -> Sent:
        """The gateway sent the request on to `replica`, as the chosen one did not take it."""
        self.ended(sent, is_served=False, has_failed=True)
        now = Sent(replica, replica.timeline.place(sent.placed.task), was_alone=False)
        self._begin(now)
        replica.timeline.add(now.placed)
        return now

    def is_full(self) -> bool:
        """No replica could be sent anything now."""
        able = [one for one in self.all if one.is_alive and not one.is_drained]
        return bool(able) and all(one.under_way >= self._settings.open_per_replica for one in able)

    def answered(self, sent: Sent) -> None:
        """The first token came: how good was the prediction?"""
        replica, now_s = sent.replica, self._now_s()
        took_s = max(1e-6, now_s - sent.placed.task.arrival_s)
        replica.errors.append(min(1.0, abs(sent.placed.response_s - took_s) / took_s))
        replica.timeline.measured(sent.placed, now_s)
        if sent.was_alone:
            task = sent.placed.task
            replica.alone.append(Measured(batch=1, tokens=task.new_tokens, took_s=took_s))
            replica.measured += 1
            if replica.measured % REFIT_EVERY == 0:
                with contextlib.suppress(np.linalg.LinAlgError, ValueError):
                    law = fit(list(replica.alone))
                    replica.timeline.profile = replace(replica.timeline.profile, forward=law)

    def ended(self, sent: Sent, *, is_served: bool, has_failed: bool) -> None:
        """Once for each request sent: served, failed by the replica, or neither: its client gave it up."""
        if not sent.is_open:
            return
        sent.is_open = False
        sent.replica.under_way -= 1
        sent.replica.prompt_tokens -= sent.placed.task.tokens
        sent.replica.served += is_served
        sent.replica.failed += has_failed
        if not sent.replica.under_way:  # nothing of what was planned is left to wait for
            sent.replica.timeline.forward_end_s = None
            sent.replica.gap_s = 0.0

    def is_published(self, model: str) -> bool:
        return model in self.published.names

    def listed(self, replica: Replica, listing: Listing) -> None:
        """What it says that it has."""
        self.published.listed(replica.adapters, listing, self._held())

    def given(self, replica: Replica, tried: Collection[str]) -> None:
        """It was asked to load these, and has said since what it has."""
        self.published.given(replica.adapters, tried, self._held())

    def _held(self) -> list[HeldAdapters]:
        return [one.adapters for one in (*self._left, *self.all)]

    def heard(self, replica: Replica, why_not: str) -> None:
        """Of a question after its health; empty: it is well."""
        if why_not:
            replica.adapters.away()
        if replica.is_alive and why_not:
            replica.prefixes.clear()
            replica.errors.clear()
        replica.is_alive, replica.why_not = not why_not, why_not

    def find(self, name: str) -> Replica | None:
        return next((one for one in self.all if name in (one.name, one.url)), None)
