"""The messages of proto/abi/link.h as values: bytes in, values out, and back. No sockets here; KV memory: kv_link.py.

The numbers are those of the headers (`valve_abi`). A packet is judged whole: magic, type, stated length and real length
must agree, or `Malformed` is raised and the caller closes the connection. Text fields may hold anything; they come out
as printable ASCII.

codec.py says how a body is read and written.
"""

from __future__ import annotations

from typing import Any

import msgspec
import valve_abi
from valve_abi import Feature, LinkType, Note, Refusal

from valved.abi import kv_link
from valved.abi.codec import Codec, Malformed, Plain

__all__ = ["Feature", "LinkType", "Malformed", "Note", "Refusal"]

MAGIC = valve_abi.LINK_MAGIC
ABI = valve_abi.LINK_ABI
MAX_PACKET = valve_abi.LINK_MAX
MAX_FDS = valve_abi.LINK_FDS


class Hello(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    abi_min: int
    abi_max: int
    features: int
    wanted_role: int
    driver: int
    build: str
    comm: str


class Welcome(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    abi: int = ABI
    role: int
    features: int
    service: int
    client: int
    control_bytes: int
    region_bytes: int


class RefusedMessage(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    code: Refusal
    abi_min: int = ABI
    abi_max: int = ABI
    text: str


class Ack(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    status: int = 0
    want_fd: bool = False


class RmClient(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    gpu_uuid: bytes
    device_instance: int
    h_client: int
    h_device: int
    h_subdevice: int
    has_fd: bool


class Channel(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Body of both CHANNEL_ADD and CHANNEL_DEL."""

    gpu_uuid: bytes
    device_instance: int
    h_client: int
    h_channel: int
    cid: int
    h_tsg: int
    engine: int
    compute: bool


class Schedule(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Body of SCHEDULE_WAIT and SCHEDULE_DONE."""

    h_client: int
    h_object: int


class EndingMessage(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    signal: int


class NoteMessage(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    code: int
    h_client: int
    h_channel: int
    text: str


Body = Any
"""One of the values above, or of kv_link.py."""


class Packet(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    type: LinkType
    seq: int
    sent_ns: int
    body: Body


_HEADER = valve_abi.LINK_HEADER.struct()


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
    kind = KINDS.get(kind_value)
    if kind is None:
        raise Malformed(f"unknown type {kind_value}")
    codec = CODECS[kind]
    if not len(packet) == length == _HEADER.size + codec.size:
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


CODECS: dict[LinkType, Codec] = {
    LinkType.HELLO: Plain(Hello, valve_abi.LINK_HELLO),
    LinkType.WELCOME: Plain(Welcome, valve_abi.LINK_WELCOME),
    LinkType.REFUSED: Plain(RefusedMessage, valve_abi.LINK_REFUSED, code=_refusal),
    LinkType.ACK: Plain(Ack, valve_abi.LINK_ACK),
    LinkType.RM_CLIENT: Plain(RmClient, valve_abi.LINK_RM_CLIENT),
    LinkType.CHANNEL_ADD: Plain(Channel, valve_abi.LINK_CHANNEL),
    LinkType.CHANNEL_DEL: Plain(Channel, valve_abi.LINK_CHANNEL),
    LinkType.SCHEDULE_WAIT: Plain(Schedule, valve_abi.LINK_SCHEDULE),
    LinkType.NOTE: Plain(NoteMessage, valve_abi.LINK_NOTE),
    LinkType.SCHEDULE_DONE: Plain(Schedule, valve_abi.LINK_SCHEDULE),
    LinkType.ENDING: Plain(EndingMessage, valve_abi.LINK_ENDING),
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
    LinkType.KV_STEP: kv_link.STEP,
    LinkType.KV_RUNS: kv_link.RUNS,
    LinkType.KV_SCRATCH: kv_link.SCRATCH,
    LinkType.KV_MAKE: kv_link.ATTACH,
}
KINDS: dict[int, LinkType] = {int(kind): kind for kind in CODECS}
