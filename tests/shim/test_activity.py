"""Busy and idle: the doorbell rings once per gate epoch, and idleness is claimed only where it was proven."""

from __future__ import annotations

import os
import subprocess
from itertools import count

import pytest
from fake_daemon import OFFLINE, ONLINE, until

ASLEEP, WATCHING, IDLE, CAPTURE, NO_CONTEXT, ERROR = range(6)
NOT_READY, ILLEGAL_ADDRESS = 600, 700


def prove_idle(client):
    """The word for busy falls first, and a launch that is counted before the state says so ends no gap."""
    client.control.watch = 1
    until(lambda: not client.region.busy and client.region.watcher_state == IDLE, "proven idle")


def test_an_online_process_is_born_busy(world):
    _, client = world.online()

    until(lambda: client.region.magic, "the region is filled")

    assert (client.region.busy, client.region.idle_ns) == (1, 0)


def test_a_closed_gate_hears_nothing(world):
    puppet, client = world.online()

    client.gate(2)
    puppet.launch(10)

    assert (client.bells(), client.region.rings) == (0, 0)


def test_an_open_gate_hears_one_bell_per_epoch(world):
    puppet, client = world.online()

    for epoch in (1, 3, 5):
        client.gate(epoch)
        puppet.launch(10)

        assert client.bells() == 1
        assert (epoch, 1) == (client.region.rung_epoch, client.region.busy)
    assert client.region.rings == 3


def test_many_threads_ring_one_bell(world):
    puppet, client = world.online()

    client.gate(1)
    puppet.launch_in_threads(8, 50)

    assert (client.bells(), client.region.rings) == (1, 1)


def test_the_ringing_launch_is_stamped_before_it_is_made(world):
    puppet, client = world.online()
    before = client.region.launch_ns

    client.gate(1)
    puppet.launch(1)

    assert client.region.launch_ns > before


def test_idle_is_claimed_when_every_event_is_done(world):
    puppet, client = world.online()

    puppet.launch(3)
    prove_idle(client)

    assert client.region.idle_submitted == 3
    assert client.region.idle_ns
    until(lambda: client.region.idle_seq % 2 == 0, "no beat is under way")


def test_work_that_still_runs_keeps_the_process_busy(world):
    puppet, client = world.online()

    puppet.stub_answer(NOT_READY)
    puppet.launch(1)
    client.control.watch = 1
    until(lambda: puppet.stub("queries") > 20, "the watcher asked often")

    assert (client.region.busy, client.region.idle_ns) == (1, 0)
    puppet.stub_answer(0)
    prove_idle(client)


def test_a_probe_that_fails_keeps_the_process_busy(world):
    puppet, client = world.online()

    puppet.stub_answer(0, ILLEGAL_ADDRESS)
    client.control.watch = 1
    until(lambda: client.region.watcher_state == ERROR, "the failure is shown")

    assert (client.region.busy, client.region.idle_ns) == (1, 0)


def test_a_process_without_a_known_context_stays_busy(world):
    daemon = world.daemon(ONLINE)
    puppet = world.puppet()
    puppet.load()
    puppet.cu("cuInit", 0)
    puppet.launch(1)
    client = daemon.client()

    client.control.watch = 1

    until(lambda: client.region.magic, "registered")
    assert (client.region.busy, client.region.idle_ns) == (1, 0)
    puppet.cu_out("cuCtxCreate_v2", 0, 0)
    prove_idle(client)


def test_a_destroyed_context_is_asked_no_more(world):
    puppet, client = world.online()
    _, context = puppet.cu_out("cuCtxCreate_v2", 0, 0)
    prove_idle(client)

    puppet.cu("cuCtxDestroy_v2", context)
    puppet.cu("cuDevicePrimaryCtxRelease_v2", 0)
    puppet.launch(1)

    until(lambda: client.region.watcher_state == NO_CONTEXT, "no context is left to prove anything with")


def test_a_detached_context_is_never_asked(world):
    """cuCtxDetach ends a context as cuCtxDestroy does, unless somebody attached to it."""
    puppet, client = world.online()
    _, context = puppet.cu_out("cuCtxCreate_v2", 0, 0)
    puppet.cu_out("cuCtxAttach", 0)
    puppet.cu("cuDevicePrimaryCtxRelease_v2", 0)
    prove_idle(client)

    puppet.cu("cuCtxDetach", context)
    puppet.launch(1)
    until(lambda: client.region.idle_submitted == 1, "one user is left: it can still be asked")
    puppet.cu("cuCtxDetach", context)
    puppet.launch(1)

    until(lambda: client.region.watcher_state == NO_CONTEXT, "no context is left to prove anything with")


