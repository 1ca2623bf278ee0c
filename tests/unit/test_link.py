"""The link messages: the same bytes as link.h, and nothing but Malformed for everything else."""

from __future__ import annotations

import subprocess
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from valved.abi import kv_link, link
from valved.abi.link import LinkType, Malformed
from valved.model.memory import KvTensor

ROOT = Path(__file__).resolve().parents[2]

u16, u32, u64 = (st.integers(0, 2**bits - 1) for bits in (16, 32, 64))
ascii_of = lambda size: st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=size)  # noqa: E731
uuids = st.binary(min_size=16, max_size=16)

BODIES = {
    LinkType.HELLO: st.builds(
        link.Hello,
        abi_min=u16,
        abi_max=u16,
        features=u32,
        wanted_role=u32,
        driver=u32,
        build=ascii_of(31),
        comm=ascii_of(15),
    ),
    LinkType.WELCOME: st.builds(
        link.Welcome,
        abi=u16,
        role=u16,
        features=u32,
        service=u64,
        client=u64,
        control_bytes=u32,
        region_bytes=u32,
    ),
    LinkType.REFUSED: st.builds(
        link.RefusedMessage, code=st.sampled_from(link.Refusal), text=ascii_of(95), abi_min=u16, abi_max=u16
    ),
    LinkType.ACK: st.builds(link.Ack, status=u32, want_fd=st.booleans()),
    LinkType.RM_CLIENT: st.builds(
        link.RmClient,
        gpu_uuid=uuids,
        device_instance=u32,
        h_client=u32,
        h_device=u32,
        h_subdevice=u32,
        has_fd=st.booleans(),
    ),
    LinkType.CHANNEL_ADD: st.builds(
        link.Channel,
        gpu_uuid=uuids,
        device_instance=u32,
        h_client=u32,
        h_channel=u32,
        cid=u32,
        h_tsg=u32,
        engine=u32,
        compute=st.booleans(),
    ),
    LinkType.SCHEDULE_WAIT: st.builds(link.Schedule, h_client=u32, h_object=u32),
    LinkType.NOTE: st.builds(link.NoteMessage, code=u32, h_client=u32, h_channel=u32, text=ascii_of(95)),
}
spans = st.builds(kv_link.KvSpan, range=u32, offset=u64, bytes=u64)
entries = st.lists(st.tuples(u64, u32, u32), max_size=64).map(lambda rows: np.array(rows, kv_link.ENTRY).tobytes())
runs = st.lists(st.tuples(u64, u32, u32, u32, u32), max_size=80).map(lambda rows: np.array(rows, kv_link.RUN).tobytes())
orders = st.builds(kv_link.KvEntries, order=u64, range=u32, op=u16, how=u16, raw=entries)
tensors = st.builds(
    KvTensor,
    base_addr=u64,
    block_stride_bytes=u64,
    block_bytes=u64,
    repeats=st.lists(st.tuples(st.integers(1, 2**64 - 1), u64), max_size=3).map(tuple),
)
BODIES |= {
    LinkType.KV_RANGE: st.builds(
        kv_link.KvRangeMessage,
        gpu_uuid=uuids,
        device_instance=u32,
        range=u32,
        base=u64,
        handle_bytes=u64,
        slots=u32,
        flags=u32,
        held=u32,
    ),
    LinkType.KV_RANGE_DEL: spans,
    LinkType.KV_PIN: spans,
    LinkType.KV_ORDER: orders,
    LinkType.KV_HELD: orders,
    LinkType.KV_RUNS: st.builds(kv_link.KvRuns, order=u64, op=u16, how=u16, raw=runs),
    LinkType.KV_DONE: st.builds(kv_link.KvDone, order=u64, done=u32, status=u32, cu_result=u32),
    LinkType.KV_LAYOUT: st.builds(
        kv_link.KvLayoutPart,
        blocks=u32,
        block_tokens=u32,
        total=u32,
        first=u32,
        pinned=st.lists(u32, max_size=8).map(tuple),
        tensors=st.lists(tensors, max_size=16).map(tuple),
    ),
    LinkType.KV_ATTACH: st.builds(
        kv_link.KvAttach,
        abi_min=u16,
        abi_max=u16,
        mode=u32,
        blocks=u32,
        block_tokens=u32,
        rows=u32,
        row_blocks=u32,
        ranks=u32,
        engine=ascii_of(47),
    ),
    LinkType.KV_TABLE: st.builds(kv_link.KvTableMessage, abi=u16, table_bytes=u32, book_bytes=u32),
    LinkType.KV_NEED: st.builds(kv_link.KvNeed, wanted_blocks=u32),
    LinkType.KV_STEP: st.builds(kv_link.KvStep, range=u32),
    LinkType.KV_SCRATCH: st.builds(
        kv_link.KvScratch, gpu_uuid=uuids, device_instance=u32, place=u32, base=u64, bytes=u64
    ),
}
BODIES[LinkType.ENDING] = st.builds(link.EndingMessage, signal=u32)
BODIES[LinkType.CHANNEL_DEL] = BODIES[LinkType.CHANNEL_ADD]
BODIES[LinkType.SCHEDULE_DONE] = BODIES[LinkType.SCHEDULE_WAIT]
messages = st.sampled_from(sorted(BODIES)).flatmap(lambda kind: st.tuples(st.just(kind), BODIES[kind]))


