"""Short steps for an offline engine: by its own limit, never so short that a request is left out, and undone."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from valve_hook.sglang import step_limit as sglang
from valve_hook.vllm import step_limit as vllm


def scheduler(**more):
    config = SimpleNamespace(enable_chunked_prefill=True, disable_chunked_mm_input=False)
    found = {"max_num_scheduled_tokens": 8192, "max_num_running_reqs": 256, "num_spec_tokens": 0}
    return SimpleNamespace(**{"scheduler_config": config, **found, **more})


@pytest.mark.parametrize(
    ("asked", "spec", "limit"), [(1429, 0, 1429), (100, 0, 256), (1000, 4, 1280), (9000, 0, 8192), (0, 0, 8192)]
)
def test_vllms_steps_are_cut_but_every_running_request_has_its_token(asked, spec, limit):
    mine = scheduler(num_spec_tokens=spec)
    cut = vllm.step_limit(mine)

    cut.heed(asked)
    assert mine.max_num_scheduled_tokens == limit
    cut.heed(0)
    assert mine.max_num_scheduled_tokens == 8192


@pytest.mark.parametrize(
    "more",
    [
        {"scheduler_config": SimpleNamespace(enable_chunked_prefill=False, disable_chunked_mm_input=False)},
        {"scheduler_config": SimpleNamespace(enable_chunked_prefill=True, disable_chunked_mm_input=True)},
    ],
    ids=["whole prompts", "whole images"],
)
def test_a_request_that_only_fits_a_whole_step_is_never_locked_out(more, caplog):
    mine = scheduler(**more)
    cut = vllm.step_limit(mine)

    for asked in (1429, 0, 1429, 700):
        cut.heed(asked)

    assert mine.max_num_scheduled_tokens == 8192
    assert "online requests may wait for a whole step" in caplog.text


def test_a_vllm_without_such_a_limit_gets_none():
    mine = SimpleNamespace(max_num_running_reqs=8)

    vllm.step_limit(mine).heed(100)

    assert not hasattr(mine, "max_num_scheduled_tokens")


@pytest.mark.parametrize(("asked", "limit"), [(1429, 1424), (5, 16), (0, 2048), (4000, 2048)])
def test_sglangs_chunks_are_whole_pages(asked, limit):
    mine = SimpleNamespace(chunked_prefill_size=2048, page_size=16)
    cut = sglang.step_limit(mine, ranks=1)

    cut.heed(asked)

    assert mine.chunked_prefill_size == limit


@pytest.mark.parametrize(("own", "ranks"), [(2048, 2), (-1, 1), (None, 1)])
def test_sglang_is_left_alone_where_ranks_could_cut_apart_or_nothing_is_cut(own, ranks):
    mine = SimpleNamespace(chunked_prefill_size=own, page_size=1)

    sglang.step_limit(mine, ranks=ranks).heed(100)

    assert mine.chunked_prefill_size == own
