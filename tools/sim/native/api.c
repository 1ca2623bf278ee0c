/* What Python calls: building a world, reading it, and the checks that hold at every moment. */
#include <stdlib.h>
#include <string.h>

#include "core.h"

static int init_memory(struct sim *s)
{
	int32_t n = s->p.handles;

	s->free_handles = calloc((size_t)n + 1, sizeof(*s->free_handles));
	s->owner = calloc((size_t)n + 1, sizeof(*s->owner));
	if (!s->free_handles || !s->owner || space_init(&s->online_space, n, s->p.blocks_per_handle) ||
	    space_init(&s->offline_space, n, s->p.offline_blocks_per_handle))
		return -1;
	for (int32_t i = 0; i < n; i++)
		s->free_handles[s->n_free++] = n - 1 - i;
	for (int32_t i = 0; i < n && (s->p.uvm || s->p.compute == SIM_SAME_ENGINE); i++) {
		/* Managed memory is virtual on both sides; one engine holds everything. */
		space_back(&s->online_space, i, i, 0);
		if (s->p.uvm)
			space_back(&s->offline_space, i, i, 0);
	}
	return 0;
}

static int init_requests(struct sim *s, const int64_t *arrive_ns, const int32_t *in_tok,
                         const int32_t *out_tok)
{
	s->requests = calloc((size_t)s->n_requests + 1, sizeof(*s->requests));
	if (!s->requests)
		return -1;
	for (int64_t i = 0; i < s->n_requests; i++) {
		s->requests[i].arrive_ns = arrive_ns[i];
		s->requests[i].in_tok = in_tok[i];
		s->requests[i].target = in_tok[i];
		s->requests[i].out_tok = out_tok[i];
		s->requests[i].slot = NO_SLOT;
	}
	return 0;
}

static int init_lengths(struct sim *s, const int32_t *offline_in, const int32_t *offline_out)
{
	size_t bytes = (size_t)s->n_lengths * sizeof(int32_t);

	s->len_in = malloc(bytes + 1);
	s->len_out = malloc(bytes + 1);
	if (!s->len_in || !s->len_out)
		return -1;
	memcpy(s->len_in, offline_in, bytes);
	memcpy(s->len_out, offline_out, bytes);
	return 0;
}

struct sim *sim_new(const struct sim_params *params, int64_t n_online, const int64_t *arrive_ns,
                    const int32_t *in_tok, const int32_t *out_tok, int64_t n_lengths,
                    const int32_t *offline_in, const int32_t *offline_out, sim_callback callback)
{
	struct sim *s = calloc(1, sizeof(*s));

	if (!s)
		return NULL;
	s->p = *params;
	s->call = callback;
	s->n_requests = n_online;
	s->n_lengths = n_lengths;
	s->gates.width = s->idles.width = s->usage.width = 2;
	s->log.width = 4;
	s->tick_ns = 0;
	s->tgs = (struct tgs){.next_ns = 50 * NS_PER_MS, .limit = 20000, .credit = 20000, .slow_start = true};
	if (init_memory(s) || init_requests(s, arrive_ns, in_tok, out_tok) ||
	    init_lengths(s, offline_in, offline_out) ||
	    engine_init(&s->online, &s->p.online, &s->online_space) || offline_init(s)) {
		sim_free(s);
		return NULL;
	}
	s->event_ns = n_online > 0 ? s->requests[0].arrive_ns : NEVER;
	return s;
}

void sim_free(struct sim *s)
{
	for (int64_t i = 0; s->requests && i < s->n_requests; i++)
		request_free(&s->requests[i]);
	offline_free(s);
	engine_free(&s->online);
	space_free(&s->online_space);
	space_free(&s->offline_space);
	free(s->requests);
	free(s->free_handles);
	free(s->owner);
	free(s->len_in);
	free(s->len_out);
	free(s->gates.data);
	free(s->idles.data);
	free(s->usage.data);
	free(s->log.data);
	free(s);
}

const char *sim_error(const struct sim *s)
{
	return s->error ? s->error : "";
}

static int check_space(const struct sim *s, const struct space *sp, enum owner owner, const char **why)
{
	int32_t backed = 0;
	int32_t busy = 0;
	int64_t free_blocks = 0;

	for (int32_t i = 0; i < sp->slots; i++) {
		if (sp->handle[i] == NO_SLOT) {
			if (sp->used[i] != 0)
				*why = "blocks in a slot without backing";
			continue;
		}
		backed++;
		busy += sp->used[i] > 0;
		free_blocks += sp->per_slot - sp->used[i];
		if (sp->room[i] != sp->per_slot - sp->used[i])
			*why = "a slot's room is off";
		if (sp->used[i] < 0 || sp->used[i] > sp->per_slot)
			*why = "a slot holds more blocks than it has";
		if (!s->p.uvm && s->p.compute != SIM_SAME_ENGINE && s->owner[sp->handle[i]] != (int8_t)owner)
			*why = "a handle has two owners";
	}
	if (backed != sp->backed || busy != sp->busy || free_blocks != sp->free_blocks)
		*why = "a slot count is off";
	return backed;
}

