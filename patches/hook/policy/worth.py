"""What granted time is worth: weight reads saved, less what the grants themselves cost.

A pause stretches time in which the service is busy into time that would have been idle anyway, so the paused time as
such is no gain. A slower service makes fewer, fuller steps; each step that it need not make saves the part of a step
that does not depend on the batch.
"""

from __future__ import annotations

from math import exp, expm1


def steps_per_ms(tpot_ms: float, requests_per_ms: float, tokens: float) -> float:
    """Steps of a service whose requests come at random and take `tokens` steps of `tpot_ms` each."""
    return -expm1(-requests_per_ms * tokens * tpot_ms) / tpot_ms


def busy_share(tpot_ms: float, requests_per_ms: float, tokens: float) -> float:
    """The share of time in which at least one request decodes."""
    return 1.0 - exp(-requests_per_ms * tokens * tpot_ms)


def saved_share(fixed_ms: float, natural_ms: float, paced_ms: float, requests_per_ms: float, tokens: float) -> float:
    """The share of time that pacing from `natural_ms` to `paced_ms` a token saves, before its cost."""
    if paced_ms <= natural_ms:
        return 0.0
    before = steps_per_ms(natural_ms, requests_per_ms, tokens)
    return fixed_ms * (before - steps_per_ms(paced_ms, requests_per_ms, tokens))


def grants_per_ms(natural_ms: float, paced_ms: float, length_ms: float, busy: float) -> float:
    """Grants of `length_ms` that fill the paused part of the busy time."""
    if paced_ms <= natural_ms or length_ms <= 0:
        return 0.0
    return busy * (1.0 - natural_ms / paced_ms) / length_ms


def worth(
    *,
    fixed_ms: float,
    natural_ms: float,
    paced_ms: float,
    requests_per_ms: float,
    tokens: float,
    cost_ms: float,
    grants_a_ms: float,
) -> float:
    """The share of a GPU that offline work gains; below zero where grants cost more than they save."""
    saved = saved_share(fixed_ms, natural_ms, paced_ms, requests_per_ms, tokens)
    return saved - cost_ms * grants_a_ms
