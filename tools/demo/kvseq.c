/* kvseq.c - see kvseq.h */
#include "kvseq.h"

#include <stdio.h>
#include <stdlib.h>

uint64_t kv_mix(uint64_t x)
{
	x ^= x >> 31;
	x *= 0xbf58476d1ce4e5b9ull;
	x ^= x >> 27;
	x *= 0x94d049bb133111ebull;
	return x ^ (x >> 33);
}

static uint32_t blocks_for(const struct kvcache *cache, uint32_t tokens)
{
	return (tokens + cache->block_tokens - 1) / cache->block_tokens;
}

bool kvseq_begin(struct kvseq *seq, struct kvcache *cache, uint64_t id, uint32_t row, uint32_t tokens,
                 uint32_t most)
{
	uint32_t count = blocks_for(cache, most);

	if (count > cache->free)
		return false;
	seq->blocks = realloc(seq->blocks, count * sizeof(*seq->blocks));
	if (!seq->blocks) {
		perror("blocks");
		exit(1);
	}
	kvcache_take(cache, count, seq->blocks);
	seq->id = id;
	seq->row = row;
	seq->tokens = tokens;
	seq->held = count;
	seq->is_fresh = true;
	kvhook_row(&cache->hook, row, id, seq->blocks, count, tokens);
	return true;
}

/* Of a block with so many tokens in it: whose, which, how full. */
static uint64_t tag_of(const struct kvseq *seq, const struct kvcache *cache, uint32_t index)
{
	uint32_t before = index * cache->block_tokens, filled = seq->tokens - before;

	if (filled > cache->block_tokens)
		filled = cache->block_tokens;
	return kv_mix(seq->id << 32 ^ (uint64_t)index << 8 ^ filled);
}

void kvseq_plan(struct kvseq *seq, struct kvcache *cache)
{
	uint32_t count = blocks_for(cache, seq->tokens);
	uint64_t before = cache->work->count;

	for (uint32_t i = seq->is_fresh ? 0 : count - 1; i < count; i++)
		kvcache_note(cache, seq->blocks[i], true, tag_of(seq, cache, i));
	for (uint32_t i = 0; i < count; i++)
		kvcache_note(cache, seq->blocks[i], false, tag_of(seq, cache, i));
	seq->is_fresh = false;
	seq->first = &cache->work->op[before];
	seq->ops = (uint32_t)(cache->work->count - before);
	kvhook_row(&cache->hook, seq->row, seq->id, seq->blocks, seq->held, seq->tokens);
}

uint64_t kvseq_wrong(const struct kvseq *seq)
{
	uint64_t wrong = 0;

	for (uint32_t i = 0; i < seq->ops; i++)
		wrong += seq->first[i].wrong;
	return wrong;
}

void kvseq_end(struct kvseq *seq, struct kvcache *cache)
{
	kvhook_row(&cache->hook, seq->row, 0, seq->blocks, 0, 0);
	kvcache_give(cache, seq->blocks, seq->held);
	seq->held = seq->ops = 0;
	seq->id = 0;
}

bool kvseq_is_hit(const struct kvseq *seq, const struct kvcache *cache)
{
	for (uint32_t i = 0; i < seq->held; i++)
		if (cache->lost[seq->blocks[i]])
			return true;
	return false;
}
