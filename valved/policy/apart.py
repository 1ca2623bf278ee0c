"""From which quiet time on a service without hints is between two requests, judged by how its gaps are spread.

A gap in the GPU's work is inside a request (the host is late with the next step) or between two. Which of the two one
gap is cannot be told. But requests that do not know of each other are apart by an exponential law, and gaps longer than
those inside a request show its rate. So it is known how many shorter ones arrivals explain. Down to the length from
which on there are hardly more gaps than that, a gap is one between requests, and after so much quiet offline work may
run again.

Arrivals in bursts are closer together than the law says. They count as gaps inside a request, and the cooldown stays
what the largest gap makes it (cooldown.py). This bound only ever shortens that one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from valved.policy.cooldown import MS, Cooldown, CooldownSettings

LEAST_NS = 2 * MS  # a watcher proves idle in about 1 ms
PER_OCTAVE = 8  # lengths are told apart by 9 %
BINS = 100  # up to 11 s; what is longer counts as this long
ENOUGH = 20.0  # gaps that show a rate
SHARE = 0.02  # of the stretches between requests: so many gaps more than arrivals explain end in a wake
ODD_SHARE = 0.1  # so many more that are longer than the cooldown covers: the host stalls for so long, nothing is known
MARGIN_BINS = 2  # 19 % beyond the length that was found
READ_NS = 1_000_000_000  # to count and judge takes some 15 us
LARGEST_AGE, LARGEST_WEIGHT = 100.0, 1e9
EDGES_NS = tuple(LEAST_NS * 2.0 ** (k / PER_OCTAVE) for k in range(BINS))
MIDDLE = 2.0 ** (0.5 / PER_OCTAVE)  # of a bin, as a multiple of its edge


@dataclass(frozen=True, slots=True, kw_only=True)
class GapsState:
    """How many gaps of each length a service has shown. Newer ones weigh more: nothing has to be made smaller."""

    counts: tuple[float, ...] = (0.0,) * BINS
    weight: float = 1.0  # of a gap now
    new_ns: tuple[int, ...] = ()  # not counted yet
    read_ns: int = 0  # when they were last counted
    held_ns: int = 0  # the service's held time then
    bound_ns: int | None = None
    """None: there is nothing to judge by, or the host stalls for longer than the cooldown covers."""


def step_gaps(
    state: GapsState, gaps_ns: Sequence[int], now_ns: int, held_ns: int, settings: CooldownSettings
) -> GapsState:
    """These gaps ended. `held_ns`: of the service, in all; after `window_ns` of it a gap counts by half."""
    new_ns = (*state.new_ns, *gaps_ns)
    if not new_ns or now_ns - state.read_ns < READ_NS:
        return replace(state, new_ns=new_ns) if gaps_ns else state
    aged = max(0, held_ns - state.held_ns) / settings.window_ns
    weight, counts = state.weight * 2.0 ** min(aged, LARGEST_AGE), list(state.counts)
    if weight > LARGEST_WEIGHT:
        counts, weight = [count / weight for count in counts], 1.0
    for gap_ns in new_ns:
        if gap_ns >= LEAST_NS:
            counts[min(int(PER_OCTAVE * math.log2(gap_ns / LEAST_NS)), BINS - 1)] += weight
    bound_ns = _bound_ns(counts, ENOUGH * weight, settings)
    return GapsState(counts=tuple(counts), weight=weight, read_ns=now_ns, held_ns=held_ns, bound_ns=bound_ns)


def _bound_ns(counts: Sequence[float], enough: float, settings: CooldownSettings) -> int | None:
    longest, covered = _bin_of(settings.ceiling_ns), _bin_of(settings.ceiling_ns / settings.factor)
    if _down_to(counts, longest, covered, ODD_SHARE, enough) != covered:
        return None
    found = _down_to(counts, covered, 0, SHARE, enough)
    return None if found is None else int(EDGES_NS[min(found + MARGIN_BINS, BINS - 1)])


def shorten(cooldown: Cooldown, state: GapsState, settings: CooldownSettings) -> Cooldown:
    """The cooldown by the largest gap, or the bound where that is shorter."""
    if state.bound_ns is None or max(state.bound_ns, settings.floor_ns) >= cooldown.cooldown_ns:
        return cooldown
    return replace(cooldown, cooldown_ns=max(state.bound_ns, settings.floor_ns), reason="arrivals")


def common_gaps(clients: Sequence[Sequence[tuple[int, int]]]) -> list[tuple[int, int]]:
    """The (end_ns, gap_ns) pairs in which all of them were idle: the ranks of an engine stop and go on together. Of one
    client gaps come in order and apart; one that does not is not believed."""
    found = _in_order(clients[0]) if clients else []
    for client in clients[1:]:
        ours, theirs, both = iter(found), iter(_in_order(client)), []
        our, their = next(ours, None), next(theirs, None)
        while our is not None and their is not None:
            end_ns = min(our[0], their[0])
            gap_ns = end_ns - max(our[0] - our[1], their[0] - their[1])
            if gap_ns > 0:
                both.append((end_ns, gap_ns))
            if our[0] <= their[0]:
                our = next(ours, None)
            else:
                their = next(theirs, None)
        found = both
    return found


def _in_order(gaps: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    last_ns, found = 0, []
    for end_ns, gap_ns in gaps:
        if last_ns <= end_ns - gap_ns < end_ns:
            found.append((end_ns, gap_ns))
            last_ns = end_ns
    return found


def _down_to(counts: Sequence[float], far: int, least: int, share: float, enough: float) -> int | None:
    """The first bin, but none before `least`, from which on there are no more gaps than the law of those from `far` on
    explains, and this share of the law's."""
    longer = counts[far:]
    above = found = sum(longer)
    if found < enough:
        return None
    lengths = zip(longer, EDGES_NS[far:], strict=True)
    rate = found / sum(count * (edge * MIDDLE - EDGES_NS[far]) for count, edge in lengths)
    allowed = share * found * math.exp(rate * EDGES_NS[far])
    for k in range(far - 1, least - 1, -1):
        above += counts[k]
        if above - found * math.exp(rate * (EDGES_NS[far] - EDGES_NS[k])) > allowed:
            return k + 1
    return least


def _bin_of(gap_ns: float) -> int:
    """The first bin without shorter gaps than this. Behind it are others, so that what it holds has a length."""
    return min(max(math.ceil(PER_OCTAVE * math.log2(gap_ns / LEAST_NS)), 0), BINS - 1)
