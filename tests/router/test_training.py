"""The ledger of fleet jobs: nothing dropped, nothing counted twice, whoever dies; and when a trainer may train."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sqlite3

import pytest
from aiohttp.test_utils import TestClient, TestServer
from hypothesis import given, settings
from hypothesis import strategies as st
from training_books import BATCHES, begin, blobs, push
from valve_router.advice import Advice
from valve_router.plan.task import Task, TaskKind
from valve_router.replicas import Replicas
from valve_router.server import assembled
from valve_router.settings import RouterSettings
from valve_router.training.api import TrainingApi
from valve_router.training.desk import Desk
from valve_router.training.ledger import FleetBooks
from valve_router.training.records import Gone, LedgerRefused


def test_what_a_dead_trainer_held_waits_again_and_what_it_pushed_stays(tmp_path):
    ledger = begin(tmp_path)
    first = ledger.join("j", "a", 0.0)
    held = [ledger.take("j", first.trainer, first.version, 0.0) for _ in range(4)]
    assert push(ledger, first, held[:2], 200)

    assert ledger.sweep(100.0) == [first.trainer]

    other = ledger.join("j", "b", 100.0)
    assert [ledger.take("j", other.trainer, other.version, 100.0) for _ in range(2)] == held[2:]
    again = ledger.join("j", "a", 100.0)
    assert (again.tokens, again.steps, ledger.read(again.push)) == (200, 1, f"{first.trainer}/200".encode())


def test_a_trainer_that_was_given_up_never_counts_what_another_computes(tmp_path):
    ledger = begin(tmp_path)
    lost = ledger.join("j", "a", 0.0)
    number = ledger.take("j", lost.trainer, lost.version, 0.0)
    now = ledger.join("j", "a", 1.0)

    with pytest.raises(Gone):
        push(ledger, lost, [number], 100)
    with pytest.raises(Gone):
        ledger.take("j", lost.trainer, lost.version, 1.0)

    assert ledger.take("j", now.trainer, now.version, 1.0) == number
    assert push(ledger, now, [number], 100)
    assert len(ledger.kept_of("j")) == 1


def test_a_push_whose_answer_was_lost_counts_once(tmp_path):
    ledger = begin(tmp_path)
    one = ledger.join("j", "a", 0.0)
    number = ledger.take("j", one.trainer, one.version, 0.0)

    assert push(ledger, one, [number], 100)
    assert not push(ledger, one, [number], 100)

    assert len(ledger.kept_of("j")) == 1
    with pytest.raises(LedgerRefused):
        push(ledger, one, [number], 200)
    with pytest.raises(LedgerRefused):
        push(ledger, one, [number + 1], 300)


def test_a_round_is_averaged_only_when_all_of_it_is_kept(tmp_path):
    ledger = begin(tmp_path, batches=2)
    one, two = ledger.join("j", "a", 0.0), ledger.join("j", "b", 0.0)
    for joined in (one, two):
        assert ledger.standing("j", 1.0).parts is None
        with pytest.raises(LedgerRefused):
            ledger.publish("j", 0, b"half", 0.0)
        push(ledger, joined, [ledger.take("j", joined.trainer, joined.version, 0.0)], 100 + joined.trainer)

    assert [part["tokens"] for part in ledger.standing("j", 1.0).parts] == [100 + one.trainer, 100 + two.trainer]
    assert ledger.publish("j", 0, b"average", 2.0) == 1
    assert ledger.publish("j", 0, b"average", 2.0) == 1  # whose answer was lost
    with pytest.raises(LedgerRefused):
        ledger.publish("j", 0, b"other", 2.0)
    with pytest.raises(Gone):
        push(ledger, one, [0], 500)  # its round is over
    assert ledger.read(ledger.join("j", "a", 3.0).start) == b"average"


def test_a_round_never_waits_for_ever_and_what_it_did_not_do_is_in_the_next(tmp_path):
    ledger = begin(tmp_path, rounds=2, batches=4, limit_s=600.0)
    one, two = ledger.join("j", "a", 0.0), ledger.join("j", "b", 0.0)
    push(ledger, one, [ledger.take("j", one.trainer, one.version, 0.0)], 100)
    held = ledger.take("j", two.trainer, two.version, 599.0)
    assert ledger.standing("j", 599.0).queued_s is not None

    assert ledger.take("j", one.trainer, one.version, 600.0) is None  # its time is over: nobody gets more of it
    assert ledger.standing("j", 600.0).queued_s is None
    assert ledger.standing("j", 600.0).parts is None  # not before what is out is kept, or waits again
    push(ledger, two, [held], 100, now=601.0)

    assert len(ledger.standing("j", 601.0).parts) == 2
    assert ledger.publish("j", 0, b"average", 601.0) == 1
    again = ledger.join("j", "a", 601.0)
    rest = []
    for turn in range(1, 4):  # each round is as long as the first, until nothing is left
        numbers = []
        while (number := ledger.take("j", again.trainer, again.version, 601.0 + turn)) is not None:
            numbers.append(number)
        if not numbers:
            break
        rest += numbers
        push(ledger, again, numbers, 100 * len(numbers), content=b"%d" % turn)
        ledger.publish("j", turn, b"average %d" % turn, 602.0 + turn)
        again = ledger.join("j", "a", 602.0 + turn)

    assert sorted([0, held, *rest]) == list(range(8))
    assert len(ledger.kept_of("j")) == 8
    assert ledger.standing("j", 1e9).is_done
    assert ledger.standing("j", 1e9).version == 3  # one more than it would have had


def test_a_round_of_which_nothing_is_done_is_never_averaged_however_old_it_is(tmp_path):
    ledger = begin(tmp_path, limit_s=600.0)
    lost = ledger.join("j", "a", 1e4)
    assert ledger.take("j", lost.trainer, lost.version, 1e4) == 0
    assert ledger.take("j", lost.trainer, lost.version, 1e4 + 600) is None  # what is out can be averaged
    assert ledger.sweep(2e4) == [lost.trainer]

    assert ledger.standing("j", 2e4).parts is None
    with pytest.raises(LedgerRefused):
        ledger.publish("j", 0, b"nothing", 2e4)
    other = ledger.join("j", "b", 2e4)
    assert ledger.take("j", other.trainer, other.version, 2e4) == 0


def test_a_job_of_a_router_that_knew_no_time_limit_goes_on(tmp_path):
    ledger = begin(tmp_path)
    with sqlite3.connect(tmp_path / "training.sqlite3") as db:
        db.execute("DROP TABLE rounds")
    ledger.close()
    ledger = FleetBooks(tmp_path)
    one = ledger.join("j", "a", 1e6)
    assert ledger.take("j", one.trainer, one.version, 1e6) == 0

    ledger.add_job("j", rounds=2, round_batches=BATCHES, digest="d", tokens=100, limit_s=600.0, now_s=1e6)

    assert ledger.take("j", one.trainer, one.version, 1e6 + 599) == 1
    assert ledger.take("j", one.trainer, one.version, 1e6 + 600) is None


def finish(ledger, kept, now):
    """Whoever comes last does the rest."""
    for turn in range(3 * BATCHES):
        if ledger.standing("j", 1e9).is_done:
            return
        now += 1000.0
        last = ledger.join("j", "last", now)
        rest = []
        while (number := ledger.take("j", last.trainer, last.version, now)) is not None:
            rest.append(number)
        if rest:
            push(ledger, last, rest, last.tokens + 100 * len(rest), content=b"last %d" % turn, now=now)
            assert not kept & set(rest)
            kept |= set(rest)
        if ledger.standing("j", now).parts:
            ledger.publish("j", last.version, b"version %d" % turn, now)
    raise AssertionError("the job never ends")


STEPS = st.lists(
    st.tuples(st.sampled_from("abc"), st.sampled_from(["join", "take", "push", "again", "late", "sweep"])), max_size=80
)


def test_a_trainer_behind_a_closed_gate_never_idles_the_others(tmp_path):
    """Its node's service is busy for hours: the others had nothing to do from the tenth minute on."""
    ledger = begin(tmp_path, rounds=2, batches=8, limit_s=600.0)
    gated, other = ledger.join("j", "a", 0.0), ledger.join("j", "b", 0.0)
    assert ledger.take("j", gated.trainer, gated.version, 0.0) == 0
    push(ledger, other, [ledger.take("j", other.trainer, other.version, 1.0)], 100)

    assert ledger.take("j", other.trainer, other.version, 700.0) is None  # what is out may still come
    assert ledger.take("j", other.trainer, other.version, 1300.0) == 2
    push(ledger, other, [2], 200)
    push(ledger, gated, [0], 100, content=b"late")
    assert [part["tokens"] for part in ledger.standing("j", 7000.0).parts] == [100, 200]


