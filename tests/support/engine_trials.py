"""What a campaign's trials under a real engine come to."""

from __future__ import annotations


def total(results, name):
    return sum(int(trial[name]) for trial in results)


def is_sound(results):
    return {(trial["wrong"], trial["leak"], trial["crash"], trial["failures"]) for trial in results} == {(0, "", "", 0)}