def test_an_event_never_outlives_the_context_that_it_may_have_belonged_to(world):
    """Another thread retains the primary context while it goes: the same address, perhaps not the same context."""
    puppet, client = world.online()
    prove_idle(client)
    puppet.stub_shared(1)

    puppet.cu("cuDevicePrimaryCtxRelease_v2", 0)
    puppet.launch(1)

    until(lambda: client.region.idle_submitted == 1, "proven again")
    assert puppet.stub("events") == 2


def test_a_context_that_the_driver_sits_on_never_delays_another_one(world):
    puppet, client = world.online()
    puppet.cu_out("cuDevicePrimaryCtxRetain", 1)
    puppet.stub_block(0x1000)
    client.control.watch = 1
    until(lambda: puppet.stub("sits") == 1, "the watcher's record does not come back")

    puppet.cu_in_background("cuStreamBeginCapture_v2", 0x10, 0)
    until(lambda: client.region.capture_depth == 1, "a capture where the record is under way")
    puppet.cu_in_background("cuStreamBeginCapture_v2", 0x11, 0)
    until(lambda: puppet.stub("captures") == 1, "one on the other device waits for nobody")
    assert client.region.capture_depth == 2

    puppet.stub_block(0)
    until(lambda: puppet.stub("captures") == 2, "and no capture began while its context was asked")


def test_a_process_never_waits_for_the_watcher_to_end(world):
    puppet, client = world.online()
    puppet.stub_block(0x1000)
    client.control.watch = 1
    until(lambda: puppet.stub("sits") == 1, "the watcher's record does not come back")

    puppet.process.stdin.close()

    until(lambda: puppet.process.poll() is not None, "it has ended")
    assert puppet.process.returncode == 0


def test_nothing_is_probed_while_a_capture_is_open(world):
    """The stub fails such a probe, as the driver would and would also invalidate the capture."""
    puppet, client = world.online()

    puppet.cu("cuStreamBeginCapture_v2", 1, 0)
    client.control.watch = 1
    until(lambda: client.region.watcher_state == CAPTURE, "the capture is seen")

    assert (client.region.capture_depth, puppet.stub("records")) == (1, 0)
    puppet.end_capture(1)
    prove_idle(client)
    assert client.region.capture_depth == 0


def test_a_capture_that_did_not_begin_does_not_count(world):
    puppet, client = world.online()

    assert puppet.cu("cuStreamBeginCapture_v2", 0, 0) != 0

    assert client.region.capture_depth == 0
    prove_idle(client)


def test_a_capture_begun_by_a_driver_pointer_is_seen_too(world):
    puppet, client = world.online()

    pointer = puppet.getproc("cuStreamBeginCapture", 10010)[1]
    puppet.call(pointer, 1, 0)

    assert client.region.capture_depth == 1


def test_nothing_is_probed_once_a_capture_may_have_begun_by_a_call_that_is_newer_than_we_are(world):
    puppet, client = world.online()
    pointer = puppet.getproc("cuStreamBeginSomethingNew", 14000)[1]
    prove_idle(client)  # who only asked for it, as the runtime does, has begun none
    records = puppet.stub("records")

    puppet.call(pointer, 1, 0)
    puppet.launch(1)

    until(lambda: client.region.watcher_state == CAPTURE, "it may be open")
    assert (puppet.stub("internal"), puppet.stub("records")) == (1, records)


def test_a_gap_spans_from_proven_idle_to_the_next_submit(world):
    """A watcher that sees the count before the thread has said that it is busy takes the time at which it looked."""
    puppet, client = world.online()
    epochs = count(1, 2)

    def ends_with_the_launch():
        prove_idle(client)
        idle_ns, gaps = client.region.idle_ns, client.region.gaps
        client.gate(next(epochs))
        puppet.launch(1)
        until(lambda: client.region.gaps == gaps + 1, "the gap is written")
        end_ns, gap_ns = client.gaps()[-1]
        assert idle_ns == end_ns - gap_ns
        return client.region.launch_ns == end_ns

    until(ends_with_the_launch, "a gap that ends with the launch")


def test_a_launch_behind_a_closed_gate_is_noticed_and_proven_again(world):
    """Nobody rings while the gate is closed: the watcher itself must see that the count moved."""
    puppet, client = world.online()
    prove_idle(client)

    puppet.launch(1)
    until(lambda: client.region.idle_submitted == 1, "the new work was proven done")

    assert (client.bells(), client.region.gaps) == (0, 1)


