"""Every way a program reaches the driver is counted, and reaches the driver's own function with its own arguments."""

from __future__ import annotations

import os
import subprocess

import pytest
from fake_daemon import FEATURE_PLAIN_COUNT, ONLINE, until

NOT_FOUND = 500


def test_a_launch_through_dlsym_is_counted_and_keeps_all_eleven_arguments(world):
    puppet, client = world.online()

    puppet.launch(5)

    assert client.submitted() == 5
    assert puppet.stub("launches") == 5
    assert list(range(1, 12)) == puppet.stub_arguments()


@pytest.mark.parametrize(
    "name",
    ["cuLaunchKernelEx", "cuLaunchKernel_ptsz", "cuGraphLaunch", "cuMemcpyHtoDAsync_v2", "cuMemsetD8_v2"],
)
def test_each_kind_of_submit_is_counted(world, name):
    puppet, client = world.online()

    puppet.launch(3, name)

    assert (client.submitted(), puppet.stub("launches")) == (3, 3)


def test_a_name_that_the_driver_lacks_answers_not_found_instead_of_crashing(world):
    puppet, _ = world.online()

    assert puppet.cu("cuMemcpy3DPeer", 0) == NOT_FOUND


def test_a_call_that_is_no_work_is_the_drivers_own_function(world):
    puppet, client = world.online()

    assert puppet.cu("cuCtxSetCurrent", 0) == 0
    assert client.submitted() == 0


def test_an_absolute_path_to_libcuda_is_hooked_too(world):
    world.daemon(ONLINE)
    puppet = world.puppet(LD_LIBRARY_PATH="")

    puppet.load(str(world.libraries.cuda / "libcuda.so.1"))
    puppet.cu("cuInit", 0)
    puppet.launch(2)

    assert world.daemons[0].client().submitted() == 2


def test_deep_binding_does_not_take_libcuda_past_us(world):
    world.daemon(ONLINE)
    puppet = world.puppet()

    puppet.load(mode=os.RTLD_DEEPBIND | os.RTLD_NOW)
    puppet.cu("cuInit", 0)  # opens nvidiactl from inside libcuda
    puppet.launch(1)

    assert world.daemons[0].client().submitted() == 1


def test_asking_whether_libcuda_is_loaded_does_not_load_it(world):
    puppet = world.puppet()

    with pytest.raises(AssertionError, match="the puppet ended in load"):
        puppet.load(mode=os.RTLD_NOLOAD)


@pytest.mark.parametrize("v2", [True, False], ids=["v2", "v1"])
@pytest.mark.parametrize(("version", "flags"), [(4000, 0), (7000, 2), (12000, 0), (13000, 2)])
def test_get_proc_address_hands_out_a_counted_trampoline(world, v2, version, flags):
    puppet, client = world.online()

    code, pointer, _ = puppet.getproc("cuLaunchKernel", version, flags, v2=v2)
    puppet.call(pointer, 1, 2)

    assert code == 0
    assert (client.submitted(), puppet.stub("internal")) == (1, 1)
    assert (1 if flags else 0) == puppet.stub("per_thread"), "the twin that the driver chose"


def test_the_same_driver_pointer_always_gets_the_same_trampoline(world):
    puppet, _ = world.online()

    first, again = puppet.getproc("cuGraphLaunch")[1], puppet.getproc("cuGraphLaunch")[1]
    shared = puppet.getproc("cuMemcpyBatchAsync")[1]
    other = puppet.getproc("cuLaunchKernel", flags=2)[1]

    assert first == again == shared
    assert first != other


def test_get_proc_address_by_way_of_itself_stays_hooked(world):
    puppet, client = world.online()

    own = puppet.getproc("cuGetProcAddress", 12000)[1]
    puppet.call(puppet.getproc_by(own, "cuLaunchKernel"), 1)

    assert client.submitted() == 1


def test_a_name_that_the_driver_does_not_have_stays_null(world):
    puppet, _ = world.online()

    assert puppet.getproc("cuLaunchCooperativeKernel") == [0, 0, 1]
    assert puppet.getproc("") == [0, 0, 1]


