"""A vLLM worker whose cache is elastic, without vLLM: what it computes, and where its cache comes to lie."""

from __future__ import annotations

import contextlib
import sys
from types import SimpleNamespace

import pytest
from valve_hook import Refused
from valve_hook.torch_pool import is_expandable, switched_off
from valve_hook.vllm import calls, check, placement, worker
from valve_hook.vllm.placement import Placement, bracket
from valve_hook.wire import KV_ELASTIC


class Shim:
    """valve_kv_begin, valve_kv_end, valve_kv_ranges."""

    def __init__(self, monkeypatch, *, makes=1):
        self.ranges, self.makes, self.flags, self.is_open = 0, makes, None, False
        exports = {"valve_kv_begin": self.begin, "valve_kv_end": self.end}
        monkeypatch.setattr(placement, "shim_call", exports.get)
        monkeypatch.setattr(placement, "kv_ranges", lambda: self.ranges)

    def begin(self, flags):
        self.flags, self.is_open = flags.value, True

    def end(self):
        self.is_open = False

    def allocate(self):
        self.ranges += self.makes * self.is_open


class Torch(SimpleNamespace):
    """torch.cuda with a pool of its own, if it has any, and settings that are read back."""

    def __init__(self, monkeypatch, *, pools=True, settings=""):
        self.settings, self.entered, self.seen = settings, 0, None

        def pool():
            if not pools:
                raise RuntimeError("cudaMallocAsync does not yet support createOrIncrefPool")

        @contextlib.contextmanager
        def use(_pool):
            self.entered += 1
            self.seen = self.settings
            yield

        def snapshot():
            return {"allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": self.settings}}

        super().__init__(
            cuda=SimpleNamespace(MemPool=pool, use_mem_pool=use, memory=SimpleNamespace(_snapshot=snapshot)),
            _C=SimpleNamespace(_accelerator_setAllocatorSettings=lambda text: setattr(self, "settings", text)),
        )
        platform = SimpleNamespace(is_cuda=lambda: True)
        monkeypatch.setitem(sys.modules, "torch", self)
        monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace())
        monkeypatch.setitem(sys.modules, "vllm.platforms", SimpleNamespace(current_platform=platform))


def place(shim):
    ours = Placement(flags=KV_ELASTIC)
    with bracket(contextlib.nullcontext(), ours):
        shim.allocate()
    return ours


def test_the_cache_is_made_of_valves_memory(monkeypatch):
    torch, shim = Torch(monkeypatch), Shim(monkeypatch)

    assert place(shim).is_ours
    assert (torch.entered, shim.flags, shim.is_open) == (1, KV_ELASTIC, False)


def test_an_allocator_without_pools_never_ends_the_engine(monkeypatch, caplog):
    """backend:cudaMallocAsync: no pool of its own, so no memory of Valve's."""
    Torch(monkeypatch, pools=False, settings="backend:cudaMallocAsync")
    shim = Shim(monkeypatch)

    assert not place(shim).is_ours
    assert shim.flags is None
    (line,) = caplog.messages
    assert "ordinary memory" in line
    assert "createOrIncrefPool" in line


@pytest.mark.parametrize(
    ("before", "within"),
    [
        ("expandable_segments:True,max_split_size_mb:512", "max_split_size_mb:512,expandable_segments:False"),
        ("max_split_size_mb:512", "max_split_size_mb:512"),
        ("", ""),
    ],
)
def test_expandable_segments_never_take_the_cache_away(monkeypatch, before, within):
    """Off for the allocation, every other setting kept, and on again."""
    torch, shim = Torch(monkeypatch, settings=before), Shim(monkeypatch)
    place(shim)

    assert (torch.seen, torch.settings) == (within, before)


def test_settings_are_read_as_torch_reads_them():
    assert [is_expandable(each) for each in ("expandable_segments: true", "expandable_segments:1", "a:True", "")] == [
        *(True, True),
        *(False, False),
    ]
    assert switched_off("a:1,expandable_segments:True ,b:2") == "a:1,b:2,expandable_segments:False"


