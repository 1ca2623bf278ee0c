"""A real `vllm run-batch` under the real valved on the emulated card, started by `valve run` and nothing else."""

from __future__ import annotations

import signal

import pytest
from valve_tools.demo import kv_service
from valve_tools.demo.memory import BLOCK_KIB, BLOCKS, PLANES, MemoryPlan, start_online
from valve_tools.demo.node import EmulatedNode
from valve_tools.emulator.node import Options
from valve_tools.engines.sides import CONFIG, POOL_MIB, Sides

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1200)]


def useful_tokens(sides):
    """Of the batch, as one answer of valved says; none while it is not back, or over."""
    batch = sides.services().get("batch")
    return batch.useful_tokens if batch is not None else 0


def start(engines, node, folder, count):
    """What a batch answers with no Valve near it, and the same batch at work as an offline job."""
    node.start_valved()
    sides = Sides(node=node, folder=folder, python=engines.python)
    sides.prepare()
    requests = sides.write_requests(count)[0]
    alone = sides.finish(sides.start_batch("", "undisturbed", requests), "undisturbed")
    batch = sides.start_batch("offline", "batch", requests)
    sides.wait_for_work(batch, "batch")
    return sides, alone, batch


def test_a_batch_outlives_daemons_and_each_request_is_answered_once(engines, tmp_path):
    """valved is killed and started again, again and again; tokens are those of a run without Valve."""
    with EmulatedNode(tmp_path, config=CONFIG.format(pool_mib=POOL_MIB, remap="helper")) as node:
        sides, alone, batch = start(engines, node, tmp_path, 120)
        restarts = 0
        while batch.poll() is None and restarts < 4:
            node.stop_valved(signal.SIGKILL)
            node.start_valved()
            restarts += 1
            before = useful_tokens(sides)
            node.wait_for(
                lambda seen=before: batch.poll() is not None or useful_tokens(sides) > seen,
                "the batch goes on under the new daemon",
                300.0,
            )
        ours = sides.finish(batch, "batch")

    assert restarts >= 1
    assert {name: len(answers) for name, answers in ours.tokens.items()} == dict.fromkeys(alone.tokens, 1)
    assert alone.tokens == ours.tokens


def beside_bursts(engines, folder, *, seconds, count, **knobs):
    """Bursts of another program's KV demand beside a batch: reclaims, and what the batch answered alone and there."""
    plan = MemoryPlan(seconds=seconds, every_s=3.0)
    requests = [f"{at:.3f},{prompt},{answer}" for at, prompt, answer in plan.requests()]
    (folder / "requests.csv").write_text("\n".join(["t_s,in_tokens,out_tokens", *requests, ""]))
    cache = ["--kv-blocks", BLOCKS, "--kv-planes", PLANES, "--block-kib", BLOCK_KIB]
    load = ["--trace", folder / "requests.csv", "--duration", plan.seconds, "--decode-us", 4000]
    with EmulatedNode(folder, options=Options(knobs=knobs), config=plan.config(folder / "trace.jsonl")) as node:
        sides, alone, batch = start(engines, node, folder, count)
        online = start_online(node, [str(part) for part in (*kv_service.COMMAND, *cache, *load)], folder)
        node.wait_for(lambda: online.poll() is not None, "the online service is done", 600.0)
        reclaims = node.status().memory.reclaims
        ours = sides.finish(batch, "batch")
    return reclaims, alone.tokens, ours.tokens


def test_an_online_service_takes_the_batchs_memory_again_and_again(engines, tmp_path):
    """valved reclaims from vLLM, and each answer is as undisturbed."""
    reclaims, alone, ours = beside_bursts(engines, tmp_path, seconds=60.0, count=120)

    assert reclaims > 0
    assert alone == ours


@pytest.mark.parametrize("fills", ["works", "silent"])
def test_memory_comes_full_of_nan_and_nobody_sees_it(engines, tmp_path, fills):
    """New memory of this card is NaN. Zeroing keeps it from answers: on a card that fills nothing they differ."""
    _, alone, ours = beside_bursts(engines, tmp_path, seconds=20.0, count=60, poison="255", fills=fills)
    wrong = sum(alone[name] != ours.get(name) for name in alone)
    print(f"\nfills {fills}: {wrong} of {len(alone)} answers differ")

    assert (wrong > 0) == (fills == "silent")
