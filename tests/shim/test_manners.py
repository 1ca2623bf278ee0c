"""What a program never notices of us: its stderr, the stacks of threads, its exit, want of a thread."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from fake_daemon import LONG_S, OFFLINE, ONLINE, RUN, STOP, obey, until
from kv_pool import BACK, CREATE, ELASTIC, MIB, QUARANTINE, ZERO, Entry

H = 2 * MIB
REFUSED_VERSION, REFUSED_QUOTA = 1, 3
EXIT_NO_DAEMON = 69
TOLD = "another version"


def begin(world, way):
    """A program that the shim has something to say to: a valved of another version is there."""
    world.daemon(ONLINE).refusal = REFUSED_VERSION
    file = world.folder / "file"
    return file, subprocess.Popen(
        [world.libraries.compile("mute"), way, file],
        env=world.environment(role="offline"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("way", ["gone", "full"])
def test_a_message_never_ends_nor_holds_up_a_program_whose_stderr_nobody_reads(world, way):
    _, program = begin(world, way)

    assert program.communicate()[0] == "alive\n"
    assert program.returncode == 0


@pytest.mark.parametrize("way", ["data", "journal", "connection"])
def test_a_message_never_goes_into_a_file_that_has_got_the_number_of_stderr(world, way):
    file, program = begin(world, way)

    assert program.communicate()[0] == "alive\n"
    assert program.returncode == 0, "the other end of its connection has heard nothing"
    assert not file.exists() or file.read_bytes() == b""


def test_a_message_goes_to_what_the_program_has_made_its_stderr(world):
    file, program = begin(world, "made so")

    until(lambda: file.exists() and TOLD in file.read_text(), "it is said")
    program.communicate()
    assert file.read_text().count(TOLD) == 1


TINY = """
#define _GNU_SOURCE
#include <limits.h>
#include <pthread.h>
#include <stdint.h>
#include <unistd.h>
extern int cuInit(unsigned flags), cuDevicePrimaryCtxRetain(void **out, int device);
int main(void) {
	pthread_attr_t tiny;
	char line[8];
	void *context;
	if (pthread_attr_init(&tiny) || pthread_attr_setstacksize(&tiny, BYTES))
		return 1;
	if (pthread_setattr_default_np(&tiny) || cuInit(0) || cuDevicePrimaryCtxRetain(&context, 0))
		return 1;
	return read(0, line, sizeof(line)) < 0;
}
"""


def stack_bytes(task: Path) -> int:
    """Of the mapping in which this thread's stack pointer lies, once it sleeps in a system call."""
    words: list[str] = []

    def sleeps() -> bool:
        words[:] = (task / "syscall").read_text().split()
        return words[0] != "running"

    until(sleeps)
    at = int(words[-2], 16)
    for line in (task / "maps").read_text().splitlines():
        first, last = (int(end, 16) for end in line.split()[0].split("-"))
        if first <= at < last:
            return last - first
    return 0


@pytest.mark.parametrize("bytes_", ["PTHREAD_STACK_MIN", "(1ul << 30)"], ids=["tiny", "vast"])
def test_a_program_of_strange_stacks_never_gives_our_threads_one(world, tmp_path, bytes_):
    """Driver calls run on them; and a vast one may be more than the process can have, or be locked into memory."""
    source = tmp_path / "tiny.c"
    source.write_text(TINY)
    cuda = world.libraries.cuda
    libraries = [f"-L{cuda}", "-l:libcuda.so.1", "-lpthread"]
    subprocess.run(["cc", f"-DBYTES={bytes_}", source, "-o", tmp_path / "tiny", *libraries], check=True)
    daemon = world.daemon(ONLINE, watch=1)
    program = subprocess.Popen([tmp_path / "tiny"], env=world.environment(), stdin=subprocess.PIPE)
    client = daemon.client()

    until(lambda: client.region.watcher_ns, "the watcher is there, too")
    tasks = Path(f"/proc/{program.pid}/task").iterdir()
    sizes = [stack_bytes(task) for task in tasks if task.name != str(program.pid)]
    program.communicate()

    assert len(sizes) == 2
    assert min(sizes) >= MIB
    assert max(sizes) <= 9 * MIB
    assert program.returncode == 0


