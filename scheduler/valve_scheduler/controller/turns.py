"""Whose turn it is to move, those who were promised nothing last, and how long an owner keeps away then. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from valve_scheduler.controller.monitor import MonitorSettings, Owner, Track, choose_evictions, evicted


def choose(
    tracks: Sequence[Track],
    owners: Mapping[str, Owner],
    running: int,
    now_s: float,
    settings: MonitorSettings,
    namespaces: Mapping[str, str],
    denied: Sequence[Track] = (),
) -> list[Track]:
    """Who goes now: of all namespaces those that were promised something, then best effort from what is left, then who
    is denied its devices: a tenant can make a container fail with any words."""
    promised = [track for track in tracks if not track.sample.is_best_effort]
    rest = [track for track in tracks if track.sample.is_best_effort]
    chosen: list[Track] = []
    after, homes = dict(owners), dict(namespaces)
    for waiting in (promised, rest, denied):
        found = choose_evictions(waiting, after, running, now_s, settings, homes)
        for track in found:
            uid = track.sample.owner_uid
            after[uid] = gone(after.get(uid, Owner()), track, now_s, settings)
            homes[uid] = track.sample.namespace
        chosen += found

    return chosen


def gone(owner: Owner, track: Track, now_s: float, settings: MonitorSettings, *, was_guarded: bool = False) -> Owner:
    """The owner after this pod was evicted. Of best effort a busy node is avoided for one window only: nothing says
    that it stays busy, and where no other node takes the pod it must not wait for hours. A node is not avoided at all
    for a GPU under guard: that GPU is offered to nobody, and the others did no harm."""
    node = track.sample.node
    if not track.sample.is_best_effort and not was_guarded:
        return evicted(owner, node, now_s, settings)
    brief = replace(settings, avoid_s=0.0 if was_guarded else min(settings.avoid_s, settings.window_s))
    after = evicted(owner, node, now_s, brief)
    until_s = max(after.avoid_until_s[node], owner.avoid_until_s.get(node, 0.0))

    return replace(after, avoid_until_s={**after.avoid_until_s, node: until_s})
