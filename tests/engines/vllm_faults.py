"""Faults beside reclaims under a real vLLM on CPU, in this process: `vllm_faults.py MODEL FOLDER '{"seeds": [...]}'`.

Each request ends with the tokens of the undisturbed run, or with an error that its client is told. One JSON line per
trial; `handling` names an old fault that is put back (the control run).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine_faults import HANDLING, Faults, is_believed_again
from vllm_campaign import Campaign, answer_of, leaks


def functions() -> list[tuple[type, str]]:
    from valve_hook.ledger import Ledger
    from valve_hook.reconciler import Reconciler
    from valve_hook.shared import Book, Table
    from valve_hook.vllm.calls import VllmHook
    from valve_hook.vllm.engine import VllmEngine
    from valve_hook.vllm.prefixes import Prefixes
    from valve_hook.vllm.progress import Progress

    called = {
        VllmHook: ["before_schedule", "after_schedule", "before_update", "_note_idle"],
        Reconciler: ["sync", "publish", "_heed", "_safely", "_act", "_discard"],
        Ledger: ["note", "_take_in", "tend", "retain", "dismiss", "launch", "believe", "judge", "first_written"],
        VllmEngine: ["discard", "forget", "withhold", "release", "reset", "gauges", "record"],
        Prefixes: ["keep", "drop", "resume"],
        Table: ["read", "accept"],
        Book: ["open_row", "extend_row", "close_row", "write_gauges", "write_receipts", "acknowledge"],
        Progress: ["after_schedule", "count"],
    }
    return [(owner, name) for owner, names in called.items() for name in names]


def lose_now(injector: Any) -> None:
    """And back at once, empty: a later table calls these blocks backed, so only this one tells the loss."""
    if injector.armed:
        held, injector.held = injector.held, 0
        injector._take()
        injector.held = held


def generate(campaign: Campaign, seed: int, count: int, tokens: int, between: Callable[[], None]) -> dict[int, Any]:
    """What every request ended with: its tokens, or "error"."""
    engine, done = campaign.llm.llm_engine, dict[int, Any]()
    for number, prompt in enumerate(campaign.prompts(seed, count)):
        engine.add_request(f"{number}", {"prompt_token_ids": prompt}, campaign.asked(number, tokens))
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                is_error = output.outputs[0].finish_reason not in {"length", "stop"}
                done[int(output.request_id.split("-")[0])] = "error" if is_error else answer_of(output)
        between()
    return done


def trial(campaign: Campaign, hook: Any, seed: int, count: int, tokens: int) -> dict[str, Any]:
    expected = generate(campaign, seed, count, tokens, lambda: None)
    injector = campaign.injector
    faults = Faults(injector, hook, campaign.node, functions(), seed)
    injector.start(seed, every=5, held=4, most=12, columns=False, limit=10**6, zeroes=True, lost="garbage")
    crash = ""
    try:
        got = generate(campaign, seed, count, tokens, faults.between)
    except Exception as error:
        got, crash = {}, repr(error)
    faults.end()
    injector.stop()
    is_believed_again(hook)
    hook.engine.has_abandoned = False
    if not crash:
        generate(campaign, seed, 1, 8, lambda: None)
    wrong = [number for number, answer in got.items() if answer != "error" and answer != expected[number]]
    return {
        "seed": seed,
        "requests": count,
        "wrong": len(wrong),
        "lost": len(expected.keys() - got.keys()),
        "errors": sum(answer == "error" for answer in got.values()),
        "events": injector.events,
        "faults": faults.done,
        "raises": faults.raises[1],
        "raised": sum(bool(fault.raised) for fault in faults.armed),
        "broken": crash or leaks(campaign.core.scheduler),
    }


def main() -> None:
    model, folder, plan = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
    campaign = Campaign(model, folder, plan)
    campaign.generate(0, 2, 4)
    hook = campaign.core.scheduler.__dict__.get("_valve")
    assert hook is not None, "the hook did not attach"
    hook.link.retry_s = 0.02
    from valve_hook.vllm.worker import layout_of, storage_base

    kv_cache_config = campaign.core.scheduler.kv_cache_manager.kv_cache_config
    type(campaign.injector).lose_now = lose_now
    hook.link.register_layout(layout_of(storage_base(campaign.injector.runner), kv_cache_config))
    HANDLING[plan.get("handling", "full")]()
    for seed in plan["seeds"]:
        print(json.dumps(trial(campaign, hook, seed, plan.get("requests", 24), plan.get("tokens", 60))), flush=True)


if __name__ == "__main__":
    main()
