"""A real SGLang on CPU loses pages in the middle of steps: its tokens are those of an undisturbed run.

Each test starts one engine, which is most of its time, so the trials that take a protection out of the live engine come
last in it; they must change answers, or the injected garbage bites nobody.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from sglang_plugin import run_with_plugin

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1200)]
PATCH = Path(__file__).resolve().parents[2] / "patches" / "sglang" / "scheduler.patch"
FULL = 2
TRIALS = [{"seed": seed, "events": 24, "held": held} for seed, held in ((1, 4), (2, 2), (3, 0))]
STARVED = {"seed": 5, "after": 12, "events": 1, "held": 1 << 30, "requests": 1, "starve": True}
MIXED = {"overlap": True, "mixed": True, "tokens": 6000}  # every step takes the running ones along: see engines.md
NO_HANDLING = {"seed": 1, "events": 24, "held": 4, "remove": "everything"}


def campaign(engines, tmp_path, plan, *more_paths):
    trials = run_with_plugin(
        engines, tmp_path, "sglang_campaign", json.dumps(plan), *more_paths, **plan.get("variables", {})
    )
    assert len(trials) == len(plan["trials"])
    print(*(f"\n{trial}" for trial in trials))
    return trials


def held(trials):
    """The trials with every protection in: no answer differs, no page is lost for good, none spoilt stays cached."""
    good = [trial for trial in trials if "remove" not in trial]
    assert [trial["wrong"] for trial in good] == [0] * len(good)
    for trial in good:
        idle = trial["idle"]
        assert idle["free"] + idle["cached"] + idle["withheld"] == idle["pages"]
        assert idle["spoilt"] == 0
    assert (good[-1]["mode"], good[-1]["failures"], good[-1]["layout"]) == (FULL, 0, True)
    return sum(trial["events"] for trial in good)


@pytest.mark.parametrize(
    ("plan", "ablation"),
    [
        pytest.param({"overlap": True, "page": 1}, {**STARVED, "remove": "sparing_the_last"}, marks=pytest.mark.quick),
        ({"overlap": False, "page": 1}, {**TRIALS[0], "remove": "skipping_without_overlap"}),
        ({"overlap": True, "page": 16}, {**TRIALS[0], "remove": "withholding"}),
        (
            {"overlap": True, "page": 1, "variables": {"SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND": "python"}},
            {**TRIALS[0], "remove": "forgetting"},
        ),
        ({"ranks": 2, "variables": {"SGLANG_CPU_OMP_THREADS_BIND": "0|0"}}, NO_HANDLING),
    ],
    ids=["overlap", "no overlap", "pages of 16", "the Python tree", "two ranks"],
)
def test_tokens_are_identical_after_reclaims_and_change_without_a_protection(engines, tmp_path, plan, ablation):
    """With and without overlap, which skip requests by different paths; by both cores of the radix tree (Rust's is the
    default); with every rank of two deciding for itself, and spoilt in different pages.
    """
    trials = campaign(engines, tmp_path, {**plan, "trials": [*TRIALS, STARVED, ablation]})

    assert held(trials) >= 3 * 15
    assert trials[3]["starved"] == 1
    assert trials[-1]["wrong"] > 0


@pytest.mark.parametrize(
    ("plan", "ablation"),
    [
        ({"overlap": False, "asks": {"frequency_penalty": 0.7}}, "putting_back"),
        ({"overlap": False, "asks": {"repetition_penalty": 1.3, "presence_penalty": 0.4}}, "putting_back"),
        ({**MIXED, "asks": {"frequency_penalty": 0.7}}, "putting_back"),
        ({**MIXED, "asks": {"repetition_penalty": 1.3, "presence_penalty": 0.4}}, "putting_back"),
        ({"overlap": True, "logprobs": True}, "everything"),
        ({"overlap": False, "logprobs": True}, "everything"),
    ],
    ids=[
        *("frequency", "repetition and presence", "frequency, overlap", "repetition and presence, overlap"),
        *("logprobs, overlap", "logprobs, no overlap"),
    ],
)
def test_what_goes_with_an_answers_tokens_is_never_otherwise_after_reclaims(engines, tmp_path, plan, ablation):
    """Penalties count the answer of who was sent back; log probabilities are those of one's own prompt and answer."""
    trials = campaign(engines, tmp_path, {**plan, "trials": [*TRIALS, {**TRIALS[0], "remove": ablation}]})

    assert held(trials) >= 3 * 15
    assert trials[-1]["wrong"] > 0


