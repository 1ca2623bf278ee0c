"""The busy-to-idle edge and its accounts, on virtual time over a fake gate."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fake_gate import STOP_NS
from node_world import MS, SECOND

from valved.abi.link import Feature
from valved.gate.online import MOST_LEFT
from valved.machine.ports import ClientView
from valved.machine.stamps import Stamp, StampKind
from valved.model.events import EventKind
from valved.model.ids import GpuIndex, Mode, Role
from valved.policy.wake import WakeReason
from valved.state.registry import GUARD_SERVICE


def test_a_service_holds_from_birth_so_that_no_launch_precedes_its_gate(world):
    offline = world.offline()

    online = world.online()

    assert world.state(online).holding
    assert world.gate.clients[offline].channels.keys() == world.gate.off.keys()


def test_offline_runs_again_one_cooldown_after_the_last_work(world):
    world.offline()
    online = world.online()
    world.work(online, ms=3)
    cooldown_ms = world.state(online).cooldown.cooldown_ns / MS

    world.run(cooldown_ms - 1)
    still_off = bool(world.gate.off)
    world.run(2)

    assert still_off
    assert not world.gate.off


def test_the_first_launch_afterwards_stops_offline_and_is_one_preemption(world):
    world.offline()
    online = world.online()
    world.run(100)

    rang = world.gate.launch(online)
    world.run(1)

    assert rang
    assert world.gate.off
    assert world.state(online).book.preemptions == 1
    assert world.state(online).book.delay_ns == STOP_NS


def test_a_preemption_over_two_gpus_is_counted_once(world):
    world.offline(gpus=(0, 1))
    online = world.online(gpus=(0, 1))
    world.run(100)

    world.gate.launch(online)
    world.run(1)

    assert world.state(online).book.preemptions == 1
    assert [account.gates for account in world.gating.gpus.values()] == [1, 1]
    assert world.state(online).book.delay_ns == STOP_NS


def test_launches_inside_the_hold_neither_ring_nor_count(world):
    world.offline()
    online = world.online()
    world.run(100)
    world.work(online, ms=5)

    rang = [world.work(online, ms=5) for _ in range(10)]

    assert not any(rang)
    assert world.state(online).book.preemptions == 1


def test_a_gap_inside_the_hold_stretches_the_cooldown(world):
    world.offline()
    online = world.online()
    world.work(online, ms=5)
    world.run(15)
    world.work(online, ms=5)
    world.run(20)

    assert world.state(online).cooldown.cooldown_ns == pytest.approx(30 * MS, rel=0.01)


def test_idle_time_between_requests_teaches_nothing(world):
    world.offline()
    online = world.online()
    for _ in range(5):
        world.work(online, ms=5)
        world.run(300)

    assert world.state(online).cooldown.cooldown_ns <= 20 * MS


def test_a_launch_that_slips_into_a_wake_refuses_it_and_the_service_holds_on(world):
    world.offline()
    online = world.online()
    world.gate.between = lambda: world.gate.launch(online)

    world.run(25)

    assert world.gating.counters.wake_refused >= 1
    assert world.gate.off
    world.gate.between = lambda: None
    world.gate.finish(online)
    world.run(100)

    assert not world.gate.off


def test_no_wake_and_no_timer_while_no_offline_work_shares_the_gpus(world):
    """Else every request would ring for nothing, and an idle node would not sleep."""
    online = world.online()
    world.work(online, ms=5)
    world.run(1000)

    assert world.state(online).holding
    assert world.state(online).decision.reason is WakeReason.NO_OFFLINE
    assert not world.gate.clients[online].watch
    assert world.clock.waiting == 0


def test_where_idleness_is_measured_it_is_seen_without_offline_work(world):
    """Else a GPU would count as busy until offline work came, and none would come to a busy GPU."""
    world.gating.permits.ask_idleness("placement", True)
    online = world.online()
    world.work(online, ms=5)
    world.run(1000)

    assert not world.state(online).holding
    world.gate.launch(online)
    world.run(1)
    assert world.state(online).holding
    assert world.state(online).book.preemptions == 0  # nobody was stopped


def test_offline_work_that_arrives_is_let_in_after_the_cooldown(world):
    online = world.online()
    world.run(1000)

    world.offline()
    world.run(100)

    assert not world.state(online).holding
    assert not world.gate.off


def test_offline_work_on_another_gpu_does_not_concern_the_service(world):
    online = world.online(gpus=(0,))

    world.offline(gpus=(1,))
    world.run(1000)

    assert world.state(online).holding
    assert not world.gate.off


def test_two_services_on_one_gpu_both_have_to_let_go(world):
    world.offline()
    first, second = world.online(name="one"), world.online(name="two")
    world.run(100)
    world.gate.launch(first)
    world.run(1)
    world.gate.launch(second)
    world.run(1)

    world.gate.finish(first)
    world.run(100)
    one_is_not_enough = bool(world.gate.off)
    world.gate.finish(second)
    world.run(100)

    assert one_is_not_enough
    assert not world.gate.off
    assert [world.state(c).book.preemptions for c in (first, second)] == [1, 0]


def test_the_watcher_never_watches_where_no_proof_is_wanted(world):
    online = world.online()
    world.run(100)
    alone = world.gate.clients[online].watch
    offline = world.offline()
    world.run(1)
    beside = world.gate.clients[online].watch

    world.register.leave(offline, "done")
    world.run(1)

    assert (alone, beside, world.gate.clients[online].watch) == (False, True, False)


def test_a_silent_watcher_holds_the_service(world):
    world.offline()
    online = world.online()
    world.gate.launch(online)

    world.run(10_000)

    assert world.state(online).holding
    assert world.state(online).decision.reason is WakeReason.WATCHER_DEAD


def test_a_process_that_never_launched_has_no_watcher_to_be_silent(world):
    """An engine's front end loads the driver and makes no context; one request runs for longer than the lease."""
    world.offline()
    engine = world.online(pid=200)
    world.online(pid=201, parent=200, gpus=())
    hook = world.hook(engine)
    world.gate.hint(hook, 1, 0)
    for _ in range(10):
        world.work(engine, ms=500)
        world.gate.hint(hook, 1, 0)
    world.gate.hint(hook, 1, 1)

    world.run(3_000)

    assert not world.gate.off


