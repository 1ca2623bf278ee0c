"""Consent to shared weights: off unless somebody said so, shown, told to trainers, and taken back at once."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import types
from pathlib import Path

import pytest
from node_world import FakePrompt, World
from valve_kube import names

from valved import paths
from valved.clients.identity import PodClaim
from valved.config import Config, GrantedTable
from valved.errors import InvalidRequest
from valved.gate.listener import GateListener
from valved.kube.follower import Follower
from valved.kube.pods import PodBook
from valved.model.consent import Said, consent_of
from valved.model.ids import ProcessId, Role
from valved.node import upkeep
from valved.paths import WEIGHTS_FILE
from valved.state import saved as files
from valved.state.pending import PendingClaim

YES, NO = Said(share_weights="true"), Said(share_weights="false")
UID = "3c1f0000-0000-0000-0000-000000000001"


@pytest.fixture
def world(tmp_path: Path) -> World:
    made = World(tmp_path)
    made.sharing.begin()
    return made


def launched(world: World, said: Said, pid: int = 700, name: str = "chat") -> int:
    world.processes.add(pid)
    number = world.node.launch(pid, world.processes.start_time(pid), Role.ONLINE, name, said)
    world.sharing.refresh()
    return number


def told(world: World) -> dict[str, bool]:
    said = json.loads((world.folder / WEIGHTS_FILE).read_text())
    return {one["name"] or world.books.services[one["id"]].name: one["shares"] for one in said["services"]}


def shown(world: World) -> tuple[bool, str]:
    (one,) = world.node.status().services
    return one.granted.share_weights, one.granted.words


def test_every_user_is_never_told_the_name_of_a_service_that_shares_nothing(world: World) -> None:
    number = launched(world, YES)
    file = world.folder / WEIGHTS_FILE
    assert '"chat"' in file.read_text()
    world.consents.say(number, NO)
    assert "chat" not in file.read_text()


@pytest.mark.parametrize("said", [Said(), NO, Said(slo="tpot=40ms", grant="true")])
def test_nobody_who_did_not_say_so_shares_weights(world: World, said: Said) -> None:
    launched(world, said)

    assert told(world) == {"chat": False}
    assert not shown(world)[0]


def test_a_consent_is_shown_explained_and_told_with_the_processes_that_hold_the_weights(world: World) -> None:
    number = launched(world, YES)

    assert shown(world) == (True, "shares its weights with trainers")
    assert "shares its weights with trainers" in world.node.explain("service", number).facts
    (one,) = json.loads((world.folder / WEIGHTS_FILE).read_text())["services"]
    assert one == {"id": number, "name": "chat", "shares": True, "processes": [[700, world.processes.start_time(700)]]}


def test_a_consent_that_is_taken_back_is_gone_from_the_file_when_the_call_returns(world: World) -> None:
    number = launched(world, YES)
    assert told(world) == {"chat": True}

    world.consents.say(number, NO)

    assert told(world) == {"chat": False}
    assert shown(world) == (False, "shares no weights")


def test_a_consent_that_cannot_be_taken_back_in_the_file_takes_the_file_with_it(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    number = launched(world, YES)

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    world.consents.say(number, NO)
    assert not (world.folder / WEIGHTS_FILE).exists()
    monkeypatch.undo()
    world.sharing.refresh()
    assert told(world) == {"chat": False}


def test_a_valved_that_starts_never_takes_back_what_it_does_not_know_yet(world: World, tmp_path: Path) -> None:
    """Between its first moment and the end of its restore the predecessor's file stands."""
    launched(world, YES)
    world.handover.save()
    saved, _ = files.load(tmp_path / "state.json")

    successor = World(tmp_path, processes=world.processes)
    successor.sharing.refresh()
    assert told(successor) == {"chat": True}
    successor.handover.restore(saved, 2.0)
    successor.sharing.begin()
    assert told(successor) == {"chat": True}


def test_a_word_nobody_can_read_claims_nothing_and_on_a_pod_shares_nothing(world: World) -> None:
    with pytest.raises(InvalidRequest) as refused:
        launched(world, Said(share_weights="yes"))
    assert refused.value.field == "share_weights"

    consent = consent_of([Said(share_weights="yes"), YES])
    assert not consent.share_weights
    assert consent.words() == "shares no weights: 'yes' is neither true nor false"


def test_a_slip_in_the_target_takes_no_consent_to_weights_with_it_and_gives_none() -> None:
    assert consent_of([Said(slo="40", share_weights="true")]).share_weights
    assert not consent_of([Said(slo="40")]).share_weights


