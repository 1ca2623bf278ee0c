"""Configurations in which a lost block cannot be recomputed, or was never tried: refused by name, engine untouched."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from valve_hook.vllm.check import SPECS, MemoryRefused, has_name, refuse_configuration, refuse_scheduler_class

BLOCKS, LAYERS, HEADS, PAGE = 64, 4, 8, 4096


def kind(name, *bases, module=SPECS):
    return type(name, bases, {"__module__": module, "page_size_bytes": PAGE})


Full = kind("FullAttentionSpec")
Mla = kind("MLAAttentionSpec", Full)
Window = kind("SlidingWindowSpec")
Mamba = kind("MambaSpec")


class Uniform:
    def __init__(self, *specs):
        self.kv_cache_specs = {str(number): spec for number, spec in enumerate(specs)}


def tensor(layers=LAYERS, layer_stride=PAGE * BLOCKS, block_stride=PAGE, **more):
    names = [f"layer{number}" for number in range(layers)]
    return SimpleNamespace(layers=names, layer_stride=layer_stride, block_stride=block_stride, offset=0, **more)


def cache(*specs, tensors=None):
    groups = [SimpleNamespace(kv_cache_spec=spec) for spec in specs or (Full(),)]
    return SimpleNamespace(kv_cache_groups=groups, kv_cache_tensors=[tensor()] if tensors is None else tensors)


def config(*, parallel=None, model=None, **names):
    usual = {"pipeline_parallel_size": 1, "data_parallel_size": 1, "distributed_executor_backend": "uni"}
    return SimpleNamespace(
        parallel_config=SimpleNamespace(**{**usual, **(parallel or {})}),
        model_config=SimpleNamespace(**(model or {})),
        **names,
    )


@pytest.mark.parametrize("spec", [Full(), Mla(), Uniform(Full(), Full())])
def test_full_attention_is_taken(spec):
    refuse_configuration(config(), cache(spec))


@pytest.mark.parametrize(
    ("strange", "word"),
    [
        ({"parallel": {"pipeline_parallel_size": 2}}, "pipeline"),
        ({"parallel": {"data_parallel_size": 2}}, "data parallelism"),
        ({"parallel": {"decode_context_parallel_size": 2}}, "context parallelism"),
        ({"parallel": {"prefill_context_parallel_size": 2}}, "context parallelism"),
        ({"parallel": {"nnodes": 2, "distributed_executor_backend": "mp"}}, "several nodes"),
        ({"parallel": {"distributed_executor_backend": "ray"}}, "executor ray"),
        ({"parallel": {"distributed_executor_backend": "external_launcher", "world_size": 2}}, "external_launcher"),
        ({"parallel": {"distributed_executor_backend": Uniform}}, "executor Uniform"),
        ({"kv_transfer_config": object()}, "KV connector"),
        ({"ec_transfer_config": object()}, "encoder-cache"),
        ({"model": {"is_encoder_decoder": True}}, "encoder-decoder"),
        ({"model": {"is_diffusion": True}}, "diffusion"),
        ({"lora_config": object()}, "LoRA"),
        ({"model": {"is_multimodal_model": True}}, "images"),
        ({"model": {"enable_sleep_mode": True}}, "sleep mode"),
        ({"model": {"enable_cumem_allocator": True}}, "sleep mode"),
        *[
            ({"speculative_config": SimpleNamespace(method=method)}, f"speculative decoding by {method}")
            for method in ("eagle", "eagle3", "deepseek_mtp", "medusa", "draft_model", "suffix", "ngram_gpu")
        ],
    ],
)
def test_what_was_never_run_is_never_taken(strange, word):
    with pytest.raises(MemoryRefused, match=word):
        refuse_configuration(config(**strange), cache())


def test_drafts_by_ngram_and_one_worker_of_a_launcher_are_taken():
    refuse_configuration(config(speculative_config=SimpleNamespace(method="ngram")), cache())
    refuse_configuration(
        config(parallel={"distributed_executor_backend": "external_launcher", "world_size": 1}), cache()
    )


@pytest.mark.parametrize(
    ("specs", "word"),
    [
        ([Full(), Window()], "2 KV cache groups"),
        ([Window()], "SlidingWindowSpec"),
        ([Mamba()], "MambaSpec"),
        ([kind("SinkFullAttentionSpec", Full)()], "SinkFullAttentionSpec"),
        ([kind("RSWASpec", Full)()], "RSWASpec"),
        ([kind("HiddenStateCacheSpec", Mla)()], "HiddenStateCacheSpec"),
        ([kind("FullAttentionSpec", Full, module="somebody.elses")()], "FullAttentionSpec"),
        ([Uniform(Full(), Window())], "SlidingWindowSpec"),
    ],
)
def test_kv_that_only_derives_from_full_attention_is_never_taken_for_it(specs, word):
    """Sinks are written once and never recomputed; others drop blocks in the middle of a request."""
    with pytest.raises(MemoryRefused, match=word):
        refuse_configuration(config(), cache(*specs))


def test_attention_that_is_not_causal_is_refused():
    spec = Full()
    spec.non_causal = True

    with pytest.raises(MemoryRefused, match="non-causal"):
        refuse_configuration(config(), cache(spec))


def test_an_engine_without_a_cache_has_no_memory_to_lend():
    with pytest.raises(MemoryRefused, match="without a KV cache"):
        refuse_configuration(config(), SimpleNamespace(kv_cache_groups=[], kv_cache_tensors=[]))


HEAD = PAGE // HEADS
IN_PIECES = {
    "LHBNC": tensor(block_stride=HEAD),
    "BHLNC": tensor(layer_stride=HEAD, block_stride=PAGE * LAYERS),
    "LHBNC, one layer": tensor(layers=1, block_stride=HEAD),
}
WHOLE = {
    "LBNHC": tensor(),
    "BLNHC": tensor(layer_stride=PAGE, block_stride=PAGE * LAYERS),
    "BLNHC, one layer": tensor(layers=1, layer_stride=PAGE, block_stride=PAGE),
    "padded": tensor(layer_stride=2 * PAGE * BLOCKS, block_stride=2 * PAGE),
}


@pytest.mark.parametrize("name", IN_PIECES)
def test_a_layout_that_cuts_a_page_into_pieces_is_never_told(name):
    """Of LHBNC only the first head of each layer would be told, and the others would have no memory."""
    with pytest.raises(MemoryRefused, match="VLLM_KV_CACHE_LAYOUT"):
        refuse_configuration(config(), cache(tensors=[IN_PIECES[name]]))


@pytest.mark.parametrize("name", WHOLE)
def test_a_layout_of_whole_pages_is_taken(name):
    refuse_configuration(config(), cache(tensors=[WHOLE[name]]))


def test_pages_of_two_kinds_and_a_cache_of_the_host_are_refused():
    with pytest.raises(MemoryRefused, match="2 kinds"):
        refuse_configuration(config(), cache(tensors=[tensor(), tensor()]))
    with pytest.raises(MemoryRefused, match="host memory"):
        refuse_configuration(config(), cache(tensors=[tensor(host_resident=True)]))


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


def test_names_are_found_without_an_instance():
    """So a worker, which has no scheduler, judges like the scheduler."""

    class Base:
        def __init__(self):
            self.set_here = 1

        def method(self): ...

    class Derived(Base):
        def __init__(self):
            super().__init__()
            self.set_there = 2

    assert [has_name(Derived, name) for name in ("set_here", "set_there", "method", "nowhere")] == [
        True,
        True,
        True,
        False,
    ]