def test_an_online_process_that_has_not_taken_its_region_proves_nothing(world):
    """Regression: one that ran before this valved launches all the while, and no word of it was seen yet."""
    world.offline()
    online = world.online()
    world.gate.clients[online].view = ClientView.untouched()

    world.run(10_000)

    assert world.gate.off
    assert world.state(online).decision.reason is WakeReason.BUSY
    world.gate.clients[online].view = ClientView.untouched(is_filled=True)
    world.run(1_000)
    assert not world.gate.off


def test_who_only_looks_takes_nothing_from_what_the_cooldown_learns(world):
    """Regression: each `valve status` took the gaps of the moment with it."""
    world.offline()
    online = world.online()
    world.work(online, ms=5)
    world.run(15)
    world.work(online, ms=5)
    world.reporter.status()
    world.run(20)

    assert world.state(online).cooldown.cooldown_ns == pytest.approx(30 * MS, rel=0.01)


def test_the_first_request_that_an_engine_ever_tells_of_counts_its_preemption(world):
    """Regression: launched before its first report, behind a wake that no report led to, it went free."""
    world.offline()
    online = world.online()
    world.run(100)
    assert not world.gate.off

    world.gate.launch(online)
    world.run(1)
    world.gate.hint(online, 1, 0)
    world.run(30)
    world.gate.finish(online)
    world.gate.hint(online, 1, 1)
    world.run(30)

    assert world.state(online).request_figures() == (1, 1, [0, 1, 0, 0, 0, 0, 0, 0])


def test_what_was_stopped_before_a_process_told_of_requests_is_nobodys_after_the_next_wake(world):
    world.offline()
    online = world.online()
    for _ in range(3):  # warm-ups
        world.run(100)
        world.work(online, ms=2)
    world.run(100)
    world.gate.hint(online, 1, 0)
    world.gate.launch(online)
    world.run(30)
    world.gate.finish(online)
    world.gate.hint(online, 1, 1)
    world.run(30)

    assert world.state(online).book.preemptions == 4
    assert world.state(online).request_figures()[1:] == (1, [0, 1, 0, 0, 0, 0, 0, 0])


def test_zero_open_requests_wake_without_a_cooldown(world):
    world.offline()
    online = world.online()
    hook = world.hook(online)
    world.run(100)
    world.gate.hint(hook, 1, 0)
    world.work(online, ms=5)
    world.gate.hint(hook, 1, 1)

    world.run(4)

    assert not world.gate.off


def test_an_open_request_holds_through_a_stall_of_any_length(world):
    world.offline()
    online = world.online()
    hook = world.hook(online)
    world.gate.hint(hook, 1, 0)
    world.work(online, ms=5)
    for _ in range(20):
        world.run(500)
        world.gate.hint(hook, 1, 0)
        world.gate.beat(online)

    assert world.gate.off