int sim_check(struct sim *s)
{
	const char *why = NULL;
	int32_t total;

	s->n.checks++;
	total = check_space(s, &s->online_space, OWNER_ONLINE, &why);
	total += check_space(s, &s->offline_space, OWNER_OFFLINE, &why);
	if (!s->p.uvm && s->p.compute != SIM_SAME_ENGINE && total + s->n_free != s->p.handles)
		why = "handles were lost or made";
	if (s->off.t < s->now && s->p.job != SIM_JOB_NONE && s->p.compute != SIM_SAME_ENGINE)
		why = "offline is behind the clock";
	if (why)
		sim_fail(s, why);
	return why ? -1 : 0;
}

void sim_totals(const struct sim *s, struct sim_totals *out)
{
	*out = s->n;
	out->now_ns = s->now;
	out->offline_useful_tokens = s->off.useful;
	out->offline_lost_tokens = s->off.lost;
	out->offline_finished = s->off.finished;
	out->offline_preempted = s->off.engine.preempted;
	out->online_preempted = s->online.preempted;
}

void sim_memory(const struct sim *s, struct sim_memory *out)
{
	out->free = s->n_free;
	out->online_backed = s->online_space.backed;
	out->online_busy = s->online_space.busy;
	out->offline_backed = s->offline_space.backed;
	out->offline_busy = s->offline_space.busy;
	out->offline_held = s->off.engine.n_running;
}

void sim_online_times(const struct sim *s, int64_t *first_ns, int64_t *last_ns)
{
	for (int64_t i = 0; i < s->n_requests; i++) {
		first_ns[i] = s->requests[i].first_ns;
		last_ns[i] = s->requests[i].last_ns;
	}
}

static int64_t copy_pairs(const struct series *x, int64_t cap, int64_t *a, int64_t *b)
{
	for (int64_t i = 0; i < x->used && i < cap; i++) {
		a[i] = x->data[2 * i];
		b[i] = x->data[2 * i + 1];
	}
	return x->used;
}

int64_t sim_gates(const struct sim *s, int64_t cap, int64_t *at_ns, int64_t *took_ns)
{
	return copy_pairs(&s->gates, cap, at_ns, took_ns);
}

int64_t sim_idles(const struct sim *s, int64_t cap, int64_t *from_ns, int64_t *to_ns)
{
	return copy_pairs(&s->idles, cap, from_ns, to_ns);
}

int64_t sim_usage(const struct sim *s, int64_t cap, int64_t *second, int64_t *handles)
{
	return copy_pairs(&s->usage, cap, second, handles);
}

int64_t sim_trace(const struct sim *s, int64_t cap, int64_t *rows)
{
	int64_t n = s->log.used < cap ? s->log.used : cap;

	if (n > 0)
		memcpy(rows, s->log.data, (size_t)(n * 4) * sizeof(int64_t));
	return s->log.used;
}

static const struct request *offline_at(const struct sim *s, int64_t i)
{
	const struct engine *e = &s->off.engine;

	if (i < e->n_running)
		return e->running[i];
	i = e->wait_head + (i - e->n_running);
	return i < e->wait_tail ? e->waiting[i & (e->wait_cap - 1)] : NULL;
}

int64_t sim_offline_blocks(const struct sim *s, int64_t cap, int32_t *request, int32_t *position,
                           int32_t *column)
{
	const struct request *r;
	int64_t n = 0;

	for (int64_t i = 0; (r = offline_at(s, i)); i++) {
		for (int32_t k = 0; k < r->blocks; k++, n++) {
			if (n >= cap)
				continue;
			request[n] = (int32_t)i;
			position[n] = k;
			column[n] = r->block_slot[k];
		}
	}
	return n;
}

int64_t sim_offline_requests(const struct sim *s, int64_t cap, int32_t *request, int32_t *tokens)
{
	const struct request *r;
	int64_t i;

	for (i = 0; (r = offline_at(s, i)); i++) {
		if (i < cap) {
			request[i] = (int32_t)(r - s->off.slab);
			tokens[i] = r->ctx;
		}
	}
	return i;
}

int32_t sim_offline_columns(const struct sim *s, int32_t cap, int32_t *column, int32_t *free_blocks)
{
	const struct space *sp = &s->offline_space;
	int32_t n = 0;

	for (int32_t i = 0; i < sp->slots; i++) {
		if (sp->handle[i] == NO_SLOT)
			continue;
		if (n < cap) {
			column[n] = i;
			free_blocks[n] = sp->per_slot - sp->used[i];
		}
		n++;
	}
	return n;
}

void sim_set_tick(struct sim *s, int64_t at_ns)
{
	s->tick_ns = at_ns > s->now ? at_ns : s->now + 1;
}

void sim_set_cooldown(struct sim *s, int64_t cooldown_ns, int64_t floor_ns)
{
	s->cooldown_ns = cooldown_ns;
	s->gap_floor_ns = floor_ns;
}

double sim_iteration_ns(const struct sim_timing *t, int64_t seqs, int64_t context, int64_t prefill,
                        double pairs)
{
	struct work w = {.seqs = seqs, .context = context, .prefill = prefill, .pairs = pairs};

	return work_ns(t, &w);
}
