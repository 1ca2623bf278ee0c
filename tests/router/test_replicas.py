"""What the router learns of its replicas."""

from __future__ import annotations

from valve_router import replicas as module
from valve_router.replicas import REFIT_EVERY, Replicas
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
