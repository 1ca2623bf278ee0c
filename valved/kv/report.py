"""Tells others of KV memory: a snapshot for status and metrics, the account of a reclaim, the state for a successor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from valved.config import MemoryTable
from valved.kv.account import Reclaim, ReclaimLog
from valved.kv.books import KvBooks
from valved.kv.engines import Engine
from valved.kv.outside import Outside
from valved.kv.pool import Place
from valved.kv.reserve import Reserve
from valved.kv.supply import Supply
from valved.kv.ways import Ways
from valved.model.events import Event
from valved.model.figures import plausible, total
from valved.model.ids import GpuIndex, Role
from valved.model.states import EngineState, Explanation, GpuMemoryState, MemoryState, PhaseState
from valved.state.journal import Journal
from valved.state.saved import SavedHistogram, SavedMemory
from valved.state.stats import MemoryCounters

PICKS = 8  # columns named in an explanation


@dataclass(eq=False, repr=False)
class MemoryReport:
    _books: KvBooks
    _supply: Supply
    _ways: Ways
    _outside: Outside
    _reserve: Reserve
    _log: ReclaimLog
    _journal: Journal
    _gpus: list[GpuIndex]

    # Now

    def state(self, settings: MemoryTable) -> MemoryState:
        counters, pool = self._log.counters, self._books.pool
        return MemoryState(
            managed=True,
            handle_bytes=pool.handle_bytes,
            remap=settings.remap.value,
            target_per_hour=self._reserve.target_per_hour,
            gpus=tuple(self._gpu(gpu) for gpu in self._gpus),
            engines=tuple(self._engine(engine) for engine in self._books.engines.values()),
            phases=tuple(PhaseState(name=name, latency=one.state()) for name, one in self._log.phases.items()),
            reclaims=counters.reclaims,
            reclaims_short=counters.reclaims_short,
            reclaimed_bytes=counters.reclaimed_handles * pool.handle_bytes,
            lent_bytes=counters.lent_handles * pool.handle_bytes,
            returned_bytes=counters.returned_handles * pool.handle_bytes,
            late_orders=counters.late_orders,
            demotions=counters.demotions,
            trials_passed=counters.trials_passed,
            trials_failed=counters.trials_failed,
            lets=counters.lets,
            lets_again=counters.lets_again,
            let_ns=counters.let_ns,
            trials=self._outside.trials(),
            lost_tokens=total(
                [counters.lost_tokens, *(one.view().lost_tokens for one in self._books.engines.values())]
            ),
        )

    def _gpu(self, gpu: GpuIndex) -> GpuMemoryState:
        pool = self._books.pool
        return GpuMemoryState(
            index=gpu,
            handles=pool.count(gpu),
            free=pool.free_handles(gpu),
            moving=pool.count_in(Place.MOVING, gpu),
            orphaned=pool.count_in(Place.ORPHAN, gpu),
            online=self._books.mapped(gpu, Role.ONLINE),
            offline=self._books.mapped(gpu, Role.OFFLINE),
        )

    def _engine(self, engine: Engine) -> EngineState:
        view, online = engine.view(), self._reserve.online.get(engine.service)
        decision = online.decision if online is not None else None
        return EngineState(
            service=engine.service,
            name=engine.name,
            role=engine.role,
            mode=view.mode.name.lower(),
            blocks=engine.table.blocks,
            backed_blocks=engine.table.backed_blocks,
            used_blocks=view.used_blocks,
            wanted_blocks=view.wanted_blocks,
            columns=engine.columns,
            column_bytes=engine.handles_per_column * self._books.pool.handle_bytes,
            headroom_columns=online.state.headroom_handles if online is not None else 0,
            tau_ns=online.state.tau_ns if online is not None else 0,
            reclaims_per_hour=decision.reclaims_per_hour if decision is not None else 0.0,
            lost_blocks=view.lost_blocks,
            lost_tokens=view.lost_tokens,
            hit_requests=view.hit_requests,
            dropped_tokens=view.dropped_tokens,
            state=self._words(engine),
        )

    def _words(self, engine: Engine) -> str:
        if engine.is_broken:
            return "a rank has left: valved no longer moves its memory"
        if not engine.is_complete:
            return f"waiting for the layout of {engine.expected_ranks - len(engine.ranks)} ranks"
        online = self._reserve.online.get(engine.service)
        if online is not None:
            return "growing" if online.growing else (online.decision.reason if online.decision else "just attached")
        if not engine.can_lose:
            return "its hook cannot recompute: valved takes no memory from it"
        why = self._ways.why_not(engine)
        if why:
            return f"{self._ways.way_of([engine]).value}: {why}"
        unsafe = engine.clients & self._ways.unsafe
        return "memory is taken between its steps only: a mapping order hung" if unsafe else "lends and borrows"

    # Why?

    def explain_reclaim(self, number: int) -> Explanation | None:
        found = self._log.find(number)
        if found is None:
            return None
        services = sorted({need.service for need in found.needs})
        near = self._log.numbers()
        return Explanation(
            summary=f"reclaim {number}: {found.all_freed} of {found.all_missing} handles",
            facts=tuple(fact for one in found.tries for fact in _facts_of(one)),
            decisions=tuple(
                self._journal.recent(lambda event: event.seq == number or _led_to(event, services, number, near), 20)
            ),
        )

    # A successor

    def saved(self) -> SavedMemory:
        """Engines keep their own counters. Ours hold those of engines that have left."""
        spent = self._log.phases.items()
        phases = {name: SavedHistogram(counts=list(one.counts), sum_ns=one.sum_ns) for name, one in spent}
        reservations = {service: online.state for service, online in self._reserve.online.items()}
        return SavedMemory(
            counters={name: getattr(self._log.counters, name) for name in MemoryCounters.__dataclass_fields__},
            phases=phases,
            reservations={**self._reserve.saved, **reservations},
            reclaims=self._reserve.budget.saved(),
            peaks=self._supply.peaks.saved(),
        )

    def restore(self, saved: SavedMemory) -> None:
        for name in MemoryCounters.__dataclass_fields__:
            setattr(self._log.counters, name, plausible(saved.counters.get(name, 0)))
        for name, one in saved.phases.items():
            histogram = self._log.phases.get(name)
            if histogram is not None and len(one.counts) == len(histogram.counts):
                histogram.counts, histogram.sum_ns = list(one.counts), one.sum_ns
        self._reserve.restore(saved.reservations, saved.reclaims)
        self._supply.restore(saved.peaks)


def _facts_of(found: Reclaim) -> Iterator[str]:
    """Of one try."""
    missing = ", ".join(f"{count} handles on GPU {gpu}" for gpu, count in sorted(found.missing.items()))
    services = sorted({need.service for need in found.needs})
    yield f"asked by service {', '.join(map(str, services))}: missing {missing}; way: {found.how.value}"
    if found.reason:
        yield f"nothing was taken: {found.reason}"
    for victims in found.victims:
        decision = victims.decision
        unit = decision.cost.value if decision.cost is not None else "-"
        picks = ", ".join(f"{pick.column_id} ({pick.marginal_cost})" for pick in decision.picks[:PICKS])
        more = f" and {len(decision.picks) - PICKS} more" if len(decision.picks) > PICKS else ""
        yield (
            f"from service {victims.engine.service}: {decision.reason}; cost {decision.total_cost} {unit}; "
            f"columns (cost): {picks}{more}"
        )
    if found.late:
        yield f"{found.late} mapping orders did not come back in time"


def _led_to(event: Event, services: Sequence[int], number: int, reclaims: Sequence[int]) -> bool:
    """Decisions of the services that asked, between the reclaim before and this one."""
    before = max((seq for seq in reclaims if seq < number), default=0)
    return event.kind.value == "reserved" and event.service in services and before < event.seq < number
