"""A results page of a former product never passes for one of today's."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import msgspec
import pytest
from valve_tools.check import results
from valve_tools.lab.cotrain import page as cotrain
from valve_tools.lab.granted import parts as granted
from valve_tools.replay import code, provenance
from valve_tools.replay.command import main
from valve_tools.replay.report import Report, write

from valved.config import Config

RESULTS = Path(__file__).parents[3] / "docs" / "results"


@pytest.fixture
def page(tmp_path) -> Path:
    write(Report(name="pairs", title="made", summary=()), tmp_path)
    return tmp_path / "pairs.md"


def test_a_page_just_made_is_never_stale(page):
    assert provenance.stale(page.parent) == []
    assert main(["stale", str(page.parent)]) == 0


@pytest.mark.parametrize(
    ("table", "changes"),
    [
        ("memory", {"target_per_hour": 6.0}),
        ("memory", {"handle_mib": 64}),
        ("memory", {"cooperative_ratio": 0.8}),
        ("memory", {"let_ms": 50.0}),
        ("memory", {"headroom_min_mib": 4096}),
    ],
)
def test_a_page_made_under_other_default_settings_never_passes(page, monkeypatch, table, changes):
    other = msgspec.structs.replace(getattr(Config(), table), **changes)
    config = msgspec.structs.replace(Config(), **{table: other})
    monkeypatch.setattr(provenance, "Config", lambda: config)

    (line,) = provenance.stale(page.parent)
    assert "run the experiment again" in line
    assert main(["stale", str(page.parent)]) == 3


def test_a_page_made_by_another_policy_never_passes(page, monkeypatch):
    told = provenance.source
    monkeypatch.setattr(
        provenance, "source", lambda name: told(name) + ("\nx = 1" if name.endswith("reservation") else "")
    )

    assert len(provenance.stale(page.parent)) == 1


@pytest.mark.parametrize(("policy", "is_stale"), [("reservation", False), ("eviction", True), ("handout", True)])
def test_what_an_engine_loses_is_judged_by_its_own_policies(monkeypatch, policy, is_stale):
    before, told = provenance.made_with("eviction"), provenance.source
    monkeypatch.setattr(provenance, "source", lambda name: told(name) + ("\nx = 1" if name.endswith(policy) else ""))

    assert (provenance.made_with("eviction") != before) is is_stale


def test_a_page_without_a_hash_never_passes(page):
    page.write_text(provenance.FOUND.sub("", page.read_text()))

    assert provenance.stale(page.parent) == [f"{page}: carries no hash of the settings and policies that made it"]


def test_words_about_the_code_make_no_page_stale():
    plain = 'def f(a):\n    return a  \n\n\nx = "# no comment"\n'
    told = '"""Says."""\n\n\ndef f(a):  # so\n    """Gives a.\n\n    Back."""\n    return a\n\n\nx = "# no comment"\n'

    assert provenance.code_of(told) == provenance.code_of(plain)
    assert provenance.code_of(told) != provenance.code_of(told.replace("return a", "return -a"))


LABS = {
    "granted.md": granted.sources,
    **{f"cotrain/{name}.md": partial(cotrain.sources, name) for name in ("flexllm", "harli", "llmstation", "shared")},
}


@pytest.mark.parametrize("page", LABS)
def test_no_page_of_a_lab_was_made_by_another_policy_or_simulator(page):
    assert f"sha256 `{LABS[page]()}`" in (RESULTS / page).read_text("utf-8")


@pytest.mark.parametrize("page", LABS)
@pytest.mark.parametrize(
    "module",
    [
        "valve_tools.sim.machine",
        "valve_tools.sim.traces",
        "valve_tools.lab.granted.engine",
        "valve_hook.policy.granting",
    ],
)
def test_a_page_of_a_lab_never_passes_for_that_of_another_simulator(monkeypatch, page, module):
    """Not only its own modules count: what they import made its figures, too."""
    sources = LABS[page]
    before, told = sources(), code._text
    monkeypatch.setattr(code, "_text", lambda name: (told(name) or "") + "\nx = 1" if name == module else told(name))

    assert sources() != before


def test_the_check_never_lets_a_stale_page_pass(tmp_path, monkeypatch):
    folder = tmp_path / "docs" / "results"
    for each in (folder, tmp_path / "build"):
        each.mkdir(parents=True)
    write(Report(name="pairs", title="made", summary=()), folder)
    monkeypatch.setattr(results, "ROOT", tmp_path)
    assert results.findings() == []

    page = folder / "pairs.md"
    page.write_text(page.read_text().replace(provenance.made_with("pairs"), "0" * 16))

    assert results.findings() == [
        f"{page}: made with {'0' * 16}, the product is {provenance.made_with('pairs')}; run the experiment again"
    ]
