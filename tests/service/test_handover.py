"""One valved after another: what is written, what is picked up, and what is done about those who do not return."""

from __future__ import annotations

import asyncio
import json
import math

import pytest
from fake_gate import FakeGate
from node_world import World, successor
from ports import free_ports
from scarce import left

from valved.daemon import take_over
from valved.errors import InvalidRequest
from valved.model.events import EventKind
from valved.model.ids import Mode, Role, ServiceId
from valved.model.memory import ReservationState
from valved.node import turn
from valved.state import saved as state


@pytest.fixture
def first(tmp_path):
    return World(tmp_path)


def test_counters_and_receipts_survive(first):
    offline, online = first.offline(), first.online()
    for _ in range(5):
        first.work(online, ms=5)
        first.run(200)
    online_service, offline_service = first.service_of(online), first.service_of(offline)
    harvest_ns = first.register.channels.harvest.harvest_ns(offline_service, first.clock.now_ns())

    second = successor(first)

    assert (
        second.gating.online[online_service].book.preemptions
        == first.gating.online[online_service].book.preemptions
        == 4
    )
    assert second.gating.counters.gates == first.gating.counters.gates
    assert second.gating.counters.restarts == 1
    assert second.gating.gpus[0].harvest_ns == first.gating.gpus[0].harvest_ns > 0
    assert second.register.channels.harvest.harvest_ns(offline_service, second.clock.now_ns()) == harvest_ns


def test_useful_tokens_are_counted_once_however_often_valved_and_the_engine_s_link_begin_anew(first):
    """A hook's page says what its process did in all, and says it again to whomever it connects."""

    def told(world):
        (service,) = [entry for entry in world.reporter.status().services if entry.name == "batch"]
        return service.useful_tokens

    offline = first.offline(pid=300)
    first.gate.hint(first.hook(offline), 4, 0, tokens=1000)
    seen = [told(first)]
    world = first
    for _ in range(2):
        world = successor(world)
        seen.append(told(world))
        hook = world.hook(world.offline(pid=300))
        seen.append(told(world))
        world.gate.hint(hook, 4, 0, tokens=1000)
        seen.append(told(world))
    world.register.leave(hook, "link")
    seen.append(told(world))
    hook = world.hook(next(entry.id for entry in world.books.clients.values()))
    world.gate.hint(hook, 4, 0, tokens=1500)
    seen.append(told(world))

    assert seen == [*[1000] * 8, 1500]


def test_requests_are_counted_once_however_often_valved_and_the_engine_s_link_begin_anew(first):
    """Regression: an engine says what it counted in all to whomever it connects, and each of them added it up again."""
    first.offline(pid=300)
    engine = first.online(pid=200)
    world, hook = first, first.hook(engine)
    first.run(100)
    first.gate.hint(hook, 1, 0)
    first.work(engine, ms=5)
    first.gate.hint(hook, 1, 1)
    first.run(100)
    first.gate.hint(hook, 2, 1)
    first.work(engine, ms=5)  # the second request stopped offline work, too, and is open
    seen = []
    for _ in range(2):
        world = successor(world)
        engine = world.online(pid=200)
        world.offline(pid=300)
        hook = world.hook(engine)
        world.gate.hint(hook, 2, 1)
        world.run(100)
        seen.append(world.state(engine).request_figures())
        world.register.leave(hook, "link")
        hook = world.hook(engine)
        world.gate.hint(hook, 2, 1)
        world.run(100)
        seen.append(world.state(engine).request_figures())
    world.gate.hint(hook, 2, 2)
    world.run(100)

    assert seen == [(1, 1, [0, 1, 0, 0, 0, 0, 0, 0])] * 4
    assert world.state(engine).request_figures() == (2, 1, [0, 2, 0, 0, 0, 0, 0, 0])


def test_online_services_hold_again_before_any_client_is_back(first):
    """Else offline work would run beside an online process that nobody watches."""
    online = first.online()
    service = first.service_of(online)

    second = successor(first)

    assert second.gating.online[service].holding
    assert second.gate.is_gated(0)


def test_a_returning_client_finds_its_service_and_the_harvest_goes_on(first):
    first.offline(pid=300)
    service = first.service_of(first.online(pid=200))
    second = successor(first)

    again = second.online(pid=200)
    second.offline(pid=300)
    second.run(3000)

    assert second.service_of(again) == service
    assert not second.gate.off
    second.check()


def test_a_channel_left_off_is_enabled_when_its_client_reports_it_and_nobody_holds_the_gpu(first):
    offline = first.offline(pid=300)
    h_client = 0xC1D00000 + offline
    second = successor(first)

    client = second.hello(300).client
    second.add_channel(client, h_client=h_client)

    assert [ref.h_client for ref in second.gate.foreign_enabled] == [h_client]
    assert not len(second.register.channels.leftovers)


