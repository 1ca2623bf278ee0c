"""Who uses a card without Valve, on a machine without Kubernetes."""

from __future__ import annotations

import errno
from types import SimpleNamespace

import pytest
from node_world import World

from valved.clients.deaf import DEAF_NS, STANDS_NS
from valved.clients.untold import LOOKS_BEFORE_FREEZE, NO_ROOM, NO_SHIM
from valved.config import LadderTable
from valved.model.events import EventKind
from valved.model.ids import GpuIndex, Role
from valved.node.bystanders import LOOKS_BEFORE_ASKING, Bystanders
from valved.state.registry import GUARD_SERVICE


@pytest.fixture
def rig(tmp_path):
    world = World(tmp_path)
    gpus = world.gate.gpus()
    owners = world.register.channels.leftovers.expected
    waits = world.register.admission.waits_for_room
    guard = Bystanders(world.books, world.gating, world.processes, world.journal, gpus, world.ladder, owners, waits)

    def look(*pids, gpu=0):
        guard.look({info.uuid: dict.fromkeys(pids if info.index == gpu else (), 0) for info in gpus})

    def guarded():
        return [gpu for gpu in (0, 1) if GUARD_SERVICE in world.gating.gpus[GpuIndex(gpu)].holders]

    stands: set[int] = set()
    world.processes.is_stopped = stands.__contains__
    return SimpleNamespace(world=world, guard=guard, look=look, guarded=guarded, stands=stands)


def test_only_the_card_of_a_process_without_valve_is_closed_and_only_while_it_lives(rig):
    rig.world.processes.add(500, comm="python3")
    rig.look(500)
    assert rig.guarded() == [0]
    assert "process 500 (python3) uses the GPU without Valve" in rig.guard.reason(GpuIndex(0))
    rig.guard.look({})  # NVML does not answer: nothing changes
    assert rig.guarded() == [0]
    rig.world.processes.end(500)
    rig.look(500)  # still listed on its way out
    assert rig.guarded() == []


@pytest.mark.parametrize("role", [Role.ONLINE, Role.OFFLINE, None])
def test_no_process_that_dies_is_told_to_use_the_card_without_valve(rig, role):
    """It has lost its link, and the driver takes seconds to take it off the card."""
    rig.world.processes.add(500)
    if role is not None:
        rig.world.node.launch(500, rig.world.processes.start_time(500), role, "done")
    rig.world.processes.ending.add(500)

    for _ in range(LOOKS_BEFORE_FREEZE + 1):
        rig.look(500)

    assert rig.guarded() == []
    assert not rig.world.events(EventKind.GUARD) + rig.world.events(EventKind.FROZEN)


def test_no_file_is_read_of_a_process_whose_client_is_here(rig):
    """A node has hundreds of them, and a look comes every second."""
    here, asked = rig.world.books.clients[rig.world.online()].process.pid, []
    start_time = rig.world.processes.start_time
    rig.world.processes.start_time = lambda pid: asked.append(pid) or start_time(pid)
    rig.world.processes.add(501)
    rig.look(here, 501)
    assert here not in asked
    assert rig.guarded() == [0]


def test_no_process_that_cannot_be_looked_at_is_taken_for_one_that_has_ended(rig):
    """/proc of another user, on a machine that hides it (hidepid)."""

    def hidden(pid):
        raise PermissionError(1, "not permitted")

    rig.world.processes.start_time = hidden
    rig.look(500)

    assert rig.guarded() == [0]
    assert rig.guard.has_looked


def test_no_client_closes_its_own_card_because_it_hides_itself(rig):
    """It is not dumpable any more, on a machine with hidepid."""
    pids = [rig.world.books.clients[client].process.pid for client in (rig.world.online(), rig.world.offline())]

    def hidden(pid):
        raise PermissionError(1, "not permitted")

    rig.world.processes.start_time = hidden
    rig.look(*pids)

    assert rig.guarded() == []


def test_nobody_who_is_registered_or_comes_back_after_a_restart_closes_a_card(rig):
    online, offline = rig.world.online(), rig.world.offline()
    pids = [rig.world.books.clients[client].process.pid for client in (online, offline)]
    rig.look(*pids)
    assert rig.guarded() == []


def test_a_service_that_valve_run_started_is_never_said_to_be_without_valve(rig):
    """It is not connected yet after a restart of valved, or its program is linked statically."""
    rig.world.processes.add(600)
    rig.world.node.launch(600, 6000, Role.ONLINE, "chat")
    rig.look(600)

    assert rig.guarded() == [0]
    assert rig.guard.reason(GpuIndex(0)).endswith("was started with Valve and is not connected to valved")


