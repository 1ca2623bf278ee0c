/*
 * The offline engine in the time it is given. Its queue never runs dry, so the throughput is the policy's doing.
 * A stopped kernel keeps its place; what a policy throws away is thrown away by offline_drop_iteration().
 */
#include <stdlib.h>

#include "core.h"

static void new_lengths(struct sim *s, struct request *r)
{
	double u = draw_unit(s->p.seed, STREAM_LENGTH, (uint64_t)s->off.made, 0);
	int64_t i = (int64_t)(u * (double)s->n_lengths);

	s->off.made++;
	*r = (struct request){.in_tok = s->len_in[i], .out_tok = s->len_out[i], .slot = NO_SLOT};
	r->target = r->in_tok;
}

int offline_init(struct sim *s)
{
	struct offline *off = &s->off;
	int64_t n = s->p.job == SIM_JOB_SERVE ? s->p.offline.max_seqs + 8 : 1;

	if (engine_init(&off->engine, &s->p.offline, &s->offline_space))
		return -1;
	off->engine.affine = true;
	off->engine.whole_first = true;
	off->open_ns = s->p.compute == SIM_ALONE ? NEVER : 0;
	if (s->p.job == SIM_JOB_NONE)
		return 0;
	off->slab = calloc((size_t)n, sizeof(*off->slab));
	if (!off->slab)
		return -1;
	for (int64_t i = 0; i < n; i++) {
		if (s->p.job == SIM_JOB_SERVE)
			new_lengths(s, &off->slab[i]);
		off->slab[i].slot = NO_SLOT;
		if (engine_wait(&off->engine, &off->slab[i], false))
			return -1;
	}
	return 0;
}

void offline_free(struct sim *s)
{
	int64_t n = s->p.job == SIM_JOB_SERVE ? s->p.offline.max_seqs + 8 : 1;

	for (int64_t i = 0; s->off.slab && i < n; i++)
		request_free(&s->off.slab[i]);
	free(s->off.slab);
	engine_free(&s->off.engine);
}

void offline_request_done(struct sim *s, struct request *r)
{
	s->off.finished++;
	s->off.useful++; /* the last token, which never enters the KV cache */
	new_lengths(s, r);
	if (engine_wait(&s->off.engine, r, false))
		sim_fail(s, "out of memory for the offline queue");
}

void offline_drop_iteration(struct sim *s)
{
	s->off.planned = false;
	s->off.left_ns = 0;
}

/* One optimiser step needs all its activations at once; the training state is the only request, for ever waiting. */
static int64_t plan_train(struct sim *s)
{
	int64_t tokens = (int64_t)s->p.train_handles * s->p.offline_blocks_per_handle * s->p.block_tokens;

	return engine_reserve(s, &s->off.engine, &s->off.slab[0], tokens) ? s->p.train_step_ns : 0;
}

static int64_t plan_serve(struct sim *s)
{
	struct engine *e = &s->off.engine;
	struct work w = engine_plan(s, e, e->timing->budget_tokens);

	if (w.seqs + w.prefill == 0 && e->n_running == 0) {
		/* Kept prefixes may hold the room that the first in line needs. */
		engine_drop_prefixes(s, e);
		w = engine_plan(s, e, e->timing->budget_tokens);
	}
	return (int64_t)work_ns(e->timing, &w);
}

static bool plan_iteration(struct sim *s)
{
	struct offline *off = &s->off;
	int64_t wait;

	if (off->planned)
		return true;
	off->length_ns = s->p.job == SIM_JOB_TRAIN ? plan_train(s) : plan_serve(s);
	if (off->length_ns == 0)
		return false;
	wait = uvm_offline_wait(s);
	s->n.uvm_wait_ns += wait;
	off->length_ns += s->p.offline_gap_ns + wait;
	off->planned = true;
	return true;
}

static void commit_iteration(struct sim *s)
{
	s->n.offline_iterations++;
	s->off.planned = false;
	sim_log(s, TRACE_OFFLINE, s->off.length_ns, s->off.engine.n_running);
	if (s->p.job == SIM_JOB_TRAIN)
		s->off.useful += s->p.train_step_tokens;
	else
		engine_commit(s, &s->off.engine, s->off.t);
}

/* Runs what fits before `to_ns`; false when nothing can run before then. */
static bool run_some(struct sim *s, int64_t to_ns)
{
	struct offline *off = &s->off;
	int64_t run;

	if (off->t < off->dead_until)
		off->t = off->dead_until < to_ns ? off->dead_until : to_ns;
	if (off->t < off->open_ns)
		off->t = off->open_ns < to_ns ? off->open_ns : to_ns;
	if (off->t >= to_ns)
		return false;
	if (off->left_ns == 0) {
		if (!plan_iteration(s) || !compute_may_start(s))
			return false;
		off->left_ns = off->length_ns;
	}
	run = off->left_ns < to_ns - off->t ? off->left_ns : to_ns - off->t;
	off->left_ns -= run;
	off->t += run;
	s->n.offline_busy_ns += run;
	if (off->left_ns == 0)
		commit_iteration(s);
	return true;
}

void offline_advance(struct sim *s, int64_t to_ns)
{
	if (s->p.job == SIM_JOB_NONE)
		return;
	while (run_some(s, to_ns))
		;
	if (s->off.t < to_ns)
		s->off.t = to_ns;
}