def test_channels_of_a_process_that_died_meanwhile_are_enabled_at_once(first):
    """The kernel is tearing it down right now, and waits for its channels."""
    first.offline(pid=300)
    first.handover.save()
    first.processes.table.pop(300)

    second = successor(first)

    assert len(second.gate.foreign_enabled) == 1
    assert second.events(EventKind.ENABLED_LEFTOVER)


def test_channels_of_a_live_process_that_does_not_return_are_enabled_after_the_patience(first):
    first.offline(pid=300)
    second = successor(first)
    second.run(1900)
    before = list(second.gate.foreign_enabled)

    second.run(200)

    assert not before
    assert len(second.gate.foreign_enabled) == 1


def test_they_stay_off_while_online_work_holds_their_gpu(first):
    first.offline(pid=300)
    first.online(pid=200)
    second = successor(first)
    second.online(pid=200)
    second.gate.launch(max(second.books.clients))
    second.run(10_000)

    assert not second.gate.foreign_enabled


def test_what_the_application_disabled_is_never_enabled(first):
    offline = first.offline(pid=300)
    first.register.channels._app_switched(first.books.clients[offline], (0xC1D00000 + offline, 0xCAF00001), True)
    first.processes.table.pop(300)

    second = successor(first)
    second.run(10_000)

    assert not second.gate.foreign_enabled


def test_a_live_online_process_that_does_not_return_keeps_its_gpus(first):
    first.offline(pid=300)
    first.online(pid=200)
    second = successor(first)
    second.offline(pid=300)
    second.run(60_000)
    while_alive = bool(second.gate.off)

    second.processes.table.pop(200)
    second.handover.settle(patience_over=True)

    assert while_alive
    assert not second.gate.off
    second.check()


def outlived(first):
    """A claimed front end that died, and the engine that outlived it."""
    first.processes.add(210)
    assert first.node.launch(210, first.processes.start_time(210), Role.ONLINE, "chat")
    first.online(pid=211, parent=210)
    first.processes.end(210)
    first.processes.add(211)  # init has taken it


def test_an_engine_that_outlived_its_claimed_process_finds_its_service(first):
    outlived(first)
    (service,) = first.gating.online

    second = successor(first)
    second.hello(211, Role.ONLINE)

    assert set(second.gating.online) == {service}
    second.check()


def test_an_engine_that_outlived_its_claimed_process_holds_no_gpu_once_it_is_gone(first):
    outlived(first)
    second = successor(first)
    second.offline(pid=300)
    second.run(60_000)
    while_alive = bool(second.gate.off)

    second.processes.end(211)
    second.run(60_000)
    second.handover.settle(patience_over=True)
    second.run(60_000)

    assert while_alive
    assert not second.gate.off
    assert not second.gating.online
    second.check()


def test_a_service_whose_processes_all_died_is_forgotten(first):
    first.online(pid=200)
    first.processes.table.pop(200)

    second = successor(first)

    assert not second.gating.online
    assert not second.books.services


def test_another_boot_keeps_the_counters_only(first):
    first.offline(pid=300)
    first.online(pid=200)

    second = successor(first, boot="another")

    assert second.gating.counters.restarts == 1
    assert not second.books.services
    assert not len(second.register.channels.leftovers)


def test_another_driver_keeps_the_counters_only(first):
    first.offline(pid=300)

    second = successor(first, driver="570.1")
    second.run(10_000)

    assert not second.gate.foreign_enabled


def test_a_crash_between_two_lives_without_clients_back_lets_no_gpu_of_a_service_go(first):
    """A second valved that dies before the service's processes are back must not hide them from the third."""
    service = first.service_of(first.online(pid=200))
    second = successor(first)

    third = successor(second)

    assert {process.pid for process in third.gating.online[service].away} == {200}
    assert third.gate.is_gated(0)


def test_a_crash_between_two_lives_without_clients_back_loses_no_leftover(first):
    """A third valved must still know what the first left off."""
    first.offline(pid=300)
    second = successor(first)

    third = successor(second)

    assert len(third.register.channels.leftovers) == 1


def test_what_was_set_while_running_outlives_a_restart(first):
    first.node.set_policy(Mode.OBSERVE, {"floor_ns": 7_000_000}, 0)
    first.handover.save()

    saved, _ = state.load(first.folder / "state.json")

    assert saved.policy.mode is Mode.OBSERVE
    assert saved.policy.cooldown[1] == 7_000_000


