"""Faults beside reclaims under a real vLLM on CPU, in this process: `vllm_faults.py MODEL FOLDER '{"seeds": [...]}'`.

Every few steps one of them: valved dies and comes back, the link is cut, valved lets go of its table just after a loss
was told, a function of the hook raises. Each request ends with the tokens of the undisturbed run, or with an error that
its client is told. One JSON line per trial; `handling` names an old fault that is put back (the control run).
"""

from __future__ import annotations

import contextlib
import json
import random
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from faults import Fault
from kv_node import wait_for
from vllm_campaign import Campaign, answer_of, leaks

EVERY = 9  # steps between two faults, in the mean


class Patches:
    """What Fault asks of pytest's monkeypatch."""

    def __init__(self) -> None:
        self._before: list[tuple[Any, str, Any]] = []

    def setattr(self, owner: Any, name: str, value: Any) -> None:
        self._before.append((owner, name, getattr(owner, name)))
        setattr(owner, name, value)

    def undo(self) -> None:
        while self._before:
            setattr(*self._before.pop())


def functions() -> list[tuple[type, str]]:
    from valve_hook.ledger import Ledger
    from valve_hook.reconciler import Reconciler
    from valve_hook.shared import Book, Table
    from valve_hook.vllm.calls import SchedulerHook
    from valve_hook.vllm.engine import VllmEngine
    from valve_hook.vllm.prefixes import Prefixes
    from valve_hook.vllm.progress import Progress

    called = {
        SchedulerHook: ["before_schedule", "after_schedule", "before_update", "_note_idle"],
        Reconciler: ["sync", "publish", "_heed", "_safely", "_act", "_discard"],
        Ledger: ["admit", "follow", "tend", "retain", "dismiss", "launch", "believe", "judge", "first_written"],
        VllmEngine: ["discard", "forget", "withhold", "release", "reset", "gauges", "record"],
        Prefixes: ["keep", "drop", "resume"],
        Table: ["read", "accept"],
        Book: ["open_row", "extend_row", "close_row", "write_gauges", "write_receipts", "acknowledge"],
        Progress: ["after_schedule", "count"],
    }
    return [(owner, name) for owner, names in called.items() for name in names]


class Faults:
    """What goes wrong between two steps, by a seed."""

    def __init__(self, campaign: Campaign, hook: Any, seed: int) -> None:
        self.campaign, self.hook, self.node = campaign, hook, campaign.node
        self.chance = random.Random(seed)
        self.patches = Patches()
        self.done: dict[str, int] = {}
        self.armed: list[Fault] = []
        self.kinds: list[Callable[[], None]] = [
            self.daemon_dies,
            self.link_is_cut,
            self.table_is_left,
            self.hook_raises,
        ]

    def between(self) -> None:
        if self.chance.randrange(EVERY) == 0:
            kind = self.chance.choice(self.kinds if not self.armed else self.kinds[:-1])
            kind()
            self.done[kind.__name__] = self.done.get(kind.__name__, 0) + 1

    def daemon_dies(self) -> None:
        before = self.hook.link.session
        self.node.stop()
        self.node.start()
        self._wait_for_another(before)

    def link_is_cut(self) -> None:
        before = self.hook.link.session
        self._cut()
        self._wait_for_another(before)

    def table_is_left(self) -> None:
        """A loss is told in a table that valved lets go of at once."""
        before = self.hook.link.session
        self.campaign.injector.lose_now()
        self.node.detach()
        self._cut()
        self._wait_for_another(before)

    def hook_raises(self) -> None:
        """Once in a trial: after two failures it gives up, and all that is left are requests that end with an error."""
        fault = Fault(is_late=self.chance.random() < 0.5, is_lasting=False)
        fault.put(self.patches, *self.chance.choice(functions()))
        fault.is_armed = True
        self.armed.append(fault)

    def end(self) -> None:
        self.patches.undo()

    def _cut(self) -> None:
        for link in self.node._connections:
            with contextlib.suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)
        self.node._connections.clear()

    def _wait_for_another(self, before: Any) -> None:
        self.hook.link._poke.set()
        wait_for(lambda: self.hook.link.session is not before and self.node.attached, "attached again")


def lose_now(injector: Any) -> None:
    """And back at once, empty: a later table calls these blocks backed, so only this one tells the loss."""
    if injector.armed:
        held, injector.held = injector.held, 0
        injector._take()
        injector.held = held


def mend(hook: Any) -> None:
    """The next trial begins with a hook that has never failed."""
    from valve_hook.wire import Mode

    hook.reconciler.is_sure, hook.reconciler.lends, hook.reconciler.mode = True, True, Mode.FULL
    hook.engine.has_abandoned = False


def detached_is_deaf(hook: Any) -> None:
    from valve_hook.reconciler import Reconciler

    heed = Reconciler._heed

    def deaf(reconciler: Any) -> bool:
        session = reconciler.session
        return False if session is not None and session.table.is_detached else heed(reconciler)

    Reconciler._heed = deaf


HANDLING = {"full": lambda hook: None, "detached_is_deaf": detached_is_deaf}


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
    injector, faults = campaign.injector, Faults(campaign, hook, seed)
    injector.start(seed, every=5, held=4, most=12, columns=False, limit=10**6, zeroes=True, lost="garbage")
    crash = ""
    try:
        got = generate(campaign, seed, count, tokens, faults.between)
    except Exception as error:
        got, crash = {}, repr(error)
    faults.end()
    injector.stop()
    mend(hook)
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
        "raised": sum(bool(fault.raised) for fault in faults.armed),
        "crash": crash,
        "leak": "" if crash else leaks(campaign.core.scheduler),
    }


def main() -> None:
    model, folder, plan = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
    campaign = Campaign(model, folder, plan)
    campaign.generate(0, 2, 4)
    hook = campaign.core.scheduler.__dict__.get("_valve")
    assert hook is not None, "the hook did not attach"
    hook.link.retry_s = 0.02
    type(campaign.injector).lose_now = lose_now
    HANDLING[plan.get("handling", "full")](hook)
    for seed in plan["seeds"]:
        print(json.dumps(trial(campaign, hook, seed, plan.get("requests", 24), plan.get("tokens", 60))), flush=True)


if __name__ == "__main__":
    main()