def test_a_round_that_nobody_trains_never_uses_its_time_up(tmp_path):
    """After a night without trainers the first micro-batch alone was made a version."""
    ledger = begin(tmp_path, batches=4, limit_s=600.0)
    one = ledger.join("j", "a", 40_000.0)

    assert [ledger.take("j", one.trainer, one.version, 40_000.0 + second) for second in range(3)] == [0, 1, 2]


@settings(max_examples=60, deadline=None)
@given(steps=STEPS, limit_s=st.sampled_from([0.0, 20.0]))
def test_no_order_of_deaths_and_pushes_ever_drops_a_micro_batch_or_keeps_it_twice(tmp_path_factory, steps, limit_s):
    ledger = begin(tmp_path_factory.mktemp("ledger"), rounds=1, limit_s=limit_s)
    there, held, tokens, dead = {}, {}, {}, []
    now = 0.0
    kept: set[int] = set()
    for name, act in steps:
        now += 1.0
        if act == "join":
            dead += [there[name]] if name in there else []
            there[name] = ledger.join("j", name, now)
            held[name], tokens[name] = [], there[name].tokens
        elif act == "sweep":
            ledger.sweep(now + 1000.0)
            dead += there.values()
            there.clear()
        elif act == "late" and dead:
            with pytest.raises(Gone):
                push(ledger, dead[-1], [0], 10_000)
        elif name in there and act == "take":
            number = ledger.take("j", there[name].trainer, there[name].version, now)
            if number is not None:
                assert number not in kept
                held[name].append(number)
        elif name in there and act in ("push", "again") and held[name]:
            tokens[name] += 100 * len(held[name])
            push(ledger, there[name], held[name], tokens[name], now=now)
            if act == "again":
                assert not push(ledger, there[name], held[name], tokens[name], now=now)
            kept |= set(held[name])
            held[name] = []
        numbers = [number for number, _ in ledger.kept_of("j")]
        assert sorted(kept) == numbers
    ledger.sweep(now + 1000.0)
    finish(ledger, kept, now)
    assert sorted(kept) == list(range(BATCHES)) == [number for number, _ in ledger.kept_of("j")]
    ledger.close()


