"""The messages of proto/abi/link.h as values: bytes in, values out, and back. No sockets here.

A packet is judged whole: magic, type, stated length and real length must agree, or `Malformed` is raised and the
caller closes the connection. Text fields may hold anything; they come out as printable ASCII.
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass

MAGIC = 0x4B4E4C56
ABI = 1
MAX_PACKET = 2048


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


class Malformed(ValueError):
    """The packet makes no sense."""


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
    role: int
    features: int
    service: int
    client: int
    control_bytes: int
    region_bytes: int
    abi: int = ABI


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    code: Refusal
    text: str
    abi_min: int = ABI
    abi_max: int = ABI


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


Body = Hello | Welcome | Refused | Ack | RmClient | Channel | Schedule | NoteMessage


@dataclass(frozen=True, slots=True, kw_only=True)
class Packet:
    type: LinkType
    seq: int
    sent_ns: int
    body: Body


_HEADER = struct.Struct("<IHHIIQ")
_BODY = {
    LinkType.HELLO: struct.Struct("<HHIII32s16s"),
    LinkType.WELCOME: struct.Struct("<HHIQQII"),
    LinkType.REFUSED: struct.Struct("<IHH96s"),
    LinkType.ACK: struct.Struct("<II"),
    LinkType.RM_CLIENT: struct.Struct("<16sIIIIII"),
    LinkType.CHANNEL_ADD: struct.Struct("<16sIIIIIIII"),
    LinkType.CHANNEL_DEL: struct.Struct("<16sIIIIIIII"),
    LinkType.SCHEDULE_WAIT: struct.Struct("<II"),
    LinkType.NOTE: struct.Struct("<IIII96s"),
    LinkType.SCHEDULE_DONE: struct.Struct("<II"),
}


def packet_bytes(kind: LinkType) -> int:
    """Size of a whole packet of this type."""
    return _HEADER.size + _BODY[kind].size


def parse(packet: bytes) -> Packet:
    """The value of one packet, or Malformed."""
    if len(packet) < _HEADER.size:
        raise Malformed(f"{len(packet)} bytes is no header")
    magic, _, kind_value, length, seq, sent_ns = _HEADER.unpack_from(packet)
    if magic != MAGIC:
        raise Malformed(f"magic {magic:#x}")
    if kind_value not in _TYPES:
        raise Malformed(f"unknown type {kind_value}")
    kind = LinkType(kind_value)
    if not len(packet) == length == packet_bytes(kind):
        raise Malformed(f"{kind.name} of {len(packet)} bytes states {length}, needs {packet_bytes(kind)}")
    return Packet(type=kind, seq=seq, sent_ns=sent_ns, body=_read_body(kind, packet))


def build(kind: LinkType, body: Body, *, seq: int, sent_ns: int) -> bytes:
    """The bytes of one packet."""
    payload = _BODY[kind].pack(*_body_fields(body))
    return _HEADER.pack(MAGIC, ABI, kind, _HEADER.size + len(payload), seq, sent_ns) + payload


_TYPES = frozenset(int(kind) for kind in _BODY)


def _read_body(kind: LinkType, packet: bytes) -> Body:
    f = _BODY[kind].unpack_from(packet, _HEADER.size)
    match kind:
        case LinkType.HELLO:
            return Hello(
                abi_min=f[0],
                abi_max=f[1],
                features=f[2],
                wanted_role=f[3],
                driver=f[4],
                build=_text(f[5]),
                comm=_text(f[6]),
            )
        case LinkType.WELCOME:
            return Welcome(
                abi=f[0],
                role=f[1],
                features=f[2],
                service=f[3],
                client=f[4],
                control_bytes=f[5],
                region_bytes=f[6],
            )
        case LinkType.REFUSED:
            if f[0] not in set(Refusal):
                raise Malformed(f"unknown refusal {f[0]}")
            return Refused(code=Refusal(f[0]), abi_min=f[1], abi_max=f[2], text=_text(f[3]))
        case LinkType.ACK:
            return Ack(status=f[0], want_fd=bool(f[1]))
        case LinkType.RM_CLIENT:
            return RmClient(
                gpu_uuid=f[0],
                device_instance=f[1],
                h_client=f[2],
                h_device=f[3],
                h_subdevice=f[4],
                has_fd=bool(f[5]),
            )
        case LinkType.CHANNEL_ADD | LinkType.CHANNEL_DEL:
            return Channel(
                gpu_uuid=f[0],
                device_instance=f[1],
                h_client=f[2],
                h_channel=f[3],
                cid=f[4],
                h_tsg=f[5],
                engine=f[6],
                compute=bool(f[7]),
            )
        case LinkType.SCHEDULE_WAIT | LinkType.SCHEDULE_DONE:
            return Schedule(h_client=f[0], h_object=f[1])
        case LinkType.NOTE:
            return NoteMessage(code=f[0], h_client=f[1], h_channel=f[2], text=_text(f[4]))
        case _:
            raise Malformed(f"no reader for {kind.name}")


def _body_fields(body: Body) -> tuple[object, ...]:
    match body:
        case Hello():
            names = body.build.encode("ascii", "replace"), body.comm.encode("ascii", "replace")
            return (body.abi_min, body.abi_max, body.features, body.wanted_role, body.driver, *names)
        case Welcome():
            sizes = body.control_bytes, body.region_bytes
            return (body.abi, body.role, body.features, body.service, body.client, *sizes)
        case Refused():
            return (body.code, body.abi_min, body.abi_max, body.text.encode("ascii", "replace")[:95])
        case Ack():
            return (body.status, body.want_fd)
        case RmClient():
            handles = body.h_client, body.h_device, body.h_subdevice
            return (body.gpu_uuid, body.device_instance, *handles, body.has_fd, 0)
        case Channel():
            names_ = body.h_client, body.h_channel, body.cid, body.h_tsg
            return (body.gpu_uuid, body.device_instance, *names_, body.engine, body.compute, 0)
        case Schedule():
            return (body.h_client, body.h_object)
        case NoteMessage():
            return (body.code, body.h_client, body.h_channel, 0, body.text.encode("ascii", "replace")[:95])


def _text(raw: bytes) -> str:
    """A C string of a stranger: up to the first NUL, printable ASCII only."""
    return "".join(chr(byte) if 32 <= byte < 127 else "?" for byte in raw.split(b"\0", 1)[0])