@pytest.mark.parametrize(
    ("plan", "ablation"),
    [
        ({"overlap": True, "priority": True}, "everything"),
        ({"overlap": False, "priority": True}, "everything"),
        ({"overlap": False, "priority": True, "asks": {"frequency_penalty": 0.7}}, "putting_back"),
    ],
    ids=["overlap", "no overlap", "frequency"],
)
def test_no_answer_is_otherwise_where_requests_that_go_first_take_others_places(engines, tmp_path, plan, ablation):
    """SGLang itself sends back who runs, for one of higher priority, beside reclaims."""
    trials = campaign(engines, tmp_path, {**plan, "trials": [*TRIALS, {**TRIALS[0], "remove": ablation}]})

    assert held(trials) >= 3 * 15
    assert min(trial["preempted"] for trial in trials) > 3
    assert trials[-1]["wrong"] > 0


def test_an_answer_told_at_once_never_counts_otherwise_than_one_told_token_by_token(engines):
    """SGLang's own four penalizers, answers of up to 600 tokens that repeat: all that they keep is equal bit by bit."""
    if not (engines.folder / "stubs").is_dir():
        pytest.skip("SGLang is not installed: make test-engines")
    out = engines.run("sglang_penalties.py", paths=(engines.folder / "stubs",), OMP_NUM_THREADS="1")
    (told,) = [json.loads(line) for line in out.splitlines() if line.startswith("{")]

    assert told["same"] == told["of"] == 40


def test_both_tree_cores_forget_chosen_pages_and_nothing_else_and_keep_what_waits(engines):
    """Of a, b and c one page of b's own: 64 slots, less what a, c and the common beginning hold, less the lost one."""
    if not (engines.folder / "stubs").is_dir():
        pytest.skip("SGLang is not installed: make test-engines")
    out = engines.run("sglang_trees.py", paths=(engines.folder / "stubs",), OMP_NUM_THREADS="1")
    told = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    expected = {
        "forgotten": 1,
        "cached": {"a": 16, "b": 10, "c": 12},
        "free": 35,
        "shared": {"a": 10, "b": 15, "c": 0},
        "kept": {"a": 16, "b": 10, "c": 0},
        "not kept": {"a": 0, "b": 0, "c": 12},
    }

    assert told == [{"core": core, **expected} for core in ("RustUnifiedTreeCore", "UnifiedTreeCore")]


def patched(engines, folder):
    """SGLang as it is installed, by links, but for the one file that the patch changes."""
    source = next((engines.folder / "lib").glob("python3*/site-packages/sglang"))
    shutil.copytree(source, folder / "sglang", copy_function=os.symlink)
    target = folder / "sglang/srt/managers/scheduler.py"
    target.unlink()
    shutil.copy(source / "srt/managers/scheduler.py", target)
    done = subprocess.run(["patch", "-p1", "-i", str(PATCH)], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert "fuzz" not in done.stdout
    return folder


def test_the_patch_has_thirteen_lines_and_does_the_same(engines, tmp_path):
    """The second form: the exact released source with the patch applied, plugins off. At the end without handling."""
    lines = PATCH.read_text().splitlines()
    assert len([line for line in lines if line.startswith("+") and not line.startswith("+++")]) == 13
    assert [line for line in lines if line.startswith("-") and not line.startswith("---")] == []
    if not (engines.folder / "stubs").is_dir():
        pytest.skip("SGLang is not installed: make test-engines")
    overlay = patched(engines, tmp_path / "overlay")
    plan = {"variables": {"SGLANG_PLUGINS": "valve_test"}, "trials": [*TRIALS[:2], STARVED, NO_HANDLING]}
    trials = campaign(engines, tmp_path, plan, overlay)

    assert held(trials) >= 2 * 15
    assert trials[2]["starved"] == 1
    assert trials[-1]["wrong"] > 12


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no overlap"])
def test_one_request_that_does_not_fit_never_stops_a_real_engine(engines, tmp_path, overlap):
    """Those behind it go on; it ends as undisturbed once it fits. What no memory could hold ends with its reason."""
    (told,) = run_with_plugin(engines, tmp_path, "sglang_waiting", json.dumps({"overlap": overlap}))

    assert told["before"] == ["alone", "huge", *(f"short{number}" for number in range(9))]
    assert told["is_same"]
    assert "950 tokens" in told["huge"]


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no overlap"])
def test_a_real_engine_never_asks_for_what_its_cache_makes_and_never_ends_for_a_chunk(engines, tmp_path, overlap):
    """All memory that there is was cached. Then a prompt's next chunk finds none: SGLang would end itself."""
    (told,) = run_with_plugin(engines, tmp_path, "sglang_room", json.dumps({"overlap": overlap}))

    assert told == {"needs": [], "is_same": True}
