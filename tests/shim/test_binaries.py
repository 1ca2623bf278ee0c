"""The built libraries are loaded into other people's images: what they need and what they show is fixed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from valved.paths import preload_library

GLIBC_LIMIT = (2, 17)
LIBC_HOOKS = {"dlopen", "open", "open64", "openat", "openat64", "__open_2", "__open64_2", "ioctl", "close"} | {
    "close_range",
    "closefrom",
    "dup2",
    "dup3",
    "unshare",
    "setns",
}
OWN = {"valve_hint_open_requests", "valve_kv_begin", "valve_kv_end", "valve_kv_step", "valve_kv_ranges"}
LIBRARIES = [preload_library(), preload_library().with_name("libvalve-cuda.so")]


def readelf(*arguments):
    return subprocess.run(["readelf", "-W", *arguments], check=True, capture_output=True, text=True).stdout


def exported(library):
    found = set()
    for line in readelf("--dyn-syms", library).splitlines():
        fields = line.split()
        if len(fields) == 8 and fields[4] in {"GLOBAL", "WEAK"} and fields[6] != "UND":
            found.add(fields[7])
    return found


def table(repository):
    """Every name that hooks.h asks for, by the preprocessor itself."""
    source = '#include "hooks.h"\n#define E(n, p) NAME n\n#define S(t, b) VALVE_TWIN_##t(E, b)\n'
    text = subprocess.run(
        ["cc", "-E", "-P", f"-I{repository}/shim/src/hooks", "-"],
        input=source + "VALVE_SUBMIT_BASES(S) VALVE_OBSERVE_BASES(S)\n",
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    return set(re.findall(r"NAME (\w+)", text))


@pytest.mark.parametrize("library", LIBRARIES, ids=lambda path: path.name)
def test_no_symbol_is_newer_than_glibc_2_17(library):
    versions = {tuple(map(int, found.split("."))) for found in re.findall(r"GLIBC_([\d.]+)", readelf("-V", library))}

    assert versions
    assert max(versions)[:2] <= GLIBC_LIMIT


def test_the_preload_needs_nothing_but_libc():
    needed = re.findall(r"NEEDED.*\[(.*)\]", readelf("-d", LIBRARIES[0]))

    assert sorted(needed) == ["libc.so.6", "libdl.so.2"]


def test_the_cuda_part_needs_the_preload_before_the_driver():
    """dlsym searches in this order, so hooked names are found before the driver's."""
    dynamic = readelf("-d", LIBRARIES[1])

    assert re.findall(r"NEEDED.*\[(.*)\]", dynamic)[:2] == ["libvalve.so", "libcuda.so.1"]
    assert "RUNPATH" not in dynamic
    assert "RPATH" not in dynamic, "the build's stub must not become somebody's driver"


def test_what_is_exported_is_what_the_table_says(repository):
    assert exported(LIBRARIES[0]) == LIBC_HOOKS | OWN | table(repository)


def test_glibc_only_symbols_are_weak_so_that_musl_programs_start():
    undefined = [line.split() for line in readelf("--dyn-syms", LIBRARIES[0]).splitlines() if " UND " in line]
    bound = {fields[7].split("@")[0]: fields[4] for fields in undefined if len(fields) >= 8}

    assert bound["__register_atfork"] == "WEAK"
    assert not [name for name in bound if name.endswith("_chk") or "stack_chk" in name or name == "__tls_get_addr"]


# POSIX's list (and glibc's additions), less what nobody would put here.
CANCELLATION_POINTS = set(
    re.findall(
        r"\w+",
        """accept accept4 aio_suspend clock_nanosleep close connect creat fcntl fcntl64 fdatasync fsync futimens
        ioctl lockf mq_receive mq_send msgrcv msgsnd msync nanosleep open open64 openat openat64 pause poll ppoll
        pread pread64 preadv pselect pthread_cond_timedwait pthread_cond_wait pthread_join pthread_testcancel
        pwrite pwrite64 pwritev read readv recv recvfrom recvmmsg recvmsg select sem_timedwait sem_wait send
        sendmmsg sendmsg sendto sigpause sigsuspend sigtimedwait sigwait sigwaitinfo sleep splice system tcdrain
        tee usleep vmsplice wait wait3 wait4 waitid waitpid write writev fopen fread fwrite fclose fflush printf
        fprintf dprintf puts perror syslog""",
    )
)


