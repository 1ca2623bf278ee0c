"""Valve's side of the simulation: the product's own policies behind the core's callbacks. Nothing is decided here."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np
from valve_tools.sim.machine import blocks_per_handle, timing
from valve_tools.sim.rungs import waited_ns
from valve_tools.sim.world import HandleView, MemoryPolicy

from valved.model.memory import (
    OnlineMemory,
    ReservationAction,
    ReservationDecision,
    ReservationRule,
    ReservationState,
)
from valved.policy import reservation
from valved.policy.apart import LEAST_NS, GapsState, shorten, step_gaps
from valved.policy.columns import uniform_columns
from valved.policy.cooldown import (
    CooldownObservation,
    CooldownSettings,
    CooldownState,
    first_cooldown,
    step_cooldown,
)
from valved.policy.eviction import BlockTables, EvictionSettings, index_requests, select
from valved.policy.reservation import ReservationSettings
from valved.policy.wake import HintView, LauncherView, WakeAction, WakeObservation, WakeSettings, WakeState, decide_wake

SECOND_NS = 1_000_000_000


_columns = lru_cache(maxsize=8)(uniform_columns)


def take(memory: HandleView, handles: int, wait_ns: int = 0) -> int:
    """Free handles first, then offline's columns in the order of the product's selective eviction, after a wait."""
    if handles <= 0:
        return 0
    taken = memory.take_free(handles)
    if taken == handles:
        return taken
    if wait_ns:
        memory.delay(wait_ns)
    return taken + memory.take_columns(_victims(memory, handles - taken))


def _victims(memory: HandleView, handles: int) -> list[int]:
    job, settings = memory.world.job, memory.world.settings
    if job is None:
        return []
    per_column = blocks_per_handle(job.model, job.tp, settings)
    shape = _columns(memory.handles, per_column, settings.block_tokens)
    backed, _ = memory.columns()
    reclaimable = np.zeros(memory.handles, dtype=np.bool_)
    reclaimable[backed] = True
    ptr, columns, tokens = memory.block_tables()
    engine = timing(job.model, job.tp, settings, budget_tokens=1, max_seqs=1)
    index = index_requests(
        replace(shape, is_reclaimable=reclaimable),
        BlockTables(ptr=ptr, blocks=_block_ids(columns, per_column), tokens=tokens),
        EvictionSettings(
            token_ns=round(engine.prefill_token_ns),
            attention_ps_per_pair=round(engine.attention_pair_ns * 1000),
        ),
    )
    return [int(column) for column in select(index, handles).columns]


def _block_ids(columns: np.ndarray[tuple[int], np.dtype[np.int64]], per_column: int) -> np.ndarray:
    """Any distinct ids inside each block's column: eviction looks at columns only."""
    order = np.argsort(columns, kind="stable")
    ranked = columns[order]
    rank = np.arange(len(ranked)) - np.searchsorted(ranked, ranked)
    ids = np.empty_like(columns)
    ids[order] = ranked * per_column + rank
    return ids


def rests_until_ns(state: ReservationState, said: ReservationDecision, settings: ReservationSettings) -> int:
    """Until when a look that finds the use of the last one changes nothing; 0: it may at once.

    That is so at the policy's fixed point: its headroom is at its least, and it held for no pressure. Then time alone
    moves it, when a slice with a higher peak is forgotten, a wait of tau ends, or a reclaim leaves the window. Above
    its least the headroom falls at each look by a float, which no jump would round alike.
    """
    used = said.memory.used_handles
    is_least = settings.rule is ReservationRule.BUDGET and state.exact_handles <= settings.headroom_min_handles
    holds = said.action is ReservationAction.HOLD and not reservation.is_pressure(said.memory, settings)
    is_due = reservation.next_wake_ns(state, settings) <= state.looked_ns + SECOND_NS
    is_alike = state.peaks[-1][1] == state.used_handles == used and not reservation.is_heading_down(state)
    if not (is_least and holds and is_due and is_alike):
        return 0
    higher = tuple(one for one in state.peaks if one[1] > used)
    # The policy would wake at once to lower what cannot be lowered: asked with a fraction that nearly nothing lowers.
    alike = replace(state, peaks=(*higher, state.peaks[-1]), exact_handles=state.exact_handles + 0.5)
    leaves_ns = [at + settings.window_ns for at in state.reclaims_ns[:1]]
    return min([reservation.next_wake_ns(alike, replace(settings, spend_share=1e-9)), *leaves_ns])


