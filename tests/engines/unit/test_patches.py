"""What the patches cost an engine's maintainer, and where they say that its blocks lie."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from valve_hook.vllm.worker import layout_of

PATCHES = Path(__file__).resolve().parents[3] / "patches"


@pytest.mark.parametrize(
    ("patch", "most"),
    [("vllm/scheduler.patch", 10), ("sglang/scheduler.patch", 19), ("tensorrt_llm/executor.patch", 19)],
)
def test_a_patch_stays_within_its_lines(patch, most):
    lines = (PATCHES / patch).read_text().splitlines()
    changed = [line for line in lines if line[:1] in ("+", "-") and line[:3] not in ("+++", "---")]

    assert 0 < len(changed) <= most


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_patch_that_was_applied_without_the_plugin_shares_no_memory(engine):
    """The plugin alone places a cache in Valve's memory; the manual promises no more."""
    added = [line for line in (PATCHES / engine / "scheduler.patch").read_text().splitlines() if line[:1] == "+"]
    imported = re.findall(r"valve_hook\S* import (\w+)", "\n".join(added))
    calls = (PATCHES / engine / "calls.py").read_text()
    (row,) = re.findall(r"^\| patch \|.*$", (PATCHES.parent / "docs/engines.md").read_text(), re.MULTILINE)

    assert imported == ["calls"]
    assert not re.search(r"\bwrap_\w+\(|range_flags|valve_kv_begin|KV_ELASTIC", calls)
    assert "reports only" in row
    assert "no KV memory is shared" in row


LAYERS, BLOCKS, PAGE = 4, 10, 0x1000
LAYER_OUTERMOST = {"layer_stride": BLOCKS * PAGE, "block_stride": PAGE}  # LBNHC
BLOCK_OUTERMOST = {"layer_stride": PAGE, "block_stride": LAYERS * PAGE}  # BLNHC


@pytest.mark.parametrize("strides", [LAYER_OUTERMOST, BLOCK_OUTERMOST], ids=["LBNHC", "BLNHC"])
def test_every_byte_that_vllm_keeps_of_a_block_is_told_and_none_of_another(strides):
    """addr(layer l, block b) = base + offset + l * layer_stride + b * block_stride, a page each."""
    tensor = SimpleNamespace(offset=0x40, layers=[f"l{number}" for number in range(LAYERS)], **strides)
    config = SimpleNamespace(
        num_blocks=BLOCKS,
        kv_cache_tensors=[tensor],
        kv_cache_groups=[SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=16))],
    )
    layout = layout_of(1 << 30, config)
    (told,) = layout.tensors
    base = (1 << 30) + 0x40

    def pages(block):
        return {base + layer * strides["layer_stride"] + block * strides["block_stride"] for layer in range(LAYERS)}

    def told_pages(block):
        ((count, stride),) = told.repeats or [(1, 0)]
        starts = [told.base + number * stride + block * told.block_stride for number in range(count)]
        return {start + at for start in starts for at in range(0, told.block_bytes, PAGE)}

    assert (layout.blocks, layout.block_tokens) == (BLOCKS, 16)
    assert [told_pages(block) for block in range(BLOCKS)] == [pages(block) for block in range(BLOCKS)]