def test_an_uncounted_call_keeps_the_drivers_pointer(world):
    puppet, client = world.online()

    pointer = puppet.getproc("cuCtxSetCurrent")[1]
    puppet.call(pointer, 0)

    assert client.submitted() == 0


def test_a_submit_that_the_table_does_not_know_is_reported_once(world):
    puppet, client = world.online()

    for _ in range(3):
        puppet.getproc("cuLaunchSomethingNew")

    note = client.expect(9)
    assert (note.code, note.text.rstrip(b"\0")) == (5, b"cuLaunchSomethingNew")
    puppet.open("/dev/null")
    assert client.inbox.empty()


def test_a_directly_linked_program_is_hooked(world):
    """Its references are bound in the global scope, where the preload stands first."""
    daemon = world.daemon(ONLINE)
    program = world.libraries.compile("direct", f"-L{world.libraries.cuda}", "-l:libcuda.so.1")
    process = subprocess.Popen(
        [program, "7"], env=world.environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )

    client = daemon.client()
    answer = process.stdout.readline()

    assert answer.strip() == "7 7 66", "launches asked for, launches made, sum of the last one's arguments"
    assert client.submitted() == 7
    process.communicate()


def test_a_library_that_links_libcuda_and_is_loaded_late_is_hooked(world):
    daemon = world.daemon(ONLINE)
    plugin = world.libraries.compile(
        "direct", "-shared", "-fPIC", "-DPLUGIN", f"-L{world.libraries.cuda}", "-l:libcuda.so.1"
    )
    host = world.libraries.compile("host", "-ldl")
    process = subprocess.Popen(
        [host, plugin], env=world.environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )

    client = daemon.client()

    assert process.stdout.readline().strip() == "7 7 66"
    assert client.submitted() == 7
    process.communicate()


def test_the_callers_runpath_still_finds_its_libraries(world):
    """glibc knows the caller of dlopen by the return address: our hook must jump, not call."""
    host = world.libraries.compile("host", "-ldl", f"-Wl,-rpath,{world.libraries.old_cuda},--enable-new-dtags")
    plain = {**os.environ, "LD_LIBRARY_PATH": ""}
    name = "libnamedonlyhere.so"
    target = world.libraries.old_cuda / name
    if not target.exists():
        world.libraries.compile("direct", "-shared", "-fPIC", "-DEMPTY").rename(target)

    bare = subprocess.run([host, name], env=plain, capture_output=True, text=True, check=False)
    hooked = subprocess.run(
        [host, name],
        env={**plain, "LD_PRELOAD": str(world.libraries.shim)},
        capture_output=True,
        text=True,
        check=False,
    )

    assert "loaded" in bare.stdout
    assert bare.stdout == hooked.stdout


def test_every_thread_counts_in_a_slot_of_its_own(world):
    puppet, client = world.online()

    puppet.launch_in_threads(8, 100)

    assert client.submitted() == 800
    assert [count for _, count in client.slots()] == [100] * 8


def test_a_daemon_without_membarrier_gets_fenced_counts(world):
    """An older valved keeps its order by the clients' own fences; the count and the bell are the same."""
    daemon = world.daemon(ONLINE)
    daemon.features = 0
    puppet, client = world.online(daemon)

    puppet.launch_in_threads(4, 100)
    puppet.launch(7, "cuGraphLaunch")
    pointer = puppet.getproc("cuLaunchKernel")[1]
    puppet.call(pointer, 1)

    assert client.submitted() == 408
    assert not client.region.features & FEATURE_PLAIN_COUNT
    client.gate(1)
    puppet.launch(5)
    assert (client.bells(), client.submitted(), puppet.stub("launches")) == (1, 413, 412)


def test_more_threads_than_slots_lose_no_count(world):
    puppet, client = world.online()

    puppet.launch_in_threads(300, 2)

    until(lambda: client.submitted() == 600, "600 launches counted")
    assert puppet.stub("launches") == 600