@given(messages, u32, u64)
def test_what_is_built_is_what_is_read(message, seq, sent_ns):
    kind, body = message

    packet = link.parse(link.build(kind, body, seq=seq, sent_ns=sent_ns))

    assert packet == link.Packet(type=kind, seq=seq, sent_ns=sent_ns, body=body)


@given(st.binary(max_size=600))
def test_noise_is_malformed_and_nothing_else(noise):
    with pytest.raises(Malformed):
        link.parse(noise)


@given(messages, st.data())
def test_a_damaged_packet_is_read_or_refused_but_never_breaks_the_reader(message, data):
    packet = bytearray(link.build(message[0], message[1], seq=1, sent_ns=2))
    for _ in range(data.draw(st.integers(1, 4))):
        packet[data.draw(st.integers(0, len(packet) - 1))] = data.draw(st.integers(0, 255))
    try:
        read = link.parse(bytes(packet))
    except Malformed:
        return

    for text in (value for value in msgspec.structs.astuple(read.body) if isinstance(value, str)):
        assert text.isascii()
        assert text.isprintable() or not text


@given(messages, st.integers(-20, 20).filter(bool))
def test_a_packet_of_any_other_length_is_malformed(message, change):
    packet = link.build(message[0], message[1], seq=1, sent_ns=2)
    other = packet[:change] if change < 0 else packet + bytes(change)

    with pytest.raises(Malformed):
        link.parse(other)


