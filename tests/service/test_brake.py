"""Mode, pause, drain, and the ladder for what cannot be gated."""

from __future__ import annotations

import dataclasses
import errno
from functools import partial
from pathlib import Path

import pytest
from node_world import World

from valved.config import Config, KubeTable, LadderTable
from valved.errors import InvalidRequest, NotFound, NotNow
from valved.model.events import EventKind
from valved.model.ids import GpuIndex, Mode, Role
from valved.policy.stopping import Work


@pytest.fixture
def world(tmp_path):
    return World(tmp_path, config=Config(ladder=LadderTable(kill_after_s=30)))


def test_pausing_stops_all_offline_work_also_where_no_online_service_is(world):
    world.offline(gpus=(0, 1))

    world.node.pause("me")

    assert len(world.gate.off) == 2
    assert world.node.status().paused_by == "me"
    world.check()


def test_nobody_is_woken_while_paused(world):
    world.offline()
    world.online()
    world.node.pause("me")

    world.run(10_000)

    assert world.gate.off


def test_resuming_lets_offline_run_after_the_cooldown(world):
    world.offline()
    world.online()
    world.node.pause("me")
    world.run(1000)
    world.beat_all()

    world.node.resume()
    world.run(100)

    assert not world.gate.off
    world.check()


def test_the_file_alone_is_enough(world):
    world.offline()
    (world.folder / "pause").write_text("the night shift\n")

    world.brake.look_at_file()

    assert world.gate.off
    assert world.node.status().paused_by == "the night shift"


def test_a_pause_outlives_a_restart(world):
    world.node.pause("me")

    second = World(world.folder, clock=world.clock)
    second.brake.look_at_file()

    assert second.node.status().paused


def test_a_drained_node_leaves_no_channel_off_and_no_process_behind(world):
    offline = world.offline()
    pid = world.books.clients[offline].process.pid

    world.node.drain("me", stop=False)
    world.run(10)
    assert world.node.status().draining
    assert world.signals == [(pid, "SIGTERM")]
    world.processes.end(pid)
    world.run(1000)

    assert not world.gate.off
    assert world.brake.work is Work.EMPTY
    assert world.events(EventKind.DRAINED)


def test_who_does_not_leave_in_time_is_stopped_then_enabled_then_killed(world):
    offline = world.offline()
    pid = world.books.clients[offline].process.pid
    world.node.drain("me", stop=False)
    seen = []
    world.signals = Signals(lambda: seen.append("remove_client" in dict(world.gate.calls)))

    world.run(59_000)
    assert not world.signals
    world.run(1_500)

    assert list(world.signals) == [(pid, "SIGSTOP"), (pid, "SIGKILL")]
    assert seen == [False, True]
    assert not world.gate.off


def test_no_channel_is_enabled_for_the_end_of_a_process_that_has_not_met_its_stop_signal(world):
    offline = world.offline()
    pid = world.books.clients[offline].process.pid
    world.processes.slow_to_stop.add(pid)
    world.node.drain("me", stop=False)

    world.run(60_300)
    assert world.signals[1:] == [(pid, "SIGSTOP")]
    assert world.gate.off

    world.processes.slow_to_stop.clear()
    world.run(10)
    assert world.signals[1:] == [(pid, "SIGSTOP"), (pid, "SIGKILL")]
    assert not world.gate.off


def test_a_process_that_never_meets_its_stop_signal_is_killed_all_the_same(world):
    offline = world.offline()
    pid = world.books.clients[offline].process.pid
    world.processes.slow_to_stop.add(pid)
    world.node.drain("me", stop=False)

    world.run(60_900)

    assert world.signals[1:] == [(pid, "SIGSTOP"), (pid, "SIGKILL")]
    assert not world.gate.off


def test_a_drain_taken_back_kills_nobody(world):
    offline = world.offline()
    pid = world.books.clients[offline].process.pid
    world.node.drain("me", stop=False)

    world.node.resume()
    world.run(100_000)

    assert world.signals == [(pid, "SIGTERM")]
    assert not world.gate.off


