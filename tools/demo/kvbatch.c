/*
 * kvbatch.c - offline inference without a model. Each token of an answer is computed from what a kernel found in the
 * request's KV blocks: their owner's tags give the right token, anything else a wrong one. So the checksum of all answers
 * proves that no block was lost, shared or overwritten unnoticed, however often memory was taken away.
 *
 * A request that lost a block goes back to waiting with the tokens it has, and the token of the step that was under way is
 * dropped: it may have been computed from nothing. It is prefilled again when there are blocks.
 */
#include "kvbatch.h"
#include "kvseq.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>

enum { MAX_BATCH = 256, BLOCK_TOKENS = 16 };
#define IDLE_S 0.001

struct answer {
	struct kvseq seq;
	uint64_t id; /* from 1; 0: the seat is empty */
	uint32_t prompt, length, made;
	uint64_t hash;
};

struct batch {
	const struct kvbatch_plan *plan;
	struct kvcache cache;
	struct answer seat[MAX_BATCH];
	uint32_t seats;
	uint64_t begun, finished, tokens, wrong;
	uint64_t checksum, expected;
	CUfunction spin;
	CUstream stream;
	CUevent done;
	void (*step_ended)(void);
	bool in_step;
	double start_s, reported_s;
};

/* ---- what a request is, and what it answers ---- */

static uint32_t length_of(uint64_t id, uint64_t salt, double median, double seed)
{
	uint64_t draw = kv_mix(id * 0x9e3779b97f4a7c15ull + salt + (uint64_t)seed * 77) % 1024;
	double factor = 0.5 + (double)draw / 512; /* 0.5 to 2.5 */

	return 1 + (uint32_t)(median * factor * 0.8);
}

static uint64_t token_of(uint64_t id, uint32_t position, uint64_t wrong)
{
	return kv_mix(id << 24 ^ position) + wrong;
}

static uint64_t hash_after(uint64_t hash, uint64_t token)
{
	return kv_mix(hash ^ token);
}

static uint64_t right_answer(uint64_t id, uint32_t length)
{
	uint64_t hash = id;

	for (uint32_t i = 0; i < length; i++)
		hash = hash_after(hash, token_of(id, i, 0));
	return hash;
}

/* ---- losses ---- */

static void lose(void *owner)
{
	struct batch *batch = owner;
	struct valve_kv_book *book = batch->cache.hook.book;

	for (uint32_t i = 0; i < batch->seats; i++) {
		struct answer *answer = &batch->seat[i];

		if (!answer->seq.id || !kvseq_is_hit(&answer->seq, &batch->cache))
			continue;
		book->hit_requests++;
		book->lost_tokens += answer->prompt + answer->made;
		book->dropped_tokens += batch->in_step;
		kvseq_end(&answer->seq, &batch->cache);
	}
}

/* ---- a step ---- */

static bool wants_more(const struct batch *batch)
{
	const struct kvbatch_plan *plan = batch->plan;

	return (plan->requests <= 0 || (double)batch->begun < plan->requests) &&
	       (plan->duration <= 0 || now_s() - batch->start_s < plan->duration);
}

static void sit_down(struct batch *batch, struct answer *answer)
{
	uint32_t most = (batch->cache.blocks - 1) * BLOCK_TOKENS / 2;
	uint64_t id = ++batch->begun;

	answer->id = answer->hash = id;
	answer->made = 0;
	answer->prompt = length_of(id, 1, batch->plan->in_tokens, batch->plan->seed);
	answer->length = length_of(id, 2, batch->plan->out_tokens, batch->plan->seed);
	if (answer->prompt + answer->length > most)
		answer->prompt = answer->length >= most ? 1 : most - answer->length;
	if (answer->length >= most)
		answer->length = most - 1; /* else it would wait for ever */
}

/* Seats are filled in their order; who lost memory has kept the seat. Returns tokens to prefill. */
static uint32_t admit(struct batch *batch)
{
	uint32_t prefill = 0;

	for (uint32_t i = 0; i < batch->seats; i++) {
		struct answer *answer = &batch->seat[i];

		if (!answer->id && wants_more(batch))
			sit_down(batch, answer);
		if (!answer->id || answer->seq.id)
			continue;
		if (kvseq_begin(&answer->seq, &batch->cache, answer->id, i, answer->prompt + answer->made,
		                answer->prompt + answer->length))
			prefill += answer->prompt + answer->made;
	}
	return prefill;
}

static void publish(struct batch *batch)
{
	struct valve_kv_book *book = batch->cache.hook.book;
	uint32_t used = 0, wanted = 0, running = 0, waiting = 0;

	for (uint32_t i = 0; i < batch->seats; i++) {
		const struct answer *answer = &batch->seat[i];

		used += answer->seq.held;
		running += answer->seq.id != 0;
		waiting += answer->id && !answer->seq.id;
		if (answer->id && !answer->seq.id)
			wanted += (answer->prompt + answer->length) / BLOCK_TOKENS + 1;
	}
	if (book) {
		book->running = running;
		book->waiting = waiting;
	}
	kvcache_publish(&batch->cache, used, used + wanted);
}

static void finish(struct batch *batch, struct answer *answer)
{
	kvseq_end(&answer->seq, &batch->cache);
	batch->checksum += answer->hash;
	batch->expected += right_answer(answer->id, answer->length);
	batch->finished++;
	answer->id = 0;
}