def test_python_and_c_agree_on_every_byte(tmp_path):
    """Each field gets a value of its own in C; Python must read the same values back."""
    source = tmp_path / "show.c"
    program = tmp_path / "show"
    source.write_text(C_PROGRAM)
    subprocess.run(["cc", "-std=c11", f"-I{ROOT / 'proto/abi'}", "-o", program, source], check=True)
    lines = subprocess.run([program], check=True, capture_output=True, text=True).stdout.split()

    packets = [bytes.fromhex(line) for line in lines]
    read = {packet.type: packet.body for packet in map(link.parse, packets)}

    assert {LinkType(packet[6]): packet for packet in packets} == {
        kind: link.build(kind, body, seq=1, sent_ns=0) for kind, body in read.items()
    }
    assert read[LinkType.KV_RANGE] == kv_link.KvRangeMessage(
        gpu_uuid=bytes([9]) + bytes(15),
        device_instance=1,
        range=2,
        base=3,
        handle_bytes=4,
        slots=5,
        flags=6,
        held=7,
    )
    assert read[LinkType.KV_PIN] == kv_link.KvSpan(range=1, offset=2, bytes=3)
    order = read[LinkType.KV_ORDER]
    assert (order.order, order.range, order.op, order.how) == (1, 2, kv_link.KvOp.UNBACK, kv_link.KvHow.AT_STEP)
    assert order.entries.tolist() == [(4, 5, kv_link.CREATE), (6, 7, kv_link.ZERO)]
    runs = read[LinkType.KV_RUNS]
    assert (runs.order, runs.op, runs.how) == (1, kv_link.KvOp.UNBACK, kv_link.KvHow.AT_STEP)
    assert runs.runs.tolist() == [(4, 5, 6, 7, kv_link.CREATE), (8, 9, 10, 11, kv_link.ZERO)]
    assert read[LinkType.KV_DONE] == kv_link.KvDone(order=1, done=2, status=3, cu_result=4)
    tensor = KvTensor(base_addr=1, block_stride_bytes=2, block_bytes=3, repeats=((4, 5), (6, 7)))
    assert read[LinkType.KV_LAYOUT] == kv_link.KvLayoutPart(
        blocks=1, block_tokens=2, total=3, first=4, pinned=(8, 9), tensors=(tensor,)
    )
    assert read[LinkType.KV_ATTACH] == kv_link.KvAttach(
        abi_min=1,
        abi_max=2,
        mode=kv_link.KvMode.FULL,
        blocks=4,
        block_tokens=5,
        rows=6,
        row_blocks=7,
        ranks=8,
        engine="nine",
    )
    assert read[LinkType.KV_TABLE] == kv_link.KvTableMessage(abi=1, table_bytes=2, book_bytes=3)
    assert read[LinkType.KV_NEED] == kv_link.KvNeed(wanted_blocks=1)
    assert read[LinkType.KV_STEP] == kv_link.KvStep(range=1)
    assert read[LinkType.KV_SCRATCH] == kv_link.KvScratch(
        gpu_uuid=bytes([7, *bytes(14), 9]), device_instance=1, place=2, base=3, bytes=4
    )
    assert read[LinkType.HELLO] == link.Hello(
        abi_min=1, abi_max=2, features=3, wanted_role=4, driver=5, build="six", comm="seven"
    )
    assert read[LinkType.RM_CLIENT] == link.RmClient(
        gpu_uuid=bytes([9]) + bytes(15), device_instance=1, h_client=2, h_device=3, h_subdevice=4, has_fd=True
    )
    assert read[LinkType.CHANNEL_ADD] == link.Channel(
        gpu_uuid=bytes([9]) + bytes(15),
        device_instance=1,
        h_client=2,
        h_channel=3,
        cid=4,
        h_tsg=5,
        engine=6,
        compute=True,
    )
    assert read[LinkType.WELCOME] == link.Welcome(
        abi=1, role=2, features=3, service=4, client=5, control_bytes=6, region_bytes=7
    )
    assert read[LinkType.NOTE] == link.NoteMessage(code=1, h_client=2, h_channel=3, text="note")
    assert read[LinkType.REFUSED] == link.RefusedMessage(code=link.Refusal.VERSION, text="no", abi_min=3, abi_max=4)