def test_on_a_kubernetes_node_valved_signals_nobody(tmp_path):
    world = World(tmp_path, config=Config(kube=KubeTable(node="n1")))
    world.offline()
    world.node.set_policy(Mode.OFF, {}, 0)

    world.run(100_000)

    assert not world.signals
    assert world.brake.work is Work.LEAVING
    assert 99 < world.leaving.since_s() < 101
    assert world.gate.off


def test_draining_with_stop_ends_valved_after_the_answer(world):
    world.node.drain("me", stop=True)

    assert world.stopped


def test_a_drain_can_be_taken_back(world):
    world.offline()
    world.node.drain("me", stop=False)

    world.node.resume()
    world.online()

    assert not world.node.status().draining
    assert world.gate.off


def test_a_draining_node_never_lets_a_held_schedule_call_enable_channels(world):
    online, offline = world.online(), world.offline()
    world.gate.launch(online)
    seq = world.schedule(offline, 0xC1D00000 + offline)

    world.node.drain("me", stop=False)

    assert seq not in dict(world.connections[offline].acks())


def test_switching_off_wakes_nobody(world):
    world.offline()
    online = world.online()
    world.gate.launch(online)

    world.node.set_policy(Mode.OFF, {}, 0)
    world.run(1000)

    assert world.gate.off
    assert world.clock.waiting <= 1


def test_harvesting_again_after_observing_stops_offline_where_online_is_busy(world):
    world.offline()
    world.node.set_policy(Mode.OBSERVE, {}, 0)
    online = world.online()
    world.run(100)
    world.gate.launch(online)
    world.run(1)

    world.node.set_policy(Mode.HARVEST, {}, 0)

    assert world.gate.off


def test_a_drain_outlives_a_crash_and_ends_with_its_file(world):
    world.node.drain("me", stop=False)

    second = World(world.folder, clock=world.clock)
    second.brake.look_at_file()
    assert second.node.status().draining
    (world.folder / "drain").unlink()
    second.brake.look_at_file()

    assert not second.node.status().draining


def test_a_drain_that_ended_the_daemon_does_not_drain_the_next_one(world):
    world.node.drain("me", stop=True)

    second = World(world.folder, clock=world.clock)
    second.brake.look_at_file()

    assert not second.node.status().draining


def test_a_daemon_never_ends_for_a_drain_that_was_taken_back_while_memory_moved(world):
    turn = world.kv.turn
    with pytest.raises(StopIteration):
        turn.mine().send(None)
    world.node.drain("me", stop=True)
    assert not world.stopped

    world.node.resume()
    turn.open()

    assert not world.stopped


def test_a_gpu_that_is_not_there_is_never_called_unknown_without_those_that_are(world):
    with pytest.raises(NotFound, match="there is no GPU 9 here") as refused:
        world.node.explain("gpu", 9)

    assert refused.value.next_step == "there are: gpu0, gpu1"


def test_a_policy_change_is_on_record_with_who(world):
    world.node.set_policy(Mode.OBSERVE, {}, 0, "uid 7")

    assert world.events(EventKind.POLICY)[-1].detail["by"] == "uid 7"


def test_an_impossible_policy_changes_nothing(world):
    before = world.node.policy()

    with pytest.raises(InvalidRequest, match="floor"):
        world.node.set_policy(Mode.OBSERVE, {"floor_ns": 10**12}, 0)

    assert before == world.node.policy()


def test_the_lease_cannot_change_while_running(world):
    with pytest.raises(InvalidRequest) as caught:
        world.node.set_policy(None, {}, 123)

    assert caught.value.field == "lease_ns"


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ((0, 0, Role.ONLINE, ""), InvalidRequest),
        ((99_999, 1, Role.ONLINE, ""), NotFound),
        ((1, 0, Role.HOOK, ""), InvalidRequest),
        ((1, 0, Role.NONE, ""), InvalidRequest),
    ],
)
def test_a_launch_that_makes_no_sense_says_which_field(world, arguments, error):
    with pytest.raises(error) as caught:
        world.node.launch(*arguments)

    assert caught.value.field


def test_a_launch_on_a_draining_node_is_refused_with_the_next_step(world):
    world.node.drain("me", stop=False)

    with pytest.raises(NotNow) as caught:
        world.node.launch(1, 0, Role.OFFLINE, "")

    assert caught.value.next_step


# The ladder


