"""Puts together the driver objects of a CUDA process through a puppet, as libcuda would."""

from __future__ import annotations

import os
import struct
import time
from dataclasses import dataclass
from typing import Any

ROOT, DEVICE, SUBDEVICE, SPACE, SHARE, GROUP = 0x41, 0x80, 0x2080, 0x90F1, 0x9067, 0xA06C
GPFIFO, COMPUTE, COPY, MPS = 0xC86F, 0xCBC0, 0xC8B5, 0x900E
GR0, COPY0 = 1, 9
SCHEDULE_GROUP, SCHEDULE_CHANNEL = 0xA06C0101, 0xA06F0103
BIND_GROUP, BIND_CHANNEL = 0xA06C0102, 0xA06F0104
DISABLE, GID_INFO = 0x2080110B, 0x2080014A
UUID = bytes(range(16))


def device_params(instance: int = 0) -> str:
    return struct.pack("<I52x", instance).hex()


def group_params(engine: int = GR0, space: int = 0) -> str:
    return struct.pack("<IIIII", 0, 0, space, engine, 0).hex()


def share_params(space: int) -> str:
    return struct.pack("<III", space, 0, 0).hex()


def channel_params(engine: int = 0, space: int = 0, share: int = 0, size: int = 368) -> str:
    head = struct.pack("<IIQIIII96xII", 0, 0, 0, 1024, 0, share, space, engine, 0)
    return (head + bytes(size - len(head))).hex()


def disable_params(off: bool, pairs: list[tuple[int, int]], count: int | None = None) -> str:
    clients = [pair[0] for pair in pairs] + [0] * (64 - len(pairs))
    channels = [pair[1] for pair in pairs] + [0] * (64 - len(pairs))
    count = len(pairs) if count is None else count
    return struct.pack("<B3xIBB6xQ64I64I", off, count, 0, 0, 0, *clients, *channels).hex()


def register(client: int, channel: int, uuid: bytes = UUID) -> str:
    return struct.pack("<16siIIIQQII", uuid, 0, client, channel, 0, 0, 0, 0, 0).hex()


def unregister(client: int, channel: int, uuid: bytes = UUID) -> str:
    return struct.pack("<16sIII", uuid, client, channel, 0).hex()


@dataclass
class Process:
    """One RM client with a device, and what tests add to it. Handles are chosen like libcuda's."""

    puppet: Any
    ctl: int
    uvm: int
    client: int
    instance: int = 0
    device: int = 0x5C000001
    subdevice: int = 0x5C000002
    space: int = 0x5C000003
    form: int = 64
    xfer: bool = False

    @classmethod
    def begin(cls, puppet: Any, instance: int = 0, **more: Any) -> Process:
        ctl, uvm = puppet.open("/dev/nvidiactl"), puppet.open("/dev/nvidia-uvm")
        made = cls(puppet, ctl, uvm, 0, instance=instance, **more)
        made.client = made.alloc(0, 0, ROOT)
        made.alloc(made.client, made.device, DEVICE, device_params(instance))
        made.alloc(made.device, made.subdevice, SUBDEVICE, "00000000")
        made.alloc(made.device, made.space, SPACE)
        return made

    def alloc(self, parent: int, handle: int, cls: int, params: str = "", **more: Any) -> int:
        return self.puppet.alloc(
            self.ctl, self.client, parent, handle, cls, params, form=self.form, xfer=self.xfer, **more
        )

    def group(self, handle: int, engine: int = GR0) -> int:
        return self.alloc(self.device, handle, GROUP, group_params(engine, self.space))

    def channel(self, parent: int, handle: int, engine: int = 0, share: int = 0) -> int:
        return self.alloc(parent, handle, GPFIFO, channel_params(engine, self.space, share))

    def control(self, handle: int, command: int, params: str, **more: Any) -> int:
        return self.puppet.control(self.ctl, self.client, handle, command, params, xfer=self.xfer, **more)

    def schedule(self, handle: int, on: bool = True) -> int:
        return self.control(handle, SCHEDULE_GROUP, f"{int(on):02x}0000")

    def free(self, handle: int) -> int:
        return self.puppet.free(self.ctl, self.client, handle, xfer=self.xfer)

    def register(self, channel: int, uuid: bytes = UUID) -> None:
        self.puppet.uvm(self.uvm, 27, register(self.client, channel, uuid))


def call(process: Process, word: str, *handles: int) -> str:
    """As the fake driver logs it."""
    listed = "".join(f" {handle:x}" for handle in handles)
    return f"{word} client={process.client:x} object={process.subdevice:x} n={len(handles)}{listed}"


def end_now(client: Any, word: str = "run_until_0") -> int:
    """Granted time ends, as the issuer says it: the word, then the bell."""
    end_ns = time.monotonic_ns() + 1_000_000
    setattr(client.control, word, end_ns)
    os.eventfd_write(client.order_bell, 1)
    return end_ns
