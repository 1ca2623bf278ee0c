"""What a program never notices of us where memory, threads or calls are short, or where it leaves a call by a jump."""

from __future__ import annotations

import os
import select
import signal
import socket
import struct
import subprocess
import threading
from pathlib import Path

import pytest
from fake_daemon import (
    ABI,
    CHANNEL_ADD,
    ENDING,
    FEATURE_ENDING,
    FEATURE_KEEP_STOP,
    HEADER,
    LONG_S,
    MAGIC,
    OFFLINE,
    ONLINE,
    REFUSED,
    SCHEDULE_WAIT,
    mask,
    until,
)
from rmkit import GR0, Process, call

FIRST, REFUSED_QUOTA = 0x5C000008, 3
HANGS = 0x4E  # as in jump.c
CUDA = "-l:libcuda.so.1"


def preloaded(world, tmp_path, text, **settings):
    """The environment of a program before whose libc this library stands."""
    source, library = tmp_path / "more.c", tmp_path / "more.so"
    source.write_text(text)
    subprocess.run(["cc", "-shared", "-fPIC", "-D_GNU_SOURCE", source, "-o", library, "-ldl"], check=True)
    environment = world.environment(**settings)
    return {"LD_PRELOAD": f"{environment['LD_PRELOAD']}:{library}"}


# -- memory --

OLD_MREMAP = """
#include <dlfcn.h>
#include <errno.h>
#include <stdarg.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>
/* Kernels up to 6.12, say (mm/mremap.c, mremap_to): the new place is unmapped first, then the limits are looked at. */
void *mremap(void *old, size_t bytes, size_t wanted, int flags, ...)
{
	void *(*real)(void *, size_t, size_t, int, ...) = dlsym(RTLD_NEXT, "mremap");
	va_list more;
	void *place;

	va_start(more, flags);
	place = va_arg(more, void *);
	va_end(more);
	if (wanted <= bytes || access(getenv("SHORT"), F_OK))
		return real(old, bytes, wanted, flags, place);
	if (flags & MREMAP_FIXED)
		munmap(place, wanted);
	errno = ENOMEM;
	return MAP_FAILED;
}
"""


def scarce(world, tmp_path, calls):
    """A file, and settings of a process where these calls fail while it is there."""
    file = tmp_path / "short"
    return file, {**preloaded(world, tmp_path, calls), "SHORT": str(file)}


@pytest.fixture
def short(world, tmp_path):
    """It may have no more memory."""
    return scarce(world, tmp_path, OLD_MREMAP)


def test_a_launch_never_meets_a_hole_where_memory_is_short(world, short):
    file, settings = short
    puppet, client = world.online(**settings)
    client.control.gate_epoch = 1
    file.touch()
    world.daemons[0].close()

    tries = world.daemon(ONLINE)
    until(lambda: tries.clients.qsize() >= 2, "it has tried, and tries again")
    puppet.launch(3)
    file.unlink()
    client = tries.client()

    until(lambda: client.submitted() >= 3, "its count is known")
    assert puppet.stub("launches") == 3


def test_offline_work_that_could_take_only_part_of_a_valveds_pages_never_runs_on_under_its_lease(world, short):
    file, settings = short
    daemon = world.daemon(OFFLINE, online_registered=1)
    puppet, client = world.offline(daemon, **settings)
    fd = puppet.open("/dev/nvidiactl")
    root = puppet.alloc(fd, 0, 0, 0, 0x41)
    puppet.alloc(fd, root, root, 1, 0x80, params="00" * 56)
    puppet.alloc(fd, root, 1, 2, 0x2080, params="00" * 4)
    puppet.alloc(fd, root, 1, 0x10, 0xC86F, params="00" * 1024)
    puppet.control(fd, root, 0x10, 0xA06F0103, params="010000")
    client.expect(CHANNEL_ADD)
    file.touch()
    daemon.close()
    lives = world.daemon(OFFLINE, online_registered=1, heartbeat_ns=2**62)
    until(lambda: lives.clients.qsize() >= 1, "it has tried to take the pages of one that lives")

    client.control.lease_ns = 50_000_000

    until(lambda: any(call.startswith("disable") for call in world.gate_calls()), "it has stopped itself")


UNSAID = """
#include <dlfcn.h>
#include <errno.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <fcntl.h>
int access(const char *path, int how);
long syscall(long number, long a, long b, long c, long d, long e, long f)
{
	static long (*real)(long, long, long, long, long, long, long);

	if (!real)
		*(void **)&real = dlsym(RTLD_NEXT, "syscall");
	if (number != SYS_sendmsg || access(getenv("SHORT"), F_OK))
		return real(number, a, b, c, d, e, f);
	errno = ENOBUFS;
	return -1;
}
"""


