"""What an engine and valved agree on: the hook's part of proto/abi/link.h, kv.h and region.h, and nothing else.

Numbers and layouts only. `tests/engines/unit/test_contract.py` compares them with the headers.
"""

from __future__ import annotations

import struct
from enum import IntEnum

LINK_MAGIC = 0x4B4E4C56
LINK_ABI = 1
LINK_MAX = 2048
ROLE_HOOK = 3
FEATURE_HINT = 1 << 1
FEATURE_MEMORY = 1 << 6


class Message(IntEnum):
    HELLO = 1
    WELCOME = 2
    REFUSED = 3
    ACK = 4
    KV_LAYOUT = 22
    KV_ATTACH = 23
    KV_TABLE = 24
    KV_NEED = 25


HEADER = struct.Struct("<IHHIIQ")  # magic, abi, type, length, seq, sent_ns
HELLO = struct.Struct("<HHIII32s16s")  # abi_min, abi_max, features, wanted_role, driver, build, comm
WELCOME = struct.Struct("<HHIQQII")  # abi, role, features, service, client, control_bytes, region_bytes
REFUSED = struct.Struct("<IHH96s")  # code, daemon_abi_min, daemon_abi_max, text
ACK = struct.Struct("<II")  # status, want_fd
KV_ATTACH = struct.Struct("<HHIIIIIII48s")  # abi_min, abi_max, mode, blocks, tokens, rows, row_blocks, ranks, -, engine
KV_TABLE = struct.Struct("<HHIII")  # abi, -, table_bytes, book_bytes, -
KV_NEED = struct.Struct("<II")  # wanted_blocks, -
KV_LAYOUT = struct.Struct("<IIIIII8I")  # blocks, block_tokens, total, first, count, pinned_count, pinned[8]
KV_TENSOR = struct.Struct("<QQQ6Q")  # base, block_stride, block_bytes, 3 x (count, stride)
KV_TENSORS = 16  # in one packet
KV_PINNED = 8

KV_ELASTIC = 1  # flag of a range: the engine heeds the table

# ---- kv.h: the table (valved writes) ----
KV_ABI = 1
TABLE_MAGIC = 0x31425456564B4C56
TABLE_HEAD = struct.Struct("<QIIIIIII")  # magic, abi, bytes, blocks, block_tokens, columns, entry_offset, column_offset
TABLE_EPOCH = 64
TABLE_BACKED_BLOCKS = 80
TABLE_TARGET_BLOCKS = 84
TABLE_DETACHED = 88
ENTRY_BACKED = 1

# ---- kv.h: the book (the hook writes) ----
BOOK_MAGIC = 0x314B4256564B4C56
BOOK_HEAD = struct.Struct("<QIIIIIII")  # magic, abi, bytes, rows, row_blocks, offered, head and cell offset
BOOK_BYTES = 192
BOOK_EPOCH_SEEN = 64
BOOK_GAUGES = struct.Struct("<IIII")  # mode, used_blocks, wanted_blocks, steps
BOOK_GAUGES_AT = 72
BOOK_RECEIPTS = struct.Struct("<QQQQQII")  # lost_blocks, hit_requests, lost_ and dropped_tokens, ...
BOOK_RECEIPTS_AT = 128
ROW = struct.Struct("<QII")  # request, blocks, tokens
MAX_ROWS = 65536
MAX_ROW = 1 << 20
MAX_BOOK = 256 << 20

# ---- region.h: the page this process writes ----
REGION_MAGIC = 0x314E4752564C4156
REGION_HEAD = struct.Struct("<QIIIIIIII")  # magic, abi, bytes, features, slot_count, slot_, gap_offset, gap_count, pid
REGION_SLOT_OFFSET = 4096
REGION_SLOTS = 256
REGION_GAPS = 64
REGION_OPEN = 320
REGION_HINT_NS = 328
REGION_STARTED = struct.Struct("<QQQ")  # requests_started, requests_ended, useful_tokens
REGION_STARTED_AT = 336
CONTROL_LEASE_NS = 136
CONTROL_ROLE = 20


class Mode(IntEnum):
    """`enum valve_kv_mode`: what the hook can do about a lost block."""

    NONE = 0
    COARSE = 1
    FULL = 2


def packet(kind: Message, body: bytes, seq: int, sent_ns: int) -> bytes:
    return HEADER.pack(LINK_MAGIC, LINK_ABI, kind, HEADER.size + len(body), seq, sent_ns) + body


def split(raw: bytes) -> tuple[int, int, bytes]:
    """(type, seq, body) of a packet; ValueError when it is none."""
    if len(raw) < HEADER.size:
        raise ValueError(f"{len(raw)} bytes are no packet")
    magic, _, kind, length, seq, _ = HEADER.unpack_from(raw)
    if magic != LINK_MAGIC or length != len(raw):
        raise ValueError(f"magic {magic:#x}, {len(raw)} bytes that say they are {length}")
    return kind, seq, raw[HEADER.size :]