def test_a_queue_that_is_killed_keeps_what_was_pushed_and_nothing_else(tmp_path):
    """kill -9 within a push: before its commit it is nothing, after it is whole."""
    begin(tmp_path).close()
    child = os.fork()
    if not child:
        ledger = FleetBooks(tmp_path)
        one = ledger.join("j", "a", 0.0)
        push(ledger, one, [ledger.take("j", one.trainer, one.version, 0.0)], 100)
        number = ledger.take("j", one.trainer, one.version, 0.0)
        with ledger._change() as db:
            db.execute("UPDATE batches SET kept = 7 WHERE number = ?", (number,))
            os.kill(os.getpid(), signal.SIGKILL)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL

    ledger = FleetBooks(tmp_path)

    assert [number for number, _ in ledger.kept_of("j")] == [0]
    again = ledger.join("j", "a", 1.0)
    assert again.tokens == 100
    assert ledger.take("j", again.trainer, again.version, 1.0) == 1


def test_another_job_of_the_same_name_is_refused(tmp_path):
    ledger = begin(tmp_path)
    ledger.add_job("j", rounds=2, round_batches=BATCHES, digest="d", tokens=100, now_s=9.0)
    with pytest.raises(LedgerRefused, match="another job"):
        ledger.add_job("j", rounds=2, round_batches=BATCHES, digest="other", tokens=100, now_s=9.0)


