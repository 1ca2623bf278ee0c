"""The process under test: loads libcuda, opens driver nodes, issues ioctls and launches, one JSON line per command.

It runs with libvalve.so preloaded and knows nothing of it; everything goes through libc and libcuda by ctypes, the way
a foreign program would.
"""

import contextlib
import ctypes
import json
import os
import queue
import signal
import struct
import subprocess
import sys
import threading

LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.ioctl.argtypes = [ctypes.c_int, ctypes.c_ulong, ctypes.c_void_p]
LIBC.open.argtypes = [ctypes.c_char_p, ctypes.c_int, ctypes.c_int]
KEEP = []  # parameter blocks stay where they are while the process lives


def iowr(nr, size):
    return 0xC0000000 | size << 16 | 0x46 << 8 | nr


def block(data):
    """A buffer that lives for good; returns its address."""
    made = ctypes.create_string_buffer(data, len(data))
    KEEP.append(made)
    return ctypes.addressof(made), made


class Commands:
    def __init__(self):
        self.cuda = None
        self.heard = []

    def load(self, path="libcuda.so.1", mode=0):
        self.cuda = ctypes.CDLL(path, mode=mode)

    def cu(self, name, *numbers):
        return getattr(self.cuda, name)(*[ctypes.c_uint64(n) for n in numbers])

    def cu_out(self, name, *numbers):
        """A call whose first argument is an out pointer: [result, value]."""
        out = ctypes.c_uint64()
        return [getattr(self.cuda, name)(ctypes.byref(out), *[ctypes.c_uint64(n) for n in numbers]), out.value]

    def stub_block(self, context):
        self.cuda.stub_block(ctypes.c_uint64(context))

    def stub_shared(self, is_shared):
        self.cuda.stub_shared(is_shared)

    def cu_in_background(self, name, *numbers):
        threading.Thread(target=self.cu, args=(name, *numbers), daemon=True).start()

    def end_capture(self, stream):
        graph = ctypes.c_void_p()
        return self.cuda.cuStreamEndCapture(ctypes.c_uint64(stream), ctypes.byref(graph))

    def stub(self, what):
        self.cuda.stub_count.restype = ctypes.c_uint64
        return self.cuda.stub_count(what.encode())

    def stub_arguments(self):
        self.cuda.stub_argument.restype = ctypes.c_uint64
        return [self.cuda.stub_argument(i) for i in range(11)]

    def stub_answer(self, query, record=0):
        self.cuda.stub_answer(query, record)

    def launch(self, count=1, name="cuLaunchKernel"):
        call = getattr(self.cuda, name)
        for _ in range(count):
            call(*[ctypes.c_uint64(n) for n in range(1, 12)])

    def hint(self, open_requests):
        LIBC.valve_hint_open_requests(open_requests)

    def launch_in_threads(self, threads, count):
        team = [threading.Thread(target=self.launch, args=(count,)) for _ in range(threads)]
        for thread in team:
            thread.start()
        for thread in team:
            thread.join()

    def launch_in_background(self, count=1):
        """Launches on a thread of its own and answers at once."""
        threading.Thread(target=self.launch, args=(count,), daemon=True).start()

    def getproc(self, name, version=12000, flags=0, v2=True):
        """[result, pointer, status]; v1 has no status."""
        out, status = ctypes.c_void_p(), ctypes.c_int(-1)
        if v2:
            code = self.cuda.cuGetProcAddress_v2(
                name.encode(), ctypes.byref(out), version, ctypes.c_uint64(flags), ctypes.byref(status)
            )
        else:
            code = self.cuda.cuGetProcAddress(name.encode(), ctypes.byref(out), version, ctypes.c_uint64(flags))
        return [code, out.value or 0, status.value]

    def call(self, pointer, *numbers):
        return ctypes.CFUNCTYPE(ctypes.c_int)(pointer)(*[ctypes.c_uint64(n) for n in numbers])

    def getproc_by(self, pointer, name, version=12000, flags=0):
        """Asks a cuGetProcAddress_v2 that was itself obtained by cuGetProcAddress."""
        out = ctypes.c_void_p()
        ctypes.CFUNCTYPE(ctypes.c_int)(pointer)(name.encode(), ctypes.byref(out), version, ctypes.c_uint64(flags), None)
        return out.value or 0

    def open(self, path, flags=os.O_RDWR):
        return LIBC.open(path.encode(), flags, 0)

    def close(self, fd):
        ctypes.set_errno(0)
        return [LIBC.close(fd), ctypes.get_errno()]

    def close_by_syscall(self, fd):
        return LIBC.syscall(3, fd)

    def close_range(self, first, last):
        return LIBC.close_range(ctypes.c_uint(first), ctypes.c_uint(last), 0)

    def close_range_in_a_table_of_its_own(self, first):
        """On a thread that then ends, as before an exec: the other threads keep their files."""
        thread = threading.Thread(target=lambda: LIBC.close_range(ctypes.c_uint(first), ctypes.c_uint(2**32 - 1), 2))
        thread.start()
        thread.join()

    def closefrom(self, first):
        LIBC.closefrom(first)

    def dup2(self, old, new):
        return LIBC.dup2(old, new)

    def dup3(self, old, new):
        return LIBC.dup3(old, new, 0)

    def steal(self, number):
        """Puts an eventfd of ours under a number, past libc: a runtime that makes its own system calls."""
        own = os.eventfd(7, os.EFD_NONBLOCK)
        LIBC.syscall(33, own, number)
        LIBC.syscall(3, own)

    def eventfd_read(self, number):
        return os.eventfd_read(number)

    def fill_fds(self, count):
        """Every number up to there is in use."""
        import resource

        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        while os.dup(0) < count:
            pass

    def limit_fds(self, count):
        """No number from there on may be given out any more, as in a sandbox."""
        import resource

        resource.setrlimit(resource.RLIMIT_NOFILE, (count, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))

    def forbid(self, error, *calls, everywhere=True):
        """A filter of system calls, in all threads or in the calling one: these are refused so. 0: it is in place."""
        rules = [(0x20, 0, 0, 0), *((0x15, len(calls) - i, 0, call) for i, call in enumerate(calls))]
        rules += [(6, 0, 0, 0x7FFF0000), (6, 0, 0, 0x50000 | error)]  # allow, refuse
        where, _ = block(b"".join(struct.pack("<HBBI", *rule) for rule in rules))
        program, _ = block(struct.pack("<H6xQ", len(rules), where))
        LIBC.prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
        return LIBC.syscall(317, 1, int(everywhere), ctypes.c_void_p(program))

    def drop_capabilities(self):
        """Of the calling thread, and of those that it makes: limits hold for it from now on."""
        header, none = struct.pack("<Ii", 0x20080522, 0), bytes(24)
        if LIBC.capset(header, none):
            raise OSError(ctypes.get_errno(), "capset")

    def bind(self, priority, *cores):
        """The calling thread, and what it makes from now on. False: not allowed here."""
        os.sched_setaffinity(0, cores)
        try:
            os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(priority))
        except PermissionError:
            return False
        return True

    def own_threads(self):
        """(policy, number of cores) of every other thread."""
        others = [int(name) for name in os.listdir("/proc/self/task") if int(name) != threading.get_native_id()]
        return [(os.sched_getscheduler(tid), len(os.sched_getaffinity(tid))) for tid in others]

    def chdir(self, folder):
        os.chdir(folder)

    def chroot(self, folder):
        os.chroot(folder)

    def unshare_users(self):
        return LIBC.unshare(0x10000000)

    def setenv(self, name, value):
        return LIBC.setenv(name.encode(), value.encode(), 1)

    def fds(self):
        """Without what the shim's threads close meanwhile."""
        found = {}
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(FileNotFoundError):
                found[name] = os.readlink(f"/proc/self/fd/{name}")
        return found

    def threads(self):
        return len(os.listdir("/proc/self/task"))

    def alloc(self, fd, root, parent, handle, cls, params="", form=64, flags=0, xfer=False, argument=None):
        """RM_ALLOC in either form. Returns the handle that came back."""
        address = block(bytes.fromhex(params))[0] if params else (argument or 0)
        body = struct.pack("<IIIIQ", root, parent, handle, cls, address)
        body += struct.pack("<QIIII", 0, 0, flags, 0, 0) if form == 64 else struct.pack("<II", 0, 0)
        where, made = block(body)
        self._ioctl(fd, 0x2B, where, len(body), xfer)
        return struct.unpack_from("<I", made, 8)[0]

    def free(self, fd, root, handle, xfer=False):
        where, made = block(struct.pack("<IIII", root, 0, handle, 0))
        self._ioctl(fd, 0x29, where, 16, xfer)
        return struct.unpack_from("<I", made, 12)[0]

    def control(self, fd, client, handle, command, params="", flags=0, xfer=False, argument=None):
        address = block(bytes.fromhex(params))[0] if params else (argument or 0)
        where, made = block(struct.pack("<IIIIQII", client, handle, command, flags, address, len(params) // 2, 0))
        self._ioctl(fd, 0x2A, where, 32, xfer)
        return struct.unpack_from("<I", made, 28)[0]

    def control_in_background(self, *arguments, **named):
        threading.Thread(target=self.control, args=arguments, kwargs=named, daemon=True).start()

    def dup(self, fd, client, parent, handle, client_from, handle_from):
        where, _ = block(struct.pack("<IIIIIII", client, parent, handle, client_from, handle_from, 0, 0))
        self._ioctl(fd, 0x34, where, 28, False)

    def uvm(self, fd, request, data):
        where, _ = block(bytes.fromhex(data))
        return LIBC.ioctl(fd, request, where)

    def raw_ioctl(self, fd, request, address):
        return LIBC.ioctl(fd, request, address)

    def _ioctl(self, fd, nr, where, size, xfer):
        if xfer:
            outer, _ = block(struct.pack("<IIQ", nr, size, where))
            return LIBC.ioctl(fd, iowr(211, 16), outer)
        return LIBC.ioctl(fd, iowr(nr, size), where)

    def fork_and(self, name, *arguments, how="fork"):
        """Runs a command in a forked child and returns what it returned there. `_Fork` and the bare system call run no
        handler in it."""
        read, write = os.pipe()
        pid = {"fork": os.fork, "_Fork": LIBC._Fork, "system call": lambda: LIBC.syscall(57)}[how]()
        if pid == 0:
            os.write(write, json.dumps(getattr(self, name)(*arguments)).encode())
            os._exit(0)
        os.close(write)
        with os.fdopen(read) as answer:
            text = answer.read()
        os.waitpid(pid, 0)
        return json.loads(text)

    def leave_table(self, flags=0x400):
        """A thread that stays, with a table of files of its own, unless `flags` are none."""
        self.told, self.answers = queue.SimpleQueue(), queue.SimpleQueue()

        def serve():
            self.answers.put(LIBC.unshare(flags))
            while True:
                name, arguments, named = self.told.get()
                self.answers.put(getattr(self, name)(*arguments, **named))

        threading.Thread(target=serve, daemon=True).start()
        return self.answers.get()

    def elsewhere(self, name, *arguments, **named):
        """On that thread."""
        self.told.put((name, arguments, named))
        return self.answers.get()

    def wait_for(self, pid):
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    def fork_idle(self, how="fork"):
        """A child that stays; returns its pid."""
        pid = os.fork() if how == "fork" else LIBC.syscall(57)
        if pid == 0:
            while True:
                threading.Event().wait()
        return pid

    def handle(self, number, how):
        """By Python, as most programs do. Returns what was there before, as Python knows it."""
        before = signal.signal(number, {"default": signal.SIG_DFL, "handler": self._heard}[how])
        return getattr(before, "name", "handler")

    def handled(self, number):
        return getattr(signal.getsignal(number), "name", "handler")

    def _heard(self, number, frame):
        self.heard.append(number)

    def has_heard(self):
        return self.heard

    def handle_in_c(self, library, number):
        """As libraries do that hand a signal on to the handler that was there. Python is not asked."""
        self.handed_on = ctypes.CDLL(library)
        return self.handed_on.handle(number)

    def heard_in_c(self):
        return ctypes.c_int.in_dll(self.handed_on, "heard").value

    def open_in_clone(self, library, flags):
        """In a child that shares with us what the flags say; it has ended when this returns."""
        return ctypes.CDLL(library).open_in_clone(flags)

    def raise_signal(self, number):
        signal.raise_signal(number)

    def block_and_wait_for(self, number):
        """Blocked in this thread, and in those that it makes; takes the signal from the queue."""
        signal.pthread_sigmask(signal.SIG_BLOCK, {number})
        print('"blocked"', flush=True)
        return signal.sigwait({number})

    def spawn_idle(self, way):
        """Another program that stays; returns its pid."""
        if way == "posix_spawn":
            return os.posix_spawn("/bin/sleep", ["sleep", "1000"], os.environ)
        return subprocess.Popen(["sleep", "1000"], close_fds=way == "vfork").pid

    def fork_many(self, count):
        """Children that open the driver and end, one after another."""
        for _ in range(count):
            pid = os.fork()
            if pid == 0:
                LIBC.open(b"/dev/nvidiactl", os.O_RDWR, 0)
                os._exit(0)
            os.waitpid(pid, 0)

    def init_and_launch(self, count):
        """What a child does that takes up CUDA itself."""
        self.cuda.cuInit(0)
        self.launch(count)
        return [os.getpid(), self.stub("launches")]

    def spawn(self, *command):
        return subprocess.run(command, check=False, capture_output=True, text=True).stdout


def main():
    commands = Commands()
    for line in sys.stdin:
        name, arguments, named = json.loads(line)
        print(json.dumps(getattr(commands, name)(*arguments, **named)), flush=True)


main()