def test_the_nearest_place_is_believed(tmp_path: Path) -> None:
    world = World(tmp_path, config=Config(granted=GrantedTable(share_weights="true")))
    world.sharing.begin()
    follower = Follower(world.brake, world.gating, None, world.consents)
    number = launched(world, Said())
    assert told(world) == {"chat": True}

    follower.obey({"mode": "harvest", "resolved": {"granted": {"shareWeights": False}}})
    assert told(world) == {"chat": False}
    world.consents.say(number, YES)
    assert told(world) == {"chat": True}
    follower.obey({"mode": "harvest", "resolved": {"granted": {"slo": "40", "shareWeights": True}}})
    world.consents.say(number, Said())
    assert told(world) == {"chat": True}, "a bad target says nothing of weights"


def test_an_annotation_that_is_taken_off_is_no_consent_from_then_on(tmp_path: Path) -> None:
    pods = PodBook()
    world = World(tmp_path, pods=pods)
    world.sharing.begin()
    pods.listener.pods_changed = world.gating.listener.clients_changed  # type: ignore[method-assign]

    def pod(**words: str) -> dict[str, object]:
        marks = {f"{names.DOMAIN}/{key.replace('_', '-')}": value for key, value in words.items()}
        return {"metadata": {"uid": UID, "namespace": "serving", "name": "chat", "annotations": marks}}

    pods.replace([pod(role="online", share_weights="true")])
    world.processes.add(700)
    claim = PodClaim(role=Role.ONLINE, name="serving/chat", cgroup=f"/kubepods/burstable/pod{UID}")
    root = ProcessId(pid=700, start_time=world.processes.start_time(700))
    world.register.claimed._book_claim(root, claim.role, claim.name, claim.cgroup)
    world.sharing.refresh()
    assert told(world) == {"serving/chat": True}

    pods.put(pod(role="online"))
    assert told(world) == {"serving/chat": False}
    pods.replace_namespaces([{"metadata": {"name": "serving", "annotations": {names.SHARE_WEIGHTS: "true"}}}])
    assert told(world) == {"serving/chat": True}


def test_a_claim_left_for_a_later_valved_keeps_its_consent() -> None:
    import msgspec

    claim = PendingClaim(pid=os.getpid(), start_time=2, name="chat", share_weights="true")
    assert msgspec.json.decode(msgspec.json.encode(claim), type=PendingClaim) == claim


def test_a_trainer_reads_what_valved_says_and_hears_at_its_next_look_that_it_is_taken_back(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "tune"))
    from valve_tune.base.consent import NotShared, Owners, Permit

    number = launched(world, YES)
    owners = Owners(world.folder)
    service = owners.named("chat")
    assert (service.id, service.processes) == (number, ((700, world.processes.start_time(700)),))
    permit = Permit(owners, [service])
    permit.check()

    world.consents.say(number, NO)

    with pytest.raises(NotShared, match=r"share_weights: service \d+ \(chat\) does not consent"):
        permit.check()


@pytest.mark.parametrize("env", [{"VALVE_RUN_DIR": "/a"}, {"XDG_RUNTIME_DIR": "/b"}, {}])
@pytest.mark.parametrize("user", [0, 1000])
def test_a_trainer_never_looks_into_another_folder_than_valveds(
    env: dict[str, str], user: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "tune"))
    from valve_tune.base import consent

    for name in ("VALVE_RUN_DIR", "XDG_RUNTIME_DIR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(os, "geteuid", lambda: user)

    assert (consent.run_dir(), consent.NAME) == (paths.run_dir(), WEIGHTS_FILE)


def test_a_consent_never_stands_because_what_comes_before_its_withdrawal_fails(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    number = launched(world, YES)

    def fails() -> None:
        raise RuntimeError("once more")

    monkeypatch.setattr(world.granting, "refresh", fails)
    with pytest.raises(RuntimeError):
        world.consents.say(number, NO)

    assert told(world) == {"chat": False}


def test_a_consent_never_stands_because_the_look_at_the_gate_fails(world: World, monkeypatch) -> None:
    number = launched(world, YES)
    listener, world.gating.listener = world.gating.listener, GateListener()
    world.consents.say(number, NO)

    def fails(**how: bool) -> None:
        raise RuntimeError("once more")

    monkeypatch.setattr(upkeep, "TICK_S", 0.001)
    ours = types.SimpleNamespace(is_ours=lambda: True)
    gating = types.SimpleNamespace(resync=fails, listener=listener)
    with pytest.raises(RuntimeError):
        asyncio.run(upkeep.Upkeep(None, gating, world.handover, world.brake, ours, FakePrompt(), has_watch=True).run())

    assert told(world) == {"chat": False}


def test_a_full_disk_never_gets_a_line_of_the_log_every_two_seconds(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(path: Path, *_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    with monkeypatch.context() as disk:
        disk.setattr(Path, "write_bytes", full)
        launched(world, YES)
        for _ in range(100):
            world.sharing.refresh()
    world.sharing.refresh()

    assert caplog.text.count("weights.json cannot be written") == 1
    assert world.sharing._written
