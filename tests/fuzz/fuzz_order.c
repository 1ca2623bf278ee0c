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

static void carry_out(const struct valve_link_kv_entries *packet, const struct valve_fds *fds)
{
	struct valve_kv_order order = {
	        .op = packet->op, .how = packet->how, .count = packet->count, .fds = *fds};
	struct valve_outcome out = {0};

	memcpy(order.entry, packet->entry, sizeof(order.entry));
	valve_vmm_carry_out(range, &order, &out);
	CHECK(out.done <= packet->count);
	compare(range);
	no_references(range->place->zero);
	valve_vmm_cleared(range, &order, out.done, true);
	compare(range);
	valve_fds_close(&out.made);
	if (gpu.next_handle > HANDLES - 200) {
		valve_vmm_empty(range);
		CHECK(!valve_vmm_fill(range));
		gpu.next_handle = range->place->zero;
	}
}

int LLVMFuzzerTestOneInput(const unsigned char *data, size_t size);

int LLVMFuzzerTestOneInput(const unsigned char *data, size_t size)
{
	_Alignas(8) unsigned char packet[VALVE_LINK_MAX] = {0};
	size_t length = size > 2 ? size - 2 : 0;
	struct valve_fds fds = {.count = size ? data[0] % (VALVE_LINK_FDS + 1) : 0,
	                        .cut = size > 1 && data[1] == 1};

	if (!range)
		begin();
	if (length > sizeof(packet))
		return 0;
	if (length)
		memcpy(packet, data + 2, length);
	/* Numbers that are no descriptors: whatever is wrong with an order, it must not close what is not its own. */
	for (uint32_t i = 0; i < fds.count; i++)
		fds.at[i] = 60000 + (int)i;
	if (valve_packet_is_order((const void *)packet, (int)length, &fds) &&
	    ((const struct valve_link_kv_entries *)(const void *)packet)->op != VALVE_KV_TRY)
		carry_out((const void *)packet, &fds);
	return 0;
}

#ifndef FUZZER
/* An order that is right but for a few bytes. */
static size_t invent(unsigned char *input)
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
	input[0] = (unsigned char)(draw() % 8 ? fds : draw());
	input[1] = draw() % 8 == 0;
	memcpy(input + 2, &packet, sizeof(packet));
	for (uint64_t wrong = draw() % 4; wrong > 1; wrong--)
		input[2 + draw() % sizeof(packet)] = (unsigned char)draw();
	return 2 + sizeof(packet) - (draw() % 16 == 0);
}

int main(int argc, char **argv)
{
	static unsigned char input[VALVE_LINK_MAX + 2];
	long count = argc == 4 ? strtol(argv[2], NULL, 10) : 0;

	gpu.random = argc == 4 ? strtoull(argv[3], NULL, 10) : 1;
	for (long i = 0; i < count; i++)
		LLVMFuzzerTestOneInput(input, invent(input));
	printf("%ld inputs\n", count);
	return 0;
}
#endif
