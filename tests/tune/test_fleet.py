"""Fleet jobs: averages as stated, parts that add up to a serial run, and kills that cost time alone."""

from __future__ import annotations

import json
import random
import re
import signal
import socket
import sqlite3
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import jobs
import numpy as np
import pytest
import torch
from command import HERE, LONG_S, Command, until
from jobs import Counting, job, model_folder
from tiny import base, conversations
from valve_tune.base.consent import NotShared
from valve_tune.base.weights import BadBase, StillWeights
from valve_tune.model.adapter import LoraPair
from valve_tune.serve import cli
from valve_tune.serve.fleet import FleetWorker, GivenUp, RouterAway, RouterLink, own_name
from valve_tune.serve.folder import STOP, FolderError, JobFolder
from valve_tune.train import average
from valve_tune.train.average import APART, FROZEN_A, PRODUCTS, Part
from valve_tune.train.batch import IGNORED
from valve_tune.train.build import open_model
from valve_tune.train.guard import BEGUN
from valve_tune.train.job import Hopeless, Stopped
from valve_tune.train.part import ADAPTER, PartTrainer

RANK, INPUTS, OUTPUTS = 3, 10, 8


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return model_folder(tmp_path_factory.mktemp("model") / "llama")


def drawn(seed: int, a: torch.Tensor | None = None) -> dict[str, LoraPair]:
    draw = torch.Generator().manual_seed(seed)
    first = torch.randn(RANK, INPUTS, generator=draw) if a is None else a
    return {"site": LoraPair(first, torch.randn(OUTPUTS, RANK, generator=draw))}


def product(pairs) -> torch.Tensor:
    return pairs["site"].b.double() @ pairs["site"].a.double()


def mean_of(parts) -> torch.Tensor:
    total = sum(part.tokens for part in parts)
    return sum(part.tokens / total * product(part.pairs) for part in parts)


def test_with_a_frozen_the_average_is_that_of_the_products():
    a = drawn(0)["site"].a
    parts = [Part(pairs=drawn(seed, a), tokens=100 * seed) for seed in (1, 2, 3)]

    pairs, left = average.average(parts, FROZEN_A, {})

    assert torch.allclose(product(pairs), mean_of(parts), atol=1e-6)
    assert not left
    with pytest.raises(ValueError, match="not the same"):
        average.average([Part(pairs=drawn(1), tokens=1), Part(pairs=drawn(2), tokens=1)], FROZEN_A, {})


def test_of_products_nothing_is_lost_what_the_rank_does_not_hold_is_in_the_residual():
    parts = [Part(pairs=drawn(seed), tokens=100 * seed) for seed in (1, 2, 3)]

    pairs, left = average.average(parts, PRODUCTS, {})

    assert torch.allclose(product(pairs) + product(left), mean_of(parts), atol=1e-5)
    best = torch.linalg.svdvals(mean_of(parts))[RANK:].norm()
    assert float((mean_of(parts) - product(pairs)).norm()) == pytest.approx(float(best), rel=1e-4)
    more, rest = average.average(parts, PRODUCTS, left)
    assert torch.allclose(product(more) + product(rest), mean_of(parts) + product(left), atol=1e-5)


def test_averaging_a_and_b_apart_is_another_thing():
    parts = [Part(pairs=drawn(seed), tokens=100) for seed in (1, 2)]

    pairs, _ = average.average(parts, APART, {})

    assert float((product(pairs) - mean_of(parts)).norm() / mean_of(parts).norm()) > 0.3


def part_trainer(model: Path, out: Path, method: str = PRODUCTS, **more: Any) -> PartTrainer:
    spec = job(model, out, **{"save_steps": 100, "warmup_steps": 0, "max_grad_norm": 0.0, **more})
    return PartTrainer(spec, Counting(spec), method)


