/*
 * The clock: the earliest of the online side's next event, a policy tick, a rate-controller sample and a wake.
 * Offline is advanced to that moment first, so every decision sees the memory as it is then.
 */
#include <stdlib.h>

#include "core.h"

#define STALL_RETRY_NS (10 * NS_PER_MS)
#define CHECK_EVERY    8192

int series_add(struct series *x, int64_t a, int64_t b, int64_t c, int64_t d)
{
	int64_t row[4] = {a, b, c, d};

	if (x->used == x->cap) {
		int64_t cap = x->cap ? x->cap * 2 : 1024;
		int64_t *wider = realloc(x->data, (size_t)(cap * x->width) * sizeof(*wider));

		if (!wider)
			return -1;
		x->data = wider;
		x->cap = cap;
	}
	for (int i = 0; i < x->width; i++)
		x->data[x->used * x->width + i] = row[i];
	x->used++;
	return 0;
}

void sim_fail(struct sim *s, const char *why)
{
	if (!s->error)
		s->error = why;
}

void sim_log(struct sim *s, enum step_kind kind, int64_t a, int64_t b)
{
	int64_t at = kind == TRACE_OFFLINE ? s->off.t : s->now;

	if (s->p.trace && series_add(&s->log, at, kind, a, b))
		sim_fail(s, "out of memory for the event trace");
}

void sim_move(struct sim *s, int64_t to_ns)
{
	if (to_ns < s->now)
		sim_fail(s, "time went backwards");
	s->now = to_ns;
}

static int64_t host_gap(struct sim *s)
{
	/* Keyed by the last arrival and the iterations since: a delay by a policy does not reshuffle the gaps. */
	return draw_lognormal(s->p.seed, STREAM_GAP, (uint64_t)s->next_arrival, (uint64_t)s->since_arrival++,
	                      s->p.gap.median_ns, s->p.gap.sigma, s->p.gap.max_ns);
}

static bool is_too_large(const struct sim *s, const struct request *r)
{
	return blocks_for(s, (int64_t)r->in_tok + r->out_tok) >
	       (int64_t)s->p.handles * s->p.blocks_per_handle;
}

void accept_arrivals(struct sim *s)
{
	while (s->next_arrival < s->n_requests && s->requests[s->next_arrival].arrive_ns <= s->now) {
		struct request *r = &s->requests[s->next_arrival++];

		s->since_arrival = 0;
		if (is_too_large(s, r)) {
			s->n.refused++;
			continue;
		}
		sim_log(s, TRACE_ARRIVE, r->in_tok, r->out_tok);
		s->open_requests++;
		if (engine_wait(&s->online, r, false))
			sim_fail(s, "out of memory for the online queue");
	}
}

static int64_t arrival_ns(const struct sim *s)
{
	return s->next_arrival < s->n_requests ? s->requests[s->next_arrival].arrive_ns : NEVER;
}

static void on_arrival(struct sim *s)
{
	int64_t idle_from = s->idle_from;

	accept_arrivals(s);
	s->event_ns = arrival_ns(s);
	if (s->open_requests == 0)
		return;
	if (s->now > idle_from) {
		s->n.idle_ns += s->now - idle_from;
		if (series_add(&s->idles, idle_from, s->now, 0, 0))
			sim_fail(s, "out of memory for idle periods");
	}
	compute_on_hint(s, s->now);
	s->busy_from = s->now;
	s->phase = PHASE_READY;
	s->event_ns = s->now + host_gap(s);
}

static void stall(struct sim *s)
{
	if (s->phase != PHASE_STALLED)
		s->n.stalls++;
	else
		s->n.stall_ns += STALL_RETRY_NS;
	s->phase = PHASE_STALLED;
	s->event_ns = s->now + STALL_RETRY_NS;
}

/* Only what ends while the service holds its GPUs teaches the largest gap; how gaps are spread is told by all of them. */
static void tell_gap(struct sim *s)
{
	int64_t gap = s->now - s->quiet_from;

	if (s->p.compute != SIM_CHANNEL || gap < s->gap_floor_ns || (s->p.hinted && !s->gated))
		return;
	s->n.callbacks++;
	s->call(SIM_ON_GAP, s->now, gap, s->gated);
}