def test_a_setting_that_was_answered_is_never_lost_to_a_crash(first):
    """`valve mode off` that comes back as harvest lets offline work run where an operator wants none."""
    first.node.set_policy(Mode.OFF, {"floor_ns": 7_000_000}, 0)

    saved, problem = state.load(first.folder / "state.json")

    assert (saved.policy.mode, saved.policy.cooldown[1], problem) == (Mode.OFF, 7_000_000, "")


def test_the_state_is_written_once_for_a_burst_of_changes(first, monkeypatch):
    writes = []
    monkeypatch.setattr(state, "save", lambda path, snapshot, encoder: writes.append(snapshot))
    for _ in range(20):
        first.offline()

    first.run(100)

    assert len(writes) == 1
    assert len(writes[0].clients) == 20


def test_what_a_predecessor_left_is_never_forgotten_because_it_cannot_be_opened_now(first):
    first.offline()
    first.handover.save()
    with left(0), pytest.raises(OSError, match="Too many open files"):
        state.load(first.folder / "state.json")

    saved, _ = state.load(first.folder / "state.json")
    assert len(saved.clients) == 1


def test_a_full_disk_does_not_stop_the_gate(first, monkeypatch):
    def full(path, snapshot, encoder):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(state, "save", full)
    first.offline()

    first.handover.save()

    assert "No space" in first.events(EventKind.NOTED)[-1].reason


def test_the_learnt_cooldown_survives(first):
    first.offline()
    online = first.online()
    for _ in range(3):
        first.work(online, ms=5)
        first.run(15)
    first.gate.launch(online)
    first.run(300)
    before_ns = first.state(online).cooldown.cooldown_ns

    second = successor(first)

    assert second.gating.online[first.service_of(online)].cooldown.cooldown_ns == pytest.approx(before_ns, rel=0.01)
    assert before_ns > 25_000_000


def test_the_run_folder_belongs_to_one(tmp_path):
    one, other = state.RunFolder(tmp_path), state.RunFolder(tmp_path)
    one.take(replace=False)
    one.sign()

    with pytest.raises(state.AlreadyRunning, match="already runs") as caught:
        other.take(replace=False)

    assert "--replace" in caught.value.next_step
    one.release()
    other.take(replace=False)
    other.release()


def test_a_successor_that_waits_is_seen_and_comes_next(tmp_path):
    """SIGTERM of a daemon that somebody waits for is a hand-over: in a rolling upgrade nobody sends anything else."""
    present, next_, third = (state.RunFolder(tmp_path) for _ in range(3))
    assert present.queue()  # nobody was before it
    assert not state.has_successor(tmp_path)
    assert not next_.queue()
    assert not third.queue()

    assert state.has_successor(tmp_path)
    present.release()
    assert not third.queue()
    assert next_.queue()
    assert not state.has_successor(tmp_path)
    assert not third.queue()

    third.release()
    next_.release()


def test_one_who_waits_counts_as_ready(tmp_path):
    """The surge of a DaemonSet tells the old pod to leave only when the new one is ready."""
    (port,) = free_ports(1)
    present, next_ = state.RunFolder(tmp_path), state.RunFolder(tmp_path)
    present.take(replace=False)

    async def body():
        waiting = asyncio.ensure_future(turn.wait_for_turn(next_, "127.0.0.1", port))
        while not state.has_successor(tmp_path):
            await asyncio.sleep(0.001)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /metrics HTTP/1.1\r\n\r\n")
        answer = await reader.read()
        writer.close()
        assert not waiting.done()
        present.release()
        await waiting
        return answer

    assert asyncio.run(asyncio.wait_for(body(), 200)).startswith(b"HTTP/1.1 200 OK")
    next_.release()


def test_whom_a_predecessor_froze_is_let_go(first):
    """A process stopped by signal stays stopped for ever if the one who stopped it is killed."""
    first.offline(pid=300)
    online = first.online(pid=200)
    first.run(100)
    first.gate.launch(online)
    first.gate.fail(gpu=0, service=first.service_of(online))
    first.run(1)

    second = successor(first)
    second.run(0)

    assert first.signals == [(300, "SIGSTOP")]
    assert second.signals == [(300, "SIGCONT")]


def test_a_service_keeps_its_gpus_until_who_came_back_has_told_of_its_channels(first):
    """HELLO and channels are two messages: a look between them must not open the GPU of a busy service."""
    online = first.online(pid=200)
    first.offline(pid=300)
    second = successor(first)
    second.run(3000)  # nobody comes back in time: the patience is over
    assert second.gate.is_gated(0)

    client = second.hello(200, wanted=Role.ONLINE).client
    second.handover.settle(patience_over=True)

    assert second.gating.online[first.service_of(online)].gpus == {0}

    second.add_channel(client, gpu=0, h_client=0xC1D00000 + client)
    second.run(2000)
    second.handover.settle(patience_over=True)

    assert second.gating.online[first.service_of(online)].gpus == {0}
    assert not second.books.services[first.service_of(online)].kept_gpus