def test_a_gate_that_fails_freezes_the_offline_processes_of_that_gpu(world):
    near, _far = world.offline(gpus=(0,)), world.offline(gpus=(1,))
    online = world.online()
    world.run(100)
    world.gate.launch(online)

    world.gate.fail(gpu=0, service=world.service_of(online))
    world.run(1)

    assert world.signals == [(world.books.clients[near].process.pid, "SIGSTOP")]
    assert world.gating.counters.gate_failures == 1


def test_a_frozen_process_is_let_go_when_its_gpu_opens(world):
    offline = world.offline()
    online = world.online()
    pid = world.books.clients[offline].process.pid
    world.run(100)
    world.gate.launch(online)
    world.gate.fail(gpu=0, service=world.service_of(online))
    world.run(1)

    world.gate.finish(online)
    world.run(100)

    assert world.signals == [(pid, "SIGSTOP"), (pid, "SIGCONT")]


def test_a_frozen_process_is_let_go_when_its_channels_are_off_after_all(world):
    """It cannot run then, and must be able to carry out what a reclaim orders."""
    offline = world.offline()
    online = world.online()
    pid = world.books.clients[offline].process.pid
    world.run(100)
    world.gate.launch(online)
    world.gate.fail(gpu=0, service=world.service_of(online))
    world.run(1)
    frozen = list(world.signals)

    world.gate.come_back(gpu=0, service=world.service_of(online))
    world.run(1)

    assert (frozen, world.signals[1:]) == ([(pid, "SIGSTOP")], [(pid, "SIGCONT")])
    assert world.gate.off, "online still holds the GPU"
    world.run(31_000)
    assert (pid, "SIGKILL") not in world.signals


def test_a_process_frozen_for_too_long_is_enabled_and_then_killed(world):
    offline = world.offline()
    online = world.online()
    pid = world.books.clients[offline].process.pid
    world.run(100)
    world.gate.launch(online)
    world.gate.fail(gpu=0, service=world.service_of(online))
    removed = []
    world.signals = Signals(lambda: removed.append("remove_client" in dict(world.gate.calls)))

    world.run(31_000)

    assert world.signals == [(pid, "SIGSTOP"), (pid, "SIGSTOP"), (pid, "SIGKILL")]
    assert removed == [False, False, True]
    world.check()


def frozen_beside(world, *gpus):
    """Two offline processes on each of these GPUs, frozen, and the online client."""
    pids = [world.books.clients[world.offline(gpus=gpus)].process.pid for _ in range(2)]
    online = world.online(gpus=gpus)
    world.run(100)
    world.gate.launch(online)
    world.run(1)
    for gpu in gpus:
        world.gate.fail(gpu=gpu, service=world.service_of(online))
    world.run(1)
    assert world.signals == [(pid, "SIGSTOP") for pid in pids]
    return pids, online


def at_each_reading(world, monkeypatch, happens):
    """What happens while stamps are read: one of these at each reading that finds none."""
    read, left = world.gate.drain_stamps, list(happens)

    def drain():
        stamps = read()
        if not stamps and left:
            left.pop(0)()
            stamps = read()
        return stamps

    world.gate.on_stamps = lambda: None
    monkeypatch.setattr(world.gate, "drain_stamps", drain)


def test_nobody_stays_frozen_because_a_stamp_came_while_others_were_let_go(world, monkeypatch):
    pids, online = frozen_beside(world, 0)
    come_back = partial(world.gate.come_back, gpu=0, service=world.service_of(online))
    at_each_reading(world, monkeypatch, [come_back, come_back])

    world.gating.drain()

    assert sorted(world.signals[2:]) == [(pid, "SIGCONT") for pid in pids]


def test_nobody_is_let_go_whose_gpu_failed_again_while_another_of_its_gpus_was_looked_at(world, monkeypatch):
    pids, online = frozen_beside(world, 0, 1)
    service = world.service_of(online)
    for gpu in (0, 1):
        world.gate.come_back(gpu=gpu, service=service)
    at_each_reading(world, monkeypatch, [lambda: None, partial(world.gate.fail, gpu=0, service=service)])

    for _ in range(3):
        world.gating.drain()

    assert dict(world.signals) == dict.fromkeys(pids, "SIGSTOP")


class Signals(list):
    """A list that calls back at each append."""

    def __init__(self, seen):
        super().__init__()
        self._seen = seen

    def append(self, item):
        self._seen()
        super().append(item)


