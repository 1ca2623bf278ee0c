/*
 * Continuous batching as vLLM's V1 scheduler does it: one token budget an iteration, running requests first (a decode
 * costs one token, a prompt what is left, in chunks), then admissions; without memory the newest request is preempted
 * and later recomputed.
 */
#include <stdlib.h>
#include <string.h>

#include "core.h"

int engine_init(struct engine *e, const struct sim_timing *timing, struct space *space)
{
	e->timing = timing;
	e->space = space;
	e->wait_cap = 64;
	e->running = calloc((size_t)timing->max_seqs + 1, sizeof(struct request *));
	e->waiting = calloc((size_t)e->wait_cap, sizeof(struct request *));
	return e->running && e->waiting ? 0 : -1;
}

void engine_free(struct engine *e)
{
	free(e->running);
	free(e->waiting);
}

void request_free(struct request *r)
{
	free(r->block_slot);
	r->block_slot = NULL;
}

int64_t blocks_for(const struct sim *s, int64_t tokens)
{
	return (tokens + s->p.block_tokens - 1) / s->p.block_tokens;
}

static int64_t waiting_count(const struct engine *e)
{
	return e->wait_tail - e->wait_head;
}

static struct request **waiting_at(const struct engine *e, int64_t i)
{
	return &e->waiting[(e->wait_head + i) & (e->wait_cap - 1)];
}

static int waiting_grow(struct engine *e)
{
	int64_t n = waiting_count(e);
	struct request **wider = calloc((size_t)e->wait_cap * 2, sizeof(struct request *));

	if (!wider)
		return -1;
	for (int64_t i = 0; i < n; i++)
		wider[i] = *waiting_at(e, i);
	free(e->waiting);
	e->waiting = wider;
	e->wait_cap *= 2;
	e->wait_head = 0;
	e->wait_tail = n;
	return 0;
}

int engine_wait(struct engine *e, struct request *r, bool front)
{
	if (waiting_count(e) == e->wait_cap && waiting_grow(e))
		return -1;
	if (front) {
		/* A head below zero would break the mask; both ends move up by one lap. */
		if (e->wait_head == 0) {
			e->wait_head += e->wait_cap;
			e->wait_tail += e->wait_cap;
		}
		e->wait_head--;
		*waiting_at(e, 0) = r;
	} else {
		e->wait_tail++;
		*waiting_at(e, waiting_count(e) - 1) = r;
	}
	return 0;
}

void engine_forget_blocks(struct sim *s, struct engine *e, struct request *r, int32_t keep)
{
	int64_t held = (int64_t)keep * s->p.block_tokens;

	while (r->blocks > keep) {
		int32_t slot = r->block_slot[--r->blocks];

		space_drop(e->space, slot);
		if (e->space->used[slot] == 0)
			memory_slot_emptied(s, e, slot);
	}
	if (r->ctx > held) {
		if (e == &s->off.engine)
			s->off.lost += r->ctx - held;
		r->ctx = (int32_t)held;
	}
	r->slot = keep > 0 ? r->block_slot[keep - 1] : NO_SLOT;
}

static void to_waiting(struct sim *s, struct engine *e, struct request *r)
{
	r->target = r->in_tok + r->done;
	r->chunk = 0;
	e->preempted++;
	sim_log(s, TRACE_PREEMPT, e == &s->online ? 0 : 1, r->in_tok);
	if (engine_wait(e, r, true))
		sim_fail(s, "out of memory for the waiting queue");
}

static void running_remove(struct engine *e, int32_t i)
{
	memmove(&e->running[i], &e->running[i + 1], (size_t)(e->n_running - i - 1) * sizeof(*e->running));
	e->n_running--;
}

void engine_preempt_newest(struct sim *s, struct engine *e)
{
	struct request *r = e->running[--e->n_running];

	engine_forget_blocks(s, e, r, 0);
	to_waiting(s, e, r);
}

