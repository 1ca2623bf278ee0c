/* kvkernel.c - the kernel of the KV workloads, for the emulated GPU: one block a step. */
#include "kvkernel.h"

/* The emulator's interface for kernels of one's own (its native.h), restated: rooms do not include each other. */
struct emu_native {
	uint32_t abi, arg_count;
	uint8_t arg_bytes[16];
	int (*step)(const void *args, uint64_t number);
};

/* Both ends of every page; different on every page, so that a page in the wrong place is found, too. */
static void visit(struct kv_op *op, uint64_t *page, uint64_t word)
{
	uint64_t *ends[] = {page, page + KV_PAGE / 8 - 1};

	for (int i = 0; i < 2; i++) {
		volatile uint64_t *end = ends[i];

		if (op->writes)
			*end = word;
		else
			op->wrong += *end != word;
	}
}

static int step(const void *args, uint64_t number)
{
	struct kv_work *work = *(struct kv_work *const *)args;
	struct kv_op *op = &work->op[number];

	for (uint64_t plane = 0; number < work->count && plane < work->planes; plane++) {
		uint64_t base = work->plane[plane] + op->block * work->block_bytes;

		for (uint64_t at = 0; at < work->block_bytes; at += KV_PAGE)
			visit(op, (uint64_t *)(base + at), op->tag + (plane << 40) + at);
	}
	return number + 1 < work->count;
}

extern const struct emu_native emu_native_kv_step;
__attribute__((visibility("default")))
const struct emu_native emu_native_kv_step = {.abi = 1, .arg_count = 1, .arg_bytes = {8}, .step = step};
