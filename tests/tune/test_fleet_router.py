"""A fleet job's trainer and a router that is away, damaged, full or forgetful."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest
from command import until
from test_fleet import Adds, Idle, Router, model, worked
from valve_tune.serve.fleet import FleetWorker, publisher
from valve_tune.serve.folder import FolderError, JobFolder
from valve_tune.serve.link import GivenUp, RouterAway, RouterLink
from valve_tune.serve.publish import FILES, new_version
from valve_tune.train.job import Stopped

__all__ = ["model", "worked"]  # fixtures
SILENT_S = 0.8  # of a router whose clock a test sets


class Clock:
    """Time that passes only where somebody waits."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds

    def rules(self, monkeypatch) -> None:
        for module in ("fleet", "patience"):
            monkeypatch.setattr(f"valve_tune.serve.{module}.time", self)


def test_a_pause_is_never_taken_for_a_router_that_is_away(monkeypatch):
    """It was away for a second, the owner paused for days, and the first question after that failed once more."""
    clock, tries = Clock(), []
    clock.rules(monkeypatch)

    class Shaky(Idle):
        def ask(self, path, asked):
            tries.append(path)
            if len(tries) <= 2:
                raise RouterAway("it does not answer")
            return {"done": True} if path == "take" else super().ask(path, asked)

    def ask() -> None:
        if len(tries) == 1:
            clock.sleep(1e6)

    FleetWorker(Shaky(False), Adds(), job="j", name="a", say=lambda text: None, ask=ask).run()
    assert tries == ["join", "join", "join", "take"]


def test_a_router_that_is_away_for_too_long_still_ends_the_trainer(monkeypatch):
    Clock().rules(monkeypatch)
    with pytest.raises(FolderError, match="the router is away"):
        FleetWorker(Idle(True), Adds(), job="j", name="a", say=lambda text: None).run()


def test_a_router_that_starts_after_its_trainers_never_ends_them(worked, monkeypatch):
    """All of them start at once after a power cut, and the job is the first thing that a trainer names."""
    asked = []

    def ask(link, path, said):
        asked.append((path, said))
        if len(asked) <= 2:
            raise RouterAway("connection refused")
        return {"done": True, "job": "out", **Idle(False).ask("join", {})}

    monkeypatch.setattr("valve_tune.serve.patience.FIRST_S", 0.0)
    run = FleetWorker.run
    monkeypatch.setattr(RouterLink, "blob", lambda *_: b"")

    def act(folder, worker):
        monkeypatch.setattr(RouterLink, "ask", ask)
        worker._trainer = Adds()
        return run(worker)

    monkeypatch.setattr(RouterLink, "ask", ask)
    folder, code = worked(act)
    assert (code, folder.status().state) == (0, "succeeded")
    assert [path for path, _ in asked if path != "seen"] == ["job", "job", "job", "join", "take"]
    assert asked[0] == asked[2]
    assert asked[0][1]["rounds"] == 1


@pytest.mark.parametrize("answer", [b"<html>gateway</html>", b""])
def test_what_stands_in_for_a_router_never_ends_a_trainer(answer, monkeypatch):
    monkeypatch.setattr(RouterLink, "_call", lambda *_: answer)
    with pytest.raises(RouterAway, match="answered"):
        RouterLink("http://127.0.0.1:9").ask("join", {})


def test_a_damaged_blob_is_never_trained_on_nor_averaged(tmp_path):
    router = Router(tmp_path / "queue")
    try:
        link = RouterLink(router.url)
        link.ask("job", {"job": "j", "rounds": 1, "round_batches": 2, "tokens": 1, "digest": "d"})
        trainer = link.ask("join", {"job": "j", "name": "a"})["trainer"]
        number = link.ask("take", {"job": "j", "trainer": trainer, "version": 0})["number"]
        said = {"job": "j", "trainer": trainer, "version": 0, "numbers": [number], "tokens": 1, "steps": 1}
        link.send("push", said, b"[0]")
        name = link.ask("join", {"job": "j", "name": "a"})["push"]
        assert link.blob(name) == b"[0]"
        (tmp_path / "queue" / "blobs" / name).write_bytes(b"[1]")
        with pytest.raises(FolderError, match="is not what was pushed"):
            FleetWorker(link, Adds(), job="j", name="a", say=lambda text: None).run()
    finally:
        router.kill()


class Answers(Idle):
    """A router that answers all but one question. `gone`: it says that it has given the trainer up."""

    def __init__(self, fails: str, gone: bool) -> None:
        super().__init__(False)
        self.fails, self.gone, self.paths = fails, gone, []

    def fail(self, path):
        self.paths.append(path)
        if path == self.fails:
            raise GivenUp("given up") if self.gone else RouterAway("500 disk full")

    def ask(self, path, asked):
        self.fail(path)
        if path == "take" and self.fails == "take":
            return {"wait": True}
        return {"average": [{"blob": "b", "tokens": 1}]} if path == "take" else super().ask(path, asked)

    def send(self, path, said, document):
        self.fail(path)
        return {"version": 1}

    def blob(self, name):
        if name:
            self.fail("blob")
        return b""


