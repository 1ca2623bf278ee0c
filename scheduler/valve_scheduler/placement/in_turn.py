"""Namespaces take turns: what one tenant has in plenty never keeps that of another from being looked at. Pure."""

from collections.abc import Iterable, Iterator, Mapping
from typing import TypeVar

T = TypeVar("T")


def in_turn(wanted: Mapping[str, Iterable[T]], after: str) -> Iterator[tuple[str, T]]:
    """One item of each namespace, then the next of each, and so on; `after`: the namespace that came last before."""
    lanes = [(name, iter(wanted[name])) for name in sorted(wanted, key=lambda name: (name <= after, name))]
    while lanes:
        left = []
        for name, items in lanes:
            for item in items:
                yield name, item
                left.append((name, items))
                break
        lanes = left