def test_one_trainers_flag_never_changes_when_the_rounds_of_all_end(tmp_path):
    """The last one that named the job won: with 0 the others waited for ever for one that was away."""
    ledger = begin(tmp_path, limit_s=600.0)
    said = {"rounds": 2, "round_batches": BATCHES, "digest": "d", "tokens": 100, "now_s": 9.0}
    for other_s in (0.0, 1200.0):
        with pytest.raises(LedgerRefused, match=f"600 s, and this trainer says {other_s:g} s.*--sync-minutes"):
            ledger.add_job("j", **said, limit_s=other_s)
    ledger.add_job("j", **said)  # a trainer of before says none
    ledger.add_job("j", **said, limit_s=600.0)
    one = ledger.join("j", "a", 9.0)
    push(ledger, one, [ledger.take("j", one.trainer, one.version, 9.0)], 100)
    assert ledger.take("j", one.trainer, one.version, 609.0) is None


def test_what_a_job_has_kept_is_never_more_than_its_trainers_pushed(tmp_path):
    """A round of 12 that ended by time after two counted as 12."""
    ledger = begin(tmp_path, limit_s=600.0)
    one, kept = ledger.join("j", "a", 0.0), []
    for turn in range(3):
        numbers = [ledger.take("j", one.trainer, one.version, 1000.0 * turn) for _ in range(2)]
        push(ledger, one, numbers, 200, content=b"%d" % turn)
        ledger.publish("j", one.version, b"version %d" % turn, 1000.0 * turn + 600)
        one = ledger.join("j", "a", 1000.0 * turn + 600)
        kept.append((one.version, one.kept))
    assert kept == [(1, 2), (2, 4), (3, 6)]


def seated(count=2, **more):
    settings = RouterSettings(replicas=tuple(f"http://r{number}:1" for number in range(count)), **more)
    replicas = Replicas(settings, lambda: 0.0)
    return replicas, Desk(settings, replicas)


@pytest.mark.parametrize("age_s", [60.0, 5.0])
def test_training_waits_for_requests_and_never_longer_than_the_age_limit(age_s):
    replicas, desk = seated(1, training_age_s=age_s)
    timeline = replicas.all[0].timeline
    assert desk.may_train("0", 100, 0.0, 0.0) is not None
    late = Task(arrival_s=1.0, tokens=100)
    timeline.lengths.add(100)
    timeline.profile = type(timeline.profile)(
        stages=1, forward=timeline.profile.forward, backward=timeline.profile.forward
    )
    long = Task(arrival_s=1.0, tokens=60_000, kind=TaskKind.TRAINING)

    assert desk.may_train("0", long.tokens, 1.0, late.arrival_s) is None
    assert desk.deferred == 1
    assert desk.may_train("0", long.tokens, 1.0, age_s) is None
    assert desk.may_train("0", long.tokens, 1.0, age_s + 2.0) is not None


def test_a_replica_that_owes_more_than_another_waits_and_a_trainer_of_no_replica_never_does():
    _, desk = seated(2)
    given = [desk.may_train("0", 100, 0.0, 0.0) for _ in range(6)]
    assert desk.may_train("1", 100, 0.0, 0.0) is not None
    assert None in [*given, *(desk.may_train("0", 100, 0.0, 0.0) for _ in range(6))]
    assert all(desk.may_train("elsewhere", 100, 0.0, 0.0) for _ in range(9))


def test_what_is_over_is_owed_no_more():
    replicas, desk = seated(1)
    task = desk.may_train("0", 100, 0.0, 0.0)
    assert replicas.all[0].timeline.owed_s > 0

    desk.trained("0", task, 0.7)

    assert replicas.all[0].timeline.owed_s == 0.0
    assert replicas.all[0].timeline.profile.backward.seconds(task) == pytest.approx(0.7)


class Asking:
    """The whole router as trainers see it: its proxy takes 1,000 bytes of a body, its queue 40,000."""

    def __init__(self, folder, client):
        self.folder, self.client = folder, client

    async def ask(self, path, **asked):
        async with self.client.post(f"/route/training/{path}", json=asked) as answer:
            return await answer.json()

    async def send(self, path, document, **said):
        body = json.dumps(said).encode() + b"\n" + document
        heads = {"Content-Type": "application/octet-stream"}
        async with self.client.post(f"/route/training/{path}", data=body, headers=heads) as answer:
            return answer.status, await answer.text()

    async def begun(self, batches):
        """A trainer that holds a whole round."""
        await self.ask("job", job="j", rounds=1, round_batches=batches, digest="d", tokens=9)
        joined = await self.ask("join", job="j", name="a")
        with sqlite3.connect(self.folder / "training.sqlite3") as db:
            db.execute("UPDATE batches SET trainer = ?", (joined["trainer"],))
        said = {"trainer": joined["trainer"], "numbers": list(range(batches)), "tokens": 9, "steps": 1}
        return {"job": "j", "version": 0, **said}


