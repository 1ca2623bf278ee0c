"""A guest in other people's processes: their forks, their threads, and their habit of closing what they do not know."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from fake_daemon import CHANNEL_ADD, CHANNEL_DEL, NOTE, NOTE_MPS, OFFLINE, ONLINE, until
from rmkit import GR0, Process

FIRST, SECOND = 0x5C000008, 0x5C00000A


def test_a_process_that_opens_no_driver_gets_no_thread_and_no_descriptor(world):
    world.daemon()
    count = "import os; print(len(os.listdir('/proc/self/fd')), len(os.listdir('/proc/self/task')))"
    command = [sys.executable, "-c", count]
    plain = subprocess.run(command, capture_output=True, text=True, check=True)
    hooked = subprocess.run(command, env=world.environment(), capture_output=True, text=True, check=True)

    assert hooked.stdout == plain.stdout
    assert world.daemons[0].alive == []


WAYS_TO_FORK = pytest.mark.parametrize("how", ["fork", "_Fork", "system call"])


@WAYS_TO_FORK
def test_a_forked_child_that_takes_up_cuda_is_a_client_of_its_own(world, how):
    puppet, client = world.online()
    puppet.launch(2)

    children = []

    def has_come():
        """A child that its machine kept off for the 50 ms of its start goes on without a link."""
        pid, launches = puppet.fork_and("init_and_launch", 3, how=how)
        came = world.daemons[0].clients
        while not came.empty():
            child = came.get()
            until(child.has_begun_or_gone, "the region is filled")
            if child.region.pid == pid:
                children.append((child, launches))
        return children

    [(child, launches)] = until(has_come, "a child is a client")
    assert (child.submitted(), launches) == (3, 5)
    puppet.launch(1)
    assert client.submitted() == 3, "the parent's counts are its own"
    child.gone.wait()
    assert not client.gone.is_set()


def test_a_forked_child_does_not_keep_a_dead_parents_link_open(world):
    puppet, client = world.online()
    pid = puppet.fork_idle()

    puppet.process.kill()
    puppet.process.wait()

    until(client.gone.is_set, "end of file though the child lives")
    os.kill(pid, 9)


@WAYS_TO_FORK
def test_a_forked_child_that_never_takes_up_cuda_rings_nobodys_bell(world, how):
    puppet, client = world.online()
    client.gate(1)

    puppet.fork_and("launch", 5, how=how)

    assert (client.bells(), client.submitted()) == (0, 0)


@WAYS_TO_FORK
def test_a_forked_child_never_tells_of_its_parents_requests(world, how):
    puppet, client = world.online()
    puppet.hint(3)

    puppet.fork_and("hint", 0, how=how)

    assert client.region.open_requests == 3


def test_a_forked_child_of_an_mps_client_never_passes_for_another_process(world):
    """Its channels are the MPS server's: valved must know that before it sees one."""
    puppet, client = world.offline(CUDA_MPS_PIPE_DIRECTORY="/nowhere")
    client.expect(NOTE, code=NOTE_MPS)

    puppet.fork_and("open", "/dev/nvidiactl")

    world.daemons[0].client().expect(NOTE, code=NOTE_MPS)


def test_an_mps_client_never_passes_for_another_process_because_its_driver_is_new(world):
    """Names that the shim does not know are noted as well, before the process has a link."""
    daemon = world.daemon(OFFLINE)
    puppet = world.puppet(role="offline", CUDA_MPS_PIPE_DIRECTORY="/nowhere")
    puppet.load()
    for number in range(40):
        puppet.getproc(f"cuLaunchSomethingNew{number}")

    puppet.cu("cuInit", 0)

    client = daemon.client()
    until(lambda: client.expect(NOTE).code == NOTE_MPS, "among the notes")


def test_an_mps_client_never_passes_for_another_process_with_a_new_daemon(world):
    puppet, client = world.offline(CUDA_MPS_PIPE_DIRECTORY="/nowhere")
    process = Process.begin(puppet)
    process.channel(process.device, FIRST, engine=GR0)
    process.register(FIRST)
    client.expect(CHANNEL_ADD, h_channel=FIRST)

    world.daemons[0].close()
    heir = world.daemon(OFFLINE).client()

    heir.expect(CHANNEL_ADD, h_channel=FIRST)
    assert [message.code for message in heir.seen if message.type == NOTE] == [NOTE_MPS], "before its first channel"