NARROW = """
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <sys/resource.h>
#include <unistd.h>
static __thread volatile char of_each[LOCAL];
static void *run(void *unused) {
	of_each[0] = 1;
	return unused;
}
int main(void) {
	FILE *file = fopen("/proc/self/statm", "r");
	struct rlimit limit;
	unsigned long pages;
	pthread_attr_t usual;
	pthread_t thread;
	char line[8];
	if (!file || fscanf(file, "%lu", &pages) != 1 || fclose(file))
		return 1;
	limit.rlim_cur = limit.rlim_max = pages * 4096 + (14 << 20);
	if (setrlimit(RLIMIT_AS, &limit) || open("/dev/nvidiactl", O_RDWR | O_CLOEXEC) < 0 || read(0, line, 1) != 1)
		return 2;
	if (pthread_attr_init(&usual) || pthread_attr_setstacksize(&usual, 8 << 20))
		return 3;
	return pthread_create(&thread, &usual, run, NULL) || pthread_join(thread, NULL) ? 4 : 0;
}
"""


@pytest.mark.parametrize("local", [1, 2 * MIB], ids=["", "many variables of each thread"])
def test_a_program_that_may_have_little_memory_never_lacks_a_thread_for_ours(world, tmp_path, local):
    """Stacks of 8 MiB count whole against its address space, or its locked memory."""
    source = tmp_path / "narrow.c"
    source.write_text(NARROW)
    subprocess.run(["cc", f"-DLOCAL={local}", source, "-o", tmp_path / "narrow", "-lpthread"], check=True)
    daemon = world.daemon(ONLINE)
    program = subprocess.Popen([tmp_path / "narrow"], env=world.environment(), stdin=subprocess.PIPE)
    client = daemon.client()
    until(lambda: len(os.listdir(f"/proc/{program.pid}/task")) == 2, "our thread is there")

    assert not client.gone.is_set()
    program.communicate(b"x")
    assert program.returncode == 0


NO_THREADS = """
#include <errno.h>
int pthread_create(void *thread, const void *how, void *run, void *with) {
	(void)thread, (void)how, (void)run, (void)with;
	return EAGAIN;
}
"""


def test_a_program_that_requires_valved_never_runs_without_it_for_want_of_a_thread(world, tmp_path):
    source = tmp_path / "none.c"
    source.write_text(NO_THREADS)
    subprocess.run(["cc", "-shared", "-fPIC", source, "-o", tmp_path / "none.so"], check=True)
    world.daemon(OFFLINE)
    program = world.libraries.compile("errno", f"-L{world.libraries.cuda}", "-l:libcuda.so.1")
    environment = world.environment(role="offline", VALVE_REQUIRE="1")
    environment["LD_PRELOAD"] += f":{tmp_path / 'none.so'}"

    done = subprocess.run([program], env=environment, capture_output=True, text=True, timeout=200, check=False)

    assert (done.returncode, done.stdout) == (EXIT_NO_DAEMON, "")


@pytest.mark.parametrize("way", ["silent", "no-room"])
def test_a_program_that_requires_valved_never_says_that_it_waits_when_it_ends(world, way):
    daemon = world.daemon(OFFLINE)
    daemon.silent = way == "silent"
    daemon.refusal = REFUSED_QUOTA if way == "no-room" else None
    program = world.libraries.compile("errno", f"-L{world.libraries.cuda}", "-l:libcuda.so.1")
    environment = world.environment(role="offline", VALVE_REQUIRE="1")

    done = subprocess.run([program], env=environment, capture_output=True, text=True, timeout=200, check=False)

    assert (done.returncode, done.stdout) == (EXIT_NO_DAEMON, "")
    (said,) = (line for line in done.stderr.splitlines() if "valve" in line)
    assert "no valved takes this offline process" in said


