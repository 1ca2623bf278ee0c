/* kvseq.h - one request's KV: its blocks, and what each must contain. Online and offline workloads share it. */
#ifndef VALVE_DEMO_KVSEQ_H
#define VALVE_DEMO_KVSEQ_H

#include "kvcache.h"

struct kvseq {
	uint64_t id; /* above 0 while it holds blocks */
	uint32_t row, tokens, held;
	uint32_t *blocks;
	bool is_fresh; /* nothing is written yet: the next step prefills */
	const struct kv_op *first;
	uint32_t ops;
};

uint64_t kv_mix(uint64_t x);

/* Takes blocks for `most` tokens, of which `tokens` are there from the first step on; false: there is no room. */
bool kvseq_begin(struct kvseq *seq, struct kvcache *cache, uint64_t id, uint32_t row, uint32_t tokens,
                 uint32_t most);
void kvseq_plan(struct kvseq *seq, struct kvcache *cache); /* a step: writes what is new, looks at all */
uint64_t kvseq_wrong(const struct kvseq *seq);             /* after that step: words that were not its own */
void kvseq_end(struct kvseq *seq, struct kvcache *cache);
bool kvseq_is_hit(const struct kvseq *seq, const struct kvcache *cache);

#endif
