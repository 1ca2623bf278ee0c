/*
 * The rival that needs no Valve: one engine, one copy of the weights, offline requests at low priority in the same
 * batch. Online goes first into the token budget and takes memory from the newest offline request.
 */
#include "core.h"

static void wait_for_memory_or_arrival(struct sim *s)
{
	int64_t next = s->next_arrival < s->n_requests ? s->requests[s->next_arrival].arrive_ns : NEVER;

	sim_move(s, next < s->p.end_ns ? next : s->p.end_ns);
}

void same_engine_run(struct sim *s)
{
	struct engine *low = &s->off.engine;

	low->space = &s->online_space;
	low->affine = false;
	while (!s->error && s->now < s->p.end_ns) {
		struct work w;
		struct work extra;
		int64_t took;

		accept_arrivals(s);
		w = engine_plan(s, &s->online, s->p.online.budget_tokens);
		extra = engine_plan(s, low, s->p.online.budget_tokens - w.prefill - w.seqs);
		w.seqs += extra.seqs;
		w.prefill += extra.prefill;
		w.context += extra.context;
		w.pairs += extra.pairs;
		if (w.seqs + w.prefill == 0) {
			wait_for_memory_or_arrival(s);
			continue;
		}
		took = (int64_t)work_ns(&s->p.online, &w);
		sim_move(s, s->now + took);
		if (s->open_requests > 0)
			s->n.online_busy_ns += took;
		else
			s->n.idle_ns += took;
		s->n.iterations++;
		s->n.offline_busy_ns += took;
		engine_commit(s, &s->online, s->now);
		engine_commit(s, low, s->now);
		sim_move(s, s->now + draw_lognormal(s->p.seed, STREAM_GAP, (uint64_t)s->next_arrival,
		                                    (uint64_t)s->since_arrival++, s->p.gap.median_ns,
		                                    s->p.gap.sigma, s->p.gap.max_ns));
	}
}
