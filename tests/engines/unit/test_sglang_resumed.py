"""SGLang requests that are sent back: nothing beside an answer's tokens comes out otherwise than undisturbed."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from kv_node import restart
from sglang_world import Reclaimer, finish, give, lose, run, undisturbed
from toy_sglang import Batch
from toy_tensor import Tensor, tensor
from toy_world import prompts
from valve_hook import Refused
from valve_hook.sglang import calls
from valve_hook.sglang.check import refuse_configuration
from valve_hook.sglang.resumed import counted, put_back
from valve_hook.sglang.steps import StepLedger
from valve_hook.wire import Mode

VOCABULARY = 40


class Counts:
    """One of SGLang's penalizers: a row a request, from the first step of the batch on."""

    def __init__(self, orchestrator):
        self.orchestrator, self.ready = orchestrator, False

    def is_prepared(self):
        return self.ready

    def prepare(self):
        self.ready = True
        self.told = np.zeros((len(self.orchestrator.batch.reqs), VOCABULARY), dtype=np.int64).view(Tensor)
        self.penalty = 3  # no tensor

    def cumulate_output_tokens(self, output_ids):
        for row, token in enumerate(output_ids):
            self.told[row, token] += 1


class Unused(Counts):
    """Nobody in the batch asked for it."""


class Orchestrator:
    device, is_required = "cpu", True

    def __init__(self, vocab_size, batch, penalizers):
        self.vocab_size, self.batch = vocab_size, batch
        self.penalizers = {kind: kind(self) for kind in penalizers}


def request(prompt, answer):
    return SimpleNamespace(origin_input_ids=prompt, output_ids=answer)


def prompt_step(reqs, decoding=(), left=0):
    """Of each prompt `left` tokens are computed in steps to come."""
    lengths = tensor([len(each.origin_input_ids) + len(each.output_ids) - left for each in reqs])
    batch = SimpleNamespace(reqs=reqs, decoding_reqs=list(decoding) or None, seq_lens=lengths, seq_lens_cpu=lengths)
    whole = Orchestrator(VOCABULARY, batch, [Counts, Unused])
    whole.penalizers[Counts].prepare()
    batch.sampling_info = SimpleNamespace(penalizer_orchestrator=whole)
    return batch, whole.penalizers[Counts].told


@pytest.mark.parametrize("overlap", [False, True])
def test_penalties_of_a_request_that_was_sent_back_never_forget_its_answer(overlap):
    """The row is what an undisturbed run has when the same token is drawn; nobody else's row is touched."""
    new, back, running = request([1, 2], []), request([3, 4], [7, 8, 7]), request([5], [9])
    batch, rows = prompt_step([new, back, running], [running])
    rows[2, 9] = 1
    put_back(batch, overlap=overlap)

    undisturbed = np.zeros(VOCABULARY, dtype=np.int64)
    for known in range(1, 4):  # each decode step tells the last token that is known when it is prepared
        step = (back.origin_input_ids + back.output_ids)[: 2 + known - overlap]
        undisturbed[step[-1]] += 1
    assert rows[1].tolist() == undisturbed.tolist()
    assert (rows[0].sum(), rows[2].tolist()) == (0, [0] * 9 + [1] + [0] * 30)


def test_nothing_is_ever_told_again_for_a_part_of_a_prompt_that_draws_no_token():
    batch, rows = prompt_step([request([3, 4], [7, 8, 7])], left=1)
    put_back(batch, overlap=False)

    assert rows.sum() == 0


def test_with_overlap_a_count_is_one_token_behind_as_in_sglang_itself():
    assert counted(request([3, 4], [7, 8]), overlap=True) == [4, 7]
    assert counted(request([3, 4], [7, 8]), overlap=False) == [7, 8]


def test_where_penalties_cannot_be_put_back_the_step_is_never_launched(world, monkeypatch):
    """As everywhere in the hook where the other way is wrong tokens: what fails twice stops the engine."""
    scheduler, _ = world()
    broken = SimpleNamespace(is_required=True, device="cpu", penalizers=None)
    scheduler.add("a", range(10), 4)
    scheduler.waiting_queue[0].output_ids.append(5)
    monkeypatch.setattr(Batch, "sampling_info", SimpleNamespace(penalizer_orchestrator=broken))
    with pytest.raises(AttributeError):
        scheduler.turn()

    assert not scheduler.result_queue


