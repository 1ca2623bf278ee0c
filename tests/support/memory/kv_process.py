"""An engine without an engine: allocates KV memory, writes owner tags into its pages and checks them, one JSON line per
command. Runs with libvalve.so preloaded on the emulated GPU and calls what an engine would call."""

import contextlib
import ctypes
import json
import os
import sys
import threading
from ctypes import byref, c_int, c_size_t, c_uint8, c_uint32, c_uint64, c_void_p

from cuda_driver import Cuda, CudaError
from cuda_memory import PAGE as VMM_PAGE
from cuda_memory import Prop, backed

PAGE = 4096


class Commands:
    def __init__(self):
        self.own = ctypes.CDLL(None)
        self.gpus = {}
        self.cuda = None
        self.threads = {}

    def start(self, device=0):
        self.cuda = self.gpus.setdefault(device, None) or Cuda(device).start()
        self.gpus[device] = self.cuda
        self.cuda.cuCtxSetCurrent(self.cuda.context)
        self.result = self.cuda.pinned(PAGE)

    def alloc(self, size, flags=None):
        """In a bracket with these flags; None: plain. The address, or the negated error."""
        out = c_uint64()
        if flags is not None:
            self.own.valve_kv_begin(c_uint32(flags))
        code = self.cuda.call("cuMemAlloc_v2", byref(out), size)
        if flags is not None:
            self.own.valve_kv_end()
        return out.value if code == 0 else -code

    def take(self, how, size):
        """Memory of the card that is no KV memory: the driver's answer."""
        out, pitch = c_uint64(), c_size_t()
        calls = {
            "plain": ("cuMemAlloc_v2", byref(out), size),
            "pitched": ("cuMemAllocPitch_v2", byref(out), byref(pitch), size >> 10, 1 << 10, 4),
            "managed": ("cuMemAllocManaged", byref(out), size, 1),
            "async": ("cuMemAllocAsync", byref(out), size, None),
            "mapped": ("cuMemCreate", byref(out), size, byref(Prop(1, 1, 1, self.cuda.device)), 0),
        }
        return self.cuda.call(*calls[how])

    def child_takes(self, size):
        """What a forked child, which uses the card before its parent does, is answered; it has ended then."""
        reader, writer = os.pipe()
        if (pid := os.fork()) == 0:
            self.start()
            os.write(writer, str(self.take("plain", size)).encode())
            os._exit(0)
        os.waitpid(pid, 0)
        return int(os.read(reader, 100))

    def free(self, address):
        return self.cuda.call("cuMemFree_v2", address)

    def tag(self, address, size, value):
        self.cuda.launch(self.cuda.kernel("emu_tag"), address, size, value)
        return self.cuda.call("cuCtxSynchronize")

    def wrong_pages(self, address, size, value):
        """How many pages do not carry the tag at both ends."""
        c_uint64.from_address(self.result).value = 0
        self.cuda.launch(self.cuda.kernel("emu_check"), address, size, value, self.result)
        self.cuda.cuCtxSynchronize()
        return c_uint64.from_address(self.result).value

    def touch(self, address, size):
        """0, or the error of a kernel that reads and writes every page."""
        self.cuda.launch(self.cuda.kernel("emu_touch"), address, size, PAGE)
        return self.cuda.call("cuCtxSynchronize")

    def read(self, address, size):
        return self.cuda.read(address, size).hex()

    def write(self, address, text):
        self.cuda.write(address, bytes.fromhex(text))

    def clear(self, address, size):
        return self.cuda.call("cuMemsetD8_v2", address, 0, size)

    def ranges(self):
        return self.own.valve_kv_ranges()

    def step(self):
        self.own.valve_kv_step()

    def launch_spin(self, us):
        self.cuda.launch(self.cuda.kernel("emu_spin"), us)

    def launch_touch(self, address, size):
        self.cuda.launch(self.cuda.kernel("emu_touch"), address, size, PAGE)

    def begin_capture(self):
        """In the mode that forbids most to other threads."""
        stream = self.cuda.stream()
        self.cuda.cuStreamBeginCapture_v2(stream, 0)
        return stream

    def end_capture(self, stream):
        return self.cuda.call("cuStreamEndCapture", stream, byref(c_void_p()))

    def synchronize(self):
        return self.cuda.call("cuCtxSynchronize")

    def attribute(self, number, address, width=8):
        out = {1: c_uint8, 4: c_uint32, 8: c_uint64}[width]()
        code = self.cuda.call("cuPointerGetAttribute", byref(out), number, address)
        return [code, out.value]

    def attributes(self, numbers, address):
        outs = [c_uint64() for _ in numbers]
        pointers = (c_void_p * len(outs))(*[ctypes.addressof(each) for each in outs])
        code = self.cuda.call("cuPointerGetAttributes", len(outs), (c_int * len(outs))(*numbers), pointers, address)
        return [code, [each.value for each in outs]]

    def set_attribute(self, number, address, value=1):
        return self.cuda.call("cuPointerSetAttribute", byref(c_uint32(value)), number, address)

    def address_range(self, address):
        base, size = c_uint64(), c_size_t()
        code = self.cuda.call("cuMemGetAddressRange_v2", byref(base), byref(size), address)
        return [code, base.value, size.value]

    def ipc_handle(self, address):
        return self.cuda.call("cuIpcGetMemHandle", ctypes.create_string_buffer(64), address)

    def export_range(self, address, size):
        fd = c_int(-1)
        return [self.cuda.call("cuMemGetHandleForAddressRange", byref(fd), address, size, 1, 0), fd.value]

    def retain(self, address):
        handle = c_uint64()
        return self.cuda.call("cuMemRetainAllocationHandle", byref(handle), address)

    def mem_info(self):
        free, total = c_size_t(), c_size_t()
        self.cuda.cuMemGetInfo_v2(byref(free), byref(total))
        return [free.value, total.value]

    def uuid(self):
        out = (c_uint8 * 16)()
        self.cuda.call("cuDeviceGetUuid", out, self.cuda.device)
        return bytes(out).hex()

    def getproc_alloc(self, size, version=12000, flags=0):
        """cuMemAlloc as the runtime gets it, in a bracket."""
        pointer, out = c_void_p(), c_uint64()
        code = self.cuda.call("cuGetProcAddress_v2", b"cuMemAlloc", byref(pointer), version, 0, None)
        if code or not pointer.value:
            return [code, 0]
        self.own.valve_kv_begin(c_uint32(flags))
        code = ctypes.CFUNCTYPE(c_int, c_void_p, c_size_t)(pointer.value)(ctypes.addressof(out), size)
        self.own.valve_kv_end()
        return [code, out.value]

    def other_alloc(self, how, size, flags=0):
        """In a bracket, as torch's other allocators make memory: from a stream's pool, or mapped by itself."""
        out = c_uint64()
        self.own.valve_kv_begin(c_uint32(flags))
        if how == "async":
            self.cuda.cuMemAllocAsync(byref(out), size, None)
        else:
            out.value = backed(self.cuda, size // VMM_PAGE)
        self.own.valve_kv_end()
        return out.value

    def linked_alloc(self, size, flags=0):
        """Through the global scope, as a directly linked program's reference is bound."""
        out = c_uint64()
        self.own.valve_kv_begin(c_uint32(flags))
        code = self.own.cuMemAlloc_v2(byref(out), c_size_t(size))
        self.own.valve_kv_end()
        return [code, out.value]

    def reset_context(self):
        return self.cuda.call("cuDevicePrimaryCtxReset_v2", self.cuda.device)

    def reset_context_at_exit(self):
        """As a destructor of the program would: after what is registered from here on."""
        reset = ctypes.cast(self.cuda.library.cuDevicePrimaryCtxReset_v2, c_void_p)
        return getattr(self.own, "__cxa_atexit")(reset, c_void_p(self.cuda.device), None)

    def begin(self, name, *arguments):
        """Runs a command on a thread of its own; `end` waits for it."""
        box = []
        thread = threading.Thread(target=lambda: box.append(self.on_thread(name, arguments)), daemon=True)
        self.threads[name] = (thread, box)
        thread.start()

    def on_thread(self, name, arguments):
        self.cuda.cuCtxSetCurrent(self.cuda.context)
        return getattr(self, name)(*arguments)

    def has_ended(self, name):
        return not self.threads[name][0].is_alive()

    def end(self, name):
        thread, box = self.threads.pop(name)
        thread.join()
        return box[0]

    def fds(self):
        return sorted(filter(None, map(self._file_of, os.listdir("/proc/self/fd"))))

    @staticmethod
    def _file_of(fd):
        """Nothing once it is closed, which the shim's threads may do meanwhile."""
        with contextlib.suppress(FileNotFoundError):
            return os.readlink(f"/proc/self/fd/{fd}")
        return ""

    def bells(self):
        """Numbers of eventfds that lie high: doorbell and order bell."""
        return [fd for fd in range(900, 1024) if "eventfd" in self._file_of(fd)]

    def limit_fds(self, count):
        import resource

        resource.setrlimit(resource.RLIMIT_NOFILE, (count, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))

    def fork_and_free(self, address):
        """What a forked child gets, which has no CUDA: the shim must not touch its parent's ranges."""
        pid = os.fork()
        if pid == 0:
            self.cuda.call("cuMemFree_v2", address)
            os._exit(0)
        return os.waitpid(pid, 0)[1]


def main():
    commands = Commands()
    for line in sys.stdin:
        name, arguments = json.loads(line)
        try:
            answer = getattr(commands, name)(*arguments)
        except CudaError as error:
            answer = {"error": error.code}
        print(json.dumps(answer), flush=True)


main()
