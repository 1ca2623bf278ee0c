"""Which adapters each replica has, which it lost as its engine restarted, and by which names clients may ask for them.

An engine that restarts comes back without the adapters that were loaded into it. If an adapter goes while the router
sees its engine all the time, an operator unloaded it: it is not lost.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from valve_router.listing import Base, ListedAdapter, Listing


@dataclass(slots=True)
class HeldAdapters:
    """Of one replica."""

    listing: Listing | None = None  # what it said last
    lost: dict[str, ListedAdapter] = field(default_factory=dict)  # to be loaded again
    losses: int = 0  # rises whenever it may have lost some
    was_away: bool = False  # since that listing

    def asks(self, model: str) -> str | None:
        """What the engine is asked for; None: it does not have this model, as far as is known."""
        return self.listing.asked.get(model) if self.listing is not None else None

    def away(self) -> None:
        self.was_away = True
        self.losses += 1

    def names(self) -> set[str]:
        there = [*(self.listing.adapters.values() if self.listing is not None else ()), *self.lost.values()]
        return {one.name for one in there} | {one.asked for one in there}

    def shown(self, base: Base) -> dict[str, ListedAdapter]:
        """What it lists of this base; nothing while it is out of sight."""
        is_there = self.listing is not None and not self.was_away and self.listing.base == base
        return dict(self.listing.adapters) if self.listing is not None and is_there else {}

    def listed(self, listing: Listing, expected: Iterable[ListedAdapter], others: Collection[HeldAdapters]) -> None:
        """`expected`: what this base has for clients; one that was away may have missed it."""
        before = self.listing.adapters if self.listing is not None else {}
        there = [one.version for one in listing.adapters.values()]
        self.losses += bool(before.keys() - listing.adapters.keys())
        has_stayed = any(one.version in there for one in before.values() if one.version[1])
        if self.was_away and not has_stayed:  # where one is left, it was only out of sight, and the rest was unloaded
            missed = dict(before) | {one.name: one for one in expected}
            newer = {name for name, number in there if number}  # another router loaded a newer one first
            self.lost |= {name: one for name, one in missed.items() if one.version[0] not in newer}
        self.lost = {
            name: one
            for name, one in self.lost.items()
            if one.base == listing.base and one.path and name not in listing.adapters
        }
        self.listing, self.was_away = listing, False
        shown = {name: one for other in others for name, one in other.shown(listing.base).items()}
        kept = shown.keys() | {name for other in others for name in other.lost}  # what others lost, they get again
        versioned = {one.version[0] for one in shown.values() if one.version[1]}
        self.lost = {name: one for name, one in self.lost.items() if name in kept or one.version[0] not in versioned}

    def retired(self, tried: Iterable[str], others: Iterable[HeldAdapters]) -> None:
        """Of what it was given in vain: a version that no replica lists is no loss where a newer one is there."""
        if self.listing is None:
            return
        there = [one.version for one in self.listing.adapters.values()]
        shown = {name for other in others for name in other.shown(self.listing.base)}
        for name in self.lost.keys() & set(tried) - shown:
            of, number = self.lost[name].version
            if any(each == of and newer > number > 0 for each, newer in there):
                del self.lost[name]


class PublishedAdapters:
    """Of all replicas."""

    def __init__(self, aliases: Collection[str]) -> None:
        """`aliases`: names that stand for the newest of their versions."""
        self.aliases = aliases
        self.names: frozenset[str] = frozenset()  # clients get these only from replicas that have them
        self._newest: dict[tuple[str, Base], ListedAdapter] = {}
        self._told: set[str] = set()  # of the aliases: a version was there, and never is there none again

    def listed(self, held: HeldAdapters, listing: Listing, everybody: Collection[HeldAdapters]) -> None:
        others = [one for one in everybody if one is not held]
        newest = {alias: one for (alias, base), one in self._newest.items() if base == listing.base}
        shown = [one for other in others for one in other.shown(listing.base).values()]
        newest |= {one.version[0]: one for one in sorted(shown, key=lambda each: each.version[1])}
        newest = {alias: one for alias, one in newest.items() if alias in self.aliases}
        held.listed(listing, newest.values(), others)
        self.look(everybody)

    def given(self, held: HeldAdapters, tried: Iterable[str], everybody: Collection[HeldAdapters]) -> None:
        held.retired(tried, [one for one in everybody if one is not held])
        self.look(everybody)

    def look(self, everybody: Collection[HeldAdapters]) -> None:
        """What they have now, all together."""
        now: dict[tuple[str, Base], ListedAdapter] = {}
        for alias, one in ((a, o) for held in everybody if held.listing for a, o in held.listing.newest.items()):
            key = (alias, one.base)
            now[key] = max(now.get(key, one), one, key=lambda each: each.version[1])
        self._newest |= now
        self._told |= {alias for alias, _ in now}
        self.names = frozenset(self._told.union(*(held.names() for held in everybody)))