def test_an_engine_that_gives_up_nothing_is_never_stopped_for_it(world, monkeypatch):
    scheduler, _ = world()
    scheduler._valve.link.is_offline = False
    broken = SimpleNamespace(is_required=True, device="cpu", penalizers=None)
    monkeypatch.setattr(Batch, "sampling_info", SimpleNamespace(penalizer_orchestrator=broken))

    assert run(scheduler, [("a", list(range(10)), 4)]) == undisturbed([("a", list(range(10)), 4)])


@pytest.mark.parametrize("why", ["a wait that fails", "a new session"])
def test_who_is_sent_back_for_a_dropped_output_never_begins_without_its_penalties(world, monkeypatch, why):
    """Nothing of his was lost: the output alone is not believed. Both come up during a step of an online engine."""
    scheduler, node = world()
    hook, put = scheduler._valve, []
    hook.link.is_offline = False
    monkeypatch.setattr(calls, "put_back", lambda batch, overlap: put.extend(each.rid for each in batch.reqs))
    scheduler.add("a", range(10), 20)
    for _ in range(5):
        scheduler.turn()
    assert not put
    with monkeypatch.context() as during:
        during.setattr(
            hook.engine, "wait", lambda _: 1 // 0 if why == "a wait that fails" else restart(node, scheduler)
        )
        scheduler.turn()

    assert finish(scheduler, "a") == undisturbed([("a", list(range(10)), 20)])
    assert put == ["a"]


def answering(batch):
    return [each.rid for each in batch.reqs if each.output_ids]


@pytest.mark.parametrize("taken", ["for good", "until one is sent back", "never"])
def test_whom_sglang_sends_back_for_want_of_taken_memory_never_begins_without_his_penalties(world, monkeypatch, taken):
    """An online engine, by SGLang's own rule: nothing of his was lost. With all its memory it is as without Valve."""
    scheduler, node = world(pages=20)
    put, gone = [], set()
    scheduler._valve.link.is_offline = False
    monkeypatch.setattr(calls, "put_back", lambda batch, overlap: put.extend(answering(batch)))
    add = scheduler._add_request_to_queue

    def sent_back(one, **how):
        if taken == "until one is sent back" and not gone:
            give(node, scheduler, [15, 16, 17, 18])
        gone.add(one.rid)
        add(one, **how)

    monkeypatch.setattr(scheduler, "_add_request_to_queue", sent_back)
    if taken != "never":
        lose(node, scheduler, [15, 16, 17, 18])
        scheduler.turn()
    work = [(name, range(start, start + 10), 30) for name, start in (("a", 0), ("b", 100))]

    assert run(scheduler, work) == undisturbed(work)
    assert gone
    assert set(put) == (set() if taken == "never" else gone)


def test_whom_sglang_sends_back_for_a_request_that_goes_first_never_begins_without_his_penalties(world, monkeypatch):
    """It takes from who runs when it admits somebody by priority, too, and not where it makes room for a step."""
    scheduler, node = world(pages=40, overlap=False)
    put, work = [], [("a", range(10), 30)]
    scheduler._valve.link.is_offline = False
    monkeypatch.setattr(calls, "put_back", lambda batch, overlap: put.extend(answering(batch)))
    lose(node, scheduler, [30, 31, 32])
    scheduler.turn()
    scheduler.add(*work[0])
    for _ in range(5):
        scheduler.turn()
    give(node, scheduler, [30, 31, 32])
    [victim] = scheduler.running_batch.reqs
    scheduler.running_batch.filter_batch([])
    scheduler.release(victim)
    scheduler._add_request_to_queue(victim, is_retracted=True)

    assert finish(scheduler, ["a"]) == undisturbed(work)
    assert put == ["a"]


def a_loss_before_the_output_of_two_prompts(world):
    scheduler, node = world(chunk=24)
    scheduler.return_logprob = True
    for name, start in (("a", 0), ("b", 100)):
        scheduler.add(name, range(start, start + 12), 6)
    scheduler.turn()
    (batch, _), *_ = scheduler.result_queue
    a, b = batch.reqs
    lose(node, scheduler, scheduler.pages_of(a)[:1])
    return scheduler, a, b


