"""The hook's view of the contract is the headers' view: names to numbers, structures to sizes and offsets."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from valve_hook import wire

ABI = Path(__file__).resolve().parents[3] / "proto" / "abi"
LINK, KV, REGION = (ABI.joinpath(name).read_text().replace("\\\n", " ") for name in ("link.h", "kv.h", "region.h"))


def number(text: str, name: str) -> int:
    found = re.search(rf"{name}\s*=?\s+\(?(0x[0-9a-f]+|[0-9]+)u?(?:ll)?(?: << ([0-9]+))?", text)
    assert found, name
    return int(found[1], 0) << int(found[2] or 0)


def size(text: str, name: str) -> int:
    found = re.search(rf"(?:VALVE_SIZE\(|_Static_assert\(sizeof\(struct ){name}\)? ?(?:,|==) (\d+)", text)
    assert found, name
    return int(found[1])


@pytest.mark.parametrize("message", list(wire.Message))
def test_message_types_are_the_headers(message):
    assert number(LINK, f"VALVE_LINK_{message.name}") == message


@pytest.mark.parametrize("mode", list(wire.Mode))
def test_modes_are_the_headers(mode):
    assert number(KV, f"VALVE_KV_MODE_{mode.name}") == mode


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        (LINK, "VALVE_LINK_MAGIC", wire.LINK_MAGIC),
        (LINK, "VALVE_LINK_ABI", wire.LINK_ABI),
        (LINK, "VALVE_LINK_MAX", wire.LINK_MAX),
        (KV, "VALVE_KV_ABI", wire.KV_ABI),
        (KV, "VALVE_KV_TABLE_MAGIC", wire.TABLE_MAGIC),
        (KV, "VALVE_KV_BOOK_MAGIC", wire.BOOK_MAGIC),
        (KV, "VALVE_KV_TENSORS", wire.KV_TENSORS),
        (KV, "VALVE_KV_BACKED", wire.ENTRY_BACKED),
        (KV, "VALVE_KV_ELASTIC", wire.KV_ELASTIC),
        (KV, "VALVE_KV_MAX_ROWS", wire.MAX_ROWS),
        (KV, "VALVE_KV_MAX_ROW", wire.MAX_ROW),
        (KV, "VALVE_KV_MAX_BOOK", wire.MAX_BOOK),
        (REGION, "VALVE_REGION_MAGIC", wire.REGION_MAGIC),
        (REGION, "VALVE_FEATURE_HINT", wire.FEATURE_HINT),
        (REGION, "VALVE_FEATURE_MEMORY", wire.FEATURE_MEMORY),
        (REGION, "VALVE_ROLE_HOOK", wire.ROLE_HOOK),
        (REGION, "VALVE_SLOTS", wire.REGION_SLOTS),
        (REGION, "VALVE_GAPS", wire.REGION_GAPS),
    ],
)
def test_constants_are_the_headers(text, name, value):
    assert number(text, name) == value


@pytest.mark.parametrize(
    ("name", "body"),
    [
        ("valve_link_hello", wire.HELLO.size),
        ("valve_link_welcome", wire.WELCOME.size),
        ("valve_link_refused", wire.REFUSED.size),
        ("valve_link_ack", wire.ACK.size),
        ("valve_link_kv_layout", wire.KV_LAYOUT.size + wire.KV_TENSORS * wire.KV_TENSOR.size),
        ("valve_link_kv_attach", wire.KV_ATTACH.size),
        ("valve_link_kv_table", wire.KV_TABLE.size),
        ("valve_link_kv_need", wire.KV_NEED.size),
    ],
)
def test_messages_have_the_headers_sizes(name, body):
    assert size(LINK, name) == wire.HEADER.size + body


def test_shared_files_have_the_headers_sizes_and_offsets():
    assert size(KV, "valve_kv_book") == wire.BOOK_BYTES
    assert size(KV, "valve_kv_row") == wire.ROW.size
    assert size(KV, "valve_kv_tensor") == wire.KV_TENSOR.size
    offsets = dict(re.findall(r"VALVE_(?:KV_)?AT\((\w+, \w+), (\d+)\)", KV + REGION))
    found = {
        "valve_kv_table, epoch": wire.TABLE_EPOCH,
        "valve_kv_table, backed_blocks": wire.TABLE_BACKED_BLOCKS,
        "valve_kv_table, target_blocks": wire.TABLE_TARGET_BLOCKS,
        "valve_kv_table, detached": wire.TABLE_DETACHED,
        "valve_kv_book, epoch_seen": wire.BOOK_EPOCH_SEEN,
        "valve_kv_book, mode": wire.BOOK_GAUGES_AT,
        "valve_kv_book, lost_blocks": wire.BOOK_RECEIPTS_AT,
        "valve_kv_book, running": wire.BOOK_RECEIPTS_AT + 40,
        "valve_region, open_requests": wire.REGION_OPEN,
    }

    assert {name: int(offsets[name]) for name in found} == found
