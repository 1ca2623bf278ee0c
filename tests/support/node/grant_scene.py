"""A native gate with one service that may grant: its hook, its offline work, and their words."""

from __future__ import annotations

import ctypes
import os
import platform
import threading
import time
from dataclasses import replace

from gates import Launcher, Rig, wait_until
from valve_abi import GRANT as WORDS
from valve_abi import GRANT_OFFSET, GrantAnswer
from valve_tools.bench import region_pages
from valve_tools.bench.region_pages import Page

from valved.machine.ports import WakeRule
from valved.machine.stamps import StampKind
from valved.model.ids import GpuIndex, Role, ServiceId
from valved.policy.wake import WakeSettings

MS = 1_000_000
QUICK = WakeRule(
    cooldown_ns=1 * MS,
    learn_ns=1 << 62,
    watch_since_ns=1,
    looking_since_ns=1,
    **{name: getattr(WakeSettings(watcher_lease_ns=10**15), name) for name in WakeSettings.__dataclass_fields__},
)


def prove(online: Launcher) -> None:
    """The watcher's proof, with its time."""
    online.region["idle_ns"] = online.region["watcher_ns"] = time.monotonic_ns()
    online.finish()


SERVICE = ServiceId(7)
SECOND = 1_000_000_000
FAR = 3600 * SECOND
NEVER_IDLE = replace(QUICK, cooldown_ns=FAR)
"""A permission under which the service is never woken by itself: only a grant opens it."""


class GrantWords:
    """A client's look at the grant's words of its control page."""

    def __init__(self, control: Page) -> None:
        self._memory = control.memory

    def __getitem__(self, name: str) -> int:
        field = WORDS.fields[name]
        at = GRANT_OFFSET + field.offset
        return int.from_bytes(self._memory[at : at + field.bytes], "little")

    def run_until(self, gpu: int) -> int:
        at = GRANT_OFFSET + WORDS.fields["run_until_ns"].offset + 8 * gpu
        return int.from_bytes(self._memory[at : at + 8], "little")


class Sleeper:
    """Sleeps on a word of a region page as its process does, on a thread."""

    SYS_FUTEX, WAIT = 202 if platform.machine() == "x86_64" else 98, 0

    def __init__(self, page: Page, at: int) -> None:
        self.is_woken = False
        self._word = ctypes.c_uint32.from_buffer(page.memory, at)
        self._value = self._word.value
        self._over = False
        self._thread = threading.Thread(target=self._sleep)

    def _sleep(self) -> None:
        libc, limit = ctypes.CDLL(None), (ctypes.c_long * 2)(0, 200_000_000)
        while not self._over and not self.is_woken:
            self.is_woken = libc.syscall(self.SYS_FUTEX, ctypes.byref(self._word), self.WAIT, self._value, limit) == 0

    def __enter__(self) -> Sleeper:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over = True
        self._thread.join()
        del self._word


class Hook:
    """The hook of an engine: asks for pauses as patches/hook does."""

    def __init__(self, rig: Rig, service: ServiceId = SERVICE) -> None:
        self.rig, self.client = rig, rig.name()
        self.fds = rig.gate.create_client(self.client, Role.HOOK, service)
        self.control = region_pages.control_page(self.fds.control)
        self.region = region_pages.region_page(self.fds.region)
        region_pages.fill_region(self.region)
        self.words = GrantWords(self.control)
        self.seq = 0
        rig._everyone.append(self)

    def say(self, until_ns: int) -> int:
        self.seq += 1
        self.region["grant_until_ns"] = until_ns
        self.region["grant_seq"] = self.seq
        os.eventfd_write(self.fds.doorbell, 1)
        return self.seq

    def ask(self, until_ns: int) -> GrantAnswer:
        seq = self.say(until_ns)
        wait_until(lambda: self.words["answer_seq"] == seq, "an answer")
        return GrantAnswer(self.words["answer"])

    def close(self) -> None:
        self.control.close()
        self.region.close()


class Scene:
    """One service of one GPU that never wakes by itself, its hook, and offline work with four channels."""

    def __init__(self, rig: Rig, gpus: frozenset[int] = frozenset({0})) -> None:
        self.rig, self.grants = rig, rig.gate.granting
        self.work = [rig.offline(gpu=gpu) for gpu in sorted(gpus)]
        for workload in self.work:
            workload.add(4)
        self.online: Launcher = rig.online(SERVICE, set(gpus))
        self.hook = Hook(rig)
        prove(self.online)
        rig.gate.permit(SERVICE, NEVER_IDLE)
        self.grants.set_grantable(frozenset(map(GpuIndex, gpus)))
        self.grants.consent(SERVICE, FAR, 0)
        rig.settle()

    def ask(self, for_ns: int = FAR) -> GrantAnswer:
        return self.hook.ask(time.monotonic_ns() + for_ns)

    def short(self) -> None:
        """A grant that ends by itself. Asked until it is heard in time: a loaded machine may be slower than a grant."""
        wait_until(lambda: self.ask(20 * MS) is GrantAnswer.GIVEN, "a short grant")

    def runs(self) -> bool:
        return all(workload.on() == 4 for workload in self.work)

    def is_off(self) -> bool:
        return all(workload.on() == 0 for workload in self.work)

    def wait_running(self) -> None:
        wait_until(self.runs, "offline work runs")

    def wait_off(self) -> None:
        wait_until(lambda: self.rig.gate.is_stopped(GpuIndex(0)) and self.is_off(), "offline work is stopped")

    def until(self) -> list[int]:
        return [GrantWords(work.control).run_until(work.gpu) for work in self.work]

    def causes(self) -> list[int]:
        return [stamp.cause for stamp in self.rig.take_stamps() if stamp.kind is StampKind.GATE]