def test_a_process_that_closes_every_number_keeps_its_link(world):
    puppet, client = world.online()

    own = [int(fd) for fd, target in puppet.fds().items() if "socket" in target or "eventfd" in target]
    answers = [puppet.close(fd) for fd in own]

    assert len(own) == 3, "link, doorbell, order"
    assert answers == [[-1, 9]] * 3, "as if they had never been there"
    client.gate(1)
    puppet.launch(1)
    assert client.bells() == 1


def own_numbers(puppet):
    return sorted(int(fd) for fd, target in puppet.fds().items() if "socket" in target or "eventfd" in target)


@pytest.mark.parametrize("way", ["close_range", "closefrom"])
def test_a_range_that_is_closed_never_takes_the_link_along(world, way):
    puppet, client = world.online()
    process = Process.begin(puppet)
    process.channel(process.device, FIRST, engine=GR0)
    process.register(FIRST)
    client.expect(CHANNEL_ADD, h_channel=FIRST)
    own = own_numbers(puppet)

    puppet.close_range(3, 2**32 - 1) if way == "close_range" else puppet.closefrom(3)

    assert sorted(map(int, puppet.fds()))[-3:] == own
    client.expect(CHANNEL_DEL, h_channel=FIRST)  # the driver's file was closed, and its channel went with it
    client.gate(1)
    puppet.launch(1)
    assert (client.bells(), client.gone.is_set()) == (1, False)


def test_a_thread_that_leaves_the_table_of_files_never_takes_a_channel_along(world):
    puppet, client = world.online()
    process = Process.begin(puppet)
    process.channel(process.device, FIRST, engine=GR0)
    process.register(FIRST)
    client.expect(CHANNEL_ADD, h_channel=FIRST)

    puppet.close_range_in_a_table_of_its_own(3)
    process.channel(process.device, SECOND, engine=GR0)
    process.register(SECOND)

    client.expect(CHANNEL_ADD, h_channel=SECOND)
    assert client.none_of(CHANNEL_DEL)


CLONE_VM, CLONE_FILES, CLONE_VFORK = 0x100, 0x400, 0x4000


def open_in_clone(world, puppet, flags):
    return puppet.open_in_clone(str(world.libraries.compile("clones", "-shared", "-fPIC")), flags)


def test_a_child_that_shares_our_table_of_files_never_closes_our_link(world):
    puppet, client = world.online()
    own = own_numbers(puppet)

    assert open_in_clone(world, puppet, CLONE_FILES) == 0

    assert set(own) <= set(own_numbers(puppet))
    client.gate(1)
    puppet.launch(1)
    assert (client.bells(), client.gone.is_set()) == (1, False)


def test_a_process_never_goes_unseen_because_a_child_in_its_memory_opened_the_driver_first(world):
    daemon = world.daemon(ONLINE)
    puppet = world.puppet(role="online")
    puppet.load()
    assert open_in_clone(world, puppet, CLONE_VM | CLONE_VFORK) == 0

    process = Process.begin(puppet)
    process.channel(process.device, FIRST, engine=GR0)
    process.register(FIRST)

    daemon.client().expect(CHANNEL_ADD, h_channel=FIRST)


class Elsewhere:
    """The puppet's commands, on its thread that has left the table of files."""

    def __init__(self, puppet):
        if puppet.leave_table():
            pytest.skip("unshare is not allowed here")
        self._puppet = puppet

    def __getattr__(self, name):
        return lambda *arguments, **named: self._puppet.elsewhere(name, *arguments, **named)


def test_a_thread_that_left_the_table_of_files_never_rings_the_bell_of_a_valved_that_is_gone(world):
    """It has the old file under that number, and all eventfds look alike."""
    puppet, client = world.online()
    there = Elsewhere(puppet)
    client.gate(1)
    there.launch(1)
    assert client.bells() == 1

    world.daemons[0].close()
    heir = world.daemon(ONLINE, gate_epoch=1).client()
    assert heir.submitted() == 1, "it is told what was launched before"
    until(heir.bells, "launches are counted there now, and the session has spoken for those before")
    heir.gate(3)
    there.launch(1)

    assert heir.bells() == 1


