"""A disk that is full, or can only be read: what is ordered holds, and nobody is told more than that."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
from node_world import World

from valved.machine import helpers
from valved.model.events import EventKind
from valved.model.ids import Mode
from valved.state import saved


@pytest.fixture
def world(tmp_path):
    return World(tmp_path)


def refuse(*_, **__):
    raise OSError(errno.EROFS, "Read-only file system")


@pytest.mark.parametrize("name", ["pause", "drain"])
def test_offline_work_never_runs_on_because_no_file_takes_the_order(world, name, monkeypatch):
    """On the day on which the file system fails, the one order that must work is to stop."""
    monkeypatch.setattr(Path, "write_text", refuse)

    getattr(world.brake, name)("alice")

    assert world.brake.switches.is_closed
    (lost,) = world.node.status().unwritten
    assert (Path(lost.path).name, lost.error) == (name, "Read-only file system")
    assert "until valved ends" in lost.loss
    world.node.resume()
    assert not world.brake.switches.is_closed
    assert not world.node.status().unwritten


@pytest.mark.parametrize("name", ["pause", "drain"])
def test_an_order_that_no_file_took_is_never_without_an_end(world, name, monkeypatch):
    """A file system that can only be read refuses to remove what is not there: nobody could resume."""
    monkeypatch.setattr(Path, "write_text", refuse)
    monkeypatch.setattr(Path, "unlink", refuse)
    getattr(world.brake, name)("alice")

    world.node.resume()

    assert not world.brake.switches.is_closed
    assert not world.node.status().unwritten


def test_a_node_whose_order_is_in_a_file_is_never_called_resumed_while_the_file_stays(world, monkeypatch):
    world.brake.pause("alice")
    monkeypatch.setattr(Path, "unlink", refuse)

    with pytest.raises(OSError, match="Read-only"):
        world.node.resume()

    assert world.brake.is_paused


@pytest.mark.parametrize("name", ["pause", "drain"])
def test_an_order_is_never_lost_by_a_restart_after_its_disk_took_files_again(world, name, monkeypatch):
    """`valve doctor` says that valved tries again by itself."""
    with monkeypatch.context() as trouble:
        trouble.setattr(Path, "write_text", refuse)
        getattr(world.brake, name)("alice")
        world.brake.look_at_file()
        assert world.node.status().unwritten

    world.brake.look_at_file()  # as the upkeep does

    assert not world.node.status().unwritten
    assert (world.folder / name).read_text() == "alice\n"
    assert world.brake.switches.is_closed


def test_an_order_that_a_file_holds_by_now_is_never_called_unwritten(world, monkeypatch):
    with monkeypatch.context() as trouble:
        trouble.setattr(Path, "write_text", refuse)
        world.brake.pause("alice")

    world.brake.pause("bob")

    assert not world.node.status().unwritten
    assert world.brake.paused_by == "bob"


class Late:
    """A disk on which each job is done after its caller has gone on."""

    def do(self, job):
        job()
        raise TimeoutError(errno.ETIMEDOUT, helpers.NO_ANSWER)

    ask = do


@pytest.mark.parametrize("name", ["pause", "drain"])
def test_an_order_never_comes_again_after_a_resume_because_its_disk_was_slow(world, name, monkeypatch):
    with monkeypatch.context() as trouble:
        trouble.setattr(world.brake, "_files", Late())
        getattr(world.brake, name)("alice")
        with pytest.raises(TimeoutError):
            world.node.resume()
    assert world.brake.is_unsure, "the upkeep looks again"

    world.brake.look_at_file()

    assert not world.brake.switches.is_closed
    assert not (world.folder / name).exists()


@pytest.mark.parametrize("name", ["pause", "drain"])
def test_an_order_that_a_slow_disk_took_never_waits_for_the_next_look(world, name, monkeypatch):
    """It took the file, and is late with what it says."""
    for order, is_closed in ((name, True), ("resume", False)):
        with monkeypatch.context() as trouble:
            trouble.setattr(type(world.brake._files), "ask", Late().do)
            getattr(world.brake, order)(*["alice"] * is_closed)
        assert world.brake.switches.is_closed is is_closed
        assert world.brake.is_unsure, "the upkeep looks again"
        world.brake.look_at_file()
        assert world.brake.switches.is_closed is is_closed


def test_a_setting_that_a_restart_would_forget_is_never_reported_without_that(world, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as trouble:
        trouble.setattr(saved, "save", full)
        world.node.set_policy(Mode.OBSERVE, {}, 0)

        (lost,) = world.node.status().unwritten
        assert (Path(lost.path).name, lost.error) == ("state.json", "No space left on device")
        assert "mode" in lost.loss
    world.run(1500)  # it is tried again each second

    assert not world.node.status().unwritten
    assert world.events(EventKind.NOTED)[-1].reason == "state file: it is written again"
