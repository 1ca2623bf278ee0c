"""Scenes of a `KvWorld` from which several tests begin."""

from __future__ import annotations


def in_a_step(world):
    """An offline engine that has its memory, and is in the middle of a step."""
    offline = world.engine("offline", columns=16)
    offline.shim.has_stepped = False
    world.run(500)
    offline.shim.has_stepped = offline.shim.steps = True
    offline.book["steps"] = 7
    return offline
