"""Faults beside reclaims under a real SGLang on CPU: `sglang_faults.py MODEL FOLDER '{"seeds": [...]}'`.

Each request ends with the tokens of the undisturbed run, or with an error that its client is told; every other one is
streamed, and what was streamed is never called back. One JSON line per trial; `handling` names an old fault that is put
back (the control run).
"""

from __future__ import annotations

import asyncio
import functools
import json
import sys
import time
from pathlib import Path
from typing import Any

from engine_faults import HANDLING, Faults, is_believed_again
from engine_trials import gaps, is_tied
from sglang_campaign import Injector, idle_state, prompts, start_engine
from sglang_campaign import register as register_injector

ANSWER_S = 300.0  # a request without an answer by then is lost
REQUESTS = 24
TIE = 1e-4  # of two log probabilities in float32; in answers that nothing ties they are mostly thousands of times that


def functions() -> list[tuple[Any, str]]:
    """Of the hook, those that SGLang does not call itself: what is raised in them must stay inside."""
    from valve_hook.reconciler import Reconciler
    from valve_hook.sglang import engine
    from valve_hook.sglang.calls import SglangHook
    from valve_hook.sglang.engine import SglangEngine
    from valve_hook.sglang.free_pages import FreePages
    from valve_hook.sglang.steps import StepLedger
    from valve_hook.shared import Book, Table

    called: dict[Any, list[str]] = {
        SglangHook: ["before_choose", "after_choose", "_look", "_settle", "_disbelieved"],
        Reconciler: ["sync", "peek", "hit", "publish", "_heed", "_safely", "_act", "_discard"],
        SglangEngine: [
            *("discard", "forget", "withhold", "release", "reset", "gauges", "launch", "wait", "come_in"),
            *("disbelieve", "believe_again", "drop", "retract_dropped", "open_requests"),
            *("_retract", "_take_back"),
        ],
        engine: ["evict"],
        FreePages: ["numbers", "_take_off", "_hand_out"],
        StepLedger: ["begin_step", "end_steps", "settle", "judge", "_keep"],
        Table: ["read", "accept"],
        Book: ["write_gauges", "write_receipts", "acknowledge"],
    }
    return [(owner, name) for owner, names in called.items() for name in names]


class FaultyInjector(Injector):
    """In the scheduler's process. A trial begins and ends while nothing runs."""

    def __init__(self, scheduler: Any) -> None:
        super().__init__(scheduler)
        self.faults: Faults | None = None

    def lose_now(self) -> None:
        """And back at once, empty: a later table calls these pages backed, so only this one tells the loss."""
        if self.plan.get("events"):
            pages = self._some()
            self.node.take(pages)
            self._fill(pages, garbage=True)
            self._give([pages])
            self.events += 1

    def _begin_step(self) -> None:
        super()._begin_step()
        if self.faults is not None:
            self.faults.between()

    def _idle(self) -> None:
        self.read_plan()
        super()._idle()

    def read_plan(self) -> None:
        """Also between two steps; the events of the trial that has ended are told before they are forgotten."""
        told = {"number": self.plan.get("number"), "events": self.events}
        seen = self.seen
        super().read_plan()
        if self.seen == seen:
            return
        if self.faults is not None:
            self.faults.end()
            faults, self.faults = self.faults, None
            self._give([pages for pages, _ in self.taken])
            is_as_new(self.scheduler._valve)
            raised = sum(bool(fault.raised) for fault in faults.armed)
            told |= {"faults": faults.done, "raises": faults.raises[1], "raised": raised}
        if self.plan.get("is_faulty"):
            hook = self.scheduler._valve
            hook.link.retry_s = 0.02
            self.faults = Faults(self, hook, self.node, functions(), self.plan["seed"])
            if not self.plan["number"]:
                HANDLING[self.plan["handling"]]()
        draft = self.report.with_suffix(".draft")
        draft.write_text(json.dumps({**told, "plan": self.plan["number"]}))
        draft.replace(self.report.with_name("trial.json"))


def is_as_new(hook: Any) -> None:
    engine = hook.engine
    is_believed_again(hook)
    hook._is_well, hook._blind_steps = True, 0
    engine.ledger.clear()
    engine.free_pages.give_as_it_comes()


def register() -> None:
    register_injector(FaultyInjector)


