"""Requests that begin again in a vLLM worker: what its V1 runner keeps per request is put back to where they begin.

A request that lost KV is sent back to waiting and the output of its steps in flight is dropped. The runner keeps some
state beside the tokens that those steps have moved on already, and it expects a preempted request to go on, not back:

  pooling by token      hidden states are gathered chunk by chunk; new chunks would stand behind the old ones
  logprobs of a prompt  the runner forgets the request when its prompt is done, and would tell them never again
  a seed of its own     the generator has drawn for tokens that nobody has seen

The V2 runner makes such a request anew, and draws by position: nothing to do. Where something cannot be put back the
runner computes no further: its answers would be wrong, and the scheduler, in another process, would never know.
"""

from __future__ import annotations

import logging
from typing import Any

log = logging.getLogger("valve")
KEPT = 16  # states of a generator: more than there are steps in flight


class NotPutBack(RuntimeError):
    """A request would go on from what a dropped step has left behind."""


class Resumed:
    """One per runner."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._states: dict[str, dict[int, Any]] = {}  # request: {tokens it had: its generator then}
        self._failure: Exception | None = None  # the first: what was noted since is not known

    def before_step(self, output: Any, *, may_lose: bool) -> None:
        """Before the runner takes the step in. `may_lose`: steps of this engine are dropped; any other one goes on
        whatever happens in here, for vLLM sends a request of its own back only when its output is in.
        """
        try:
            self._before_step(output)
        except Exception as error:
            if self._failure is None:
                log.exception("valve: this model runner keeps state of a request that the hook cannot follow")
                self._failure = error
        if self._failure is not None and may_lose and output.scheduled_cached_reqs.resumed_req_ids:
            raise NotPutBack(
                "valve: a request begins again, and the hook cannot put back what the model runner keeps beside its "
                "tokens. The engine stops, because answers would be wrong: start it again, or without Valve's memory"
            ) from self._failure

    def _before_step(self, output: Any) -> None:
        requests = getattr(self._runner, "requests", None)
        if requests is None:  # V2
            return
        for name in output.finished_req_ids:
            self._states.pop(name, None)
        cached = output.scheduled_cached_reqs
        is_seeded = bool(self._states or self._runner.input_batch.generators)
        if not cached.resumed_req_ids and not is_seeded:
            return
        rows = zip(cached.req_ids, cached.num_computed_tokens, cached.num_output_tokens, strict=True)
        for name, computed, generated in rows:
            if name in cached.resumed_req_ids:
                self._begin_again(requests[name], name, computed, generated)
            if getattr(requests[name], "generator", None) is not None:
                self._note(requests[name], name)

    def _begin_again(self, request: Any, name: str, computed: int, generated: int) -> None:
        pooling = getattr(request, "pooling_states", None)
        if pooling is not None:
            pooling.clean()
        if (
            generated == 0 and computed == 0
        ):  # the step that finished its prompt was not believed, and its logprobs went
            self._tell_prompt_again(request, name)
        if getattr(request, "generator", None) is None:
            return
        del request.output_token_ids[generated:]
        if generated == 0:
            request.generator.manual_seed(request.sampling_params.seed)
            return
        states = self._states.get(name, {})
        if generated in states:
            request.generator.set_state(states[generated])
        elif states and max(states) > generated:  # else no step began with so many tokens, and nothing was drawn since
            raise ValueError(f"{name} begins again with {generated} tokens, states were kept for {sorted(states)}")

    def _tell_prompt_again(self, request: Any, name: str) -> None:
        wanted = getattr(getattr(request, "sampling_params", None), "prompt_logprobs", None)
        if wanted is not None:
            every = self._runner.input_batch.vocab_size
            self._runner.num_prompt_logprobs[name] = every if wanted == -1 else wanted
            request.in_progress_prompt_logprobs_cpu = None

    def _note(self, request: Any, name: str) -> None:
        states = self._states.setdefault(name, {})
        states[len(request.output_token_ids)] = request.generator.get_state()
        while len(states) > KEPT:
            del states[min(states)]
