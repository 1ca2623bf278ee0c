"""What valved does to KV memory from outside of its process, and what it asks the process about it."""

from __future__ import annotations

import socket
import struct

from kv_pool import OUTSIDE, TRY, order_body
from rm_process import RmProcess

MAP_EXTERNAL_SPARSE, STATUS_AT = 74, 32


class Outside:
    """Another process with the engine's descriptor: what valved does with it."""

    def __init__(self, emulator, scratch):
        self.process = RmProcess(emulator.directory)
        [self.sent] = scratch.fds
        socket.send_fds(self.process.relay, [b"f"], [self.sent])
        self.fd = self.process.call("receive_fd")
        self.uuid = scratch.gpu_uuid

    def sparse(self, address, length):
        packed = struct.pack("<QQ16sQ", address, length, self.uuid, 0)
        answer = self.process.ioctl(self.fd, MAP_EXTERNAL_SPARSE, packed)
        assert (answer.errno, answer.word(STATUS_AT)) == (0, 0)


def attempt(pool, client, scratch, how=OUTSIDE):
    number = pool.number()
    client.send(20, 0, order_body(number, TRY, scratch.place, [], how))
    answer = pool.answer()
    assert answer.order == number
    return answer.status
