"""When does a node write its report to the API server? A token bucket, heartbeats included. Pure.

A thousand nodes share one API server. A report every 30 s each is 33 writes a second; writing whenever a figure moves
by 5 % would be a write at nearly every sample of a busy node, and drive all of them to whatever cap there is. So only a
change that decides something comes early: a GPU becomes harvestable or ceases to be, or crosses a share of idle time
that jobs ask for. Only people pass the bucket: when somebody paused or resumed the node, or set its mode, they wait for
its word.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

SECOND_NS = 1_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class RateSettings:
    period_ns: int = 30 * SECOND_NS  # heartbeat; the scheduler distrusts a report older than three of them
    burst: int = 3
    spacing_ns: int = 10 * SECOND_NS  # between two writes, whatever happens
    share: float = 0.3  # of idle time: the SLA most jobs state
    margin: float = 0.05  # hysteresis around it


@dataclass(frozen=True, slots=True, kw_only=True)
class RateState:
    """`tokens` as of `seen_ns`; the bucket refills by one per period and holds at most `burst`."""

    tokens: float = 3.0
    seen_ns: int = 0
    written_ns: int | None = None
    written: tuple[object, ...] = ()  # the standing that was last written
    next_ns: int = 0  # of the next heartbeat


@dataclass(frozen=True, slots=True, kw_only=True)
class RateDecision:
    write: bool
    reason: str
    again_ns: int  # look again at the latest


def decide_report(
    state: RateState,
    standing: tuple[object, ...],
    phase: float,
    now_ns: int,
    settings: RateSettings,
    *,
    asked: bool = False,
) -> tuple[RateState, RateDecision]:
    """`standing` is what a decision elsewhere depends on; `phase` in [0, 1) tells this node from the others; `asked`:
    the change is somebody's order.

    The heartbeat after the first report comes after a part of the period, so that nodes started together part.
    """
    tokens = min(float(settings.burst), state.tokens + max(0, now_ns - state.seen_ns) / settings.period_ns)
    state = replace(state, tokens=tokens, seen_ns=now_ns)
    first = state.written_ns is None
    early = not first and standing != state.written
    due = first or now_ns >= state.next_ns
    if not (due or early):
        return state, RateDecision(write=False, reason="nothing new", again_ns=state.next_ns)
    spaced_ns = 0 if state.written_ns is None else state.written_ns + settings.spacing_ns
    if not (early and asked) and (tokens < 1.0 or now_ns < spaced_ns):
        refilled_ns = now_ns + round(max(0.0, 1.0 - tokens) * settings.period_ns)
        return state, RateDecision(write=False, reason="bucket empty", again_ns=max(refilled_ns, spaced_ns, now_ns + 1))
    period_ns = round(settings.period_ns * (phase if first and phase > 0 else 1.0))
    state = replace(
        state, tokens=max(0.0, tokens - 1.0), written_ns=now_ns, written=standing, next_ns=now_ns + max(period_ns, 1)
    )
    return state, RateDecision(write=True, reason="changed" if early else "heartbeat", again_ns=state.next_ns)


def side_of(share: float, before: bool | None, settings: RateSettings) -> bool:
    """On which side of the asked-for share a GPU is; it stays where it was within the margin."""
    if before is None:
        return share >= settings.share
    return share >= settings.share - settings.margin if before else share >= settings.share + settings.margin
