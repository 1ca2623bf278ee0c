/*
 * kvcache.h - a paged KV cache as an engine has it: blocks in several planes of device memory, a free list that heeds
 * valved's table, and a kernel that writes owner tags and checks them. What a lost block means is the owner's business.
 */
#ifndef VALVE_DEMO_KVCACHE_H
#define VALVE_DEMO_KVCACHE_H

#include "driver.h"
#include "kvhook.h"
#include "kvkernel.h"

enum kv_state { KV_FREE, KV_USED, KV_WITHHELD };

struct kvcache {
	uint32_t blocks, planes, block_tokens;
	uint64_t block_bytes;
	uint32_t free, withheld;
	uint8_t *state;   /* kv_state */
	uint8_t *offered; /* withheld because we offered it */
	uint8_t *lost;    /* of the change that is being dealt with */
	uint32_t *entry;  /* of the table, as last read */
	uint32_t *order;  /* in which blocks are handed out: column by column */
	uint32_t session, asked;
	CUfunction kernel;
	struct kv_work *work;
	struct valve_kv_tensor tensor[KV_MAX_PLANES];
	struct kvhook_shape shape;
	struct kvhook hook;
	/* Called for a change, with `lost` filled in: give back the blocks of everybody who lost one. */
	void (*on_lost)(void *owner);
	void *owner;
};

/* Precondition: blocks, planes, block_tokens, block_bytes, on_lost and owner are set, a context is current. */
void kvcache_open(struct kvcache *cache, const char *engine, uint32_t rows, uint32_t row_blocks);

bool kvcache_take(struct kvcache *cache, uint32_t count, uint32_t *out); /* all or none */
void kvcache_give(struct kvcache *cache, const uint32_t *blocks, uint32_t count);

/* Between steps and before a step's output is believed: acts on what valved changed. */
void kvcache_sync(struct kvcache *cache);
/* After a step: used and wanted into the book; asks for more, or offers what valved wants back. */
void kvcache_publish(struct kvcache *cache, uint32_t used, uint32_t wanted);

/* A step's kernel: note what to write and what to find, then launch. `wrong` of an op counts after the stream is done. */
struct kv_op *kvcache_note(struct kvcache *cache, uint32_t block, bool writes, uint64_t tag);
void kvcache_launch(struct kvcache *cache, CUstream stream);

#endif
