"""What the router learns of its replicas."""

from __future__ import annotations

import pytest
from valve_router import replicas as module
from valve_router.replicas import CHARACTERS_PER_TOKEN, REFIT_EVERY, Replicas
from valve_router.settings import RouterSettings


def test_the_law_is_never_fitted_anew_for_each_request(monkeypatch):
    """Once the window of measurements was full it was: half a millisecond before each first token."""
    fits = []
    monkeypatch.setattr(module, "fit", lambda seen, real=module.fit: fits.append(len(seen)) or real(seen))
    now = [0.0]
    known = Replicas(RouterSettings(replicas=("http://a:1",)), lambda: now[0])
    for _ in range(20 * REFIT_EVERY):
        sent = known.send("a prompt")
        now[0] += 0.02
        known.answered(sent)
        known.ended(sent, is_served=True, has_failed=False)

    assert len(fits) == 20


def test_a_law_that_cannot_be_fitted_never_costs_a_request(monkeypatch):
    def fail(seen):
        raise ValueError

    monkeypatch.setattr(module, "fit", fail)
    known = Replicas(RouterSettings(replicas=("http://a:1",)), lambda: 1.0)
    for _ in range(2 * REFIT_EVERY):
        sent = known.send("")
        known.answered(sent)
        known.ended(sent, is_served=True, has_failed=False)

    assert known.all[0].served == 2 * REFIT_EVERY


@pytest.mark.parametrize("kv_tokens", [0, 1000])
def test_a_replica_whose_memory_would_not_hold_a_prompt_is_never_chosen_before_one_that_would(kv_tokens):
    known = Replicas(RouterSettings(replicas=("http://a:1", "http://b:1"), kv_tokens=kv_tokens), lambda: 0.0)
    first, second, third = (known.send(letter * 600 * CHARACTERS_PER_TOKEN) for letter in "abc")
    # One such prompt leaves a replica below half of its target: without the limit the first replica is filled.
    assert (first.replica is not second.replica) == bool(kv_tokens)
    assert third.replica in known.all  # nobody's memory would: it waits there, and is not refused
    for sent in (first, second, third):
        known.ended(sent, is_served=True, has_failed=False)
    assert [one.prompt_tokens for one in known.all] == [0, 0]
    assert known.send("p" * 5000 * CHARACTERS_PER_TOKEN).replica in known.all