void engine_drop_prefixes(struct sim *s, struct engine *e)
{
	for (int64_t i = 0; i < waiting_count(e); i++)
		engine_forget_blocks(s, e, *waiting_at(e, i), 0);
}

static int32_t pick_slot(struct engine *e, const struct request *r)
{
	struct space *sp = e->space;

	if (!e->affine)
		return space_lowest_with_room(sp);
	if (r->slot != NO_SLOT && sp->handle[r->slot] != NO_SLOT && sp->used[r->slot] < sp->per_slot)
		return r->slot;
	return space_emptiest(sp);
}

static bool add_block(struct sim *s, struct engine *e, struct request *r)
{
	int32_t slot = pick_slot(e, r);

	if (slot == NO_SLOT)
		return false;
	if (r->blocks == r->cap) {
		int32_t cap = r->cap ? r->cap * 2 : 16;
		int32_t *wider = realloc(r->block_slot, (size_t)cap * sizeof(*wider));

		if (!wider) {
			sim_fail(s, "out of memory for block tables");
			return false;
		}
		r->block_slot = wider;
		r->cap = cap;
	}
	if (e->space->ready_ns[slot] > e->ready_ns)
		e->ready_ns = e->space->ready_ns[slot];
	space_put(e->space, slot);
	r->block_slot[r->blocks++] = slot;
	r->slot = slot;
	return true;
}

/* Blocks for `tokens` tokens of r; false leaves what could be had. */
static bool grow(struct sim *s, struct engine *e, struct request *r, int64_t tokens)
{
	int64_t want;

	if (tokens <= (int64_t)r->blocks * s->p.block_tokens)
		return true; /* nearly always: a block lasts for sixteen steps, and a division is dear */
	want = blocks_for(s, tokens);
	while (r->blocks < want) {
		int64_t lacking = want - r->blocks - e->space->free_blocks;

		if (lacking > 0) {
			bool more = e == &s->online ? memory_online_room(s, lacking) : memory_offline_room(s);

			if (!more && e->space->free_blocks == 0)
				return false;
		}
		if (!add_block(s, e, r))
			return false;
	}
	return true;
}

bool engine_reserve(struct sim *s, struct engine *e, struct request *r, int64_t tokens)
{
	return grow(s, e, r, tokens);
}

static void account(struct work *w, struct request *r, int64_t chunk)
{
	r->chunk = (int32_t)chunk;
	if (chunk == 1 && r->done > 0) {
		w->seqs++;
		w->context += r->ctx;
	} else {
		w->prefill += chunk;
		w->pairs += (double)chunk * ((double)r->ctx + 0.5 * (double)chunk);
	}
}

static int64_t next_chunk(const struct request *r, int64_t budget)
{
	int64_t left = r->target - r->ctx;

	return left < budget ? left : budget;
}

static int64_t plan_running(struct sim *s, struct engine *e, int64_t budget, struct work *w)
{
	int32_t i = 0;

	while (i < e->n_running) {
		struct request *r = e->running[i];
		int64_t chunk = next_chunk(r, budget);

		r->chunk = 0;
		if (chunk > 0 && !grow(s, e, r, r->ctx + chunk)) {
			engine_preempt_newest(s, e);
			continue;
		}
		if (chunk > 0) {
			account(w, r, chunk);
			budget -= chunk;
		}
		i++;
	}
	return budget;
}

/* Blocks that the engine could come to hold: what is mapped, and what may still be mapped for it. */
static int64_t potential(const struct sim *s, const struct engine *e)
{
	int64_t handles = 0;

	if (e == &s->online)
		handles = s->p.online_elastic ? s->n_free : e->space->slots - e->space->backed;
	else if (s->p.offline_elastic)
		handles = s->n_free;
	return e->space->free_blocks + handles * e->space->per_slot;
}