def asked(folder, talk):
    settings = RouterSettings(
        replicas=("http://127.0.0.1:9",), training_folder=str(folder), body_bytes=1000, training_bytes=40_000
    )

    async def run():
        async with assembled(settings) as app, TestClient(TestServer(app)) as client:
            await talk(Asking(folder, client))

    asyncio.run(run())


def test_a_round_whose_time_is_over_is_averaged_and_the_job_still_does_all_of_its_work(tmp_path):
    async def talk(router):
        said = {"job": "j", "rounds": 1, "round_batches": 2, "digest": "d", "tokens": 9}
        refused = await router.ask("job", **said, limit_s=-1)
        assert "time limit" in refused["error"]["message"]
        await router.ask("job", **said, limit_s=1e-6)
        for version in (0, 1):
            joined = await router.ask("join", job="j", name="a")
            asking = {"job": "j", "trainer": joined["trainer"], "version": version}
            assert await router.ask("take", **asking) == {"number": version}
            document = b"push %d" % version
            pushed = await router.send("push", document, **asking, numbers=[version], tokens=9, steps=1)
            assert pushed[0] == 200
            assert len((await router.ask("take", **asking))["average"]) == 1
            published = await router.send("publish", b"average %d" % version, job="j", version=version)
            assert published[0] == 200
        assert await router.ask("take", **{**asking, "version": 2}) == {"done": True, "version": 2}

    asked(tmp_path, talk)


def test_a_checkpoint_larger_than_a_request_may_be_is_never_refused(tmp_path):
    async def talk(router):
        said = await router.begun(1)
        assert (await router.send("push", b"x" * 50_000, **said))[0] == 413
        assert await router.send("push", b"x" * 20_000, **said) == (200, '{"is_new": true}')
        assert await router.send("publish", b"y" * 20_000, job="j", version=0) == (200, '{"version": 1}')
        async with router.client.post("/v1/completions", data=b"x" * 20_000) as answer:
            assert answer.status == 413

    asked(tmp_path, talk)


def test_a_push_of_thousands_of_micro_batches_is_never_refused(tmp_path):
    async def talk(router):
        assert await router.send("push", b"x", **await router.begun(3000)) == (200, '{"is_new": true}')

    asked(tmp_path, talk)


def test_a_push_that_a_page_in_a_browser_may_send_is_never_taken(tmp_path):
    async def talk(router):
        for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
            async with router.client.post(
                "/route/training/push", data=b"{}\n", headers={"Content-Type": kind}
            ) as answer:
                assert answer.status == 415

    asked(tmp_path, talk)


async def until(condition):
    while not condition():
        await asyncio.sleep(0.001)


@pytest.mark.parametrize("rounds", [1, 2])
@pytest.mark.parametrize("turn", range(4))
def test_a_round_that_another_ends_meanwhile_is_never_averaged_from_nothing_nor_trained_on(tmp_path, rounds, turn):
    """The version moves before each call of the ledger that one question makes."""
    ledger = begin(tmp_path, rounds=rounds, batches=1)
    one, two = ledger.join("j", "a", 0.0), ledger.join("j", "b", 0.0)
    push(ledger, one, [ledger.take("j", one.trainer, 0, 0.0)], 100)
    calls = []

    class Overtaken:
        def __getattr__(self, name):
            calls.append(name)
            if len(calls) == turn + 1:
                ledger.publish("j", 0, b"average", 1.0)
            return getattr(ledger, name)

    _, desk = seated(1)
    api = TrainingApi(RouterSettings(replicas=("http://r0:1",)), Overtaken(), desk)
    told = asyncio.run(api._take({"job": "j", "trainer": two.trainer, "version": 0}))

    assert told == {"version": 1} or [part["name"] for part in told["average"]] == ["a"]
    assert ledger.take("j", two.trainer, 0, 2.0) is None or len(calls) <= turn
    assert ledger.standing("j", 2.0).parts is None or len(calls) <= turn


