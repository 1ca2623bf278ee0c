"""The lab's judgement of crowding goes through the product's own report and ranking, and counts what it gets wrong."""

from types import SimpleNamespace

import numpy as np
import pytest
from valve_tools.replay import crowding
from valve_tools.replay.crowding import CrowdedPair, is_refused, report
from valve_tools.replay.pair_results import LATENCY_MARKS
from valve_tools.sim.machine import MODELS
from valve_tools.sim.pairs import PAIRS
from valve_tools.sim.world import OnlineSide

QUIET = {f"{metric} {quantile}": 0.0 for metric, quantile, _ in LATENCY_MARKS}
DEAR = {**QUIET, "own_ttft_increase p99": 12.0}


def used(*gib: float) -> SimpleNamespace:
    """A run of an 8B service whose cache holds so much, a second each."""
    return SimpleNamespace(usage=np.array([(second, round(each * 16)) for second, each in enumerate(gib)]))


BOUND = SimpleNamespace(pair=PAIRS[3], service=OnlineSide(model=MODELS["8B"]))


@pytest.mark.parametrize(
    ("cache", "held", "is_out"),
    [
        ((48.0,) * 200, 23.0, True),
        ((20.0,) * 200, 23.0, False),
        ((20.0,) * 199 + (48.0,), 23.0, False),
        ((20.0,) * 190 + (48.0,) * 10, 23.0, True),
        ((38.0,) * 200, 0.0, True),
    ],
    ids=["fills the card", "leaves room", "one second in 200", "one in 20", "nobody measured the job"],
)
def test_a_pair_is_judged_by_what_online_uses_nearly_always(
    cache: tuple[float, ...], held: float, is_out: bool
) -> None:
    assert is_refused(BOUND, used(*cache), held) is is_out  # type: ignore[arg-type]


def judged(pair: str, *, refused: bool, memory: dict[str, float]) -> CrowdedPair:
    return CrowdedPair(
        half="claims", pair=pair, trace="t", seed=1, card=78.0, peak=60.0, held=20.0, refused=refused,
        refused_beside_a_job=refused, refused_unmeasured=refused, refused_measured=refused, memory=memory, valve=memory,
    )  # fmt: skip


def test_a_pair_let_in_wrongly_and_one_refused_wrongly_never_pass_for_right() -> None:
    found = [
        judged("P1", refused=False, memory=QUIET),
        judged("P2", refused=True, memory=QUIET),
        judged("P3", refused=False, memory=DEAR),
        judged("P4", refused=True, memory=DEAR),
    ]

    page = report(found, [1])

    assert [(claim.value, claim.ok) for claim in page.claims] == [(1, False)] * 3
    assert [row[7] for row in page.tables[0].rows] == ["yes", "NO", "NO", "yes"]
    assert "P3 (claims)" in page.claims[0].note
    assert "P2 (claims)" in page.claims[2].note


def test_a_refusal_for_another_reason_never_counts_as_one_for_crowding(monkeypatch: pytest.MonkeyPatch) -> None:
    told = crowding.report_of(BOUND, used(20.0))  # type: ignore[arg-type]
    told["status"]["phase"] = "Paused"
    monkeypatch.setattr(crowding, "report_of", lambda bound, run: told)

    with pytest.raises(AssertionError, match="another reason: OFF"):
        is_refused(BOUND, used(20.0), 20.0)  # type: ignore[arg-type]
