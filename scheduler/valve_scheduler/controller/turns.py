"""Which owner's pod is moved next (pods without a promise last), and for how long it keeps away then. Pure."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from valve_scheduler.controller.monitor import MonitorSettings, Owner, Track, choose_evictions, evicted

BACK_OFF_S = 600.0


class Late:
    """Remembers the pods that were to go and could not: a disruption budget refused it, or it could not be stored. Else
    the first of them would have the turn in each round. Begins anew with the controller."""

    def __init__(self) -> None:
        self._refused: dict[str, tuple[float, str]] = {}  # by UID of the pod: when, and its namespace

    def refused(self, track: Track, now_s: float) -> None:
        self._refused[track.sample.pod_uid] = now_s, track.sample.namespace

    def of(self, now_s: float) -> Callable[[Track], int]:
        """How far behind the others a pod comes: 1 if another of its namespace was refused, 2 if it was itself."""
        self._refused = {uid: one for uid, one in self._refused.items() if now_s - one[0] < BACK_OFF_S}
        pods, spaces = set(self._refused), {namespace for _, namespace in self._refused.values()}
        return lambda track: 2 if track.sample.pod_uid in pods else int(track.sample.namespace in spaces)


def choose(
    tracks: Sequence[Track],
    owners: Mapping[str, Owner],
    running: int,
    now_s: float,
    settings: MonitorSettings,
    namespaces: Mapping[str, str],
    denied: Sequence[Track] = (),
    spent: Mapping[str, int] = MappingProxyType({}),
    late: Callable[[Track], int] = lambda _: 0,
) -> list[Track]:
    """The pods that go now: of all namespaces those that were promised something, then best effort from what is left,
    then those that are `late`.

    A pod that is denied its devices has a budget of its own, a quarter of that one: a tenant can make a container fail
    with any words, and takes nothing of others. `spent`: by owner, how many moves of late were from that budget."""
    budget = max(1, int(settings.budget_share * running))
    own = sum(min(count, _recent(owners[uid], now_s, settings)) for uid, count in spent.items() if uid in owners)
    after, homes = dict(owners), dict(namespaces)

    def take(waiting: Sequence[Track], left: int) -> list[Track]:
        """`left` by its own count: what was used up is added, as `choose_evictions` takes it off."""
        if left <= 0 or not waiting:
            return []
        used = sum(_recent(owner, now_s, settings) for owner in after.values())
        found = choose_evictions(waiting, after, used + left, now_s, replace(settings, budget_share=1.0), homes)
        for track in found:
            uid = track.sample.owner_uid
            after[uid] = gone(after.get(uid, Owner()), track, now_s, settings)
            homes[uid] = track.sample.namespace
        return found

    left = budget + own - sum(_recent(owner, now_s, settings) for owner in owners.values())
    chosen: list[Track] = []
    for turn in _in_turn(tracks, lambda track: (late(track), track.sample.is_best_effort)):
        chosen += take(turn, left - len(chosen))
    left = max(1, budget // 4) - own + len(chosen)
    for turn in _in_turn(denied, late):
        chosen += take(turn, left - len(chosen))

    return chosen


def _in_turn(tracks: Iterable[Track], place: Callable[[Track], Any]) -> list[list[Track]]:
    """In groups of one place, the first place first."""
    found: defaultdict[Any, list[Track]] = defaultdict(list)
    for track in tracks:
        found[place(track)].append(track)
    return [found[key] for key in sorted(found)]


def _recent(owner: Owner, now_s: float, settings: MonitorSettings) -> int:
    return sum(now_s - at_s < settings.budget_s for at_s in owner.evicted_at_s)


def gone(owner: Owner, track: Track, now_s: float, settings: MonitorSettings, *, was_guarded: bool = False) -> Owner:
    """The owner after this pod was evicted. Of best effort a busy node is avoided for one window only: nothing says
    that it stays busy, and where no other node takes the pod it must not wait for hours. A node is not avoided at all
    for a GPU under guard: that GPU is offered to no pod, and the others did no harm."""
    node = track.sample.node
    if not track.sample.is_best_effort and not was_guarded:
        return evicted(owner, node, now_s, settings)
    brief = replace(settings, avoid_s=0.0 if was_guarded else min(settings.avoid_s, settings.window_s))
    after = evicted(owner, node, now_s, brief)
    until_s = max(after.avoid_until_s[node], owner.avoid_until_s.get(node, 0.0))

    return replace(after, avoid_until_s={**after.avoid_until_s, node: until_s})