# A state file, or an operator, without sense


def rewritten(first, change):
    """What the state file says, after a hand (or another version) changed it."""
    first.handover.save()
    path = first.folder / "state.json"
    said = json.loads(path.read_bytes())
    change(said)
    path.write_text(json.dumps(said))
    second = World(first.folder, gate=FakeGate(first.clock, 2), clock=first.clock, processes=first.processes)
    return second, second


def other_role(said):
    said["services"][0]["role"] = 9


def other_client(said):
    said["clients"][0]["role"] = 9


def bad_cooldown(said):
    said["policy"]["cooldown"] = [1, 2, 3, 0.5, -1]


def bad_hits(said):
    said["services"][-1]["told"] = [[1, 2, 9, 3, 4, []]]


@pytest.mark.parametrize("change", [other_role, other_client, bad_cooldown, bad_hits])
def test_a_state_file_that_makes_no_sense_never_keeps_valved_from_starting(first, change):
    first.offline(name="batch")
    online = first.online(name="chat")

    second, daemon = rewritten(first, change)
    take_over(daemon, second.config, first.folder)

    assert first.service_of(online) in second.gating.online, "what makes sense is taken over all the same"
    assert any("are unreadable" in event.reason for event in second.events(EventKind.NOTED))
    assert (first.folder / "state.json.bad").exists()


def test_a_state_that_nobody_could_read_back_never_replaces_one_that_can_be_read(first):
    first.handover.save()
    before = (first.folder / "state.json").read_bytes()
    first.handover.policy = state.SavedPolicy(cooldown=(1, 1, 1, math.inf, 1))

    first.handover.save()

    assert (first.folder / "state.json").read_bytes() == before
    assert any("state file" in event.reason for event in first.events(EventKind.NOTED))


@pytest.mark.parametrize("factor", [math.inf, math.nan, 1e9])
def test_a_policy_without_sense_is_never_accepted(first, factor):
    with pytest.raises(InvalidRequest):
        first.node.set_policy(None, {"factor": factor}, 0)

    assert first.online()


def test_a_claim_without_a_gate_never_stays_in_the_books(first):
    first.processes.add(700)
    put = first.gate.put_service

    def full(service, gpus):
        raise OSError("no slot")

    first.gate.put_service = full
    with pytest.raises(OSError, match="no slot"):
        first.node.launch(700, 7000, Role.ONLINE, "chat")

    assert not first.books.claims
    assert not first.books.services
    assert not first.gating.online
    first.gate.put_service = put
    assert first.node.launch(700, 7000, Role.ONLINE, "chat")
    assert first.gating.online


def test_a_mode_on_the_command_line_never_loses_to_one_that_was_set_before(first):
    first.node.set_policy(Mode.HARVEST, {}, 0)

    second, daemon = rewritten(first, lambda said: None)
    take_over(daemon, second.config, first.folder, Mode.OFF)

    assert second.brake.mode is Mode.OFF
    assert second.handover.policy.mode is None


def test_a_mode_that_was_set_outlives_a_restart_without_a_flag(first):
    first.node.set_policy(Mode.OBSERVE, {}, 0)

    second, daemon = rewritten(first, lambda said: None)
    take_over(daemon, second.config, first.folder)

    assert second.brake.mode is Mode.OBSERVE


def test_a_drain_is_never_ended_by_a_crash(first):
    first.node.drain("me", stop=False)

    second, daemon = rewritten(first, lambda said: None)
    take_over(daemon, second.config, first.folder)
    assert second.brake.is_draining

    second.node.resume()
    third, daemon = rewritten(second, lambda said: None)
    take_over(daemon, third.config, first.folder)
    assert not third.brake.is_draining


def test_the_state_file_never_grows_with_services_that_ended(first, monkeypatch):
    online = first.online()
    service = first.service_of(online)
    reservation = ReservationState.__new__(ReservationState)
    saved = state.SavedMemory(reservations={service: reservation, ServiceId(99): reservation})
    monkeypatch.setattr(first.kv.report, "saved", lambda: saved)

    assert list(first.handover.snapshot().memory.reservations) == [service]


def test_an_engine_that_loses_the_end_of_a_request_never_ends_the_harvest(first):
    first.offline()
    online = first.online()
    hook = first.hook(online)
    first.gate.hint(hook, 5, 4)
    first.gate.launch(online)
    first.run(5)
    first.gate.finish(online)
    for _ in range(70 * 4):
        first.run(250)
        first.gate.hint(hook, 5, 4)
        first.beat_all()
    assert first.gating.counters.wakes
    assert any("does not serve" in event.reason for event in first.events(EventKind.NOTED))