def test_a_cancelled_thread_never_leaves_a_lock_of_ours_held():
    """Where nothing is a cancellation point, no application thread can end inside the shim."""
    undefined = [line.split() for line in readelf("--dyn-syms", LIBRARIES[0]).splitlines() if " UND " in line]

    assert not {fields[7].split("@")[0] for fields in undefined if len(fields) >= 8} & CANCELLATION_POINTS


# -- guests: programs that have nothing to do with CUDA --


def run(command, **more):
    env = {**os.environ, "LD_PRELOAD": str(LIBRARIES[0])}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=200, check=False, **more)


@pytest.fixture
def compiled(tmp_path):
    def build(name, text, compiler="cc", *flags):
        source = tmp_path / f"{name}.c"
        source.write_text(text)
        subprocess.run([compiler, source, "-o", tmp_path / name, *flags], check=True)
        return tmp_path / name

    return build


HELLO = """
#include <fcntl.h>
#include <stdio.h>
#include <unistd.h>
#include <sys/wait.h>
int main(void) {
	int fd = open("/dev/null", O_RDWR);
	pid_t child = fork();
	if (child == 0) _exit(close(fd));
	waitpid(child, NULL, 0);
	printf("%d %d\\n", fd >= 0, close(fd));
	return 0;
}
"""


@pytest.mark.parametrize("flags", [(), ("-static",)], ids=["dynamic", "static"])
def test_an_ordinary_program_runs(compiled, flags):
    done = run([compiled("hello", HELLO, "cc", *flags)])

    assert (done.returncode, done.stdout, done.stderr) == (0, "1 0\n", "")


@pytest.mark.skipif(not shutil.which("musl-gcc"), reason="musl-tools is not installed")
def test_a_musl_program_runs(compiled):
    done = run([compiled("hello", HELLO, "musl-gcc")])

    assert (done.returncode, done.stdout, done.stderr) == (0, "1 0\n", "")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to make a set-uid program")
def test_a_set_uid_program_runs_without_us(compiled):
    folder = Path(tempfile.mkdtemp(prefix="valve-setuid-"))  # pytest's own folders are closed to others
    folder.chmod(0o755)
    program = Path(shutil.copy(compiled("hello", HELLO), folder))
    os.chown(program, 65534, 65534)
    program.chmod(0o4755)

    done = run([program], user=12345)
    shutil.rmtree(folder)

    assert (done.returncode, done.stdout) == (0, "1 0\n")


@pytest.mark.parametrize(
    "command",
    [
        ["/bin/sh", "-c", "ls / | sort | head -1 > /dev/null && echo ok"],
        [sys.executable, "-c", "import subprocess, ssl, ctypes; subprocess.run(['true']); print('ok')"],
    ],
    ids=["shell", "python"],
)
def test_programs_that_fork_and_exec_run(command):
    done = run(command)

    assert (done.returncode, done.stdout, done.stderr) == (0, "ok\n", "")


FORK = """
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>
int main(void) {
	if (fork() == 0) {
		char line[256];
		FILE *file = fopen("/proc/self/smaps_rollup", "r");
		while (file && fgets(line, sizeof(line), file))
			if (!strncmp(line, "Private_Dirty:", 14)) fputs(line + 14, stdout);
		fflush(stdout);
		_exit(0);
	}
	wait(NULL);
	return 0;
}
"""


def test_a_fork_never_pays_for_memory_of_ours_that_nobody_used(compiled):
    """Shells and pre-forking servers run under the preload, too."""
    program = compiled("fork", FORK)
    plain = subprocess.run([program], capture_output=True, text=True, check=True).stdout

    hooked = run([program]).stdout

    assert int(hooked.split()[0]) - int(plain.split()[0]) <= 40, "kB of dirty memory in the child"


def test_a_missing_libcuda_is_still_missing(compiled):
    host = """
#include <dlfcn.h>
#include <stdio.h>
int main(void) { printf("%s\\n", dlopen("libcuda.so.1", RTLD_NOW) ? "found" : dlerror()); return 0; }
"""
    program = compiled("host", host, "cc", "-ldl")
    env = {name: value for name, value in os.environ.items() if name != "LD_LIBRARY_PATH"}
    plain = subprocess.run([program], env=env, capture_output=True, text=True, check=True).stdout

    hooked = subprocess.run(
        [program], env={**env, "LD_PRELOAD": str(LIBRARIES[0])}, capture_output=True, text=True, check=True
    ).stdout

    assert hooked == plain
