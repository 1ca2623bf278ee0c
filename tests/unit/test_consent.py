"""What an owner offers: read strictly, and granted only where a target and a consent stand together."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from valved.cli.main import main
from valved.model.consent import Consent, Said, Slo, consent_of, read_slo


def test_a_target_is_read_with_its_units_and_written_back_the_same():
    slo = read_slo("ttft=0.5s, tpot=40ms,gap=100ms")

    assert slo == Slo(ttft_ms=500.0, tpot_ms=40.0, gap_ms=100.0)
    assert read_slo(str(slo)) == slo
    assert read_slo("tpot=900us") == Slo(tpot_ms=0.9, gap_ms=100.0)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("tpot=40", "has no unit"),
        ("tpot=0ms", "above 0"),
        ("tpot=2000000s", "at most an hour"),
        ("tpot=-1ms", "is not a time"),
        ("tpot=nanms", "is not a time"),
        ("tpot=infms", "is not a time"),
        ("tpot=1e3ms", "is not a time"),
        ("ttft=\x1b[2J", r"ttft='\\x1b\[2J' is not a time"),  # it is told on terminals of others
        ("itl=40ms", "ttft, tpot, gap"),
        ("40ms", "ttft, tpot, gap"),
        ("tpot=40ms,", "ttft, tpot, gap"),
        ("tpot=40ms,tpot=50ms", "twice"),
        ("gap=100ms", "a gap alone"),
        ("", "ttft, tpot, gap"),
    ],
)
def test_a_target_without_sense_is_refused_with_its_reason(text, says):
    with pytest.raises(ValueError, match=says):
        read_slo(text)


def test_nothing_is_granted_where_nobody_said_both():
    target, yes = Said(slo="tpot=40ms"), Said(grant="true")

    assert consent_of([]) == Consent()
    assert not consent_of([target]).grant
    assert not consent_of([yes]).grant
    assert "state a target" in consent_of([yes]).problem
    assert not consent_of([Said(slo="ttft=1s", grant="true")]).grant  # pauses are paid from the time between tokens
    assert consent_of([target, yes]).grant


def test_a_slip_of_the_owner_never_ends_in_a_wider_places_target():
    wide = Said(slo="tpot=500ms", grant="true")

    for slip in (Said(slo="tpot=4Oms"), Said(grant="yes")):
        consent = consent_of([slip, wide])
        assert not consent.grant
        assert consent.words().startswith("no granted time: ")


def test_a_wider_place_never_overrules_a_nearer_one():
    wide = Said(slo="tpot=500ms", grant="true")

    assert not consent_of([Said(grant="false"), wide]).grant
    near = consent_of([Said(slo="tpot=40ms"), wide])
    assert near.grant
    assert near.slo == Slo(tpot_ms=40.0)


WORD = st.one_of(st.sampled_from(["", "true", "false", "tpot=40ms", "ttft=1s", "gap=1ms"]), st.text(max_size=12))


@given(st.lists(st.builds(Said, slo=WORD, grant=WORD), max_size=4))
def test_whatever_is_written_a_grant_has_a_target_and_a_yes(places):
    consent = consent_of(places)

    if consent.grant:
        assert consent.slo is not None
        assert consent.slo.tpot_ms > 0
        assert next(said.grant for said in places if said.grant) == "true"
        assert not consent.problem


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--online", "--slo", "tpot=40", "--", "true"], "--slo: tpot=40 has no unit"),
        (["--offline", "--slo", "tpot=40ms", "--", "true"], "options of online work only"),
        (["--offline", "--grant", "--", "true"], "options of online work only"),
        (["--offline", "--share-weights", "--", "true"], "options of online work only"),
    ],
)
def test_the_launcher_refuses_words_without_sense_before_anything_runs(arguments, says, capsys, monkeypatch):
    monkeypatch.setattr("valved.cli.run.become", lambda argv, env: pytest.fail("it ran"))

    assert main(["run", *arguments]) == 2
    assert says in capsys.readouterr().err