@dataclass(slots=True, kw_only=True)
class OurMemory(MemoryPolicy):
    """Reservation decides how much, selective eviction decides which."""

    settings: ReservationSettings = field(default_factory=ReservationSettings)
    step_ns: int = 0
    """Of the offline engine, where memory comes between two of its steps; 0: taken under the gate. What is left of a
    step at that moment is any part of it."""
    let_ns: int = 0
    """How much of a step runs at a time while a request waits for the memory; 0: all of it."""
    _memory: HandleView = field(init=False)
    _state: ReservationState = field(init=False)
    _chance: random.Random = field(init=False)
    _said: ReservationDecision | None = None
    _rests_ns: int | None = None
    """Until when looks are left out; None: not asked since the last one."""
    _left_out: range = range(0)
    """The times of the looks that were left out since the last one."""

    def __post_init__(self) -> None:
        self.pressure_ratio = self.settings.pressure_ratio

    def begin(self, memory: HandleView) -> None:
        self._memory = memory
        self._chance = random.Random(memory.world.seed)
        self._state = reservation.start(0, self.settings)
        memory.take_free(self.settings.headroom_min_handles)
        memory.back_offline(memory.handles)
        memory.tick_at(SECOND_NS)

    def on_pressure(self, now_ns: int, unmet_handles: int) -> None:
        self._decide(now_ns, unmet_handles)

    def on_tick(self, now_ns: int) -> None:
        """The core does not tell every change of use: a look a second, where use moved or the policy is due."""
        peak = self._memory.peak()
        if self._rests(now_ns, peak):
            first_ns = self._left_out.start if self._left_out else now_ns
            self._left_out = range(first_ns, now_ns + 1, SECOND_NS)
        else:
            self._catch_up()
            if peak != self._state.used_handles or now_ns >= reservation.next_wake_ns(self._state, self.settings):
                self._decide(now_ns, 0, peak)
        self._memory.tick_at(now_ns + SECOND_NS)

    def _rests(self, now_ns: int, peak: int) -> bool:
        used = self._state.used_handles
        if self._said is None or not used == peak == self._memory.view().online_busy:
            return False
        if self._rests_ns is None:
            self._rests_ns = rests_until_ns(self._state, self._said, self.settings)
        return now_ns < self._rests_ns

    def _catch_up(self) -> None:
        """Of the looks that were left out those that the policy still remembers: the rest left nothing behind."""
        if not self._left_out or self._said is None:
            return
        remembered_ns = self._state.tau_ns + self._state.tau_ns // reservation.SLICES
        found = replace(self._said.memory, peak_handles=self._state.used_handles)
        for at_ns in self._left_out[-math.ceil(remembered_ns / SECOND_NS) :]:
            self._state, said = reservation.decide(self._state, found, at_ns, self.settings)
            if said.action is not ReservationAction.HOLD:
                raise AssertionError(f"a look was left out that would {said.action.value}: {said.reason}")
        self._left_out = range(0)

    def _decide(self, now_ns: int, unmet_handles: int, peak_handles: int = 0) -> None:
        self._catch_up()
        memory, view = self._memory, self._memory.view()
        online = OnlineMemory(
            used_handles=view.online_busy,
            mapped_handles=view.online_backed,
            unmet_handles=unmet_handles,
            peak_handles=peak_handles,
            # A column that no offline request holds a block of is as free as a handle of the pool.
            free_handles=view.free + view.offline_backed - view.offline_busy,
            pool_handles=memory.handles,
        )
        self._state, decision = reservation.decide(self._state, online, now_ns, self.settings)
        self._said, self._rests_ns = decision, None
        if decision.action is ReservationAction.TAKE:
            take(memory, decision.handles, waited_ns(self._chance.random() * self.step_ns, self.let_ns))
        elif decision.action is ReservationAction.GIVE:
            memory.give(decision.handles)
            memory.back_offline(memory.handles)
        if decision.is_reclaim:
            memory.reclaims.append(now_ns)


@dataclass(slots=True, kw_only=True)
class ProductWake:
    """valved's wake and cooldown policies for one service of one client."""

    hinted: bool
    by_arrivals: bool = False
    cooldown: CooldownSettings = field(default_factory=CooldownSettings)
    wake: WakeSettings = field(default_factory=WakeSettings)
    _memory: HandleView = field(init=False)
    _cooldown: CooldownState = field(init=False)
    _gaps: GapsState = field(default_factory=GapsState)
    _held_ns: int = 0
    _wake: WakeState = field(default_factory=WakeState)
    _cooldown_ns: int = 0

    def begin(self, memory: HandleView) -> None:
        self._memory = memory
        self._cooldown = first_cooldown(0, self.cooldown)
        self._step(0, ())

    def on_gap(self, now_ns: int, gap_ns: int, held: bool) -> None:
        """A gap that is large enough to matter: the core keeps smaller ones to itself. `held`: offline did not run."""
        self._step(now_ns, (gap_ns,) if held else (), held)
        if self.by_arrivals:
            self._gaps = step_gaps(self._gaps, (gap_ns,), now_ns, self._held_ns, self.cooldown)

    def on_wake(self, now_ns: int, open_requests: int, quiet_ns: int) -> int:
        """0 to wake now, else when to ask again."""
        idle_ns = now_ns - quiet_ns
        self._step(now_ns, ())
        observation = WakeObservation(
            held_since_ns=idle_ns,
            cooldown_ns=self._cooldown_ns,
            launchers=(LauncherView(is_idle=True, idle_ns=idle_ns, watcher_ns=now_ns),),
            hints=(HintView(open_requests=open_requests, hint_ns=now_ns),) if self.hinted else (),
        )
        self._wake, decision = decide_wake(self._wake, observation, now_ns, self.wake)
        if decision.action is WakeAction.WAKE:
            return 0
        return decision.look_again_ns or now_ns + SECOND_NS

    def _step(self, now_ns: int, gaps_ns: tuple[int, ...], held: bool = True) -> None:
        self._held_ns += now_ns - self._cooldown.seen_ns if held else 0
        observation = CooldownObservation(gaps_ns=gaps_ns, held=held)
        self._cooldown, read = step_cooldown(self._cooldown, observation, now_ns, self.cooldown)
        read = shorten(read, self._gaps, self.cooldown)
        self._cooldown_ns = read.cooldown_ns
        # Half the mark: a smaller gap can set it only after 110 s of held time, and larger ones come far more often.
        floor_ns = min(read.gap_ns // 2, LEAST_NS) if self.by_arrivals else read.gap_ns // 2
        self._memory.set_cooldown(read.cooldown_ns, floor_ns)
