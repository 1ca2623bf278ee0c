"""A verdict on nothing, or on what is no number, is void: of every page, whatever its table lacks."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
from valve_tools.lab.cotrain import flexllm, harli, llmstation, shared
from valve_tools.lab.fleet import claims as fleet
from valve_tools.lab.fleet import freed, proofs
from valve_tools.lab.granted import page as granted
from valve_tools.lab.granted.__main__ import told
from valve_tools.replay import crowding, rivals
from valve_tools.sim import cluster, eviction
from valve_tools.sim.metrics import at_least, at_most, most
from valve_tools.sim.rivals import SWEEPS

NAN = math.nan
ACCURATE = harli.Accuracy(solo_mean=NAN, solo_most=NAN, beside_mean=NAN, beside_most=NAN, predict_us=NAN, minutes=NAN)


@pytest.mark.parametrize("judge", [at_most, at_least])
@pytest.mark.parametrize("found", [[], iter(()), most([]), math.nan, math.inf, -math.inf, [1.0, math.nan]])
def test_a_verdict_on_nothing_is_never_a_pass(judge, found):
    for bound in (-1e9, 1e9):
        claim = judge("c", "p", list(found) if not isinstance(found, float) else found, bound)
        assert (claim.ok, claim.value, claim.verdict) == (False, None, "VOID")
        assert claim.cells()[0] == "-"


def test_of_several_the_worst_is_judged():
    assert [at_most("c", "p", [1.0, 3.0, 2.0], bound).ok for bound in (2.9, 3.0)] == [False, True]
    assert [at_least("c", "p", [1.0, 3.0, 2.0], bound).ok for bound in (1.1, 1.0)] == [False, True]
    assert at_least("c", "p", most([1.0, 3.0]), 2.0).ok


PAGES = {
    "fleet": lambda: fleet.claims([]),
    "freed": lambda: freed.claims([]),
    "proofs": lambda: proofs.proofs(0),
    "granted": lambda: granted.claims([]),
    "granted, loosely": lambda: granted.loosely([]),
    "shared": lambda: shared.claims([]),
    "flexllm": lambda: flexllm.claims([]),
    "llmstation": lambda: llmstation.claims([]),
    "harli": lambda: [
        claim
        for claim in harli.claims([], dict.fromkeys(harli.CONTENTION, ACCURATE))
        if not claim.claim.startswith("H4")  # of a table that is in the tree
    ],
    "crowding": lambda: crowding._claims({}),
    "cluster": lambda: cluster.claims_of(1.0, []),
    "eviction": lambda: eviction.claims_of(
        eviction.EvictionResult(lengths="", seeds=(), cells=(), greedy_over_exact=(), claims=())
    ),
}


@pytest.mark.parametrize("page", PAGES)
def test_no_claim_of_a_page_ever_holds_on_an_empty_table(page):
    claims = PAGES[page]()
    assert claims
    assert [one.claim for one in claims if one.ok] == []


def test_a_claim_on_nothing_is_never_printed_as_missed(capsys):
    """The lab of granted time printed MISSED, and its page said VOID of the same claim."""
    told([at_most("a", "p", [], 1.0), at_most("b", "p", 2.0, 1.0), at_most("c", "p", 0.5, 1.0)])
    assert [line.split()[:2] for line in capsys.readouterr().out.splitlines()] == [
        ["VOID", "a:"],
        ["MISSED", "b:"],
        ["holds", "c:"],
    ]


def test_what_gave_up_requests_everywhere_is_never_the_best_rival():
    """GPUs freed: of a load on which no way keeps the target there is nothing to be as good as."""
    one = freed.Freed(
        load="l", seed=1, most_open=1, gpus=dict.fromkeys(freed.MODES, 8.0), late=dict.fromkeys(freed.MODES, 0.5)
    )
    kept = replace(one, late=dict.fromkeys(freed.MODES, 0.0))
    assert [freed.claims([each])[0].verdict for each in (kept, one)] == ["holds", "VOID"]


def test_a_score_of_nothing_is_never_level_with_the_best():
    """A rival that keeps the marks under no value: the value on the pages was as good as the best one."""
    sweep = SWEEPS[0]
    summary = SimpleNamespace(share_of_alone=1.0)
    values = {value: [SimpleNamespace(summary=summary)] for value in sweep.tried}
    with pytest.MonkeyPatch.context() as patch:
        for keeps, verdict in ((True, "holds"), (False, "VOID")):
            patch.setattr(rivals, "keeps", lambda *_: keeps)  # noqa: B023
            assert {one.verdict for one in rivals._claims(sweep, values)} == {verdict}


def test_what_trains_nothing_at_the_lightest_load_is_never_said_to_lose_more(monkeypatch):
    """Four rows of a page held: a rival that misses its target at the lightest load lost all of nothing."""

    def group(kept: float) -> dict[str, SimpleNamespace]:
        alone = SimpleNamespace(machine="m", goal_ms=50.0)
        return {"separate": alone, "temporal": SimpleNamespace(kept_tokens=kept)}

    for first, lost in ((100.0, 0.5), (0.0, None)):
        monkeypatch.setattr(flexllm, "judged", lambda _: [group(first), group(50.0)])  # noqa: B023
        found = flexllm.loss([], "temporal", "m", 50.0)
        assert math.isnan(found) if lost is None else found == lost
