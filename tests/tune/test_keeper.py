"""What keeps adapters in engines that are away, refuse and restart: none is lost, and none is forced on anybody."""

from __future__ import annotations

import time

import pytest
from fake_engine import FakeEngine
from valve_tune.serve import keeper
from valve_tune.serve.engines import RunningEngine
from valve_tune.serve.keeper import EngineKeeper


@pytest.fixture
def scene(tmp_path, monkeypatch):
    """An engine under one port, a keeper of it, and what it said."""
    monkeypatch.setattr(keeper, "LONGEST_S", 0.1)
    made = Scene(tmp_path)
    yield made
    made.close()


class Scene:
    def __init__(self, folder):
        self.folder, self.said, self.engine = folder, [], FakeEngine()
        self.port = self.engine.server.server_port
        self.keeper = EngineKeeper(self.engine.url, "", "chat", self.said.append, look_s=0.02)

    def version(self, number):
        path = self.folder / f"chat-v{number}"
        path.mkdir(exist_ok=True)
        return path

    def give(self, number):
        self.keeper.hand(self.version(number))
        self.until(lambda: f"chat-v{number}" in self.engine.adapters and not self.keeper._waiting, "it is loaded")

    def stop(self):
        self.engine.close()
        before = len(self.said)
        self.until(lambda: any("tried again" in each for each in self.said[before:]), "it is seen to be away")

    def start(self, **more):
        self.engine = type("Restarted", (FakeEngine,), {"port": self.port, **more})()

    def until(self, condition, what):
        for _ in range(6000):
            if condition():
                return
            time.sleep(0.01)
        raise AssertionError(f"never: {what}: {self.said}")

    def until_looked(self):
        """From its beginning to its end."""
        before = self.engine.requests.count("/v1/models")
        self.until(lambda: self.engine.requests.count("/v1/models") >= before + 4, "it is looked at")

    def close(self):
        self.keeper.close()
        self.engine.close()


def test_what_an_engine_has_is_never_taken_for_unused(scene):
    """Versions that nothing uses are removed from the disk. What an engine has is known only once it has said so."""
    assert scene.keeper.uses() is None
    scene.engine.adapters["chat-v0"] = str(scene.version(0))  # by another command
    scene.give(1)
    scene.until(lambda: scene.keeper.uses() == {"chat-v0", "chat-v1"}, "both are known")
    scene.stop()
    scene.keeper.hand(scene.version(2))
    assert scene.keeper.uses() == {"chat-v0", "chat-v1", "chat-v2"}


def test_a_folder_that_an_engine_serves_under_another_name_is_never_taken_for_unused(scene):
    """`--lora-modules prod=OUT/published/chat-v3`, or a link to it: the engine reads it again where it restarts."""
    (scene.folder / "now").symlink_to(scene.version(4))
    scene.engine.adapters = {"prod": f"{scene.version(3)}/", "latest": str(scene.folder / "now")}
    scene.give(5)
    assert {"chat-v3", "chat-v4", "chat-v5"} <= scene.keeper.uses()


def test_a_version_that_an_engine_still_reads_is_never_taken_for_unused(scene):
    """A newer one takes the place of one that waits, not of one that is being loaded."""
    with scene.engine.decoding:  # nothing is loaded meanwhile
        scene.keeper.hand(scene.version(1))
        scene.until(lambda: "/v1/load_lora_adapter" in scene.engine.requests, "it loads")
        scene.keeper.hand(scene.version(2))
        assert {"chat-v1", "chat-v2"} <= scene.keeper.uses()


def test_an_engine_that_restarts_never_stays_without_its_versions(scene):
    for number in (1, 2, 3):
        scene.give(number)
    assert sorted(scene.engine.adapters) == ["chat-v2", "chat-v3"]
    scene.stop()
    scene.start()
    scene.until(
        lambda: list(scene.engine.adapters) == ["chat-v3", "chat-v2"], "they are loaded again, the newest first"
    )


def test_a_version_never_misses_an_engine_that_was_away_when_it_came(scene):
    scene.give(1)
    scene.stop()
    scene.keeper.hand(scene.version(2))
    scene.keeper.hand(scene.version(3))
    scene.start()
    scene.until(lambda: set(scene.engine.adapters) == {"chat-v1", "chat-v3"}, "the newest is loaded")