def test_a_stale_report_of_open_requests_does_not_hold_for_ever(world):
    world.offline()
    online = world.online()
    hook = world.hook(online)
    world.gate.hint(hook, 1, 0)
    world.work(online, ms=5)
    for _ in range(8):
        world.run(500)
        world.gate.beat(online)

    assert not world.gate.off


def test_harvested_and_gated_time_add_up(world):
    world.offline()
    online = world.online()
    started_ns = world.clock.now_ns()
    for _ in range(10):
        world.work(online, ms=30)
        world.run(170)

    account = world.gating.gpus[0]
    account.advance(world.clock.now_ns())

    assert account.harvest_ns + account.gated_ns == world.clock.now_ns() - started_ns
    assert account.harvest_ns == pytest.approx(10 * 150 * MS, rel=0.1)


def test_an_offline_owner_is_credited_what_its_gpus_were_open(world):
    offline = world.offline(gpus=(0, 1))
    world.online(gpus=(0,))

    world.run(1000)

    got = world.register.channels.harvest.harvest_ns(world.service_of(offline), world.clock.now_ns())
    assert got == pytest.approx(2000 * MS, rel=0.03)


def test_a_lost_stamp_is_found_by_the_resync(world):
    """The native ring is bounded. The time of a hold that nobody booked would count as harvest."""
    world.offline()
    online = world.online()
    world.run(100)
    world.gate.launch(online)
    world.gate.stamps.clear()
    assert not world.state(online).holding

    world.gating.resync()

    assert world.state(online).holding


def test_no_lost_stamp_goes_untold(world):
    """Nobody could say why the books lack a stop."""
    world.gate.lost = 3
    world.gating.drain()
    world.gating.drain()

    assert world.gating.counters.stamps_lost == 3
    told = world.journal.recent(lambda event: "lost" in event.detail, 10)
    assert [event.detail["lost"] for event in told] == [3]


def test_a_late_stamp_of_a_finished_hold_changes_nothing(world):
    """A slow issuer may report after the wake that undid its work."""
    world.offline()
    online = world.online()
    world.run(100)
    late = Stamp(
        code=StampKind.GATE,
        service=world.service_of(online),
        client=online,
        gpu=0,
        epoch=world.gate.services[world.service_of(online)].epoch - 1,
        channels=1,
        status=0,
        launch_ns=world.clock.now_ns(),
        seen_ns=world.clock.now_ns(),
        ioctl_ns=world.clock.now_ns(),
        done_ns=world.clock.now_ns(),
    )
    world.gate.stamps.append(late)

    world.gating.drain()

    assert not world.state(online).holding


def test_observing_sees_when_online_is_busy_and_never_lets_offline_run(world):
    world.offline()
    world.brake.set_mode(Mode.OBSERVE, "test")
    online = world.online()
    world.beat_all()
    world.run(100)
    was_idle = not world.state(online).holding

    world.gate.launch(online)
    world.run(1)

    assert was_idle
    assert world.state(online).holding
    assert world.gate.off


def test_the_breaker_rests_a_service_that_is_delayed_beyond_its_budget(world):
    """Requests of 1 ms: 0.4 ms of delay each is a price nobody agreed to."""
    world.offline()
    online = world.online()
    hook = world.hook(online)
    count = 0
    while not world.events(EventKind.BREAKER) and count < 500:
        count += 1
        world.gate.hint(hook, count, count - 1)
        world.work(online, ms=1)
        world.gate.hint(hook, count, count)
        world.run(9)

    assert len(world.events(EventKind.BREAKER)) == 1
    world.run(60_000)
    assert world.gate.off
    world.beat_all()
    world.clock.advance(600 * SECOND)
    world.beat_all()
    world.run(5000)
    assert not world.gate.off


def test_gates_and_decisions_are_on_record_with_their_times(world):
    world.offline()
    online = world.online()
    world.run(100)
    world.gate.launch(online)
    world.run(1)

    gate = world.events(EventKind.GATE)[-1]

    assert gate.service == world.service_of(online)
    assert gate.detail["done_ns"] - gate.detail["launch_ns"] == STOP_NS
    world.run(300)

    assert [event.reason for event in world.events(EventKind.DECIDED)] == ["busy"]
    assert world.events(EventKind.WAKE)[0].reason == "cooldown-over"


def test_the_watcher_is_asked_at_the_ring_and_not_a_cooldown_later(world):
    """The cooldown runs from the proof of idleness: a proof that comes late is harvest lost after every request."""
    world.offline()
    online = world.online()
    world.run(100)
    cooldown_ms = world.state(online).cooldown.cooldown_ns / MS
    world.gate.launch(online)
    world.run(1)
    world.gate.finish(online)

    world.run(cooldown_ms + 2)

    assert not world.gate.off