static void on_launch(struct sim *s)
{
	struct work w;
	int64_t delay;
	int64_t wait;
	int64_t uvm;
	int64_t work;

	accept_arrivals(s);
	w = engine_plan(s, &s->online, s->p.online.budget_tokens);
	if (w.seqs + w.prefill == 0) {
		stall(s);
		return;
	}
	memory_after_plan(s);
	tell_gap(s);
	work = (int64_t)work_ns(&s->p.online, &w);
	delay = compute_on_launch(s, s->now, work);
	wait = s->online.ready_ns > s->now ? s->online.ready_ns - s->now : 0;
	uvm = uvm_online_wait(s);
	s->n.memory_wait_ns += wait;
	s->n.uvm_wait_ns += uvm;
	s->wake_after_ns = 0;
	s->run_from = s->now + delay + wait + uvm;
	s->run_to = s->run_from + work;
	s->phase = PHASE_RUNNING;
	s->event_ns = s->run_to;
	sim_log(s, TRACE_LAUNCH, delay + wait + uvm, w.seqs + w.prefill);
}

/* The ranks of a service do not leave the GPU together: the last one is busy for a seeded share longer. */
static int64_t rank_skew(struct sim *s)
{
	double u;

	if (s->p.gpus < 2 || s->p.skew_max <= 0)
		return 0;
	u = draw_unit(s->p.seed, STREAM_SKEW, (uint64_t)s->next_arrival, 0);
	return (int64_t)(u * s->p.skew_max * (double)(s->now - s->busy_from));
}

static void on_drain(struct sim *s)
{
	s->idle_from = s->now + rank_skew(s);
	s->phase = PHASE_IDLE;
	s->event_ns = arrival_ns(s);
	compute_on_done(s, s->idle_from, true);
}

static void on_gap(struct sim *s)
{
	s->phase = PHASE_READY;
	s->event_ns = s->now + host_gap(s);
	compute_on_done(s, s->now, false);
}

static void on_done(struct sim *s)
{
	int64_t sample_from = s->tgs.next_ns - 50 * NS_PER_MS;
	int64_t from = s->run_from > sample_from ? s->run_from : sample_from;

	if (s->now > from)
		s->tgs.seen += (double)(s->now - from);
	s->n.iterations++;
	s->n.online_busy_ns += s->run_to - s->run_from;
	engine_commit(s, &s->online, s->now);
	accept_arrivals(s);
	sim_log(s, TRACE_DONE, s->online.n_running, s->open_requests);
	if (s->open_requests == 0)
		on_drain(s);
	else
		on_gap(s);
	if (s->n.iterations % CHECK_EVERY == 0 && sim_check(s))
		sim_fail(s, s->error ? s->error : "the books do not balance");
}

static void on_event(struct sim *s)
{
	switch (s->phase) {
	case PHASE_IDLE:
		on_arrival(s);
		break;
	case PHASE_READY:
	case PHASE_STALLED:
		on_launch(s);
		break;
	case PHASE_RUNNING:
		on_done(s);
		break;
	}
}

static void on_tick(struct sim *s)
{
	s->tick_ns = NEVER;
	s->n.callbacks++;
	s->call(SIM_ON_TICK, s->now, 0, 0);
}

static int64_t earliest(int64_t a, int64_t b)
{
	return a < b ? a : b;
}

static void finish(struct sim *s)
{
	s->now = s->p.end_ns;
	offline_advance(s, s->now);
	if (s->phase == PHASE_IDLE && s->now > s->idle_from) {
		s->n.idle_ns += s->now - s->idle_from;
		series_add(&s->idles, s->idle_from, s->now, 0, 0);
	}
	series_add(&s->usage, s->usage_second, s->usage_peak, 0, 0);
}

int sim_run(struct sim *s)
{
	if (s->p.compute == SIM_SAME_ENGINE) {
		same_engine_run(s);
		return s->error ? -1 : 0;
	}
	while (!s->error) {
		int64_t wake = compute_wake_at(s);
		int64_t sample = s->p.compute == SIM_KERNEL_TGS ? s->tgs.next_ns : NEVER;
		int64_t at = earliest(earliest(s->event_ns, wake), earliest(s->tick_ns, sample));

		if (at >= s->p.end_ns)
			break;
		if (at < s->now)
			at = s->now;
		sim_move(s, at);
		offline_advance(s, at);
		if (at == s->tick_ns)
			on_tick(s);
		else if (at == s->event_ns)
			on_event(s);
		else if (at == sample)
			compute_tgs_sample(s);
		else
			compute_wake(s, at);
	}
	if (!s->error)
		finish(s);
	return s->error || sim_check(s) ? -1 : 0;
}