C_PROGRAM = """
#include <stdio.h>
#include <string.h>
#include "link.h"
static void show(const void *at, size_t n) {
	const unsigned char *p = at;
	for (size_t i = 0; i < n; i++) printf("%02x", p[i]);
	printf("\\n");
}
#define HEAD(what, t) \\
	.header = {.magic = VALVE_LINK_MAGIC, .abi = 1, .type = t, .length = sizeof(struct what), .seq = 1}
#define SHOW(...) show(&(__VA_ARGS__), sizeof(__VA_ARGS__))
int main(void) {
	SHOW((struct valve_link_hello){HEAD(valve_link_hello, VALVE_LINK_HELLO), .abi_min = 1, .abi_max = 2,
		.features = 3, .wanted_role = 4, .driver = 5, .build = "six", .comm = "seven"});
	SHOW((struct valve_link_welcome){HEAD(valve_link_welcome, VALVE_LINK_WELCOME), .abi = 1, .role = 2, .features = 3,
		.service = 4, .client = 5, .control_bytes = 6, .region_bytes = 7});
	SHOW((struct valve_link_refused){HEAD(valve_link_refused, VALVE_LINK_REFUSED), .code = 1,
		.daemon_abi_min = 3, .daemon_abi_max = 4, .text = "no"});
	SHOW((struct valve_link_rm_client){HEAD(valve_link_rm_client, VALVE_LINK_RM_CLIENT), .gpu_uuid = {9},
		.device_instance = 1, .h_client = 2, .h_device = 3, .h_subdevice = 4, .has_fd = 1});
	SHOW((struct valve_link_channel){HEAD(valve_link_channel, VALVE_LINK_CHANNEL_ADD), .gpu_uuid = {9},
		.device_instance = 1, .h_client = 2, .h_channel = 3, .cid = 4, .h_tsg = 5, .engine = 6, .compute = 1});
	SHOW((struct valve_link_note){HEAD(valve_link_note, VALVE_LINK_NOTE), .code = 1, .h_client = 2, .h_channel = 3,
		.text = "note"});
	SHOW((struct valve_link_kv_range){HEAD(valve_link_kv_range, VALVE_LINK_KV_RANGE), .gpu_uuid = {9},
		.device_instance = 1, .range = 2, .base = 3, .handle_bytes = 4, .slots = 5, .flags = 6, .held = 7});
	SHOW((struct valve_link_kv_span){HEAD(valve_link_kv_span, VALVE_LINK_KV_PIN), .range = 1, .offset = 2, .bytes = 3});
	SHOW((struct valve_link_kv_entries){HEAD(valve_link_kv_entries, VALVE_LINK_KV_ORDER), .order = 1, .range = 2,
		.op = VALVE_KV_UNBACK, .how = VALVE_KV_AT_STEP, .count = 2,
		.entry = {{4, 5, VALVE_KV_CREATE}, {6, 7, VALVE_KV_ZERO}}});
	SHOW((struct valve_link_kv_runs){HEAD(valve_link_kv_runs, VALVE_LINK_KV_RUNS), .order = 1,
		.op = VALVE_KV_UNBACK, .how = VALVE_KV_AT_STEP, .count = 2,
		.run = {{4, 5, 6, 7, VALVE_KV_CREATE}, {8, 9, 10, 11, VALVE_KV_ZERO}}});
	SHOW((struct valve_link_kv_done){HEAD(valve_link_kv_done, VALVE_LINK_KV_DONE), .order = 1, .done = 2, .status = 3,
		.cu_result = 4});
	SHOW((struct valve_link_kv_layout){HEAD(valve_link_kv_layout, VALVE_LINK_KV_LAYOUT), .blocks = 1,
		.block_tokens = 2, .total = 3, .first = 4, .count = 1, .pinned_count = 2, .pinned = {8, 9},
		.tensor = {{.base = 1, .block_stride = 2, .block_bytes = 3, .repeat = {{4, 5}, {6, 7}}}}});
	SHOW((struct valve_link_kv_attach){HEAD(valve_link_kv_attach, VALVE_LINK_KV_ATTACH), .abi_min = 1, .abi_max = 2,
		.mode = VALVE_KV_MODE_FULL, .blocks = 4, .block_tokens = 5, .rows = 6, .row_blocks = 7, .ranks = 8,
		.engine = "nine"});
	SHOW((struct valve_link_kv_table){HEAD(valve_link_kv_table, VALVE_LINK_KV_TABLE), .abi = 1, .table_bytes = 2,
		.book_bytes = 3});
	SHOW((struct valve_link_kv_need){HEAD(valve_link_kv_need, VALVE_LINK_KV_NEED), .wanted_blocks = 1});
	SHOW((struct valve_link_kv_step){HEAD(valve_link_kv_step, VALVE_LINK_KV_STEP), .range = 1});
	SHOW((struct valve_link_kv_scratch){HEAD(valve_link_kv_scratch, VALVE_LINK_KV_SCRATCH),
		.gpu_uuid = {7, [15] = 9}, .device_instance = 1, .place = 2, .base = 3, .bytes = 4});
	return 0;
}
"""
