"""The zero-line form: vLLM loads `register` through the entry point `vllm.general_plugins` in each of its processes.

Wrapped are three methods of Scheduler, `__init__`, `schedule` and `update_from_output` (calls.py), two of EngineCore
for granted time (pauses.py), and, for memory, four of Worker (worker.py). Where there is no valved nothing is wrapped.
"""

from __future__ import annotations

import functools
import logging
import sys
import time
from typing import Any

from valve_hook.link import process_link, socket_path

log = logging.getLogger("valve")
MARK = "_valve_wrapped"


def register() -> None:
    """Idempotent and cheap: vLLM calls it in the front end, in EngineCore and in every worker."""
    if socket_path() is None:
        return
    try:
        wrap_scheduler()
    except Exception:
        log.exception("valve: this vLLM cannot be hooked; it runs untouched")
        return
    try:
        from valve_hook.vllm.worker import wrap_worker

        wrap_worker()
    except Exception:
        log.exception("valve: KV memory stays vLLM's own; nothing is reclaimed from it")


def wrap_scheduler() -> None:
    from valve_hook.vllm import calls, pauses

    from vllm.v1.core.sched.scheduler import Scheduler

    is_patched = hasattr(sys.modules[Scheduler.__module__], "valve")
    if getattr(Scheduler.__init__, MARK, False):
        return
    build, schedule, update = Scheduler.__init__, Scheduler.schedule, Scheduler.update_from_output

    @functools.wraps(build)
    def valve_build(self: Any, *args: Any, **kwargs: Any) -> None:
        build(self, *args, **kwargs)
        calls.built(self)
        if not is_patched:
            pauses.wrap_engine_core(process_link)

    setattr(valve_build, MARK, True)
    Scheduler.__init__ = valve_build
    if is_patched:
        return

    @functools.wraps(schedule)
    def valve_schedule(self: Any, *args: Any, **kwargs: Any) -> Any:
        begun_ns = time.monotonic_ns()
        calls.before_schedule(self)
        output = schedule(self, *args, **kwargs)
        calls.after_schedule(self, output)
        pauses.scheduled(self, output, begun_ns)
        return output

    @functools.wraps(update)
    def valve_update(self: Any, scheduler_output: Any, model_runner_output: Any) -> Any:
        calls.before_update(self, scheduler_output, model_runner_output)
        outputs = update(self, scheduler_output, model_runner_output)
        pauses.delivered(self, scheduler_output, outputs)
        return outputs

    Scheduler.schedule, Scheduler.update_from_output = valve_schedule, valve_update
