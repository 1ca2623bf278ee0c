"""An engine whose cache may have holes never takes a step that nobody watches; and both who decide judge alike."""

from __future__ import annotations

import ctypes
import sys
from types import ModuleType, SimpleNamespace

import pytest
from toy_engine import ToyScheduler
from toy_sglang import Scheduler as ToySglang
from toy_sglang_memory import MHATokenToKVPool
from valve_hook import Refused, shim
from valve_hook.sglang import calls as sglang_calls
from valve_hook.sglang import check, memory
from valve_hook.vllm import calls
from valve_hook.wire import KV_ELASTIC


@pytest.fixture
def elastic(monkeypatch):
    """A range that was asked for elastic stands in this offline process; whoever asks for a hook gets none."""
    monkeypatch.setenv("VALVE_ROLE", "offline")
    begin = SimpleNamespace(valve_kv_begin=lambda flags: None)
    monkeypatch.setattr(shim.ctypes, "CDLL", lambda _: Exports(vars(begin)))
    monkeypatch.setattr(shim, "_asked_for_elastic", False)
    monkeypatch.setattr(shim, "kv_ranges", lambda: 1)
    shim.shim_call("valve_kv_begin")(ctypes.c_uint32(KV_ELASTIC))


class Exports(dict):
    def __getitem__(self, name):
        def function(*arguments):
            return self.get(name)(*arguments)

        return function


def test_a_vllm_with_elastic_memory_and_no_session_never_takes_a_step(elastic, monkeypatch):
    scheduler = ToyScheduler(hooks=calls)
    scheduler._valve = None
    scheduler.add("a", range(6), 4)
    with pytest.raises(shim.Blind, match="holes"):
        scheduler.launch()

    monkeypatch.setattr(shim, "kv_ranges", lambda: 0)
    scheduler.launch()


def test_an_sglang_with_elastic_memory_and_no_session_never_takes_a_step(elastic):
    scheduler = ToySglang(hooks=sglang_calls)
    scheduler._valve = None
    scheduler.turn()
    scheduler.add("a", range(6), 4)
    with pytest.raises(shim.Blind, match="holes"):
        scheduler.turn()


@pytest.mark.parametrize("role", ["online", ""])
def test_an_online_engine_is_never_stopped_because_nobody_reads_the_table(elastic, monkeypatch, role):
    """valved backs an online range whole before the engine gets it. Online pods have no role in their environment."""
    monkeypatch.setenv("VALVE_ROLE", role)
    scheduler = ToyScheduler(hooks=calls)
    scheduler._valve = None
    scheduler.add("a", range(6), 4)

    scheduler.launch()


def test_a_range_that_was_whole_from_the_start_needs_no_session(monkeypatch):
    monkeypatch.setattr(shim, "_asked_for_elastic", False)
    monkeypatch.setattr(shim, "kv_ranges", lambda: 1)
    shim.refuse_blind(None)


PLAIN = {
    **dict.fromkeys(("nnodes", "tp_size", "ep_size", "attn_cp_size", "dcp_size", "pp_size", "dp_size"), 1),
    **dict.fromkeys(("enable_hierarchical_cache", "enable_streaming_session"), False),
    "disaggregation_mode": "null",
    "speculative_algorithm": None,
}
KINDS = {
    "plain": ({}, {}, {}, KV_ELASTIC),
    "sliding window": ({"is_hybrid_swa": True}, {}, {}, 0),
    "state space": ({"is_hybrid_ssm": True}, {}, {}, 0),
    "quantized": ({}, {}, {"is_quantized_kv_cache": True}, 0),
    "another order": ({}, {}, {"kv_cache_layout": "hnd"}, 0),
    "unified memory": ({}, {"enable_unified_memory": True}, {}, 0),
    "two nodes": ({}, {"nnodes": 2}, {}, 0),
    "LoRA": ({}, {"enable_lora": True}, {}, 0),
    "LoRA by paths": ({}, {"lora_paths": ["a=/adapters/a"]}, {}, 0),
    "images": ({"is_multimodal": True}, {}, {}, 0),
}


@pytest.mark.parametrize("kind", KINDS)
def test_no_pool_is_elastic_whose_scheduler_is_refused(monkeypatch, kind):
    """Hybrid models make a plain pool for their full layers: the pool alone does not say."""
    hybrid, arguments, of_pool, expected = KINDS[kind]
    hybrid = {"is_hybrid_swa": False, "is_hybrid_ssm": False, **hybrid}
    config = SimpleNamespace(**{**PLAIN, **arguments})
    scheduler = ToySglang()
    pool = MHATokenToKVPool(8)
    vars(pool).update(of_pool)
    vars(scheduler).update(server_args=config, spec_algorithm=SimpleNamespace(is_none=lambda: True), **hybrid)
    scheduler.model_config = SimpleNamespace(**hybrid)
    monkeypatch.setattr(scheduler.allocator, "get_kvcache", lambda: pool, raising=False)
    monkeypatch.setattr(check, "SCHEDULER_NAMES", ())
    contents = {
        "sglang": {"__version__": check.SUPPORTED[0]},
        "sglang.srt": {},
        "sglang.srt.mem_cache": {},
        "sglang.srt.mem_cache.kv_cache_builder": {"uses_ssm_state": lambda model: model.is_hybrid_ssm},
        "sglang.srt.runtime_context": {
            "get_server_args": lambda: config,
            "process_model_config": lambda: SimpleNamespace(**hybrid),
        },
    }
    for name, content in contents.items():
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    flags = memory.range_flags(pool)
    try:
        check.judge(check.SUPPORTED[0], scheduler)
        is_taken = True
    except Refused:
        is_taken = False

    assert flags == expected
    assert is_taken == bool(flags)
