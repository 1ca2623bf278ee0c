/* kvkernel.h - what the workloads hand to their one kernel: owner tags to write into blocks, or to find there. */
#ifndef VALVE_DEMO_KVKERNEL_H
#define VALVE_DEMO_KVKERNEL_H

#include <stdint.h>

enum { KV_MAX_PLANES = 16, KV_MAX_OPS = 16384, KV_PAGE = 4096 };

struct kv_op {
	uint32_t block;
	uint32_t wrong;  /* written by the kernel: words that are not what the tag says */
	uint64_t writes; /* 1: write the tag, 0: look for it */
	uint64_t tag;
};

/* A block is a piece of every plane (a layer's K or V). In memory that the device can read. */
struct kv_work {
	uint64_t planes, block_bytes, count;
	uint64_t plane[KV_MAX_PLANES];
	struct kv_op op[KV_MAX_OPS];
};

#endif