@pytest.mark.parametrize("role", [ONLINE, OFFLINE], ids=["online", "offline"])
def test_channels_that_the_kernel_had_no_memory_to_tell_of_are_never_forgotten(world, tmp_path, role):
    file, settings = scarce(world, tmp_path, UNSAID)
    puppet, client = (world.online if role == ONLINE else world.offline)(**settings)
    file.touch()
    fd = puppet.open("/dev/nvidiactl")
    root = puppet.alloc(fd, 0, 0, 0, 0x41)
    puppet.alloc(fd, root, root, 1, 0x80, params="00" * 56)
    puppet.alloc(fd, root, 1, 2, 0x2080, params="00" * 4)
    puppet.alloc(fd, root, 1, 0x10, 0xC86F, params="00" * 1024)
    puppet.control_in_background(fd, root, 0x10, 0xA06F0103, params="010000")  # offline work waits for valved
    assert client.none_of(CHANNEL_ADD)

    file.unlink()

    client.expect(CHANNEL_ADD, h_channel=0x10)


# -- threads --

ONE_AT_A_TIME = """
#include <dlfcn.h>
#include <errno.h>
#include <stdlib.h>
#include <unistd.h>
int pthread_create(void *thread, const void *how, void *run, void *with)
{
	int (*real)(void *, const void *, void *, void *) = dlsym(RTLD_NEXT, "pthread_create");

	return access(getenv("SHORT"), F_OK) ? real(thread, how, run, with) : EAGAIN;
}
"""


@pytest.fixture
def threadless(world, tmp_path):
    """It may make no thread."""
    return scarce(world, tmp_path, ONE_AT_A_TIME)


def leaves(daemon):
    """Also one that gave up waiting for its welcome: without a thread it comes no second time."""
    assert daemon.clients.get(timeout=LONG_S).gone.wait(LONG_S)


def test_a_service_that_could_have_no_thread_never_stays_without_valved(world, threadless):
    file, settings = threadless
    daemon = world.daemon(ONLINE)
    file.touch()
    puppet = world.puppet(**settings)
    puppet.load()
    puppet.open("/dev/nvidiactl")
    leaves(daemon)

    file.unlink()
    puppet.open("/dev/nvidiactl")
    client = daemon.client()
    client.gate(1)

    def rings():
        puppet.launch()
        return client.region.rings

    # Its session made the link if valved took longer than the start waits. It then speaks for a launch of meanwhile.
    assert until(rings, "it has moved to the new pages") in {1, 2}


def test_channels_made_while_there_was_no_thread_never_stay_unknown(world, threadless):
    """valved would take for stopped what it does not know of."""
    file, settings = threadless
    daemon = world.daemon(OFFLINE)
    file.touch()
    puppet = world.puppet(role="offline", **settings)
    puppet.load()
    fd = puppet.open("/dev/nvidiactl")
    leaves(daemon)
    root = puppet.alloc(fd, 0, 0, 0, 0x41)
    puppet.alloc(fd, root, root, 1, 0x80, params="00" * 56)
    puppet.alloc(fd, root, 1, 2, 0x2080, params="00" * 4)
    puppet.alloc(fd, root, 1, 0x10, 0xC86F, params="00" * 1024)
    puppet.control(fd, root, 0x10, 0xA06F0103, params="010000")

    file.unlink()
    puppet.open("/dev/nvidiactl")

    daemon.client().expect(CHANNEL_ADD, h_channel=0x10)


def test_a_service_that_could_have_no_watcher_never_counts_as_busy_for_ever(world, threadless):
    file, settings = threadless
    daemon = world.daemon(ONLINE, watch=1)
    puppet = world.puppet(**settings)
    puppet.load()
    puppet.cu("cuInit", 0)
    client = daemon.client()
    file.touch()
    puppet.cu_out("cuDevicePrimaryCtxRetain", 0)

    file.unlink()

    until(lambda: client.region.watcher_ns, "the watcher has begun")


# -- calls --

LAST_WORDS = """
#include <dlfcn.h>
#include <fcntl.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>
int main(int argc, char **argv)
{
	const char *said;

	dlopen("libnothing-of-this-name.so", RTLD_NOW);
	if (!strcmp(argv[1], "open"))
		close((int)open("/dev/null", O_RDONLY));
	else if (!strcmp(argv[1], "dup2"))
		dup2(1, 9);
	else if (!strcmp(argv[1], "ioctl"))
		ioctl(0, FIONREAD, &argc);
	else if (!strcmp(argv[1], "unshare"))
		unshare(0);
	else
		close(9);
	said = dlerror();
	puts(said ? said : "nothing");
	return 0;
}
"""