static void admit(struct sim *s, struct engine *e, int64_t budget, struct work *w)
{
	while (budget > 0 && e->n_running < e->timing->max_seqs && waiting_count(e) > 0) {
		struct request *r = *waiting_at(e, 0);
		int32_t before = r->blocks;
		int64_t chunk = next_chunk(r, budget);
		int64_t tokens = e->whole_first ? r->target : r->ctx + chunk;

		if (blocks_for(s, r->target) - r->blocks > potential(s, e))
			return;
		if (!grow(s, e, r, tokens)) {
			engine_forget_blocks(s, e, r, before);
			return;
		}
		e->wait_head++;
		e->running[e->n_running++] = r;
		account(w, r, chunk);
		budget -= chunk;
	}
}

struct work engine_plan(struct sim *s, struct engine *e, int64_t budget)
{
	struct work w = {0, 0, 0, 0.0};
	int64_t preempted = e->preempted;

	e->ready_ns = 0;
	budget = plan_running(s, e, budget, &w);
	/* What was just preempted is not admitted again in the same iteration: it would fail the same way. */
	if (e->preempted == preempted || e->n_running == 0)
		admit(s, e, budget, &w);
	return w;
}

static bool is_finished(struct sim *s, struct engine *e, struct request *r, int64_t at_ns)
{
	if (r->chunk == 0)
		return false;
	r->ctx += r->chunk;
	r->chunk = 0;
	if (e == &s->off.engine && r->ctx > r->useful) {
		s->off.useful += r->ctx - r->useful;
		r->useful = r->ctx;
	}
	if (r->ctx < r->target)
		return false;
	r->done++;
	r->target = r->ctx + 1;
	if (r->first_ns == 0)
		r->first_ns = at_ns;
	if (r->done < r->out_tok)
		return false;
	r->last_ns = at_ns;
	return true;
}

void engine_commit(struct sim *s, struct engine *e, int64_t at_ns)
{
	int32_t kept = 0;

	for (int32_t i = 0; i < e->n_running; i++) {
		struct request *r = e->running[i];

		if (!is_finished(s, e, r, at_ns)) {
			e->running[kept++] = r;
			continue;
		}
		r->ctx = 0; /* nothing is lost: it is complete */
		engine_forget_blocks(s, e, r, 0);
		request_free(r);
		if (e == &s->online)
			s->open_requests--;
		else
			offline_request_done(s, r);
	}
	e->n_running = kept;
}

static int32_t first_block_in(const struct request *r, int32_t slot)
{
	for (int32_t k = 0; k < r->blocks; k++)
		if (r->block_slot[k] == slot)
			return k;
	return r->blocks;
}

/* The content is lost: a request with a block there keeps its valid prefix (or nothing) and recomputes the rest. */
void engine_lose_slot(struct sim *s, struct engine *e, int32_t slot)
{
	for (int64_t i = 0; i < waiting_count(e); i++) {
		struct request *r = *waiting_at(e, i);
		int32_t first = first_block_in(r, slot);

		if (first < r->blocks)
			engine_forget_blocks(s, e, r, s->p.keep_prefix ? first : 0);
	}
	for (int32_t i = e->n_running; i-- > 0;) {
		struct request *r = e->running[i];
		int32_t first = first_block_in(r, slot);

		if (first == r->blocks)
			continue;
		running_remove(e, i);
		engine_forget_blocks(s, e, r, s->p.keep_prefix ? first : 0);
		to_waiting(s, e, r);
	}
}

void engine_requeue_all(struct sim *s, struct engine *e)
{
	engine_drop_prefixes(s, e);
	while (e->n_running > 0)
		engine_preempt_newest(s, e);
}

double work_ns(const struct sim_timing *t, const struct work *w)
{
	double linear = (double)(w->prefill + w->seqs) * t->prefill_token_ns;

	if (w->seqs + w->prefill == 0)
		return 0.0;
	if (linear < t->base_ns)
		linear = t->base_ns;
	return linear + t->fixed_ns + (double)w->seqs * t->seq_ns + (double)w->context * t->context_token_ns +
	       w->pairs * t->attention_pair_ns;
}