def test_a_channel_of_a_thread_that_left_the_table_of_files_is_never_left_out(world):
    """Its copy of the link is that of a valved that is gone."""
    puppet, _ = world.offline()
    process, there = Process.begin(puppet), Elsewhere(puppet)
    world.daemons[0].close()
    heir = world.daemon(OFFLINE).client()
    process.channel(process.device, SECOND, engine=GR0)
    process.register(SECOND)
    heir.expect(CHANNEL_ADD, h_channel=SECOND)  # the new link is in use

    process.puppet = there
    process.channel(process.device, FIRST, engine=GR0)
    process.register(FIRST)

    heir.expect(CHANNEL_ADD, h_channel=FIRST)


def test_a_thread_that_tidies_up_a_table_of_its_own_never_takes_channels_or_link_along(world):
    """The others go on with the files: what they compute would be stopped by nobody."""
    puppet, client = world.offline()
    process, there = Process.begin(puppet), Elsewhere(puppet)
    process.channel(process.device, FIRST, engine=GR0)
    process.register(FIRST)
    client.expect(CHANNEL_ADD, h_channel=FIRST)

    assert there.dup2(0, process.uvm) == process.uvm
    assert there.close(process.ctl) == [0, 0]
    for number in own_numbers(puppet):
        there.dup2(0, number)
    there.closefrom(3)
    process.channel(process.device, SECOND, engine=GR0)
    process.register(SECOND)

    client.expect(CHANNEL_ADD, h_channel=SECOND)
    assert client.none_of(CHANNEL_DEL)
    assert not client.gone.is_set()
    assert not world.daemons[0].has_another()


@pytest.mark.parametrize("way", ["dup2", "dup3"])
def test_a_number_that_the_application_wants_is_given_up_and_the_link_is_not(world, way):
    puppet, client = world.online()
    own = own_numbers(puppet)

    taken = [getattr(puppet, way)(0, number) for number in own]

    assert taken == own
    assert {puppet.fds()[str(number)] for number in own} == {puppet.fds()["0"]}
    client.gate(1)
    puppet.launch(1)
    assert (client.bells(), client.gone.is_set()) == (1, False)
    world.daemons[0].close()
    world.daemon(ONLINE).client()
    assert [puppet.close(number) for number in own] == [[0, 0]] * 3, "it was the application's"


def test_a_file_of_the_application_is_never_read_written_or_closed(world):
    """Its own eventfds lie under the numbers that were ours; nothing told us."""
    puppet, client = world.online()
    own = own_numbers(puppet)
    for number in own:
        puppet.steal(number)

    client.gate(1)
    puppet.launch(1)
    world.daemons[0].client()  # a link of new descriptors
    world.daemons[0].close()
    world.daemon(ONLINE).client()

    assert [puppet.eventfd_read(number) for number in own] == [7, 7, 7]
    assert [puppet.close(number) for number in own] == [[0, 0]] * 3


def test_a_doorbell_that_was_closed_behind_our_back_never_silences_a_service(world):
    daemon = world.daemon(ONLINE, gate_epoch=1)
    puppet, client = world.online(daemon)
    for number in own_numbers(puppet):
        puppet.close_by_syscall(number)

    puppet.launch(1)

    heir = daemon.client()
    until(lambda: heir.bells() == 1, "the launch is spoken for")
    assert client.bells() == 0


def test_a_thousand_processes_come_and_go(world):
    puppet, client = world.online()
    fds = len(puppet.fds())

    puppet.fork_many(1000)

    # An online start waits 50 ms for its link and then goes on without: on a loaded machine some never come.
    others = world.daemons[0].alive
    until(lambda: len(others) > 1 and all(one.gone.is_set() for one in others[1:]), "whoever came has gone")
    puppet.launch(1)
    assert (client.submitted(), len(puppet.fds())) == (1, fds)
    assert not client.gone.is_set()


def test_our_threads_never_compete_on_the_core_of_the_thread_that_made_them(world):
    cores = os.sched_getaffinity(0)
    world.daemon(ONLINE)
    puppet = world.puppet()
    puppet.load()
    if not puppet.bind(10, min(cores)):
        pytest.skip("needs the right to real-time scheduling")

    puppet.cu("cuInit", 0)
    puppet.cu_out("cuDevicePrimaryCtxRetain", 0)

    world.daemons[0].client()
    until(lambda: puppet.own_threads() == [[os.SCHED_OTHER, len(cores)]] * 2, "session and watcher, as at the start")