def test_a_trainer_that_gets_every_micro_batch_trains_what_a_job_of_its_own_does(model, tmp_path):
    """The two sum in another order. AdamW divides by its epsilon where a gradient is no more than rounding: with the
    usual 1e-8 the last bits of a CPU's sums are 2e-5 of an adapter. One micro-batch in place of another is 1e-3."""
    part = part_trainer(model, tmp_path / "part", adam_epsilon=1e-4)
    for number in range(8):
        part.compute(number)
    alone = part_trainer(model, tmp_path / "alone", adam_epsilon=1e-4)
    jobs.train(alone.spec)
    alone.state.adapter.load((tmp_path / "alone" / "adapter_model.safetensors").read_bytes())

    for path, pair in part.model.adapter.pairs.items():
        wanted = alone.state.adapter.pairs[path]
        assert torch.allclose(pair.a, wanted.a, atol=1e-5)
        assert torch.allclose(pair.b, wanted.b, atol=1e-5)
    assert part.steps == 4
    assert part.since_push == list(range(8))


def test_a_micro_batch_is_the_same_whoever_computes_it(model, tmp_path):
    """Its gradients, in one trainer after others and in another one first: several in flight are a serial run."""
    one, other = part_trainer(model, tmp_path / "one"), part_trainer(model, tmp_path / "other")
    sums = []
    for trainer, numbers in ((one, [4, 5]), (other, [5, 4])):
        for number in numbers:
            trainer.compute(number)
        sums.append(average.pairs_of(trainer.model.adapter))
    for path, pair in sums[0].items():
        assert torch.allclose(pair.b, sums[1][path].b, atol=1e-6)


def test_a_trainer_that_begins_at_its_push_is_where_it_was_and_a_new_round_has_new_moments(model, tmp_path):
    trainer = part_trainer(model, tmp_path / "one")
    for number in range(4):
        trainer.compute(number)
    document = trainer.document()
    again = part_trainer(model, tmp_path / "two")
    again.begin(b"", document, trainer.tokens, trainer.steps)
    for each in (trainer, again):
        each.compute(4)
        each.compute(5)
    assert trainer.document() == again.document()

    version = trainer.averaged([(trainer.document(), trainer.tokens), (document, 10)])
    again.begin(version, b"", 0, 0)

    assert not again.state.optimizer._adamw.state
    assert again.since_push == []


def test_a_frozen_a_is_never_moved(model, tmp_path):
    trainer = part_trainer(model, tmp_path / "one", FROZEN_A, weight_decay=0.1)
    before = average.pairs_of(trainer.model.adapter)
    for number in range(4):
        trainer.compute(number)
    for path, pair in trainer.model.adapter.pairs.items():
        assert torch.equal(pair.a, before[path].a)
        assert not torch.equal(pair.b, before[path].b)


class Played:
    """A router that loses answers and forgets trainers, by a seed; its books are a real ledger's rules in short."""

    def __init__(self, seed: int, batches: int) -> None:
        self.draw, self.number, self.kept, self.pushed = random.Random(seed), 0, [], (0, b"", 0)
        self.waiting, self.out, self.published = list(range(batches)), [], None

    def ask(self, path, asked):
        answer = getattr(self, path)(asked)
        if self.draw.random() < 0.2:
            raise RouterAway("the answer is lost")
        return answer

    def join(self, asked):
        self.number += 1
        self.waiting, self.out = sorted(self.waiting + self.out), []
        tokens, blob, steps = self.pushed
        push = "push" if blob else ""
        kept = {"push": push, "tokens": tokens, "steps": steps}
        return {"version": 0, "trainer": self.number, "start": "", "silent_s": 60.0, "kept": len(self.kept), **kept}

    def take(self, asked):
        if asked["trainer"] != self.number or self.draw.random() < 0.1:
            self.number += 1
            raise GivenUp("given up")
        if self.published:
            return {"done": True}
        if self.waiting:
            self.out.append(self.waiting.pop(0))
            return {"number": self.out[-1]}
        return {"empty": True} if self.out else {"average": [{"blob": "push", "tokens": self.pushed[0]}]}

    def send(self, path, said, document):
        if path == "publish":
            self.published = document
        elif said["trainer"] != self.number:
            raise GivenUp("given up")
        elif document != self.pushed[1]:
            assert set(said["numbers"]) <= set(self.out)
            self.kept += said["numbers"]
            self.out = [number for number in self.out if number not in said["numbers"]]
            self.pushed = (said["tokens"], document, said["steps"])
        if self.draw.random() < 0.2:
            raise RouterAway("the answer is lost")
        return {}

    def blob(self, name):
        return self.pushed[1] if name else b""