static void believe(struct batch *batch)
{
	for (uint32_t i = 0; i < batch->seats; i++) {
		struct answer *answer = &batch->seat[i];
		uint64_t wrong;

		if (!answer->seq.id)
			continue; /* hit while the step ran: its token is dropped */
		wrong = kvseq_wrong(&answer->seq);
		batch->wrong += wrong;
		batch->tokens++;
		answer->hash = hash_after(answer->hash, token_of(answer->id, answer->made++, wrong));
		answer->seq.tokens++;
		if (answer->made == answer->length)
			finish(batch, answer);
	}
}

/* false: nobody could run. */
static bool run_step(struct batch *batch)
{
	uint32_t prefill = admit(batch), running = 0;
	uint64_t us;

	batch->cache.work->count = 0;
	for (uint32_t i = 0; i < batch->seats; i++)
		if (batch->seat[i].seq.id) {
			kvseq_plan(&batch->seat[i].seq, &batch->cache);
			running++;
		}
	publish(batch);
	if (!running)
		return false;
	us = (uint64_t)(batch->plan->step_us + prefill * batch->plan->prefill_us);
	batch->in_step = true;
	kvcache_launch(&batch->cache, batch->stream);
	cuda_launch(batch->spin, batch->stream, &us, 1);
	CHECK(cu.cuEventRecord(batch->done, batch->stream));
	CHECK(cu.cuEventSynchronize(batch->done));
	kvcache_sync(&batch->cache); /* before anything of the step is believed */
	batch->in_step = false;
	believe(batch);
	return true;
}

/* ---- the run ---- */

static void print_progress(struct batch *batch)
{
	if (batch->plan->report <= 0 || now_s() - batch->reported_s < batch->plan->report)
		return;
	batch->reported_s = now_s();
	printf("{\"t_s\": %.3f, \"now_s\": %.6f, \"units\": %llu, \"tokens\": %llu, \"withheld\": %u}\n",
	       batch->reported_s - batch->start_s, batch->reported_s, (unsigned long long)batch->finished,
	       (unsigned long long)batch->tokens, batch->cache.withheld);
	fflush(stdout);
}

static bool has_work(const struct batch *batch)
{
	if (wants_more(batch))
		return true;
	for (uint32_t i = 0; i < batch->seats; i++)
		if (batch->seat[i].id)
			return true;
	return false;
}

static int verdict(const struct batch *batch)
{
	const struct valve_kv_book *book = batch->cache.hook.book;
	static const struct valve_kv_book nothing;
	bool ok = batch->checksum == batch->expected && !batch->wrong;

	book = book ? book : &nothing;
	printf("{\"summary\": \"offline\", \"units\": %llu, \"tokens\": %llu, \"wall_s\": %.3f, "
	       "\"checksum\": "
	       "\"%016llx\", \"expected\": \"%016llx\", \"wrong_words\": %llu, \"tables\": %u, "
	       "\"lost_blocks\": %llu, "
	       "\"hit_requests\": %llu, \"lost_tokens\": %llu, \"dropped_tokens\": %llu, \"ok\": %s}\n",
	       (unsigned long long)batch->finished, (unsigned long long)batch->tokens,
	       now_s() - batch->start_s, (unsigned long long)batch->checksum,
	       (unsigned long long)batch->expected, (unsigned long long)batch->wrong,
	       batch->cache.hook.sessions, (unsigned long long)book->lost_blocks,
	       (unsigned long long)book->hit_requests, (unsigned long long)book->lost_tokens,
	       (unsigned long long)book->dropped_tokens, ok ? "true" : "false");
	return ok ? 0 : 1;
}

int kvbatch_run(const struct kvbatch_plan *plan, const volatile sig_atomic_t *stop)
{
	static struct batch batch;

	batch.plan = plan;
	batch.seats = (uint32_t)plan->batch;
	batch.cache = (struct kvcache){.blocks = (uint32_t)plan->blocks,
	                               .planes = (uint32_t)plan->planes,
	                               .block_tokens = BLOCK_TOKENS,
	                               .block_bytes = (uint64_t)plan->block_kib * 1024,
	                               .on_lost = lose,
	                               .owner = &batch};
	if (batch.seats < 1 || batch.seats > MAX_BATCH || plan->planes < 1 || plan->planes > KV_MAX_PLANES ||
	    plan->blocks < 2 || batch.cache.block_bytes % KV_PAGE || !batch.cache.block_bytes) {
		fprintf(stderr,
		        "kv-batch is 1 to %d, kv-planes 1 to %d, kv-blocks above 1, block-kib a multiple of "
		        "4\n",
		        MAX_BATCH, KV_MAX_PLANES);
		return 2;
	}
	*(void **)&batch.step_ended = dlsym(RTLD_DEFAULT, "valve_kv_step");
	batch.spin = cuda_kernel("emu_spin");
	CHECK(cu.cuStreamCreate(&batch.stream, 1));
	CHECK(cu.cuEventCreate(&batch.done, CU_EVENT_DISABLE_TIMING));
	kvcache_open(&batch.cache, "demo-offline", batch.seats, (uint32_t)plan->blocks);
	batch.start_s = batch.reported_s = now_s();
	while (!*stop && has_work(&batch)) {
		kvcache_sync(&batch.cache);
		if (batch.step_ended)
			batch.step_ended();
		if (!run_step(&batch))
			sleep_s(IDLE_S);
		print_progress(&batch);
	}
	return verdict(&batch);
}