@pytest.mark.parametrize("call", ["open", "close", "dup2", "ioctl", "unshare"])
def test_what_dlerror_is_to_say_is_never_lost_to_a_hook(world, tmp_path, call):
    """A program that makes a string of it would end."""
    source = tmp_path / "last.c"
    source.write_text(LAST_WORDS)
    subprocess.run(["cc", "-D_GNU_SOURCE", source, "-o", tmp_path / "last", "-ldl"], check=True)

    environment = {**world.environment(), "LD_PRELOAD": str(world.libraries.shim)}  # the fake driver asks dlsym, too

    done = subprocess.run(
        [tmp_path / "last", call], env=environment, stdin=subprocess.DEVNULL, capture_output=True, check=False
    )

    assert b"libnothing-of-this-name.so" in done.stdout


UNWOKEN = """
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>
extern int cuInit(unsigned flags), cuDevicePrimaryCtxRetain(void **out, int device), cuCtxDestroy_v2(void *context);
extern void stub_block(uint64_t context);
extern uint64_t stub_count(const char *what);
static atomic_int id, has_ended;
static void *destroy(void *context) {
	id = gettid();
	cuCtxDestroy_v2(context);
	has_ended = 1;
	return NULL;
}
static int waits(void) {
	char path[64], words[16] = "";
	FILE *file;
	snprintf(path, sizeof(path), "/proc/self/task/%d/syscall", id);
	file = fopen(path, "r");
	if (!file || !fgets(words, sizeof(words), file))
		return 0;
	fclose(file);
	return !strncmp(words, "202 ", 4);
}
int main(void) {
	struct sock_filter rule[] = {
		BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_futex, 0, 1),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | 1),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
	};
	struct sock_fprog filter = {4, rule};
	pthread_t thread;
	void *context;
	alarm(100); /* only ends a hung test */
	stub_block(0x1000);
	if (cuInit(0) || cuDevicePrimaryCtxRetain(&context, 0))
		return 1;
	while (!stub_count("sits"))
		usleep(1000);
	pthread_create(&thread, NULL, destroy, context);
	while (!id || !waits())
		usleep(1000);
	prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
	if (syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_TSYNC, &filter))
		return 2;
	stub_block(0);
	while (!has_ended)
		usleep(1000);
	_exit(write(1, "ended", 5) != 5);
}
"""


def test_a_thread_that_waits_as_a_sandbox_begins_never_waits_for_ever(world, tmp_path):
    """What would wake it is refused."""
    source = tmp_path / "unwoken.c"
    source.write_text(UNWOKEN)
    libraries = [f"-L{world.libraries.cuda}", CUDA, "-lpthread"]
    subprocess.run(["cc", "-D_GNU_SOURCE", source, "-o", tmp_path / "unwoken", *libraries], check=True)
    world.daemon(ONLINE, watch=1, quiet_us=1)

    done = subprocess.run([tmp_path / "unwoken"], env=world.environment(), capture_output=True, check=False)

    assert (done.returncode, done.stdout) == (0, b"ended")