def test_a_prompts_log_probabilities_are_never_those_of_one_that_was_sent_back_before_it(world):
    """With overlap a loss is acted on while the output of the step that computed both prompts has not come in."""
    scheduler, _, b = a_loss_before_the_output_of_two_prompts(world)
    finish(scheduler, "ab")

    assert b.prompt_logprobs[:12] == [-token for token in range(100, 112)]


@pytest.mark.parametrize("overlap", [False, True])
def test_no_request_has_the_log_probabilities_of_anothers_prompt_whatever_is_taken(world, overlap):
    scheduler, node = world(overlap=overlap, chunk=40)
    scheduler.return_logprob = True
    seen = {}
    release = scheduler.release

    def keep(one):
        seen.setdefault(one.rid, (one, list(one.prompt_logprobs)))
        if one.finished():
            seen[one.rid] = one, list(one.prompt_logprobs)
        release(one)

    scheduler.release = keep
    reclaimer = Reclaimer(node, scheduler, 3, every=2)
    run(scheduler, prompts(3, 16), reclaimer)

    assert reclaimer.events > 10
    for one, told in seen.values():  # of what was not found in the cache, the prompt's end and the answer's beginning
        whole = [-token for token in one.tokens]
        assert any(told == whole[at : at + len(told)] for at in range(len(whole)))


def test_a_request_with_embeddings_of_its_own_ends_reclaiming_before_it_begins(world):
    """SGLang empties its answer when it is sent back, and what was streamed of it stands."""
    scheduler, node = world()
    scheduler.add("a", range(10), 4)
    scheduler.waiting_queue[0].input_embeds = [[0.0]] * 10
    scheduler.turn()

    assert node.book()["mode"] == Mode.NONE


@pytest.mark.parametrize("asked", [{"enable_return_hidden_states": True}, {"return_hidden_states_mode": "full"}])
def test_an_engine_that_gives_hidden_states_of_answers_is_never_taken(asked):
    off = (
        "enable_hierarchical_cache",
        "speculative_algorithm",
        "enable_lora",
        "lora_paths",
        "enable_streaming_session",
    )
    one = ("nnodes", "tp_size", "ep_size", "attn_cp_size", "dcp_size", "pp_size", "dp_size")
    config = {**dict.fromkeys(off), **dict.fromkeys(one, 1), "disaggregation_mode": "null"}
    refuse_configuration(SimpleNamespace(**config))
    with pytest.raises(Refused, match="hidden states"):
        refuse_configuration(SimpleNamespace(**config, **asked))


def begin_work(scheduler, requests):
    """A few steps of each."""
    work = [(name, range(start, start + 10), 60) for name, start in (("a", 0), ("b", 100))[:requests]]
    for one in work:
        scheduler.add(*one)
    for _ in range(4):
        scheduler.turn()
    return work


@pytest.mark.parametrize("requests", [1, 2])
def test_output_of_a_step_that_the_hook_does_not_know_is_never_taken_for_that_of_the_next(world, monkeypatch, requests):
    """With overlap the same requests are in the step behind it, which was noted, when its output comes in. Of that step
    and of the next the output is dropped, and of no other: an unknown step never makes those behind it unknown.
    """
    scheduler, _ = world()
    work = begin_work(scheduler, requests)
    hook = scheduler._valve
    monkeypatch.setattr(hook.engine, "abandon", lambda: pytest.fail("a request was ended"))
    with monkeypatch.context() as unnoted:
        unnoted.setattr(hook.engine, "launch", lambda batch: 1 // 0)
        unnoted.setattr(StepLedger, "begin_unread", lambda *_: 1 // 0)
        scheduler.turn()

    assert finish(scheduler, [name for name, _, _ in work]) == undisturbed(work)
    assert hook.reconciler.receipts.dropped_tokens == 2 * requests
    assert hook.reconciler.receipts.failures <= 4  # noting it, in two ways; its output; what was lost by it


@pytest.mark.parametrize("requests", [1, 2])
def test_output_of_a_step_that_is_noted_unread_is_never_dropped_where_nothing_is_lost(world, monkeypatch, requests):
    scheduler, _ = world()
    work = begin_work(scheduler, requests)
    receipts = scheduler._valve.reconciler.receipts
    with monkeypatch.context() as unread:
        unread.setattr(scheduler._valve.engine, "launch", lambda batch: 1 // 0)
        scheduler.turn()

    assert finish(scheduler, [name for name, _, _ in work]) == undisturbed(work)
    assert (receipts.dropped_tokens, receipts.failures) == (0, 1)