@pytest.mark.parametrize("how", ["joined again", "silent"])
def test_what_a_given_up_trainer_had_in_hand_never_stays_in_the_plan(tmp_path, monkeypatch, how):
    monkeypatch.setattr("valve_router.training.api.SWEEP_S", 0.001)
    replicas, desk = seated(1)
    ledger = begin(tmp_path, silent_s=-1.0)
    api, timeline = TrainingApi(RouterSettings(replicas=("http://r0:1",)), ledger, desk), replicas.all[0].timeline

    async def run():
        joined = await api._join({"job": "j", "name": "a"})
        await api._take({"job": "j", "trainer": joined["trainer"], "version": 0, "replica": "0"})
        assert timeline.owed_s > 0
        if how == "joined again":
            await api._join({"job": "j", "name": "a"})
            assert timeline.owed_s == 0.0
            return
        sweeping = asyncio.create_task(api._sweep())
        await asyncio.wait_for(until(lambda: timeline.owed_s == 0.0), 200)
        sweeping.cancel()

    asyncio.run(run())


def test_one_sweep_that_fails_is_never_the_last(tmp_path, monkeypatch):
    monkeypatch.setattr("valve_router.training.api.SWEEP_S", 0.001)
    monkeypatch.setattr("valve_router.advice.LOOK_S", 0.001)
    _, desk = seated(1)
    settings, turns = RouterSettings(replicas=("http://r0:1",)), []
    api, advice = TrainingApi(settings, begin(tmp_path), desk), Advice(settings, Replicas(settings, lambda: 0.0))

    def fails(*_):
        turns.append(1)
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(api._ledger, "sweep", fails)
    monkeypatch.setattr(advice, "look", fails)

    async def run():
        for forever in (api._sweep(), advice.run()):
            turns.clear()
            task = asyncio.create_task(forever)
            await asyncio.wait_for(until(lambda: len(turns) > 2 or task.done()), 200)  # noqa: B023
            assert not task.done()
            task.cancel()

    asyncio.run(run())


def test_what_nobody_needs_any_more_is_never_left_on_the_disk_and_what_somebody_needs_always_is(tmp_path):
    ledger = begin(tmp_path, batches=3)
    one, two = ledger.join("j", "a", 0.0), ledger.join("j", "b", 0.0)
    mine = [ledger.take("j", one.trainer, one.version, 0.0) for _ in range(2)]
    other = ledger.take("j", two.trainer, two.version, 0.0)
    push(ledger, one, mine[:1], 100, content=b"a1")
    with pytest.raises(LedgerRefused):
        push(ledger, one, [other], 200, content=b"refused")
    assert blobs(tmp_path) == [b"a1"]
    push(ledger, one, mine[1:], 200, content=b"a2")
    push(ledger, two, [other], 100, content=b"b1")
    assert not push(ledger, two, [other], 100, content=b"b1")
    parts = ledger.standing("j", 1.0).parts
    with pytest.raises(LedgerRefused):
        ledger.publish("j", 1, b"refused", 1.0)
    assert [ledger.read(part["blob"]) for part in parts] == blobs(tmp_path) == [b"a2", b"b1"]

    ledger.publish("j", 0, b"average", 1.0)

    assert blobs(tmp_path) == [b"average"]
    with pytest.raises(Gone):
        ledger.read(parts[0]["blob"])  # somebody else is averaging still
    for left in (".left.1.2", "0" * 64):
        (tmp_path / "blobs" / left).write_bytes(b"of a router that was killed")
    ledger.close()
    again = FleetBooks(tmp_path)
    assert again.read(again.version("j", 1)) == b"average"
    assert blobs(tmp_path) == [b"average"]


def test_a_blob_of_two_names_is_never_dropped_for_one_of_them(tmp_path):
    ledger = begin(tmp_path, batches=3)
    one, two = ledger.join("j", "a", 0.0), ledger.join("j", "b", 0.0)
    for joined in (one, two):
        push(ledger, joined, [ledger.take("j", joined.trainer, joined.version, 0.0)], 100, content=b"same")
    push(ledger, one, [ledger.take("j", one.trainer, one.version, 0.0)], 200, content=b"more")
    assert blobs(tmp_path) == [b"more", b"same"]
    ledger.publish("j", 0, b"same", 1.0)  # the average of the same is the same
    assert blobs(tmp_path) == [b"same"]