def test_a_thread_that_jumped_out_of_a_driver_call_never_goes_unheard(world):
    """Its launches ring, and its channels are told of."""
    daemon = world.daemon(ONLINE)
    program = subprocess.Popen(
        [world.libraries.compile("jump", f"-L{world.libraries.cuda}", CUDA)],
        env=world.environment(FAKERM_RAISES=str(HANGS)),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    client = daemon.client()
    assert program.stdout.readline() == b"out\n"
    client.gate(1)
    os.write(program.stdin.fileno(), b"x")

    client.expect(CHANNEL_ADD, h_channel=0x10)

    assert client.region.rings == 1
    program.communicate()
    assert program.returncode == 0


# -- room in valved --


def stands(world):
    """A job that its valved did not take."""
    puppet = world.puppet(role="offline")
    puppet.load()
    process = Process.begin(puppet)
    process.channel(process.device, FIRST, engine=GR0)
    process.register(FIRST)
    until(lambda: world.gate_calls()[-1:] == [call(process, "disable", FIRST)], "it stopped itself")
    return puppet, process


@pytest.mark.parametrize("is_silent", [False, True], ids=["no-room", "no-answer"])
def test_offline_work_that_valved_would_take_never_runs_before_it_is_taken(world, is_silent):
    """No valved had it yet, so none would stop it for an online service."""
    daemon = world.daemon(OFFLINE)
    daemon.refusal, daemon.silent = REFUSED_QUOTA, is_silent
    _, process = stands(world)

    daemon.refusal, daemon.silent = None, False

    daemon.client().expect(CHANNEL_ADD, h_channel=FIRST)
    until(lambda: world.gate_calls()[-1] == call(process, "enable", FIRST), "it goes on when it is taken")


def test_a_job_that_waits_for_room_never_dies_with_its_channels_off(world):
    """The driver would wait for them, and online work for the driver. No valved is to be told of its signal."""
    daemon = world.daemon(OFFLINE)
    daemon.refusal = REFUSED_QUOTA
    puppet, process = stands(world)
    until(lambda: signal.SIGTERM in mask(puppet.process.pid, "SigCgt"), "it is watched")

    puppet.process.send_signal(signal.SIGTERM)

    assert puppet.process.wait() == -signal.SIGTERM
    assert world.gate_calls()[-1] == call(process, "enable", FIRST)


def test_a_process_that_can_have_no_thread_never_stays_stopped_for_want_of_room(world, threadless):
    """Nothing of it would ask again, nor end the stop when a valved takes it later."""
    file, settings = threadless
    daemon = world.daemon(OFFLINE)
    daemon.refusal = REFUSED_QUOTA
    file.touch()
    puppet = world.puppet(role="offline", **settings)
    puppet.load()
    process = Process.begin(puppet)
    process.channel(process.device, FIRST, engine=GR0)
    process.register(FIRST)
    puppet.open("/dev/nvidiactl")  # it asks again, and finds a channel

    assert world.gate_calls()[-1] == call(process, "enable", FIRST)


def test_a_job_for_which_valved_has_no_descriptor_never_runs_because_its_hello_was_left_unread(world):
    """Of a socket that valved closes so the kernel first tells that, and then what valved had said."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(world.folder / "link.sock"))
        listener.listen()
        puppet = world.puppet(role="offline")
        puppet.load()

        def refuse():
            link, _ = listener.accept()
            select.select([link], [], [])
            puppet.process.send_signal(signal.SIGSTOP)  # it reads only when all has happened
            os.waitid(os.P_PID, puppet.process.pid, os.WSTOPPED)
            head = HEADER.pack(MAGIC, ABI, REFUSED, HEADER.size + 104, 0, 0)
            link.send(head + struct.pack("<IHH96s", REFUSED_QUOTA, 1, 1, b"no"))
            link.close()
            listener.close()
            puppet.process.send_signal(signal.SIGCONT)

        valved = threading.Thread(target=refuse)
        valved.start()
        process = Process.begin(puppet)
        valved.join()
    process.channel(process.device, FIRST, engine=GR0)
    process.register(FIRST)

    assert world.gate_calls()[-1:] == [call(process, "disable", FIRST)]


def test_a_job_that_valved_takes_as_a_signal_ends_it_never_dies_before_valved_is_told(world):
    told = []

    def heard(client, message):
        told.append(message.type)
        return message.type == SCHEDULE_WAIT  # the gate is closed

    def greet(client, hello):
        daemon.silent = True
        if not is_taken:
            return False
        pid = puppet.process.pid
        puppet.process.send_signal(signal.SIGTERM)
        until(lambda: "SigBlk:\t0000000000000000" not in Path(f"/proc/{pid}/status").read_text(), "it is handled")
        daemon.silent = False
        return False

    is_taken = False
    daemon = world.daemon(OFFLINE, FEATURE_KEEP_STOP | FEATURE_ENDING, heard)
    daemon.on_hello = greet
    daemon.silent = True
    puppet, process = stands(world)
    until(lambda: signal.SIGTERM in mask(puppet.process.pid, "SigCgt"), "it is watched")
    is_taken = True

    assert puppet.process.wait() == -signal.SIGTERM
    assert all(client.gone.wait(LONG_S) for client in daemon.alive)  # whatever it said is heard
    assert ENDING in told or world.gate_calls()[-1] == call(process, "enable", FIRST)


def test_a_process_that_is_taken_as_online_never_stands_until_valved_answers_more(world):
    """It wished to be offline, and so stopped itself. That valved may die next."""
    daemon = world.daemon(OFFLINE, FEATURE_KEEP_STOP, lambda client, message: True)
    daemon.silent = True
    _, process = stands(world)

    daemon.role, daemon.silent = ONLINE, False

    until(lambda: world.gate_calls()[-1] == call(process, "enable", FIRST), "it goes on as it is welcomed")
