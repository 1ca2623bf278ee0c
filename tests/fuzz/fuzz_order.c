/*
 * fuzz_order.c - KV orders of any bytes, as they come from the socket: what is taken for an order is carried out on a
 * strict driver (tests/shim/c/kvdriver.h), and afterwards the shim's books are what is so.
 *
 * With clang: -fsanitize=fuzzer,address,undefined. Elsewhere main() runs N inputs of its own making: -r N SEED
 */
#include "kvdriver.h"

#include "contexts.h"

struct valve_shim valve_shim;
struct valve_contexts valve_contexts;
_Thread_local struct valve_tls valve_tls;

static struct valve_range *range;

static void begin(void)
{
	struct valve_place *place = valve_place_here(H);
	CUdeviceptr base;

	CHECK(place);
	range = valve_range_new(place, 70 * H, VALVE_KV_ELASTIC);
	CHECK(range && !reserve(&base, 70 * H, 0, 0, 0));
	range->base = base;
	CHECK(!valve_vmm_fill(range));
}

/* What the memory thread does with a part of an order, were all ranges this one. False: the rest is left out. */
static bool carry_out(struct valve_kv_order *part)
{
	struct valve_outcome out = {0};

	valve_vmm_carry_out(range, part, &out);
	CHECK(out.done <= part->count);
	compare(range);
	no_references(range->place->zero);
	valve_vmm_cleared(range, part, out.done, true);
	compare(range);
	valve_fds_close(&out.made);
	if (gpu.next_handle > HANDLES - 200) {
		valve_vmm_empty(range);
		CHECK(!valve_vmm_fill(range));
		gpu.next_handle = range->place->zero;
	}
	return out.done == part->count;
}

/* Into the queue and out of it, as either form of a packet. False: it is neither. */
static bool queue(const void *packet, size_t length, struct valve_fds *fds, struct valve_queued *order)
{
	const struct valve_link_kv_entries *entries = packet;

	if (valve_packet_is_order(packet, (int)length, fds) && entries->op != VALVE_KV_TRY)
		valve_queued_order(order, packet, fds);
	else if (valve_packet_is_runs(packet, (int)length, fds))
		valve_queued_runs(order, packet, fds);
	else
		return false;
	return true;
}

/* The header of a packet of the right length in front of a body: coverage alone does not lead there. */
static size_t frame(unsigned char *packet, const unsigned char *body, size_t length, bool runs)
{
	size_t bytes = runs ? sizeof(struct valve_link_kv_runs) : sizeof(struct valve_link_kv_entries);
	size_t room = bytes - sizeof(struct valve_link_header);

	*(struct valve_link_header *)(void *)packet =
	        (struct valve_link_header){.magic = VALVE_LINK_MAGIC,
	                                   .type = runs ? VALVE_LINK_KV_RUNS : VALVE_LINK_KV_ORDER,
	                                   .length = (uint32_t)bytes};
	memcpy(packet + sizeof(struct valve_link_header), body, length < room ? length : room);
	return bytes;
}

int LLVMFuzzerTestOneInput(const unsigned char *data, size_t size);

int LLVMFuzzerTestOneInput(const unsigned char *data, size_t size)
{
	_Alignas(8) unsigned char packet[VALVE_LINK_MAX] = {0};
	static struct valve_queued order;
	struct valve_kv_order part;
	uint32_t slots = 0, parts = 0;
	size_t length = size > 2 ? size - 2 : 0;
	struct valve_fds fds = {.count = size ? data[0] % (VALVE_LINK_FDS + 1) : 0,
	                        .cut = size > 1 && data[1] & 1};

	if (!range)
		begin();
	if (length > sizeof(packet))
		return 0;
	if (length && data[1] & 6)
		length = frame(packet, data + 2, length, data[1] & 2);
	else if (length)
		memcpy(packet, data + 2, length);
	/* Numbers that are no descriptors: whatever is wrong with an order, it must not close what is not its own. */
	for (uint32_t i = 0; i < fds.count; i++)
		fds.at[i] = 60000 + (int)i;
	if (!queue(packet, length, &fds, &order))
		return 0;
	for (uint32_t i = 0; i < order.runs; i++)
		slots += order.run[i].count;
	while (valve_queued_next(&order, &part)) {
		CHECK(part.count <= VALVE_KV_ENTRIES && part.count <= slots && part.fds.count <= part.count);
		CHECK(part.count || !parts);
		slots -= part.count;
		parts++;
		if (!carry_out(&part))
			return 0;
	}
	CHECK(!slots && (order.refused || order.next.fd == order.fds.count));
	return 0;
}

