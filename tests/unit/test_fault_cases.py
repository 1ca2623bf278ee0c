"""The short form of a table of faults leaves out no function, no flag and no combination."""

from __future__ import annotations

from faults import cases

PLACES = [(str, name) for name in ("lower", "upper", "strip", "split")]
FLAGS = ("early", "late"), ("once", "always"), ("a", "b")


def values(**options):
    return [each.values for each in cases(PLACES, *FLAGS, **options)]


def test_each_function_fails_with_each_flag_both_ways():
    for _, name in PLACES:
        chosen = [flags for _, mine, *flags in values(whole=False) if mine == name]

        assert len(chosen) == 2
        assert all(one is not other for one, other in zip(*chosen, strict=True))


def test_every_combination_is_seen_somewhere_and_all_of_them_where_asked_for():
    assert len({tuple(flags) for _, _, *flags in values(whole=False)}) == 8
    assert len(values(whole=True)) == 8 * len(PLACES)
