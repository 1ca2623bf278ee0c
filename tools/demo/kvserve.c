/* kvserve.c - see kvserve.h */
#include "kvserve.h"
#include "kvseq.h"

#include <stdio.h>
#include <stdlib.h>

enum { BLOCK_TOKENS = 16 };
#define POLL_S 0.01

static struct {
	bool is_open;
	struct kvcache cache;
	struct kvseq *seat;
	unsigned seats, waits;
	const struct request *blocked; /* the request that waits for memory */
	double blocked_s, waited_s, longest_s;
	uint64_t wrong, taken; /* taken: blocks of running requests that valved took. Must not happen */
	uint32_t most;         /* blocks in use at a time */
} kv;

/* An online engine is never reclaimed from; what a new valved cannot vouch for is counted. */
static void lose(void *owner)
{
	(void)owner;
	for (unsigned i = 0; i < kv.seats; i++)
		kv.taken += kv.seat[i].id && kvseq_is_hit(&kv.seat[i], &kv.cache);
}

bool kvserve_open(const struct kvserve_plan *plan, unsigned seats)
{
	kv.cache = (struct kvcache){.blocks = (uint32_t)plan->blocks,
	                            .planes = (uint32_t)plan->planes,
	                            .block_tokens = BLOCK_TOKENS,
	                            .block_bytes = (uint64_t)plan->block_kib * 1024,
	                            .on_lost = lose};
	if (plan->planes < 1 || plan->planes > KV_MAX_PLANES || plan->blocks < 2 || !kv.cache.block_bytes ||
	    kv.cache.block_bytes % KV_PAGE) {
		fprintf(stderr, "kv-planes 1 to %d, kv-blocks above 1, block-kib a multiple of 4\n",
		        KV_MAX_PLANES);
		return false;
	}
	kv.seat = calloc(seats, sizeof(*kv.seat));
	kv.seats = seats;
	kvcache_open(&kv.cache, "demo-online", seats, (uint32_t)plan->blocks);
	kv.is_open = kv.seat != NULL;
	return kv.is_open;
}

static unsigned tokens_of(const struct request *request)
{
	unsigned tokens = request->in_tokens + request->out_tokens,
	         most = (kv.cache.blocks - 1) * BLOCK_TOKENS;

	return tokens < most ? tokens : most; /* a prompt that never fits is cut */
}

static void note_wait(const struct request *request)
{
	double waited_s = now_s() - kv.blocked_s;

	if (kv.blocked != request)
		return;
	kv.blocked = NULL;
	kv.waits++;
	kv.waited_s += waited_s;
	kv.longest_s = waited_s > kv.longest_s ? waited_s : kv.longest_s;
}

bool kvserve_enter(struct request *request)
{
	unsigned i = 0, most = kv.is_open ? tokens_of(request) : 0;
	uint32_t prompt = request->in_tokens < most ? request->in_tokens : most;

	if (!kv.is_open)
		return true;
	while (i < kv.seats && kv.seat[i].id)
		i++;
	kvcache_sync(&kv.cache);
	if (i < kv.seats && kvseq_begin(&kv.seat[i], &kv.cache, request->id + 1, i, prompt, most)) {
		request->seq = &kv.seat[i];
		note_wait(request);
		return true;
	}
	if (kv.blocked != request) {
		kv.blocked = request;
		kv.blocked_s = now_s();
	}
	return false;
}

void kvserve_leave(struct request *request)
{
	if (request->seq)
		kvseq_end(request->seq, &kv.cache);
	request->seq = NULL;
}

void kvserve_launch(CUstream stream, struct request *const *requests, unsigned count)
{
	if (!kv.is_open)
		return;
	kv.cache.work->count = 0;
	for (unsigned i = 0; i < count; i++)
		kvseq_plan(requests[i]->seq, &kv.cache);
	kvcache_launch(&kv.cache, stream);
}

void kvserve_check(struct request *const *requests, unsigned count)
{
	if (!kv.is_open)
		return;
	kvcache_sync(&kv.cache);
	for (unsigned i = 0; i < count; i++) {
		struct kvseq *seq = requests[i]->seq;

		kv.wrong += kvseq_wrong(seq);
		if (seq->tokens < tokens_of(requests[i]))
			seq->tokens++;
	}
}

void kvserve_publish(struct request *const *active, unsigned batch, const struct request *waiting,
                     unsigned count)
{
	uint32_t used = 0, wanted = 0;

	if (!kv.is_open)
		return;
	kvcache_sync(&kv.cache);
	for (unsigned i = 0; i < batch; i++)
		used += active[i]->seq->held;
	for (unsigned i = 0; i < count; i++)
		wanted += (tokens_of(&waiting[i]) + BLOCK_TOKENS - 1) / BLOCK_TOKENS;
	kv.most = used > kv.most ? used : kv.most;
	if (kv.cache.hook.book) {
		kv.cache.hook.book->running = batch;
		kv.cache.hook.book->waiting = count;
	}
	kvcache_publish(&kv.cache, used, used + wanted);
}

double kvserve_nap(double seconds)
{
	if (!kv.is_open)
		return seconds;
	if (kv.blocked)
		return POLL_S / 20;
	return seconds < POLL_S ? seconds : POLL_S;
}

void kvserve_summarise(void)
{
	if (!kv.is_open)
		return;
	printf(", \"kv\": {\"tables\": %u, \"most_blocks\": %u, \"waits\": %u, \"waited_ms\": %.3f, "
	       "\"longest_wait_ms\": %.3f, \"wrong_words\": %llu, \"taken\": %llu}",
	       kv.cache.hook.sessions, kv.most, kv.waits, kv.waited_s * 1e3, kv.longest_s * 1e3,
	       (unsigned long long)kv.wrong, (unsigned long long)kv.taken);
}

bool kvserve_is_sound(void)
{
	return !kv.wrong && !kv.taken;
}