def begin(folder: Path, plan: dict[str, Any]) -> dict[str, Any]:
    """Hand a plan to the scheduler, and what it says of the one before."""
    draft = folder / "plan.draft"
    draft.write_text(json.dumps(plan))
    draft.replace(folder / "plan.json")  # never half of it
    told, deadline = folder / "trial.json", time.monotonic() + 200
    while True:
        found = json.loads(told.read_text()) if told.exists() else {}
        if found.get("plan") == plan["number"]:
            return found
        assert time.monotonic() < deadline, f"the scheduler has not seen plan {plan['number']}"
        time.sleep(0.02)


def sampling_of(number: int) -> dict[str, Any]:
    return {"temperature": 0, "max_new_tokens": 50 - number % 7, "ignore_eos": True}


def tops(engine: Any, prompt: list[int], answer: list[int]) -> list[list[tuple[float, int]]]:
    """The two best at each place of an answer, given what comes before it there: read by the engine as one prompt, when
    nothing is taken. What is computed again is computed in another batch, whose sums may round to the other candidate.
    """
    told = engine.generate(
        input_ids=[[*prompt, *answer]],
        sampling_params=[{"temperature": 0, "max_new_tokens": 1}],
        return_logprob=True,
        logprob_start_len=0,
        top_logprobs_num=2,
    )
    found = told[0]["meta_info"]["input_top_logprobs"][len(prompt) :]
    return [[(value, token) for value, token, *_ in top] for top in found]


async def answer(engine: Any, number: int, prompt: list[int]) -> list[int] | str:
    """Tokens; "error" where the client was told so; "lost" without an answer; "called back"."""
    from fastapi import HTTPException

    sampling, last = sampling_of(number), dict[str, Any](output_ids=[])
    try:
        if number % 2:
            last = await engine.async_generate(input_ids=prompt, sampling_params=sampling)
        else:
            async for chunk in await engine.async_generate(input_ids=prompt, sampling_params=sampling, stream=True):
                is_end = chunk["meta_info"]["finish_reason"]
                if not is_end and chunk["output_ids"][: len(last["output_ids"])] != last["output_ids"]:
                    return "called back"
                last = chunk
    except HTTPException:  # how SGLang reports an abort
        return "error"
    return "error" if last["meta_info"]["finish_reason"]["type"] == "abort" else list(last["output_ids"])


async def answers(engine: Any, work: list[list[int]]) -> list[Any]:
    async def one(number: int) -> Any:
        try:
            return await asyncio.wait_for(answer(engine, number, work[number]), ANSWER_S)
        except asyncio.TimeoutError:
            return "lost"

    return await asyncio.gather(*map(one, range(len(work))))


def leaks(*, free: int, cached: int, withheld: int, pages: int, spoilt: int, **_: int) -> str:
    """Nothing runs: every page is free, cached or withheld, and none that is cached is spoilt."""
    is_whole = free + cached + withheld == pages and not spoilt
    return "" if is_whole else f"{free} free, {cached} cached ({spoilt} spoilt), {withheld} withheld of {pages} pages"


def main() -> None:
    model, folder, plan = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
    engine = start_engine(
        model,
        folder,
        max_total_tokens=3000,
        page_size=plan.get("page", 1),
        chunked_prefill_size=128,
        disable_overlap_schedule=not plan.get("overlap", True),
    )

    def ask(seed: int) -> list[Any]:
        return engine.loop.run_until_complete(answers(engine, prompts(seed, REQUESTS)))

    @functools.cache
    def expected(seed: int) -> list[Any]:
        return ask(seed)

    handling, number = plan.get("handling", "full"), 0
    for seed in plan["seeds"]:
        wanted = expected(seed % 4)
        trial = {"seed": seed, "every": 5, "held": 4, "events": 1 << 30, "is_faulty": True, "handling": handling}
        begin(folder, {**trial, "number": number})
        got = ask(seed % 4)
        told = begin(folder, {"seed": 0, "events": 0, "number": number + 1})
        number += 2
        unlike = [at for at, one in enumerate(got) if one not in ("error", "lost") and one != wanted[at]]
        work = prompts(seed % 4, REQUESTS)
        best = {at: tops(engine, work[at], got[at]) for at in unlike if got[at] != "called back"}
        tied = [at for at in best if is_tied(got[at], wanted[at], best[at], TIE)]
        counts = {
            "wrong": len(unlike) - len(tied),
            "tied": len(tied),
            "unlike": [(at, got[at], wanted[at], gaps(got[at], best[at]) if at in best else []) for at in unlike],
            "lost": got.count("lost"),
            "errors": got.count("error"),
        }
        report = {"seed": seed, "requests": REQUESTS, **counts, **told, "broken": leaks(**idle_state(folder)["idle"])}
        print(json.dumps(report), flush=True)
    engine.shutdown()


if __name__ == "__main__":
    main()