class Adds:
    """Its adapter is the list of micro-batches that are in it."""

    def begin(self, start, push, tokens, steps):
        self.inside, self.tokens, self.steps = json.loads(push or "[]"), tokens, steps
        self.since_push, self.steps_since_push = [], 0

    def compute(self, number):
        self.inside.append(number)
        self.since_push.append(number)
        self.tokens, self.steps, self.steps_since_push = self.tokens + 1, self.steps + 1, self.steps_since_push + 1

    def step(self):
        pass

    def pushed(self):
        self.since_push, self.steps_since_push = [], 0

    def document(self):
        return json.dumps(self.inside).encode()

    def averaged(self, parts):
        return parts[0][0]


@pytest.mark.parametrize("seed", range(20))
def test_whatever_answers_are_lost_every_micro_batch_is_in_the_version_once(seed, monkeypatch):
    monkeypatch.setattr("valve_tune.serve.patience.FIRST_S", 0.0)
    monkeypatch.setattr("valve_tune.serve.fleet.WAIT_S", 0.0)
    router = Played(seed, 30)

    FleetWorker(router, Adds(), job="j", name="a", push_steps=4, say=lambda text: None).run()

    assert sorted(json.loads(router.published)) == list(range(30))
    assert sorted(router.kept) == list(range(30))


class Router:
    def __init__(self, folder: Path, silent_s: float = 1e6) -> None:
        self.folder, self.silent_s = folder, silent_s
        with socket.socket() as one:
            one.bind(("127.0.0.1", 0))
            self.port = one.getsockname()[1]
        self.start()

    def start(self) -> None:
        argv = [sys.executable, str(HERE / "fleet_router.py"), str(self.folder), str(self.port), str(self.silent_s)]
        self.process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
        assert "listens" in self.process.stdout.readline()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def job(self) -> dict[str, Any]:
        with urllib.request.urlopen(f"{self.url}/route/training/jobs") as answer:
            found = json.load(answer)["jobs"]
        return found[0] if found else {"kept": 0, "version": -1}


def test_two_nodes_with_folders_of_one_name_never_give_each_other_up(monkeypatch, tmp_path):
    names = set()
    for host in ("node1", "node2"):
        monkeypatch.setattr("socket.gethostname", lambda host=host: host)
        names |= {own_name(tmp_path / card / "chat") for card in ("0", "1")}
    assert len(names) == 4
    assert all(re.fullmatch(r"node[12]-chat-[0-9a-f]{6}", name) for name in names)


class Two:
    """A version has come while this node was away; it has pushed since."""

    def ask(self, path, asked):
        if path == "join":
            joined = {"version": 1, "trainer": 1, "start": "v1", "push": "p", "tokens": 1, "steps": 1, "kept": 3}
            return {**joined, "silent_s": 60.0}
        return {"done": True}

    def blob(self, name):
        return {"v1": b"[0, 1]", "p": b"[0, 1, 2]", "": b""}[name]


def test_a_trainer_that_comes_back_never_hands_its_own_part_over_as_the_version():
    handed: list[list[int]] = []

    class Begun(Adds):
        def begin(self, start, push, tokens, steps):
            super().begin(start, push or start, tokens, steps)

    trainer = Begun()
    FleetWorker(
        Two(), trainer, job="j", name="a", moved=lambda *_: handed.append(list(trainer.inside)), say=print
    ).run()
    assert (handed, trainer.inside) == ([[0, 1]], [0, 1, 2])