def test_a_new_cooldown_is_never_kept_from_a_service_that_does_not_hold(world):
    """Its next hold may be over before anybody looks."""
    world.offline()
    online = world.online()
    world.run(100)
    assert not world.state(online).holding

    world.gating.settings.cooldown = replace(world.gating.settings.cooldown, floor_ns=100 * MS, start_ns=100 * MS)
    world.run(260)
    world.work(online, ms=1)
    world.run(90)
    before = dict(world.gate.off)
    world.run(20)

    assert before
    assert not world.gate.off


def test_a_guarded_gpu_stays_closed_whatever_its_service_says(world):
    """Somebody may work there whom nobody hears: the service's own wake opens nothing until the guard lets go."""
    offline = world.offline(gpus=(0, 1))
    world.gating.set_standing(GUARD_SERVICE, frozenset({GpuIndex(0)}))

    assert (world.gate.is_gated(0), world.gate.is_gated(1)) == (True, False)
    assert "the guard holds GPU 0" in world.node.status().services[0].state

    world.gating.set_standing(GUARD_SERVICE, frozenset({GpuIndex(1)}))

    assert (world.gate.is_gated(0), world.gate.is_gated(1)) == (False, True)

    world.gating.set_standing(GUARD_SERVICE, frozenset())

    assert not world.gate.is_gated(1)
    assert offline in world.books.clients


def test_the_books_of_a_service_never_grow_with_every_engine_that_ended(world):
    """Its figures go on."""
    root = world.processes.add(500)
    world.node.launch(root, 5000, Role.ONLINE, "chat")
    service = world.service_of(world.online(pid=root))
    for pid in range(1000, 1000 + MOST_LEFT + 10):
        hook = world.hello(world.processes.add(pid, parent=root), Role.HOOK, features=Feature.HINT).client
        world.gate.hint(hook, 2, 1)
        world.gating.online[service].hear(world.books.clients[hook], world.gate.view(hook))
        world.processes.end(pid)

    assert len(world.gating.online[service].left) <= MOST_LEFT
    assert world.gating.online[service].request_figures()[0] == MOST_LEFT + 10


def _counting_hook(world, pid, ended):
    hook = world.hello(pid, Role.HOOK, features=Feature.HINT).client
    world.gate.hint(hook, ended, ended)
    entry = world.books.clients[hook]
    world.gating.online[entry.service].hear(entry, world.gate.view(hook))
    return hook


def test_requests_of_an_engine_that_comes_back_are_never_counted_twice_because_others_ended(world):
    root = world.processes.add(500)
    world.node.launch(root, 5000, Role.ONLINE, "chat")
    service = world.service_of(world.online(pid=root))
    world.processes.add(900, parent=root)
    world.register.leave(_counting_hook(world, 900, 4), "its link broke")
    for pid in range(1000, 1000 + MOST_LEFT + 10):
        _counting_hook(world, world.processes.add(pid, parent=root), 1)
        world.processes.end(pid)

    _counting_hook(world, 900, 4)

    assert world.gating.online[service].request_figures()[0] == 4 + MOST_LEFT + 10


def test_what_one_of_two_engines_of_a_process_counted_is_never_lost_when_both_leave(world):
    chat = world.online(pid=500)
    hooks = [_counting_hook(world, 500, ended) for ended in (2, 1)]
    for hook in hooks:
        world.register.leave(hook, "its link broke")

    assert world.gating.online[world.service_of(chat)].request_figures()[0] == 3


def test_a_tick_that_fails_is_never_the_last(world, monkeypatch):
    """Nobody else reads the stamps of ordinary edges, or looks at who is busy."""
    world.offline()
    world.online()
    world.run(100)
    drain, looks = world.gate.drain_stamps, []

    def fails_once():
        looks.append(world.clock.now_ns())
        if len(looks) == 1:
            raise RuntimeError("a stamp that makes no sense")
        return drain()

    monkeypatch.setattr(world.gate, "drain_stamps", fails_once)
    with pytest.raises(RuntimeError, match="no sense"):
        world.clock.advance(SECOND)
    world.clock.advance(SECOND)

    assert len(looks) > 2


def test_a_stopped_job_never_names_each_of_a_hundred_services(world):
    for number in range(9):
        world.online(name=f"chat-{number}")
    world.offline(name="batch")

    (state,) = [service.state for service in world.node.status().services if service.name == "batch"]

    assert state == "stopped: chat-0, chat-1, chat-2 and 6 more hold GPU 0"