def test_a_cache_that_did_not_come_to_lie_in_valves_memory_is_never_taken_for_it(monkeypatch, caplog):
    Torch(monkeypatch)
    shim = Shim(monkeypatch, makes=0)

    assert not place(shim).is_ours
    (line,) = caplog.messages
    assert "ordinary memory" in line


def test_an_error_of_the_engine_within_the_bracket_is_the_engines(monkeypatch):
    torch, shim = Torch(monkeypatch, settings="expandable_segments:True"), Shim(monkeypatch)
    with pytest.raises(MemoryError), bracket(contextlib.nullcontext(), Placement(flags=0)):
        raise MemoryError

    assert (torch.settings, shim.is_open) == ("expandable_segments:True", False)


# ---- what it computes ----


@pytest.fixture
def elastic(monkeypatch):
    monkeypatch.setenv("VALVE_ROLE", "offline")
    monkeypatch.setattr(check, "judge", lambda *_: "vllm")
    hook = worker.WorkerHook(None, None)
    hook.placement.is_ours = True
    return hook


def step(tokens=5, **note):
    cached = SimpleNamespace(req_ids=(), resumed_req_ids=())
    return SimpleNamespace(total_num_scheduled_tokens=tokens, scheduled_cached_reqs=cached, finished_req_ids=(), **note)


@pytest.mark.parametrize(
    ("note", "said"),
    [({}, "VLLM_PLUGINS"), ({calls.UNHEEDED: "not attached: KV_LAYOUT was refused"}, "KV_LAYOUT was refused")],
)
def test_a_step_for_which_nobody_heeds_the_table_is_never_computed(elastic, note, said):
    with pytest.raises(worker.Unheeded, match=said):
        elastic.before_step(SimpleNamespace(), step(**note))


def test_a_step_of_an_online_engine_is_never_refused(elastic, monkeypatch):
    monkeypatch.setenv("VALVE_ROLE", "online")

    elastic.before_step(SimpleNamespace(), step(**{calls.UNHEEDED: "valved went away"}))


def test_a_step_is_computed_where_the_table_is_heeded_or_nothing_is_at_stake(elastic):
    elastic.before_step(SimpleNamespace(), step(**{calls.UNHEEDED: ""}))
    elastic.before_step(SimpleNamespace(), step(tokens=0))
    elastic.placement.is_ours = False  # the cache is vLLM's own
    elastic.before_step(SimpleNamespace(), step())


def test_a_step_that_warms_up_never_waits_for_a_scheduler_that_is_not_built_yet(elastic):
    """valve_kv_step asks valved who heeds the table, and what this process launches waits until somebody does."""
    asked = []
    elastic._between_steps = lambda: asked.append(1)
    with elastic.warming_up():
        elastic.before_step(SimpleNamespace(), step())
    assert asked == []

    elastic.before_step(SimpleNamespace(), step(**{calls.UNHEEDED: ""}))
    assert asked == [1]


@pytest.mark.parametrize("error", [check.MemoryRefused("hybrid"), Refused("a name is missing"), ValueError("odd")])
def test_what_the_scheduler_would_refuse_never_makes_a_cache_elastic(monkeypatch, error):
    def judge(config, cache):
        raise error

    monkeypatch.setattr(check, "judge", judge)

    assert worker.range_flags(None, None) == 0


def test_worker_and_scheduler_ask_one_judge_about_the_same(monkeypatch):
    """Else one makes memory elastic for which the other heeds no table."""
    asked = []
    monkeypatch.setattr(check, "judge", lambda *facts: asked.append(facts) or "vllm")
    monkeypatch.setattr(check, "refuse_scheduler_class", lambda *_: None)
    monkeypatch.setattr(calls, "VllmHook", lambda *arguments: arguments)
    known = SimpleNamespace(Scheduler=type("Scheduler", (), {}))
    for name in ("vllm", "vllm.v1", "vllm.v1.core", "vllm.v1.core.sched"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace())
    monkeypatch.setitem(sys.modules, "vllm.v1.core.sched.scheduler", known)
    config, cache = object(), object()
    scheduler = SimpleNamespace(vllm_config=config, kv_cache_manager=SimpleNamespace(kv_cache_config=cache))
    worker.range_flags(config, cache)
    calls._make_hook(scheduler, None)

    assert asked == [(config, cache), (config, cache)]