def test_the_watcher_sleeps_when_nobody_asks(world):
    puppet, client = world.online()
    prove_idle(client)

    client.control.watch = 0
    until(lambda: client.region.watcher_state == ASLEEP, "asleep")
    probes = client.region.probes
    puppet.launch(100)

    until(lambda: client.region.watcher_ns, "it still beats")
    assert probes == client.region.probes


def test_a_process_that_lives_never_tells_of_open_requests_that_are_too_old_to_be_believed(world):
    """valved reads them behind the heartbeat. A process that stood still for a while has an old word of both, and gave
    its GPUs away where it told first that it lives."""
    slow = world.libraries.compile("slowclock", "-shared", "-fPIC")
    preload = f"{slow}:{world.libraries.shim}:{world.libraries.fakerm}"
    puppet, client = world.online(LD_PRELOAD=preload)
    prove_idle(client)
    puppet.hint(1)
    region, beats = client.region, set()
    while len(beats) < 100:
        beats.add(alive_ns := region.watcher_ns)
        hint_ns = region.hint_ns
        assert hint_ns >= alive_ns


def test_a_driver_without_context_events_is_asked_stream_by_stream(world):
    puppet, client = world.online(cuda=world.libraries.old_cuda)
    puppet.cu_out("cuStreamCreate", 0)

    puppet.launch(1)
    prove_idle(client)

    assert puppet.stub("queries") >= 2, "the legacy stream and the one that was made"


def test_without_context_events_per_thread_streams_keep_the_process_busy(world):
    puppet, client = world.online(cuda=world.libraries.old_cuda)

    puppet.launch(1, "cuLaunchKernel_ptsz")
    client.control.watch = 1

    until(lambda: client.region.watcher_state == ERROR, "nobody can ask those streams")
    assert client.region.busy == 1
    assert puppet.stub("launches") == 1, "the detour reached the driver"


def test_an_offline_process_never_rings(world):
    puppet, client = world.offline()

    client.gate(1)
    puppet.launch(3)

    assert (client.bells(), client.submitted()) == (0, 3)


def test_held_launches_wait_for_the_order_to_run(world):
    puppet, client = world.offline()
    puppet.launch(1)

    client.control.order = 2
    client.gate(1)
    puppet.launch_in_background(1)
    until(lambda: client.submitted() == 2, "the launch is on its way")
    assert puppet.stub("launches") == 1
    client.control.order = 0

    until(lambda: puppet.stub("launches") == 2, "the launch went through")


@pytest.mark.parametrize("role", [ONLINE, OFFLINE, None], ids=["online", "offline", "no-daemon"])
def test_no_system_call_is_made_while_the_gate_is_closed(world, role):
    """The program forbids itself everything but write and exit by seccomp, then launches: a call would kill it."""
    if role is not None:
        world.daemon(role)
    program = world.libraries.compile("sealed", f"-L{world.libraries.cuda}", "-l:libcuda.so.1")

    done = subprocess.run(
        [program, "100000"], env=world.environment(), capture_output=True, text=True, timeout=200, check=False
    )

    assert (done.returncode, done.stdout) == (0, "100000 launches\n")


def test_a_launch_leaves_errno_alone(world):
    daemon = world.daemon(ONLINE)
    daemon.role = ONLINE
    program = world.libraries.compile("errno", f"-L{world.libraries.cuda}", "-l:libcuda.so.1")

    done = subprocess.run([program], env=world.environment(), capture_output=True, text=True, timeout=200, check=False)

    assert f"{os.EX_OK} 1234 1234" == done.stdout.strip()


def test_a_launch_never_counts_where_valved_does_not_look(world):
    """valved adds up the slots that the header counts, and reads no more of them at each wake than threads count in."""
    puppet, client = world.online()

    puppet.launch(3)
    assert (client.region.slot_count, client.submitted()) == (1, 3)
    puppet.launch_in_threads(8, 5)
    assert (client.region.slot_count, client.submitted()) == (9, 43)

    world.daemons[0].close()
    client.gone.wait()
    puppet.launch_in_threads(3, 2)  # on pages of its own
    heir = world.daemon(ONLINE, gate_epoch=1).client()
    assert (heir.region.slot_count, heir.submitted()) == (12, 49)
    until(heir.bells, "launches are counted there now, and the session has spoken for those before")

    puppet.launch_in_threads(260, 1)
    assert (heir.region.slot_count, heir.submitted()) == (256, 309)