class Averages(Adds):
    def averaged(self, parts):
        return b"average"


@pytest.mark.parametrize("gone", [False, True])
@pytest.mark.parametrize("fails", ["take", "blob", "publish"])
def test_a_router_that_answers_all_but_one_question_is_never_asked_for_ever(fails, gone, monkeypatch):
    """Each `join` that it answered made it a router that is well: the rest was asked once a second, without a word."""
    clock, told = Clock(), []
    clock.rules(monkeypatch)
    router = Answers(fails, gone)
    with pytest.raises(FolderError, match=f"{fails} failed"):
        FleetWorker(router, Averages(), job="j", name="a", say=lambda text: None, trouble=told.append).run()
    assert 600 < clock.now_s - 100 < 700
    assert 10 <= router.paths.count(fails) <= 40
    assert [fails in text and "asking again" in text for text in told] == [True] * len(told)
    assert 2 <= len(told) <= 5


def test_a_trouble_that_is_over_is_never_still_told(monkeypatch):
    clock, told = Clock(), []
    clock.rules(monkeypatch)
    router = Answers("take", False)

    def ask() -> None:
        if clock.now_s > 200:
            router.fails = ""
        if "publish" in router.paths:
            raise Stopped

    with pytest.raises(Stopped):
        FleetWorker(router, Averages(), job="j", name="a", say=lambda text: None, trouble=told.append, ask=ask).run()
    assert "take failed 3 times" in told[0]
    assert told[-1] == ""


def test_a_trainer_that_stood_still_for_hours_never_takes_two_failures_for_a_router_that_is_away(monkeypatch):
    """Its process was frozen after the first one."""
    clock, router = Clock(), Answers("take", True)
    clock.rules(monkeypatch)

    def ask() -> None:
        if router.paths.count("take") == 2:
            router.fails = ""
        if "publish" in router.paths:
            raise Stopped

    def frozen(seconds: float) -> None:
        clock.now_s += 1e5

    clock.sleep = frozen
    with pytest.raises(Stopped):
        FleetWorker(router, Averages(), job="j", name="a", say=lambda text: None, ask=ask).run()


def test_an_average_that_is_refused_for_itself_never_goes_round_for_ever(monkeypatch):
    """Another one's average that was first is refused once: then there is a new version. One that is too large is
    refused each time."""

    class Refuses(Idle):
        def ask(self, path, asked):
            return {"average": [{"blob": "", "tokens": 1}]} if path == "take" else super().ask(path, asked)

        def send(self, path, said, document):
            self.asked += 1
            if self.asked > 20:
                pytest.fail("it is sent again and again")
            raise FolderError("413 too large")

    with pytest.raises(FolderError, match="413"):
        FleetWorker(Refuses(False), Averages(), job="j", name="a", say=lambda text: None).run()


def test_what_a_trainer_has_already_is_never_fetched_again_at_each_failure(monkeypatch):
    """It joins after each one, and its version and its last push are as large as the adapter and its moments."""
    Clock().rules(monkeypatch)
    begun = []

    class Failing(Answers):
        def ask(self, path, asked):
            if path != "join":
                self.fail(path)
                return {"number": 7} if self.paths.count("take") == 20 else {"done": True}
            return {**Idle.ask(self, path, asked), "version": 1, "start": "v", "push": "p"}

        def fail(self, path):
            self.paths.append(path)
            tries = self.paths.count("take")
            if path == "take" and tries not in (20, 24):
                raise RouterAway("500 disk full")

    class Counts(Adds):
        def begin(self, *given):
            begun.append(given)
            super().begin(b"", b"", 0, 0)

    router = Failing("take", False)
    monkeypatch.setattr("valve_tune.serve.patience.TRIES", 100)
    FleetWorker(router, Counts(), job="j", name="a", say=lambda text: None).run()
    assert router.paths.count("take") == 24
    assert router.paths.count("push") == 1  # what it computed in between is beyond what it had
    assert router.paths.count("blob") == 4
    assert [len(given) for given in begun] == [4, 4, 4]


class Engine:
    """A keeper of an engine that has said what it has, or has not."""

    def __init__(self, names):
        self.names, self.handed = names, []

    def uses(self):
        return self.names

    def hand(self, home):
        self.handed.append(home)


@pytest.mark.parametrize(
    ("engines", "stay"),
    [
        ([], [5, 6, 7]),
        ([{"chat-v2", "other-v1", "base"}, {"chat-v2", "chat-v4"}], [2, 4, 5, 6, 7]),
        ([set(), None], [1, 2, 3, 4, 5, 6, 7]),
    ],
    ids=["no engine", "two engines", "one that has not answered"],
)
def test_versions_never_fill_the_disk_and_none_that_an_engine_has_is_ever_removed(tmp_path, engines, stay):
    """An engine that restarts reads a version again, from the path that it had."""
    folder = JobFolder(tmp_path / "out")

    class Trainer:
        class state:
            @staticmethod
            def finish() -> None:
                for name in FILES:
                    (folder.path / name).write_text("{}")

    home = folder.path / "published"
    for name in ("chat-v1.txt", "chat-v01", "other-v1", f".chat-v1.{1 << 30}"):  # not ours, or what a kill has left
        (home / name).mkdir(parents=True)
    publish = publisher(folder, Trainer, "chat", [Engine(names) for names in engines], 3)
    for version in range(1, 8):
        publish(version)
    assert sorted(path.name for path in home.iterdir()) == sorted(
        ["chat-v1.txt", "chat-v01", "other-v1", *(f"chat-v{number}" for number in stay)]
    )
    publish(7)  # the same command again
    assert (home / "chat-v7").is_dir()