def test_a_program_that_goes_elsewhere_never_loses_the_next_valved(world, monkeypatch):
    """VALVE_RUN_DIR was said from the folder in which it began."""
    monkeypatch.chdir(world.folder.parent)
    puppet, client = world.online(VALVE_RUN_DIR=world.folder.name)
    client.gate(0)

    puppet.chdir("/")
    world.daemons[0].close()

    assert world.daemon(ONLINE).client().gone.is_set() is False


SLOW_THREADS = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdlib.h>
#include <unistd.h>
struct begin { void *(*run)(void *), *with; };
static void *late(void *given) {
	struct begin begin = *(struct begin *)given;
	free(given);
	usleep(100000);
	return begin.run(begin.with);
}
int pthread_create(pthread_t *thread, const pthread_attr_t *how, void *(*run)(void *), void *with) {
	int (*real)(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *) = dlsym(RTLD_NEXT, "pthread_create");
	struct begin *begin = malloc(sizeof(*begin));
	*begin = (struct begin){run, with};
	return real(thread, how, late, begin);
}
"""


def slow_threads(world, tmp_path):
    """The environment of a program whose threads are long in beginning."""
    source, library = tmp_path / "slow.c", tmp_path / "slow.so"
    source.write_text(SLOW_THREADS)
    subprocess.run(["cc", "-shared", "-fPIC", source, "-o", library, "-ldl"], check=True)
    return {"LD_PRELOAD": f"{world.environment()['LD_PRELOAD']}:{library}"}


def test_a_program_that_changes_its_root_at_once_never_loses_the_next_valved(world, tmp_path):
    """An offline one would stand for good, an online one go without protection. The session has its root once
    the driver is open, however long its thread takes to begin."""
    puppet, client = world.online(**slow_threads(world, tmp_path))
    client.gate(0)

    puppet.chroot(str(tmp_path))
    world.daemons[0].close()

    assert world.daemon(ONLINE).client().gone.is_set() is False


def test_a_program_that_changes_its_root_in_a_new_namespace_never_loses_the_next_valved(world, tmp_path):
    """The session's thread ends for the call, and begins again."""
    world.daemon(ONLINE)
    puppet = world.puppet(**slow_threads(world, tmp_path))
    puppet.open("/dev/nvidiactl")
    world.daemons[0].client()

    assert puppet.unshare_users() == 0
    puppet.chroot(str(tmp_path))
    world.daemons[0].close()

    assert world.daemon(ONLINE).client().gone.is_set() is False


# -- exit --


def leaving(kv_world):
    """An offline engine whose context is destroyed by a destructor, at the very end of its exit. A slot of its memory
    is being zeroed, for which the gate would have to open."""
    world = kv_world(OFFLINE)
    pool = world.begin()
    engine, client = world.engine()
    engine.reset_context_at_exit()
    engine.alloc(8 * H, ELASTIC)
    number = world.range_of(pool).range
    pool.order(client, QUARANTINE, number, [Entry(0)])
    obey(client, STOP)
    before = world.emulator.state().used_bytes()
    pool.send(client, BACK, number, [Entry(0, 77, CREATE | ZERO)])
    until(lambda: world.emulator.state().used_bytes() > before, "the order is at work")
    return engine, client


def tasks_of(engine):
    return len(os.listdir(f"/proc/{engine.process.pid}/task"))


def test_an_exit_never_waits_for_a_zeroing_that_nobody_looks_at_any_more(kv_world):
    engine, client = leaving(kv_world)
    threads = tasks_of(engine)

    engine.process.stdin.close()
    until(lambda: tasks_of(engine) < threads, "the memory thread has ended")
    obey(client, RUN)

    assert engine.process.wait(timeout=LONG_S) == 0