def test_an_engine_that_refuses_is_asked_again_and_its_refusal_said_once(scene):
    scene.engine.updating = False
    scene.keeper.hand(scene.version(1))
    scene.until(lambda: scene.engine.requests.count("/v1/load_lora_adapter") >= 3, "it is asked again")
    assert len([each for each in scene.said if "VLLM_ALLOW" in each]) == 1
    scene.engine.updating = True
    scene.until(lambda: "chat-v1" in scene.engine.adapters, "it is loaded")


def test_what_somebody_unloads_is_never_forced_on_the_engine(scene):
    scene.give(1)
    scene.engine.adapters.clear()
    scene.until_looked()
    assert scene.engine.adapters == {}


def test_an_engine_of_another_base_never_gets_the_adapter(scene):
    scene.give(1)
    scene.stop()
    scene.start(base="other")
    scene.until(lambda: any("another base" in each for each in scene.said), "it is seen")
    assert scene.engine.adapters == {}


def test_a_version_of_that_name_from_elsewhere_is_never_taken_for_ours(scene):
    scene.engine.adapters["chat-v1"] = "/elsewhere/chat-v1"
    scene.keeper.hand(scene.version(1))
    scene.until(lambda: any("from /elsewhere/chat-v1" in each for each in scene.said), "it is refused")


def test_a_command_that_is_started_again_finds_its_version_there(scene):
    scene.engine.adapters["chat-v1"] = str(scene.version(1))
    scene.give(1)
    assert scene.said == [f"{scene.engine.url} answers as chat-v1"]
    assert "/v1/load_lora_adapter" not in scene.engine.requests


@pytest.mark.parametrize("nonsense", ["no JSON", "[1]", "null"])
def test_an_engine_that_says_nonsense_never_ends_its_keeper(scene, monkeypatch, nonsense):
    scene.give(1)
    ask = RunningEngine._ask

    def answer(engine, path, *more, **most):
        said = ask(engine, path, *more, **most)
        return nonsense if path == "/v1/completions" else said

    monkeypatch.setattr(RunningEngine, "_ask", answer)
    scene.keeper.hand(scene.version(2))
    scene.until(lambda: any("no JSON object" in each for each in scene.said), "it is said")
    monkeypatch.undo()
    scene.give(3)


def test_what_nobody_expected_never_ends_a_keeper(scene, monkeypatch):
    scene.give(1)
    with monkeypatch.context() as patched:
        patched.setattr(keeper, "hand_over", lambda *_, **__: 1 // 0)
        scene.keeper.hand(scene.version(2))
        scene.until(lambda: any("ZeroDivisionError" in each for each in scene.said), "it is said")
    scene.give(3)


def test_a_trainer_never_waits_for_an_engine_that_hangs(scene):
    scene.give(1)
    with scene.engine.decoding:  # every load waits for it
        scene.keeper.hand(scene.version(2))
        scene.until(lambda: scene.engine.requests.count("/v1/load_lora_adapter") == 2, "the load hangs")
        scene.keeper.hand(scene.version(3))
        assert "chat-v2" not in scene.engine.adapters  # it hangs still
    scene.until(lambda: "chat-v3" in scene.engine.adapters, "the newest is loaded")


def test_a_restart_within_a_long_pause_is_never_missed(scene, monkeypatch):
    monkeypatch.setattr(keeper, "LONGEST_S", 3600.0)
    scene.give(1)
    scene.engine.updating = False
    scene.keeper.hand(scene.version(2))
    scene.until(lambda: any("VLLM_ALLOW" in each for each in scene.said), "it refuses")
    asked = scene.engine.requests
    loads, looks = asked.count("/v1/load_lora_adapter"), asked.count("/v1/models")
    scene.until(lambda: asked.count("/v1/models") >= looks + 100, "it is looked at all the same")
    assert asked.count("/v1/load_lora_adapter") < loads + 20
    scene.stop()
    scene.start()
    scene.until(lambda: set(scene.engine.adapters) == {"chat-v1", "chat-v2"}, "it gets all again")
