"""What the granting policy costs a step of the engine: telling it of the step, and asking for a decision.

Distribution over the steps of a service with 8 to 512 requests that decode; one request ends and one begins now
and then, so that no path is left out. Time is the thread's own: what others take of the core is not the policy's.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import count

from valve_abi import CONTROL_BYTES, GRANT, GRANT_OFFSET, PAGE
from valve_hook.grant_page import GrantPage
from valve_hook.grants import Asking
from valve_hook.policy.granting import EngineFacts, GrantCost, GrantPolicy, GrantSettings, Target
from valve_hook.policy.misses import MissSettings
from valve_hook.shared import Bell
from valve_hook.vllm.rows import StepRows
from valve_tools.bench.row import Row, row_of

STEPS = 6_000
TURNOVER = 25
"""Steps after which a request ends and another begins."""
BUDGET_US = 50.0
COST = GrantCost(stop_ms=0.1, wake_ms=0.1, bubble_ms=0.1, damage_ms=0.1)


def bench_granting() -> Iterator[Row]:
    for requests in (8, 64, 256, 512):
        telling, deciding, granted = _steps(requests)
        note = f"{granted} of {STEPS} granted"
        yield row_of("granting", f"decide-{requests}", "us", deciding, BUDGET_US, judged="p99", note=note)
        yield row_of("granting", f"tell-{requests}", "us", telling, None, note="with refits, a few in a thousand steps")
        following, wanting, asked = _hook_steps(requests)
        yield row_of(
            "granting", f"hook-wants-{requests}", "us", wanting, BUDGET_US, judged="p99", note=f"{asked} wanted"
        )
        note = "each token of a step, from a vLLM's output on"
        yield row_of("granting", f"hook-follows-{requests}", "us", following, BUDGET_US, judged="p99", note=note)


def _steps(requests: int) -> tuple[list[float], list[float], int]:
    settings = GrantSettings(grants_per_s=1e9, least_worth=-1.0, misses=MissSettings(trial=0))
    policy = GrantPolicy(Target(tpot_ms=20.0, gap_ms=100.0), COST, settings=settings)
    names = count()
    running = [next(names) for _ in range(requests)]
    for request in running:
        policy.arrived(request, -500.0 - 300.0 * (requests - request))
        policy.first_token(request, 0.0)
    facts = EngineFacts(
        running=requests, context_tokens=1_000 * requests, kv_pool=10**8, kv_mapped=10**8, max_num_seqs=1_024
    )
    now_ms, telling, deciding, granted = 0.0, [], [], 0
    for step in range(STEPS):
        now_ms += 7.0
        facts.context_tokens += requests
        begun = time.thread_time_ns()
        policy.stepped(requests, facts.context_tokens, 6.5, 0.5)
        policy.delivered(now_ms)
        if step % TURNOVER == 0:
            gone, new = running.pop(0), next(names)
            running.append(new)
            policy.finished(gone, now_ms)
            policy.arrived(new, now_ms - 500.0)
            policy.first_token(new, now_ms)
            facts.context_tokens = 1_000 * requests
        told = time.thread_time_ns()
        decision = policy.decide(now_ms, facts)
        deciding.append((time.thread_time_ns() - told) / 1e3)
        telling.append((told - begun) / 1e3)
        granted += decision.grant_ms > 0
        now_ms += decision.grant_ms
    return telling, deciding, granted


BENCHES: dict[str, Callable[[], Iterable[Row]]] = {"granting": bench_granting}


class Consented:
    """A link whose valved says that the owner consents."""

    def __init__(self) -> None:
        control, region, bell = os.memfd_create("control"), os.memfd_create("region"), os.eventfd(0)
        os.ftruncate(control, CONTROL_BYTES)
        os.ftruncate(region, PAGE)
        for name, value in (("tpot_ns", 20_000_000), ("gap_ns", 100_000_000), ("consented", 1)):
            field = GRANT.fields[name]
            os.pwrite(control, value.to_bytes(field.bytes, "little"), GRANT_OFFSET + field.offset)
        self.grant: GrantPage | None = GrantPage(control, mmap.mmap(region, PAGE), Bell(bell))
        for fd in (control, region, bell):
            os.close(fd)


@dataclass(slots=True)
class Output:
    """Of one request in a step, as vLLM tells of it."""

    request_id: str
    new_token_ids: list[int]
    finish_reason: str | None = None


@dataclass(slots=True)
class Outputs:
    outputs: list[Output]


def _hook_steps(requests: int) -> tuple[list[float], list[float], int]:
    """The same, as an engine's hook pays for it."""
    settings = GrantSettings(grants_per_s=1e9, least_worth=-1.0, misses=MissSettings(trial=0))
    hook, names, now = Asking(Consented(), settings=settings), count(), time.monotonic_ns()
    facts = EngineFacts(running=requests, kv_pool=10**8, kv_mapped=10**8, max_num_seqs=1_024)
    batch, scheduled, rows, wanted = Outputs([]), dict[str, int](), StepRows(), 0
    following, wanting = [], []
    for step in range(STEPS):
        begun = time.thread_time_ns()
        if hook.follows:
            while len(batch.outputs) < requests:
                batch.outputs.append(Output(f"request-{next(names)}", [7]))
                scheduled[batch.outputs[-1].request_id] = 1
                hook.arrived(batch.outputs[-1].request_id, 1_000, now - 500_000_000)
            first = batch.outputs[0]
            first.finish_reason = "length" if step % TURNOVER == TURNOVER - 1 else None
            hook.stepped(now + 500_000, now + 7_000_000, requests, prefill=False)
            now += 7_000_000
            odd, plain, served = rows.told(scheduled, (batch,), hook.reading)
            hook.delivered(odd, now, plain=plain, names=served)
            if first.finish_reason:
                del batch.outputs[0], scheduled[first.request_id]
        followed = time.thread_time_ns()
        wanted += hook.wants(now, facts) > 0
        wanting.append((time.thread_time_ns() - followed) / 1e3)
        following.append((followed - begun) / 1e3)
    return following, wanting, wanted