def test_offline_work_that_cannot_be_stopped_never_runs_on_in_a_mode_that_must_stop_it(world):
    offline = world.offline()
    world.brake.set_mode(Mode.OBSERVE, "test")
    world.signals.clear()

    world.gate.fail(gpu=0)
    world.run(1)

    assert world.signals == [(world.books.clients[offline].process.pid, "SIGSTOP")]


def test_explanations_name_the_holder(world):
    offline = world.offline(name="batch")
    online = world.online(name="chat")
    world.gate.launch(online)
    world.run(300)

    gpu = world.node.explain("gpu", 0)
    service = world.node.explain("service", world.service_of(offline))
    process = world.node.explain("pid", world.books.clients[online].process.pid)

    assert gpu.summary == "GPU 0: offline work is stopped"
    assert any("chat: busy" in fact for fact in gpu.facts)
    assert "chat holds GPU 0" in service.summary
    assert "online service" in process.summary
    assert any("cooldown 20.0 ms" in fact for fact in process.facts)
    assert gpu.decisions


def test_a_refused_process_can_be_explained(world):
    world.processes.add(700)
    world.hello(700, wanted=Role.ONLINE)

    assert "refused: an online process needs a claim" in world.node.explain("pid", 700).summary


@pytest.mark.parametrize(("subject", "number"), [("gpu", 9), ("pid", 4), ("service", 77)])
def test_what_nobody_knows_cannot_be_explained(world, subject, number):
    with pytest.raises(NotFound) as caught:
        world.node.explain(subject, number)

    assert caught.value.field == subject


def test_a_status_has_a_value_in_every_field(world):
    world.offline()
    world.online()

    values = dataclasses.asdict(world.node.status())

    assert not [name for name, value in values.items() if value is None]


def test_a_daemon_without_descriptors_never_takes_a_missing_file_for_a_drain(world, monkeypatch):
    """open() takes a number before it looks for the file: then nothing says that there is none."""
    world.offline()

    def full(*_arguments, **_more):
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(Path, "open", full)
    world.brake.look_at_file()

    assert not world.brake.is_draining
    assert not world.brake.is_paused


def test_no_switch_ever_takes_a_hand_over_back(world):
    """Between the word to end and the end others may still call: offline work beside online work stays stopped."""
    world.offline()
    online = world.online()
    world.run(100)
    world.brake.hand_over()
    world.brake.resume()
    world.brake.set_mode(Mode.HARVEST, "test")
    world.gate.finish(online)
    world.run(5_000)

    assert world.gating.is_held([GpuIndex(0)])


def test_an_offline_service_is_never_explained_by_preemptions_that_it_cannot_have(world):
    clients = world.offline(name="batch"), world.online(name="chat")
    world.run(50)
    batch, chat = (world.node.explain("service", world.service_of(client)) for client in clients)

    assert not any("preempted" in fact for fact in batch.facts)
    assert any("was let run for" in fact for fact in batch.facts)
    assert any("preempted offline work 0 times" in fact for fact in chat.facts)


def test_those_that_hold_a_gpu_are_never_a_list_without_an_end(world):
    offline = world.offline(name="batch")
    online = world.online(name="chat")
    world.gate.launch(online)
    world.run(5)
    world.node.pause("me")

    service = world.node.explain("service", world.service_of(offline))

    assert "the pause and chat hold GPU 0" in service.summary


@pytest.mark.parametrize("name", ["pause", "drain"])
def test_a_brake_that_holds_on_a_full_disk_is_never_reported_as_failed(world, name, monkeypatch):
    write = Path.write_text

    def full(path, text, **more):
        write(path, "", **more)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    if name == "pause":
        world.brake.pause("alice")
    else:
        world.brake.drain("alice")

    assert world.brake.switches.is_closed


@pytest.mark.parametrize("name", ["pause", "drain"])
def test_a_link_to_nothing_is_never_taken_for_no_order(world, name):
    order = world.folder / name
    order.symlink_to(world.folder / "nowhere")

    world.brake.look_at_file()
    assert world.brake.switches.is_closed

    world.brake.resume()
    assert not world.brake.switches.is_closed
    assert not order.is_symlink()