#ifndef FUZZER
/* Bytes that are wrong; descriptors of more or less. */
static size_t spoil(unsigned char *input, size_t bytes, uint32_t fds)
{
	input[0] = (unsigned char)(draw() % 8 ? fds : draw());
	input[1] = draw() % 8 == 0;
	for (uint64_t wrong = draw() % 4; wrong > 1; wrong--)
		input[2 + draw() % bytes] = (unsigned char)draw();
	return 2 + bytes - (draw() % 16 == 0);
}

static size_t invent_runs(unsigned char *input)
{
	struct valve_link_kv_runs packet = {.op = (uint16_t)(1 + draw() % 3),
	                                    .how = (uint16_t)(draw() % 4),
	                                    .count = (uint32_t)(1 + draw() % 6)};
	uint32_t fds = 0;

	packet.header = (struct valve_link_header){
	        .magic = VALVE_LINK_MAGIC, .type = VALVE_LINK_KV_RUNS, .length = sizeof(packet)};
	for (uint32_t i = 0; i < packet.count; i++) {
		packet.run[i] = (struct valve_kv_run){.range = (uint32_t)(draw() % 2),
		                                      .slot = (uint32_t)(draw() % 72),
		                                      .count = (uint32_t)(1 + draw() % 12)};
		packet.run[i].flags = packet.op == VALVE_KV_BACK ? (uint32_t)(draw() % 4) : 0;
		if (packet.op == VALVE_KV_BACK && !(packet.run[i].flags & VALVE_KV_CREATE))
			fds += packet.run[i].count;
	}
	memcpy(input + 2, &packet, sizeof(packet));
	return spoil(input, sizeof(packet), fds);
}

/* An order that is right but for a few bytes. */
static size_t invent_entries(unsigned char *input)
{
	struct valve_link_kv_entries packet = {.op = (uint16_t)(draw() % 6),
	                                       .how = (uint16_t)(draw() % 4),
	                                       .count = (uint32_t)(draw() % 70)};
	uint32_t fds = 0;

	packet.header = (struct valve_link_header){
	        .magic = VALVE_LINK_MAGIC, .type = VALVE_LINK_KV_ORDER, .length = sizeof(packet)};
	for (uint32_t i = 0; i < packet.count && i < VALVE_KV_ENTRIES; i++) {
		packet.entry[i] = (struct valve_kv_entry){.slot = (uint32_t)(draw() % 72)};
		packet.entry[i].flags = packet.op == VALVE_KV_BACK ? (uint32_t)(draw() % 4) : 0;
		fds += packet.op == VALVE_KV_BACK && !(packet.entry[i].flags & VALVE_KV_CREATE);
	}
	memcpy(input + 2, &packet, sizeof(packet));
	return spoil(input, sizeof(packet), fds);
}

int main(int argc, char **argv)
{
	static unsigned char input[VALVE_LINK_MAX + 2];
	long count = argc == 4 ? strtol(argv[2], NULL, 10) : 0;

	gpu.random = argc == 4 ? strtoull(argv[3], NULL, 10) : 1;
	for (long i = 0; i < count; i++)
		LLVMFuzzerTestOneInput(input, draw() % 2 ? invent_runs(input) : invent_entries(input));
	printf("%ld inputs\n", count);
	return 0;
}
#endif
