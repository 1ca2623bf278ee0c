"""Pauses between the steps of a vLLM: where its engine core waits, and what it tells the asking half. Plugin form only.

`EngineCore.step` and `step_with_batch_queue` are wrapped. A pause begins before a step, when all output was delivered
and nothing is in flight. Under async scheduling a step is in flight all the time: one call then schedules nothing, so
that its output is delivered, and the pause begins before the next. Whatever comes to the core's input queue ends it.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable
from typing import Any

from valve_hook.grants import Asking
from valve_hook.link import Link
from valve_hook.policy.granting import EngineFacts
from valve_hook.vllm import check
from valve_hook.vllm.rows import StepRows

log = logging.getLogger("valve")
MARK, PAUSES, BEGUN = "_valve_wrapped", "_valve_pauses", "_valve_begun_ns"


def why_not(core: Any) -> str:
    """Why this engine never asks; empty where it may."""
    config = core.vllm_config
    parallel = config.parallel_config
    reasons = {
        "pipeline parallelism": parallel.pipeline_parallel_size > 1,
        "data parallelism": parallel.data_parallel_size > 1,
        "several nodes": getattr(parallel, "nnodes", 1) > 1,
        f"the executor {check.executor_of(parallel)}": check.executor_of(parallel) not in check.EXECUTORS,
        "a KV connector": getattr(config, "kv_transfer_config", None) is not None,
        "drafts beside a step": getattr(config, "speculative_config", None) is not None,
        "answers without tokens": getattr(core, "is_pooling_model", False),
        "requests that come on the engine's own thread": not hasattr(core, "input_queue"),
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


class CorePauses:
    """One per EngineCore, and of its Scheduler."""

    def __init__(self, core: Any, link: Link) -> None:
        self.core, self.scheduler = core, core.scheduler
        self.asking = Asking(link, refused=why_not(core))
        self.facts = EngineFacts(max_num_seqs=int(self.scheduler.max_num_running_reqs))
        self._rows = StepRows()
        self._unfinished = 0  # requests of the last step that got no token from it
        self._resume_ns = 0  # of a pause that waits for what is in flight
        if self.asking.refused:
            log.info("valve: this engine never asks for pauses: %s", self.asking.refused)

    # ---- around a step ----

    def step(self, step: Callable[[Any], Any]) -> Any:
        if not self.asking.follows:
            return step(self.core)
        return self._drained(step) if self._guard(self._before) else step(self.core)

    def _before(self) -> bool:
        """Pause here, or say that what is in flight must come in first."""
        core, asking, now_ns = self.core, self.asking, time.monotonic_ns()
        if not asking.readers:
            asking.rested(now_ns)
        resume_ns, self._resume_ns = self._resume_ns, 0
        if resume_ns:
            self._look()
            resume_ns = asking.still(resume_ns, self.facts)
        else:
            self._look()
            resume_ns = asking.wants(now_ns, self.facts)
        if not resume_ns:
            return False
        if core.batch_queue:
            self._resume_ns = resume_ns
            return True
        asking.pause(resume_ns, self.wait, is_done=True)
        return False

    def _drained(self, step: Callable[[Any], Any]) -> Any:
        """One call that schedules nothing."""
        self.scheduler.has_requests = lambda: False
        try:
            return step(self.core)
        finally:
            del self.scheduler.has_requests

    def wait(self, seconds: float) -> bool:
        """Until a request, an abort, a call or the end comes to the core."""
        queue = self.core.input_queue
        with queue.not_empty:
            return bool(queue.queue) or queue.not_empty.wait(seconds) or bool(queue.queue)

    def _look(self) -> None:
        scheduler, facts = self.scheduler, self.facts
        facts.running = len(scheduler.running)
        facts.waiting = len(scheduler.waiting) + len(getattr(scheduler, "skipped_waiting", ()))
        facts.prefilling = max(self._unfinished, facts.running - self.asking.readers)
        pool = scheduler.kv_cache_manager.block_pool
        hook = scheduler.__dict__.get("_valve")
        withheld = len(hook.engine.withheld) if hasattr(hook, "engine") else 0
        facts.kv_pool = int(pool.num_gpu_blocks) - 1
        facts.kv_mapped = facts.kv_pool - withheld
        facts.kv_used = facts.kv_mapped - int(pool.get_num_free_blocks())
        session = hook.reconciler.session if hasattr(hook, "reconciler") else None
        facts.reclaim_pending = session is not None and session.is_asked(facts.kv_mapped + 1)

    # ---- what the scheduler says ----

    def scheduled(self, output: Any, begun_ns: int) -> None:
        setattr(output, BEGUN, begun_ns)
        if self.asking.policy is None:
            return
        since_ns, now_s = time.monotonic_ns(), time.time()
        for new in output.scheduled_new_reqs:
            request = self.scheduler.requests[new.req_id]
            streamed = getattr(getattr(request.sampling_params, "output_kind", None), "name", "") != "FINAL_ONLY"
            age_ns = int(max(0.0, now_s - request.arrival_time) * 1e9)
            self.asking.arrived(new.req_id, request.num_prompt_tokens, since_ns - age_ns, streamed=streamed)

    def delivered(self, output: Any, outputs: Any) -> None:
        count = len(output.num_scheduled_tokens)
        if not count:
            return
        now_ns, is_prefill = time.monotonic_ns(), output.total_num_scheduled_tokens > count
        self.asking.stepped(getattr(output, BEGUN, now_ns), now_ns, count, prefill=is_prefill)
        if self.asking.policy is None:
            return
        batches, reading = (outputs or {}).values(), self.asking.reading
        odd, plain, names = self._rows.told(output.num_scheduled_tokens, batches, reading)
        self._unfinished = count - plain - sum(tokens > 0 for _, tokens, _ in odd)
        self.asking.delivered(odd, now_ns, plain=plain, names=names)
        self.asking.left(output.finished_req_ids, now_ns)

    def _guard(self, action: Callable[[], bool]) -> bool:
        try:
            return action()
        except Exception:
            self.fail("looking for a pause failed")
            return False

    def fail(self, what: str) -> None:
        """The engine goes on, and asks no more."""
        log.exception("valve: %s; the engine goes on without pauses", what)
        self.asking.refuse("the hook failed")


def wrap_engine_core(link: Callable[[], Link | None]) -> None:
    """When a Scheduler is built its EngineCore is being built, and takes the methods up afterwards."""
    try:
        from vllm.v1.engine.core import EngineCore

        if not getattr(EngineCore.step, MARK, False):
            EngineCore.step, EngineCore.step_with_batch_queue = (
                around(EngineCore.step, link),
                around(EngineCore.step_with_batch_queue, link),
            )
    except Exception:
        log.exception("valve: this engine never asks for pauses")


def around(step: Callable[[Any], Any], link: Callable[[], Link | None]) -> Callable[[Any], Any]:
    @functools.wraps(step)
    def valve_step(self: Any) -> Any:
        pauses = pauses_of(self, link)
        return step(self) if pauses is None else pauses.step(step)

    setattr(valve_step, MARK, True)
    return valve_step


def pauses_of(core: Any, link: Callable[[], Link | None]) -> CorePauses | None:
    if PAUSES not in core.__dict__:
        core.__dict__[PAUSES] = core.scheduler.__dict__[PAUSES] = _make(core, link)
    pauses: CorePauses | None = core.__dict__[PAUSES]
    return pauses


def _make(core: Any, link: Callable[[], Link | None]) -> CorePauses | None:
    try:
        made = link()
        return CorePauses(core, made) if made is not None else None
    except Exception:
        log.exception("valve: this engine never asks for pauses")
        return None


def scheduled(scheduler: Any, output: Any, begun_ns: int) -> None:
    """After Scheduler.schedule, which was entered at `begun_ns`."""
    tell(scheduler, lambda pauses: pauses.scheduled(output, begun_ns))


def delivered(scheduler: Any, output: Any, outputs: Any) -> None:
    """After Scheduler.update_from_output."""
    tell(scheduler, lambda pauses: pauses.delivered(output, outputs))


def tell(scheduler: Any, what: Callable[[CorePauses], None]) -> None:
    pauses = scheduler.__dict__.get(PAUSES)
    if pauses is not None and not pauses.asking.refused:
        try:
            what(pauses)
        except Exception:
            pauses.fail("following the requests failed")