class Silent(Counting):
    """Its first step has no label."""

    tokens = 100

    def __len__(self) -> int:
        return 10

    def step(self, step: int) -> Any:
        batches = super().step(step)
        for batch in batches if step == 0 else ():
            batch.labels[:] = IGNORED
        return batches


def test_micro_batches_without_a_label_never_end_the_job_nor_come_again(model, tmp_path):
    spec = job(model, tmp_path / "out", warmup_steps=0)
    trainer = PartTrainer(spec, Silent(spec), PRODUCTS)
    for number in range(2):
        trainer.compute(number)
    assert (trainer.since_push, trainer.steps) == ([0, 1], 0)
    before = trainer.tokens
    assert before > 0
    trainer.begin(b"", trainer.document(), trainer.tokens, 0)
    for number in range(2, 4):
        trainer.compute(number)
    assert (trainer.since_push, trainer.steps) == ([2, 3], 1)
    assert trainer.tokens > before


@pytest.fixture
def worked(model, tmp_path, monkeypatch):
    """`valve tune fleet` in this process, where a worker only does what it is told; its folder and exit code."""
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(RouterLink, "ask", lambda *_: {})
    folder = JobFolder(tmp_path / "out")

    def work(act) -> tuple[JobFolder, int]:
        spec = job(model, folder.path, share_weights="chat")
        monkeypatch.setattr("valve_tune.serve.fleet.rows_of", lambda values: (spec, Silent(spec)))
        own = open_model(job(model, tmp_path / "own"))
        monkeypatch.setattr("valve_tune.train.build.shared_base", lambda *_: own.weights)
        monkeypatch.setattr(StillWeights, "is_writable", True)
        monkeypatch.setattr(FleetWorker, "run", lambda worker: act(folder, worker))
        return folder, cli.main(["fleet", "--router", "http://127.0.0.1:9", "--model", str(model), "--out", "x"])

    return work


def test_a_trainer_of_a_fleet_job_never_works_on_weights_of_others_without_a_guard(worked):
    there = []
    folder, code = worked(lambda folder, _: there.append((folder.path / BEGUN).exists()) or 4)
    assert (there, code, folder.status().state) == ([True], 0, "succeeded")


