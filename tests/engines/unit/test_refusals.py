"""Configurations in which a lost block cannot be recomputed, or was never tried: refused by name, engine untouched."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from valve_hook.vllm.check import (
    MemoryRefused,
    is_full_attention,
    refuse_configuration,
    refuse_for_worker,
    refuse_scheduler_class,
)


class FullAttentionSpec:
    pass


class MLAAttentionSpec(FullAttentionSpec):
    pass


class MambaSpec:
    pass


class SlidingWindowSpec:
    pass


class Uniform:
    def __init__(self, *specs):
        self.kv_cache_specs = {str(number): spec for number, spec in enumerate(specs)}


def scheduler(*specs, parallel=None, model=None, **names):
    groups = [SimpleNamespace(kv_cache_spec=spec) for spec in specs or (FullAttentionSpec(),)]
    defaults = {"pipeline_parallel_size": 1, "data_parallel_size": 1}
    return SimpleNamespace(
        vllm_config=SimpleNamespace(
            parallel_config=SimpleNamespace(**{**defaults, **(parallel or {})}),
            model_config=SimpleNamespace(**(model or {})),
        ),
        kv_cache_manager=SimpleNamespace(kv_cache_config=SimpleNamespace(kv_cache_groups=groups)),
        **names,
    )


@pytest.mark.parametrize("spec", [FullAttentionSpec(), MLAAttentionSpec(), Uniform(FullAttentionSpec())])
def test_full_attention_is_taken(spec):
    refuse_configuration(scheduler(spec))


@pytest.mark.parametrize(
    ("strange", "word"),
    [
        (scheduler(FullAttentionSpec(), SlidingWindowSpec()), "2 KV cache groups"),
        (scheduler(SlidingWindowSpec()), "not full attention"),
        (scheduler(MambaSpec()), "not full attention"),
        (scheduler(Uniform(FullAttentionSpec(), MambaSpec())), "not full attention"),
        (scheduler(parallel={"pipeline_parallel_size": 2}), "pipeline"),
        (scheduler(parallel={"data_parallel_size": 2}), "data parallelism"),
        (scheduler(dcp_world_size=2), "context parallelism"),
        (scheduler(connector=object()), "KV connector"),
        (scheduler(ec_connector=object()), "encoder-cache"),
        (scheduler(is_encoder_decoder=True), "encoder-decoder"),
        (scheduler(model={"enable_sleep_mode": True}), "sleep mode"),
        (scheduler(model={"enable_cumem_allocator": True}), "sleep mode"),
    ],
)
def test_this_is_refused_by_name(strange, word):
    with pytest.raises(MemoryRefused, match=word):
        refuse_configuration(strange)


def test_an_engine_without_a_cache_has_no_memory_to_lend():
    nothing = scheduler()
    nothing.kv_cache_manager.kv_cache_config.kv_cache_groups = []

    with pytest.raises(MemoryRefused, match="without a KV cache"):
        refuse_configuration(nothing)


def config(*, parallel=None, **names):
    usual = {"pipeline_parallel_size": 1, "data_parallel_size": 1, "decode_context_parallel_size": 1}
    return SimpleNamespace(
        **{
            "parallel_config": SimpleNamespace(**{**usual, **(parallel or {})}),
            "kv_transfer_config": None,
            "model_config": SimpleNamespace(is_encoder_decoder=False),
            **names,
        }
    )


FULL = (SimpleNamespace(kv_cache_spec=FullAttentionSpec()),)


@pytest.mark.parametrize(
    ("strange", "groups", "word"),
    [
        (config(), (), "without a KV cache"),
        (config(), (*FULL, SimpleNamespace(kv_cache_spec=SlidingWindowSpec())), "2 KV cache groups"),
        (config(), (SimpleNamespace(kv_cache_spec=MambaSpec()),), "not full attention"),
        (config(parallel={"pipeline_parallel_size": 2}), FULL, "pipeline"),
        (config(parallel={"decode_context_parallel_size": 2}), FULL, "context parallelism"),
        (config(kv_transfer_config=object()), FULL, "KV connector"),
        (config(ec_transfer_config=object()), FULL, "encoder-cache"),
        (config(model_config=SimpleNamespace(is_encoder_decoder=True)), FULL, "encoder-decoder"),
        (config(model_config=SimpleNamespace(enable_sleep_mode=True)), FULL, "sleep mode"),
    ],
)
def test_a_worker_refuses_what_the_scheduler_will_refuse(strange, groups, word):
    """Else its cache would begin without memory, and nobody would heed the table that says so."""
    refuse_for_worker(config(), FULL)

    with pytest.raises(MemoryRefused, match=word):
        refuse_for_worker(strange, groups)


def test_a_scheduler_class_that_replaces_what_the_hook_sits_in_is_refused():
    class Stock:
        def schedule(self): ...

        def update_from_output(self): ...

    class Async(Stock):
        def other(self): ...

    class Own(Stock):
        def schedule(self): ...

    refuse_scheduler_class(Async, Stock)

    with pytest.raises(MemoryRefused, match=r"schedule of its own \(Own\)"):
        refuse_scheduler_class(Own, Stock)


def test_a_group_of_many_kinds_is_full_attention_only_if_all_are():
    assert is_full_attention(Uniform(FullAttentionSpec(), MLAAttentionSpec()))
    assert not is_full_attention(Uniform(FullAttentionSpec(), SlidingWindowSpec()))