def test_a_version_of_an_earlier_job_is_never_handed_to_an_engine(tmp_path):
    """The router's folder was lost and the same commands run again: chat-v1 is another adapter now, and an engine keeps
    what it computed under a name."""
    handed: list[Path] = []
    folder = JobFolder(tmp_path / "out")

    class Keeps:
        hand = handed.append
        uses = staticmethod(set)

    class Wrote:
        class state:
            @staticmethod
            def finish() -> None:
                (folder.path / "adapter_model.safetensors").write_bytes(content)
                (folder.path / "adapter_config.json").write_text("{}")

    folder.path.mkdir()
    publish, content = publisher(folder, Wrote, "chat", [Keeps]), b"first"
    publish(1)
    publish(1)
    content = b"second"
    publish(3)  # this node was away for a version
    home = folder.path / "published"
    assert handed == [home / "chat-v1", home / "chat-v1", home / "chat-v3"]
    assert [path.name for path in sorted(home.iterdir())] == ["chat-v1", "chat-v3"]
    with pytest.raises(FolderError, match="another adapter, of an earlier job"):
        publish(1)
    assert len(handed) == 3
    assert (home / "chat-v1" / "adapter_model.safetensors").read_bytes() == b"first"


def test_a_version_that_a_person_publishes_never_takes_the_number_of_the_fleets_next_one(tmp_path):
    """Its job ended at that round, each time that it was begun again."""
    folder = JobFolder(tmp_path / "chat")
    folder.path.mkdir()
    (folder.path / "fleet").write_text("chat\n")
    for name in FILES:
        (folder.path / name).write_text("{}")
    with pytest.raises(FolderError, match="choose another --name"):
        new_version(folder, "chat", folder.path)
    assert new_version(folder, "mine", folder.path).name == "mine-v1"


def test_a_name_whose_folder_was_removed_is_never_given_to_another_adapter(tmp_path):
    """The same, where the earlier job went on for long: chat-v1 is no longer there to compare."""
    engine, folder = Engine(set()), JobFolder(tmp_path / "out")

    class Wrote:
        class state:
            @staticmethod
            def finish() -> None:
                for name in FILES:
                    (folder.path / name).write_text("{}")

    folder.path.mkdir()
    publish = publisher(folder, Wrote, "chat", [engine], 1)
    for version in (1, 2, 3):
        publish(version)
    with pytest.raises(FolderError, match="later versions of an earlier job"):
        publish(1)
    assert [path.name for path in engine.handed] == ["chat-v1", "chat-v2", "chat-v3"]
    (folder.path / "published" / "chat-v9").mkdir()
    publish(3)  # the same command again
    assert sorted(path.name for path in (folder.path / "published").iterdir()) == ["chat-v3", "chat-v9"]


class Slow(Adds):
    """Computes for three times as long as the router waits for a word, on the router's clock."""

    def __init__(self, link: RouterLink, clock: Path) -> None:
        self.clock, self.now_s, self.heard_s, self._ask = clock, 1000.0, 0.0, link.ask
        link.ask = self.ask
        self.set(0.0)

    def set(self, more_s: float) -> None:
        self.now_s += more_s
        beside = self.clock.with_suffix(".new")
        beside.write_text(str(self.now_s))
        beside.rename(self.clock)

    def ask(self, path, asked):
        asked_s = self.now_s
        answer = self._ask(path, asked)
        if path == "seen":
            self.heard_s = asked_s
        return answer

    def compute(self, number):
        for _ in range(7):
            self.set(SILENT_S * 0.45)  # a jump of more than half, and the router takes its clock for set
            until(lambda: self.heard_s == self.now_s, "the router hears of the trainer")
        super().compute(number)


def test_a_micro_batch_that_takes_longer_than_the_router_waits_is_never_computed_twice(tmp_path):
    (tmp_path / "queue").mkdir()
    (tmp_path / "queue" / "clock").write_text("1000.0")
    router = Router(tmp_path / "queue", silent_s=SILENT_S)
    try:
        link = RouterLink(router.url)
        link.ask("job", {"job": "j", "rounds": 1, "round_batches": 1, "tokens": 1, "digest": "d"})
        said: list[str] = []
        FleetWorker(link, Slow(link, tmp_path / "queue" / "clock"), job="j", name="a", say=said.append).run()
        assert not [text for text in said if "gone" in text]
        with sqlite3.connect(tmp_path / "queue" / "training.sqlite3") as db:
            assert db.execute("SELECT MAX(id) FROM trainers").fetchone()[0] == 2  # one for each version
    finally:
        router.kill()
