"""What a campaign's trials under a real engine come to."""

from __future__ import annotations


def total(results, name):
    return sum(int(trial[name]) for trial in results)


def is_sound(results):
    return {(trial["wrong"], trial["leak"], trial["crash"], trial["failures"]) for trial in results} == {(0, "", "", 0)}


def gaps(answer, tops):
    """How far each token of an answer lies below the best one, given all that comes before it there. `tops`: the best
    (log probability, token) at each place; a token that is not among them lies infinitely far below.
    """
    return [
        max(value for value, _ in top) - next((value for value, token in top if token == mine), float("-inf"))
        for mine, top in zip(answer, tops, strict=True)
    ]


def is_tied(answer, wanted, tops, bound):
    """Whether an answer that is not the undisturbed one is as right: as long, and each of its tokens is the best after
    those before it, or below it by less than the bound. So what comes behind a tie is judged like all else.
    """
    return len(answer) == len(wanted) and all(gap < bound for gap in gaps(answer, tops))