def test_an_offline_job_without_the_shim_never_runs_on(rig):
    """Its parent was claimed; the program itself is linked statically, say."""
    root = rig.world.processes.add(600)
    rig.world.node.launch(600, 6000, Role.OFFLINE, "batch")
    rig.world.processes.add(601, parent=root, comm="static")
    for _ in range(LOOKS_BEFORE_FREEZE - 1):
        rig.look(601)
    assert rig.world.signals == []
    assert rig.guarded() == []
    rig.look(601)
    assert (601, "SIGSTOP") in rig.world.signals


def test_a_job_that_valved_refused_for_want_of_room_never_stands_for_good(rig):
    """Its shim asks again, and cannot while it stands."""
    root = rig.world.processes.add(600)
    rig.world.node.launch(600, 6000, Role.OFFLINE, "batch")
    rig.world.gate.create_error = OSError(errno.EMFILE, "too many")
    rig.world.hello(600)
    rig.world.processes.add(601, parent=root, comm="static")
    for _ in range(LOOKS_BEFORE_ASKING):
        rig.look(600, 601)

    assert [(pid, word) for pid, word in rig.world.signals if word == "SIGCONT"] == [(600, "SIGCONT")]

    for _ in range(LOOKS_BEFORE_FREEZE):
        rig.look(600, 601)
    assert (600, "SIGSTOP") in rig.world.signals[-2:], "it did not register"


def test_a_job_for_which_valved_had_no_room_is_never_told_to_run_without_the_shim(rig):
    root = rig.world.processes.add(600)
    rig.world.node.launch(600, 6000, Role.OFFLINE, "batch")
    rig.world.gate.create_error = OSError(errno.EMFILE, "too many")
    rig.world.hello(600)
    rig.world.processes.add(601, parent=root, comm="static")
    for _ in range(LOOKS_BEFORE_FREEZE):
        rig.look(600, 601)

    assert {one.detail["pid"]: one.reason.partition("GPU ")[2] for one in rig.world.events(EventKind.FROZEN)} == {
        600: NO_ROOM,
        601: NO_SHIM,
    }


def test_a_job_that_waits_for_room_never_stands_for_good_because_valved_is_restarted(rig):
    """With more descriptors, say. The next valved has not refused it, and it cannot ask while it stands."""
    for pid in (600, 601):
        rig.world.processes.add(pid)
        rig.world.node.launch(pid, rig.world.processes.start_time(pid), Role.OFFLINE, "batch")
    rig.world.gate.create_error = OSError(errno.EMFILE, "too many")
    rig.world.hello(600)
    for _ in range(LOOKS_BEFORE_FREEZE):
        rig.look(600, 601)

    assert sorted(rig.world.signals[-2:]) == [(600, "SIGSTOP"), (601, "SIGSTOP")]
    assert [process.pid for process in rig.world.ladder.to_release()] == [600]


def test_a_job_that_valved_turned_away_unheard_never_stands_for_good(rig):
    """It may be any that valved had no descriptor to look at."""
    rig.world.processes.add(600)
    rig.world.node.launch(600, 6000, Role.OFFLINE, "batch")
    rig.world.register.admission.deaf.not_taken()
    rig.world.run(DEAF_NS / 1e6)
    for _ in range(LOOKS_BEFORE_ASKING):
        rig.look(600)

    assert rig.world.signals[-1] == (600, "SIGCONT")

    rig.world.run(STANDS_NS / 1e6)
    for _ in range(LOOKS_BEFORE_ASKING):
        rig.look(600)
    assert rig.world.signals[-1] == (600, "SIGSTOP"), "it never asked"


def test_a_process_of_which_only_the_hook_is_connected_is_never_taken_for_one_that_can_be_heard(rig):
    online = rig.world.online()
    pid = rig.world.books.clients[online].process.pid
    rig.world.hook(online)
    rig.look(pid)
    assert rig.guarded() == []
    rig.world.register.leave(online, "its shim is gone")
    rig.look(pid)
    assert rig.guarded() == [0]


def test_cards_that_do_not_answer_never_count_as_looked_at(rig):
    """After a start offline work waits until it is known who uses the cards."""
    rig.guard.look({})
    assert not rig.guard.has_looked

    rig.look()
    assert rig.guard.has_looked


def test_a_process_that_nobody_hears_is_never_passed_over_because_nvml_says_the_same_as_before(rig):
    here = rig.world.online()
    process = rig.world.books.clients[here].process
    for _ in range(2):
        rig.look(process.pid)
    assert rig.guarded() == []
    rig.world.register.leave(here, "link closed")  # and computes on
    rig.look(process.pid)
    assert rig.guarded() == [0]