def test_a_round_that_its_time_ended_never_counts_as_steps_that_nobody_took(worked, monkeypatch):
    """Version 3 stood for 300 steps, whatever its rounds had kept."""
    monkeypatch.setattr("valve_tune.serve.fleet.publisher", lambda *_: lambda version: None)
    told = []

    def act(folder, worker):
        worker._moved(3, 14)
        told.append(folder.status().step)
        return 3

    worked(act)
    assert told == [14 // 2]


@pytest.mark.parametrize(
    ("error", "state", "code"),
    [
        (Stopped(), "cancelled", 130),
        (Hopeless("nothing to learn"), "failed", 1),
        (BadBase("another base"), "failed", 1),
        (NotShared("no longer"), "failed", 1),
        (FolderError("the router is away"), "failed", 1),
    ],
)
def test_an_end_of_a_fleet_job_is_never_a_traceback(worked, capsys, error, state, code):
    def act(folder, _):
        assert folder.status().state == "running"
        if state == "cancelled":
            folder.want(STOP)
        raise error

    folder, found = worked(act)
    assert (found, folder.status().state) == (code, state)
    assert folder.status().message in capsys.readouterr().err


def test_a_part_of_a_fleet_job_is_never_gone_on_with_as_a_job_of_one_node(worked, capsys):
    """Both have the same fields: alone, this node would train all steps and write over the version of the fleet."""
    folder, _ = worked(lambda *_: 4)
    before = (folder.path / "adapter_model.safetensors").read_bytes()
    assert cli.main(["resume", str(folder.path)]) == 2
    assert "fleet job out, and its process is gone" in capsys.readouterr().err
    with pytest.raises(FolderError, match="a part of the fleet job out"), folder.claimed(folder.spec()):
        pass
    with folder.claimed(folder.spec(), fleet="out"):
        pass
    assert (folder.path / "adapter_model.safetensors").read_bytes() == before


def test_a_job_of_one_node_never_becomes_a_part_of_a_fleet_job(model, tmp_path):
    folder = JobFolder(tmp_path / "out")
    with folder.claimed(job(model, folder.path)):
        (folder.path / "checkpoint-1").mkdir()
        (folder.path / "checkpoint-1" / "adapter_model.safetensors").touch()
    with pytest.raises(FolderError, match="a job of this node alone"), folder.claimed(folder.spec(), fleet="chat"):
        pass
    assert folder.fleet == ""


class Idle:  # a router that has nothing for this trainer, or is away
    def __init__(self, is_away: bool) -> None:
        self.is_away, self.asked = is_away, 0

    def ask(self, path, asked):
        self.asked += 1
        if self.is_away:
            raise RouterAway("it does not answer")
        joined = {"version": 0, "trainer": 1, "start": "", "push": "", "tokens": 0, "steps": 0, "silent_s": 60.0}
        return joined if path == "join" else {"wait": True}

    blob = staticmethod(lambda name: b"")


@pytest.mark.parametrize("is_away", [False, True])
def test_a_trainer_that_has_nothing_to_do_never_misses_that_it_was_cancelled(is_away, monkeypatch):
    monkeypatch.setattr("valve_tune.serve.patience.FIRST_S", 0.0)
    monkeypatch.setattr("valve_tune.serve.fleet.WAIT_S", 0.0)
    router = Idle(is_away)

    def ask() -> None:
        if router.asked >= 5:
            raise Stopped

    with pytest.raises(Stopped):
        FleetWorker(router, Adds(), job="j", name="a", say=lambda text: None, ask=ask).run()


def test_the_command_hears_of_a_cancel_between_two_micro_batches(worked):
    def act(folder, worker):
        worker._ask()
        folder.want(STOP)
        worker._ask()
        return 4

    folder, code = worked(act)
    assert (code, folder.status().state) == (130, "cancelled")


def test_killed_trainers_and_a_killed_queue_cost_time_and_no_micro_batch(tmp_path):
    """kill -9 of a trainer in its work and of the queue; at the end each micro-batch is kept once, and all trainers
    hold the same last version under the same name."""
    folder = base(tmp_path / "base")
    data = conversations(tmp_path / "train.jsonl", 40)
    router, command = Router(tmp_path / "queue"), Command(tmp_path, fake=False)
    rounds, steps, batches = 2, 12, 2

    def start(name: str) -> subprocess.Popen[str]:
        flags = ["--model", folder, "--data", data, "--out", tmp_path / name, "--max-length", "32"]
        flags += ["--gradient-accumulation-steps", str(batches), "--lora-r", "4", "--learning-rate", "0.005"]
        fleet = ["--router", router.url, "--job", "chat", "--worker", name, "--rounds", str(rounds)]
        return command.start(
            "fleet", *flags, *fleet, "--sync-steps", str(steps), "--push-steps", "2", errors=subprocess.STDOUT
        )

    trainers = {name: start(name) for name in ("a", "b")}
    try:
        until(lambda: router.job()["kept"] >= 4, "something is kept")
        trainers["a"].kill()
        trainers["a"].communicate()
        trainers["a"] = start("a")
        until(lambda: router.job()["version"] >= 1, "the first average")
        router.kill()
        router.start()
        said = {name: trainer.communicate(timeout=LONG_S)[0] for name, trainer in trainers.items()}
    finally:
        for trainer in trainers.values():
            trainer.kill()
        router.kill()

    assert {name: trainer.returncode for name, trainer in trainers.items()} == {"a": 0, "b": 0}, said
    db = sqlite3.connect(tmp_path / "queue" / "training.sqlite3")
    kept = [number for (number,) in db.execute("SELECT number FROM batches WHERE kept IS NOT NULL ORDER BY number")]
    assert kept == list(range(rounds * steps * batches))
    assert db.execute("SELECT COUNT(*) FROM batches").fetchone()[0] == len(kept)
    first, second = ((tmp_path / name / "adapter_model.safetensors").read_bytes() for name in trainers)
    assert first == second
    for name in trainers:
        assert (tmp_path / name / "published" / f"chat-v{rounds}" / "adapter_model.safetensors").read_bytes() == first


class Drifting(Counting):
    """Rows whose step widens as the job goes on, another one for each node's share: data that drift and differ."""

    def rows(self, step: int) -> np.ndarray:
        rows = super().rows(step)
        return (rows * (1 + step // 20 % 2)) % 64


def loss_of(trainer: PartTrainer, steps: range) -> float:
    held = Drifting(trainer.spec)
    return float(np.mean([trainer._loss_of(batch) / batch.label_count for step in steps for batch in held.step(step)]))


def fleet_losses(model: Path, out: Path, *, nodes: int, rounds: int, sync: int, seed: int) -> dict[str, float]:
    """Held-out loss after the same training tokens. `separate`: half of the nodes train, all their gradients in one."""
    held, found = range(10_000, 10_012), {}
    more = {"lora_dropout": 0.0, "learning_rate": 1e-2, "lr_scheduler_type": "constant", "seed": seed}

    def make(name: str, method: str) -> PartTrainer:
        spec = job(model, out / name, max_steps=rounds * sync * nodes, warmup_steps=0, **more)
        return PartTrainer(spec, Drifting(spec), method)

    for method in (FROZEN_A, PRODUCTS, APART):
        trainers = [make(f"{method}{node}", method) for node in range(nodes)]
        version = b""
        for turn in range(rounds):
            parts = []
            for node, trainer in enumerate(trainers):
                trainer.begin(version, b"", 0, 0)
                for step in range(sync):
                    number = 2 * ((turn * sync + step) * nodes + node)
                    trainer.compute(number)
                    trainer.compute(number + 1)
                parts.append((trainer.document(), trainer.tokens))
            version = trainers[0].averaged(parts)
        trainers[0].begin(version, b"", 0, 0)
        found[method] = loss_of(trainers[0], held)
    apart = [make(f"isolated{node}", PRODUCTS) for node in range(nodes)]
    for node, trainer in enumerate(apart):
        for step in range(rounds * sync):
            for half in (0, 1):
                trainer.compute(2 * (step * nodes + node) + half)
    found["isolated"] = float(np.mean([loss_of(trainer, held) for trainer in apart]))
    few = [make(f"separate{node}", PRODUCTS) for node in range(1)]
    for number in range(2 * rounds * sync * nodes):
        few[0].compute(number)
    found["separate"] = loss_of(few[0], held)
    return found


def test_an_average_is_never_worse_than_nodes_that_train_alone(model, tmp_path):
    found = fleet_losses(model, tmp_path, nodes=4, rounds=3, sync=10, seed=1)

    print({name: round(loss, 4) for name, loss in found.items()})
    assert found[FROZEN_A] <= found["isolated"]
    assert found[PRODUCTS] <= found["isolated"]
    assert max(found[FROZEN_A], found[PRODUCTS]) <= found["separate"]


def test_a_parcel_comes_out_as_it_went_in():
    files = {ADAPTER: b"a\n\x00", "moments": b"", "residual": bytes(range(256))}
    assert average.unparcel(average.parcel(files)) == files
    with pytest.raises(ValueError, match="whole"):
        average.unparcel(average.parcel(files) + b"x")
