"""Configurations in which a lost block cannot be recomputed, or was never tried: refused by name, engine untouched."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from valve_hook.vllm.check import Refused, is_full_attention, refuse_configuration


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


def scheduler(*specs, parallel=None, **names):
    groups = [SimpleNamespace(kv_cache_spec=spec) for spec in specs or (FullAttentionSpec(),)]
    defaults = {"pipeline_parallel_size": 1, "data_parallel_size": 1}
    return SimpleNamespace(
        vllm_config=SimpleNamespace(parallel_config=SimpleNamespace(**{**defaults, **(parallel or {})})),
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
    ],
)
def test_this_is_refused_by_name(strange, word):
    with pytest.raises(Refused, match=word):
        refuse_configuration(strange)


def test_a_group_of_many_kinds_is_full_attention_only_if_all_are():
    assert is_full_attention(Uniform(FullAttentionSpec(), MLAAttentionSpec()))
    assert not is_full_attention(Uniform(FullAttentionSpec(), SlidingWindowSpec()))