def test_no_card_stays_closed_because_one_look_failed_half_way(rig, monkeypatch):
    """The next look sees the same and does what was left undone."""
    rig.world.processes.add(500)
    rig.look(500)
    calls = []

    def fail(*_):
        calls.append(1)
        raise OSError("no memory")

    with monkeypatch.context() as patched:
        patched.setattr(type(rig.world.gating), "set_standing", fail)
        with pytest.raises(OSError, match="no memory"):
            rig.look()
    assert calls

    rig.look()

    assert rig.guarded() == []


def many(rig, *pids, gpu=0, looks=LOOKS_BEFORE_FREEZE):
    for _ in range(looks):
        rig.look(*pids, gpu=gpu)


def pid_of(rig, client):
    return rig.world.books.clients[client].process.pid


def test_an_offline_job_whose_channels_are_in_no_book_never_runs_on(rig):
    """It is registered, and its CUDA went past the shim: no gate stops it."""
    told, hidden = rig.world.offline(), rig.world.offline(gpus=())
    many(rig, pid_of(rig, told), pid_of(rig, hidden), looks=LOOKS_BEFORE_FREEZE - 1)
    assert rig.world.signals == []

    rig.look(pid_of(rig, told), pid_of(rig, hidden))

    assert rig.world.signals == [(pid_of(rig, hidden), "SIGSTOP")]
    assert rig.guarded() == []
    [event] = rig.world.events(EventKind.FROZEN)
    assert event.reason.endswith("uses a GPU by channels of which valved was not told")


def test_a_job_that_tells_of_one_card_never_runs_unseen_on_another(rig):
    told = rig.world.offline(gpus=(0,))
    many(rig, pid_of(rig, told), gpu=1)
    assert (pid_of(rig, told), "SIGSTOP") in rig.world.signals


def test_a_job_is_never_stopped_for_a_moment_between_its_channel_and_the_word_of_it(rig):
    job = rig.world.offline(gpus=())
    many(rig, pid_of(rig, job), looks=LOOKS_BEFORE_FREEZE - 1)
    rig.world.add_channel(job, h_client=0xC1D00077)
    many(rig, pid_of(rig, job))
    assert rig.world.signals == []


def test_a_job_that_stands_in_a_debugger_is_never_taken_for_one_that_runs_unseen(rig):
    job = rig.world.offline(gpus=())
    rig.stands.add(pid_of(rig, job))
    many(rig, pid_of(rig, job), looks=3 * LOOKS_BEFORE_FREEZE)
    assert rig.world.signals == []

    rig.stands.clear()
    many(rig, pid_of(rig, job))
    assert rig.world.signals == [(pid_of(rig, job), "SIGSTOP")]


def test_a_job_whose_proof_was_late_never_stands_for_good(rig):
    job = rig.world.offline(gpus=())
    many(rig, pid_of(rig, job))
    rig.world.add_channel(job, h_client=0xC1D00077)
    rig.look(pid_of(rig, job))

    assert rig.world.signals == [(pid_of(rig, job), "SIGSTOP"), (pid_of(rig, job), "SIGCONT")]
    many(rig, pid_of(rig, job))
    assert len(rig.world.signals) == 2


def test_a_job_that_valved_may_not_freeze_is_never_made_to_go_on(rig):
    """Its user may have stopped it."""
    rig.world.ladder._settings = LadderTable(freeze=False)
    job = rig.world.offline(gpus=())
    many(rig, pid_of(rig, job))
    rig.world.add_channel(job, h_client=0xC1D00077)
    rig.look(pid_of(rig, job))

    assert rig.world.signals == []
    assert not rig.world.events(EventKind.THAWED)


def test_threads_of_a_job_that_was_frozen_are_never_read_each_second(rig):
    """How many it has is its choice."""
    job, asked = rig.world.offline(gpus=()), []
    rig.world.processes.is_stopped = lambda pid: bool(asked.append(pid))
    many(rig, pid_of(rig, job), looks=3 * LOOKS_BEFORE_FREEZE)

    assert (pid_of(rig, job), "SIGSTOP") in rig.world.signals
    assert len(asked) == LOOKS_BEFORE_FREEZE


def test_no_card_is_harvested_beside_a_service_whose_channels_are_in_no_book(rig):
    """Its launches ring, and stop nobody: its gate domain lacks this card."""
    service = rig.world.online(gpus=())
    rig.look(pid_of(rig, service))
    assert rig.guarded() == []
    rig.look(pid_of(rig, service))

    assert rig.guarded() == [0]
    assert rig.guard.reason(GpuIndex(0)).endswith("uses the GPU by channels of which valved was not told")
    rig.world.add_channel(service, h_client=0xC1D00077)
    rig.look(pid_of(rig, service))
    assert rig.guarded() == []
