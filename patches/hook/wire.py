"""What an engine and valved agree on: the hook's part of proto/abi/{link,kv,region}.h, and how a packet is cut."""

from __future__ import annotations

import valve_abi
from valve_abi import GrantAnswer
from valve_abi import KvMode as Mode
from valve_abi import LinkType as Message

__all__ = ["GrantAnswer", "Message", "Mode"]  # the headers' own, by the names that the hook uses

LINK_MAGIC, LINK_ABI, LINK_MAX = valve_abi.LINK_MAGIC, valve_abi.LINK_ABI, valve_abi.LINK_MAX
ROLE_HOOK = valve_abi.Role.HOOK
FEATURE_HINT, FEATURE_MEMORY = valve_abi.Feature.HINT, valve_abi.Feature.MEMORY
FEATURE_KV_MAKE = valve_abi.Feature.KV_MAKE  # valved's: this process brings the memory of its table

# Bodies of messages. Padding is no field.
HEADER = valve_abi.LINK_HEADER.struct()
HELLO = valve_abi.LINK_HELLO.struct()
WELCOME = valve_abi.LINK_WELCOME.struct()
REFUSED = valve_abi.LINK_REFUSED.struct()
ACK = valve_abi.LINK_ACK.struct()
KV_ATTACH = valve_abi.LINK_KV_ATTACH.struct()
KV_TABLE = valve_abi.LINK_KV_TABLE.struct()
KV_NEED = valve_abi.LINK_KV_NEED.struct()
KV_LAYOUT = valve_abi.LINK_KV_LAYOUT.struct()  # tensors follow
KV_TENSOR = valve_abi.KV_TENSOR.struct()
KV_TENSORS = valve_abi.KV_TENSORS  # in one packet
KV_PINNED = valve_abi.LINK_KV_LAYOUT.fields["pinned"].bytes // 4

# The table: valved writes.
KV_ABI = valve_abi.KV_ABI
TABLE_MAGIC = valve_abi.KV_TABLE_MAGIC
TABLE_HEAD = valve_abi.KV_TABLE.struct(last="column_offset")
TABLE_EPOCH = valve_abi.KV_TABLE.at("epoch")
TABLE_BACKED_BLOCKS = valve_abi.KV_TABLE.at("backed_blocks")
TABLE_TARGET_BLOCKS = valve_abi.KV_TABLE.at("target_blocks")
TABLE_STEP_TOKENS = valve_abi.KV_TABLE.at("step_tokens")
ENTRY_BACKED = valve_abi.KV_BACKED
ENTRY_SECOND_CHANGE = 2 << 1  # of an entry: its generation is 2 or more
KV_ELASTIC = valve_abi.KV_ELASTIC  # flag of a range: the engine heeds the table

# The book: the hook writes.
BOOK_MAGIC = valve_abi.KV_BOOK_MAGIC
BOOK_HEAD = valve_abi.KV_BOOK.struct(last="cell_offset")
BOOK_BYTES = valve_abi.KV_BOOK.size
BOOK_EPOCH_SEEN = valve_abi.KV_BOOK.at("epoch_seen")
BOOK_GAUGES_AT = valve_abi.KV_BOOK.at("mode")  # four words: mode, used, wanted, steps
BOOK_RECEIPTS = valve_abi.KV_BOOK.struct("lost_blocks", "waiting")
BOOK_RECEIPTS_AT = valve_abi.KV_BOOK.at("lost_blocks")
ROW = valve_abi.KV_ROW.struct()
MAX_ROWS, MAX_ROW, MAX_BOOK = valve_abi.KV_MAX_ROWS, valve_abi.KV_MAX_ROW, valve_abi.KV_MAX_BOOK

# The region: the page that this process writes. The control page: valved writes.
REGION_MAGIC = valve_abi.REGION_MAGIC
REGION_HEAD = valve_abi.REGION.struct(last="pid")
REGION_SLOT_OFFSET, REGION_SLOTS, REGION_GAPS = valve_abi.SLOT_OFFSET, valve_abi.SLOTS, valve_abi.GAPS
REGION_LAUNCH_NS = valve_abi.REGION.at("launch_ns")
REGION_OPEN = valve_abi.REGION.at("open_requests")
REGION_HINT_NS = valve_abi.REGION.at("hint_ns")
REGION_STARTED = valve_abi.REGION.struct("requests_started", "useful_tokens")
REGION_STARTED_AT = valve_abi.REGION.at("requests_started")
CONTROL_LEASE_NS = valve_abi.CONTROL.at("lease_ns")
CONTROL_ROLE = valve_abi.CONTROL.at("role")
CONTROL_BYTES = valve_abi.CONTROL_BYTES

# Granted time: valved writes the first, this process the second.
GRANT_AT = valve_abi.GRANT_OFFSET
GRANT_CONSENTED = valve_abi.GRANT.at("consented")
GRANT_ANSWER = valve_abi.GRANT.at("answer")
GRANT_BY_SLICES = valve_abi.GRANT.at("by_slices")
GRANT_TPOT_NS = valve_abi.GRANT.at("tpot_ns")
REGION_GRANT_UNTIL_NS = valve_abi.REGION.at("grant_until_ns")
REGION_GRANT_SEQ = valve_abi.REGION.at("grant_seq")


def packet(kind: Message, body: bytes, seq: int, sent_ns: int) -> bytes:
    return HEADER.pack(LINK_MAGIC, LINK_ABI, kind, HEADER.size + len(body), seq, sent_ns) + body


def split(raw: bytes) -> tuple[int, int, int, bytes]:
    """(type, seq, when it was sent, body) of a packet; ValueError when it is none."""
    if len(raw) < HEADER.size:
        raise ValueError(f"{len(raw)} bytes are no packet")
    magic, _, kind, length, seq, sent_ns = HEADER.unpack_from(raw)
    if magic != LINK_MAGIC or length != len(raw):
        raise ValueError(f"magic {magic:#x}, {len(raw)} bytes that say they are {length}")
    return kind, seq, sent_ns, raw[HEADER.size :]
