"""The messages of proto/abi/link.h as values: bytes in, values out, and back. No sockets here; KV memory: kv_link.py.

A packet is judged whole: magic, type, stated length and real length must agree, or `Malformed` is raised and the
caller closes the connection. Text fields may hold anything; they come out as printable ASCII.

codec.py says how a body is read and written.
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass
from typing import Any

from valved.mechanism import kv_link
from valved.mechanism.codec import Codec, Malformed, Plain

__all__ = ["Malformed"]

MAGIC = 0x4B4E4C56
ABI = 1
MAX_PACKET = 2048
MAX_FDS = 64


class LinkType(enum.IntEnum):
    HELLO = 1
    WELCOME = 2
    REFUSED = 3
    ACK = 4
    RM_CLIENT = 5
    CHANNEL_ADD = 6
    CHANNEL_DEL = 7
    SCHEDULE_WAIT = 8
    NOTE = 9
    SCHEDULE_DONE = 10
    KV_RANGE = 16
    KV_RANGE_DEL = 17
    KV_HELD = 18
    KV_PIN = 19
    KV_ORDER = 20
    KV_DONE = 21
    KV_LAYOUT = 22
    KV_ATTACH = 23
    KV_TABLE = 24
    KV_NEED = 25
    KV_SCRATCH = 26


class Refusal(enum.IntEnum):
    VERSION = 1
    ROLE = 2
    QUOTA = 3
    DRAINING = 4
    MODE = 5
    MALFORMED = 6


class Note(enum.IntEnum):
    INCOMPLETE_MAP = 1
    APP_DISABLED = 2
    APP_ENABLED = 3
    UNKNOWN_DRIVER = 4
    UNKNOWN_SUBMIT = 5
    MPS = 6


class Feature(enum.IntFlag):
    """`enum valve_feature` of region.h."""

    GAPS = 1
    HINT = 2
    SELF_GATE = 4
    HOLD = 8
    SCHEDULE_DONE = 16
    PLAIN_COUNT = 32
    MEMORY = 64
    SPARSE = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    abi_min: int
    abi_max: int
    features: int
    wanted_role: int
    driver: int
    build: str
    comm: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    abi: int = ABI
    role: int
    features: int
    service: int
    client: int
    control_bytes: int
    region_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    code: Refusal
    abi_min: int = ABI
    abi_max: int = ABI
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Ack:
    status: int = 0
    want_fd: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RmClient:
    gpu_uuid: bytes
    device_instance: int
    h_client: int
    h_device: int
    h_subdevice: int
    has_fd: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Channel:
    """Body of both CHANNEL_ADD and CHANNEL_DEL."""

    gpu_uuid: bytes
    device_instance: int
    h_client: int
    h_channel: int
    cid: int
    h_tsg: int
    engine: int
    compute: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Body of SCHEDULE_WAIT and SCHEDULE_DONE."""

    h_client: int
    h_object: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NoteMessage:
    code: int
    h_client: int
    h_channel: int
    text: str


Body = Any
"""One of the values above, or of kv_link.py."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Packet:
    type: LinkType
    seq: int
    sent_ns: int
    body: Body


_HEADER = struct.Struct("<IHHIIQ")


def packet_bytes(kind: LinkType) -> int:
    """Size of a whole packet of this type."""
    return _HEADER.size + CODECS[kind].size


def parse(packet: bytes) -> Packet:
    """The value of one packet, or Malformed."""
    if len(packet) < _HEADER.size:
        raise Malformed(f"{len(packet)} bytes is no header")
    magic, _, kind_value, length, seq, sent_ns = _HEADER.unpack_from(packet)
    if magic != MAGIC:
        raise Malformed(f"magic {magic:#x}")
    codec = CODECS.get(kind_value)
    if codec is None:
        raise Malformed(f"unknown type {kind_value}")
    kind = LinkType(kind_value)
    if not len(packet) == length == packet_bytes(kind):
        raise Malformed(f"{kind.name} of {len(packet)} bytes states {length}, needs {packet_bytes(kind)}")
    return Packet(type=kind, seq=seq, sent_ns=sent_ns, body=codec.read(packet, _HEADER.size))


def build(kind: LinkType, body: Body, *, seq: int, sent_ns: int) -> bytes:
    """The bytes of one packet."""
    payload = CODECS[kind].write(body)
    return _HEADER.pack(MAGIC, ABI, kind, _HEADER.size + len(payload), seq, sent_ns) + payload


def _refusal(value: int) -> Refusal:
    if value not in set(Refusal):
        raise Malformed(f"unknown refusal {value}")
    return Refusal(value)


# Text loses its last byte to the terminating NUL.
CODECS: dict[int, Codec] = {
    LinkType.HELLO: Plain(Hello, "<HHIII31sx15sx"),
    LinkType.WELCOME: Plain(Welcome, "<HHIQQII"),
    LinkType.REFUSED: Plain(Refused, "<IHH95sx", code=_refusal),
    LinkType.ACK: Plain(Ack, "<II"),
    LinkType.RM_CLIENT: Plain(RmClient, "<16sIIIII4x"),
    LinkType.CHANNEL_ADD: Plain(Channel, "<16sIIIIIII4x"),
    LinkType.CHANNEL_DEL: Plain(Channel, "<16sIIIIIII4x"),
    LinkType.SCHEDULE_WAIT: Plain(Schedule, "<II"),
    LinkType.NOTE: Plain(NoteMessage, "<III4x95sx"),
    LinkType.SCHEDULE_DONE: Plain(Schedule, "<II"),
    LinkType.KV_RANGE: kv_link.RANGE,
    LinkType.KV_RANGE_DEL: kv_link.SPAN,
    LinkType.KV_HELD: kv_link.ENTRIES,
    LinkType.KV_PIN: kv_link.SPAN,
    LinkType.KV_ORDER: kv_link.ENTRIES,
    LinkType.KV_DONE: kv_link.DONE,
    LinkType.KV_LAYOUT: kv_link.LAYOUT,
    LinkType.KV_ATTACH: kv_link.ATTACH,
    LinkType.KV_TABLE: kv_link.TABLE,
    LinkType.KV_NEED: kv_link.NEED,
    LinkType.KV_SCRATCH: kv_link.SCRATCH,
}
