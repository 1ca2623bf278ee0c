"""A native gate over a fake driver: what tests/native and the properties stand on."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import cffi
from valve_tools.bench import region_pages
from valved.native._gate import ffi, lib

from valved.gate.adapter import NativeGate, NativeSettings
from valved.machine.ports import ArmResult, ClientFds
from valved.machine.stamps import Stamp
from valved.model.ids import ChannelRef, ClientId, GpuIndex, Role, ServiceId

ROOT = Path(__file__).resolve().parents[3]
# A loaded machine must not look like a driver that hangs: only tests about one have a short patience.
SETTINGS = NativeSettings(lease_ns=500_000_000, hang_ns=30_000_000_000, order_ns=100_000_000_000, fifo_priority=0)
HASTY = replace(SETTINGS, hang_ns=150_000_000)
WARNINGS = ["-std=gnu11", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Wconversion", "-Werror"]
INCLUDES = [f"-I{ROOT / folder}" for folder in ("proto/abi", "valved/native", "tests/native")]
DEADLINE_S = 200.0  # ends a hung test; nothing is ever judged by it


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"never came: {what}"

        time.sleep(0.0005)


def compile_c(out: Path, sources: list[Path], *flags: str) -> None:
    command = ["cc", *WARNINGS, *INCLUDES, *flags, "-o", str(out), *map(str, sources), "-lpthread"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr


class FakeDriver:
    """tests/native/fake_rm.c, loaded."""

    def __init__(self, library: Path) -> None:
        self.ffi: Any = cffi.FFI()
        header = (ROOT / "tests/native/fake_rm.h").read_text().splitlines()
        self.ffi.cdef("\n".join(line for line in header if not line.startswith("#")))
        self.lib: Any = self.ffi.dlopen(str(library))
        self.lib.fake_reset()

    @property
    def rules(self) -> Any:
        return self.lib.fake_rules

    @property
    def counts(self) -> Any:
        return self.lib.fake_counts

    def machine(self) -> Any:
        return ffi.cast("struct valve_os *", int(self.ffi.cast("uintptr_t", self.lib.fake_machine())))


class Workload:
    """An offline process: one RM client with channels."""

    def __init__(self, rig: Rig, client: ClientId, gpu: int, features: int) -> None:
        self.rig, self.client, self.gpu = rig, client, GpuIndex(gpu)
        self.fds = rig.gate.create_client(client, Role.OFFLINE, ServiceId(0))
        self.control = region_pages.control_page(self.fds.control)
        self.region = region_pages.region_page(self.fds.region)
        region_pages.fill_region(self.region, features=features)
        fd, subdevice = rig.driver.ffi.new("int *"), rig.driver.ffi.new("uint32_t *")
        self.h_client: int = rig.driver.lib.fake_client(fd, subdevice, gpu)
        self.fd, self.h_subdevice = fd[0], subdevice[0]
        self.channels: list[ChannelRef] = []
        self.obeyed: list[int] = []

    def allocate(self, *, compute: bool = True) -> ChannelRef:
        """A channel that the driver has and nobody has reported."""
        handle = 0x5C000010 + len(self.channels)
        cid = self.rig.driver.lib.fake_channel(self.h_client, handle, self.gpu)
        ref = ChannelRef(
            gpu=self.gpu, h_client=self.h_client, h_channel=handle, cid=cid, h_tsg=1, engine=1, compute=compute
        )
        self.channels.append(ref)
        return ref

    def add(self, count: int = 1, *, compute: bool = True) -> list[ArmResult]:
        refs = [self.allocate(compute=compute) for _ in range(count)]
        return [self.rig.gate.channels.add_channel(self.client, ref) for ref in refs]

    def pass_fd(self) -> None:
        mine = os.dup(self.fd)
        self.rig.gate.channels.give_rm_client(self.client, self.gpu, self.h_client, 0, self.h_subdevice, mine)

    def on(self) -> int:
        """How many of its channels run."""
        return sum(self.rig.driver.lib.fake_is_on(ref.h_client, ref.h_channel) == 1 for ref in self.channels)

    def free(self, ref: ChannelRef) -> None:
        self.rig.driver.lib.fake_free_channel(ref.h_client, ref.h_channel)

    @contextmanager
    def obeying(self, before: Callable[[], None] = lambda: None) -> Iterator[None]:
        """A gating thread that answers every order, once it has called `before`."""
        ending = threading.Event()

        def keep() -> None:
            while not ending.wait(0.0005):
                seq = self.control["order_seq"]
                if seq != self.region["order_done"]:
                    before()
                    seq = self.control["order_seq"]
                    self.obeyed.append(self.control["order"])
                    self.region["order_done"] = seq

        thread = threading.Thread(target=keep)
        thread.start()
        try:
            yield
        finally:
            ending.set()
            thread.join()

    def close(self) -> None:
        self.control.close()
        self.region.close()
        os.close(self.fd)


class Launcher:
    """An online process: counts launches and rings as the shim does."""

    def __init__(self, rig: Rig, client: ClientId, service: ServiceId) -> None:
        self.fds: ClientFds = rig.gate.create_client(client, Role.ONLINE, service)
        self.client = client
        self.control = region_pages.control_page(self.fds.control)
        self.region = region_pages.region_page(self.fds.region)
        region_pages.fill_region(self.region)
        self.submitted = 0

    def launch(self) -> bool:
        """Count, look at the word, ring once per epoch. True if it rang."""
        self.submitted += 1
        region_pages.set_submitted(self.region, 3, self.submitted)
        epoch = self.control["gate_epoch"]
        if epoch % 2 == 0 or self.region["rung_epoch"] == epoch:
            return False
        self.region["rung_epoch"] = epoch
        self.region["launch_ns"] = time.monotonic_ns()
        os.eventfd_write(self.fds.doorbell, 1)
        return True

    def finish(self) -> None:
        """The watcher proves that everything is done."""
        self.region["idle_submitted"] = self.submitted

    def close(self) -> None:
        self.control.close()
        self.region.close()


class Rig:
    """The gate, its driver, and everybody connected."""

    def __init__(self, driver: FakeDriver, settings: NativeSettings = SETTINGS) -> None:
        self.driver = driver
        self.gate = NativeGate(settings, driver.machine())
        self._next = 0
        self._everyone: list[Workload | Launcher] = []
        self.stamps: list[Stamp] = []

    def name(self) -> ClientId:
        self._next += 1
        return ClientId(self._next)

    def offline(self, *, gpu: int = 0, features: int = 0) -> Workload:
        workload = Workload(self, self.name(), gpu, features)
        self._everyone.append(workload)
        return workload

    def online(self, service: int, gpus: set[int]) -> Launcher:
        self.gate.put_service(ServiceId(service), frozenset(map(GpuIndex, gpus)))
        launcher = Launcher(self, self.name(), ServiceId(service))
        self._everyone.append(launcher)
        return launcher

    def take_stamps(self) -> list[Stamp]:
        self.stamps += self.gate.drain_stamps()
        return self.stamps

    def wait_stamp(self, wanted: Callable[[Stamp], bool]) -> Stamp:
        wait_until(lambda: any(map(wanted, self.take_stamps())), "a stamp")
        return next(stamp for stamp in self.stamps if wanted(stamp))

    def wait_gated(self, gpu: int, gated: bool = True) -> None:
        """Until the issuer has done it, not only until it is due."""
        index = GpuIndex(gpu)
        done = self.gate.is_stopped if gated else lambda index: not self.gate.is_gated(index)
        wait_until(lambda: done(index), f"GPU {gpu} gated={gated}")

    def settle(self) -> None:
        """Until every issuer has done what it should."""
        assert lib.valve_gate_settle(self.gate._gate, int(DEADLINE_S * 1e9)) == 0

    def close(self) -> None:
        self.gate.close()
        for one in self._everyone:
            one.close()


@contextmanager
def gate_rig(driver: FakeDriver, settings: NativeSettings = SETTINGS) -> Iterator[Rig]:
    rig = Rig(driver, settings)
    try:
        yield rig
    finally:
        driver.rules.hang = driver.rules.hang_enable = driver.rules.hang_query = 0
        driver.rules.fail_disable = driver.rules.fail_enable = driver.rules.fail_query = 0
        driver.lib.fake_set_between(driver.ffi.NULL)
        driver.lib.fake_watch_word(driver.ffi.NULL)
        rig.close()
        driver.lib.fake_reset()
