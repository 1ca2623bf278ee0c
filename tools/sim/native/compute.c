/*
 * Which side waits for the other: one function for the moment online launches, one for the moment it leaves the GPU,
 * one for the wake of ours. Sources and constants of each policy: docs/replay.md.
 */
#include "core.h"

static int64_t stop_draw(struct sim *s, uint64_t gpu)
{
	return draw_lognormal(s->p.seed, STREAM_STOP, (uint64_t)s->gates.used, gpu, s->p.stop_median_ns,
	                      s->p.stop_sigma, s->p.stop_max_ns);
}

/* All GPUs of the service: one after another under the driver's global lock, together without it. */
static int64_t stop_all(struct sim *s)
{
	int64_t sum = 0;
	int64_t worst = 0;

	for (int32_t gpu = 0; gpu < s->p.gpus; gpu++) {
		int64_t d = stop_draw(s, (uint64_t)gpu);

		sum += d;
		if (d > worst)
			worst = d;
	}
	return s->p.serial_gate ? sum : worst;
}

static void record_gate(struct sim *s, int64_t at_ns, int64_t took_ns)
{
	if (series_add(&s->gates, at_ns, took_ns, 0, 0))
		sim_fail(s, "out of memory for gate times");
	sim_log(s, TRACE_GATE, took_ns, s->open_requests);
}

/* Offline goes on until it is stopped; online starts when it is. */
static void stop_channels(struct sim *s, int64_t at_ns)
{
	int64_t took = stop_all(s);

	record_gate(s, at_ns, took);
	s->stopped_ns = at_ns + took;
	offline_advance(s, s->stopped_ns);
	s->off.open_ns = NEVER;
	s->gated = true;
}

/* The hint rings before the engine's first launch: the stop runs while the host prepares it. */
void compute_on_hint(struct sim *s, int64_t at_ns)
{
	if (s->p.compute == SIM_CHANNEL && s->p.job != SIM_JOB_NONE && s->p.hinted && s->p.gate_on_hint &&
	    !s->gated)
		stop_channels(s, at_ns);
}

static int64_t stop_context(struct sim *s, int64_t at_ns)
{
	int64_t took;

	if (s->off.open_ns > at_ns) {
		s->off.open_ns = NEVER; /* the switch back in had not begun to run anything */
		return 0;
	}
	took = stop_all(s) + (int64_t)s->p.stop_hintless_ns;
	record_gate(s, at_ns, took);
	offline_advance(s, at_ns + took);
	s->off.open_ns = NEVER;
	return took;
}

static int64_t wait_graph(struct sim *s, int64_t at_ns)
{
	int64_t left = s->off.left_ns;

	if (left > 0 && s->off.open_ns <= at_ns) {
		record_gate(s, at_ns, left);
		offline_advance(s, at_ns + left);
	} else {
		left = 0;
	}
	s->off.open_ns = NEVER;
	return left;
}

static int64_t wait_layer(struct sim *s, int64_t at_ns)
{
	double u = draw_unit(s->p.seed, STREAM_LAYER, (uint64_t)s->gates.used, 0);
	int64_t took = 0;

	if (s->off.left_ns > 0 && s->off.open_ns <= at_ns) {
		took = (int64_t)(u * (double)s->off.length_ns / s->p.offline_layers);
		record_gate(s, at_ns, took);
		s->off.left_ns = s->off.length_ns; /* the iteration is repeated */
	}
	s->off.open_ns = NEVER;
	return took;
}

/* Two contexts take turns: offline ends the slice that it is in, and has one of its own between two of online's. */
static int64_t wait_turns(struct sim *s, int64_t at_ns, int64_t work_ns)
{
	double u = draw_unit(s->p.seed, STREAM_SLICE, (uint64_t)s->gates.used, 0);
	int64_t turns = (work_ns - 1) / s->p.slice_ns;
	int64_t took;

	if (s->off.left_ns == 0 || s->off.open_ns > at_ns)
		return 0;
	took = (int64_t)(u * (double)s->p.offline_slice_ns) + turns * s->p.offline_slice_ns;
	record_gate(s, at_ns, took);
	offline_advance(s, at_ns + took);
	s->off.open_ns = NEVER;
	return took;
}

/* `work_ns`: what online is about to launch takes so long by itself. */
int64_t compute_on_launch(struct sim *s, int64_t at_ns, int64_t work_ns)
{
	if (s->p.job == SIM_JOB_NONE)
		return 0;
	switch ((enum sim_compute)s->p.compute) {
	case SIM_CHANNEL:
	case SIM_EDGE:
		if (!s->gated && s->p.compute == SIM_EDGE && s->off.open_ns > at_ns)
			s->off.open_ns = NEVER; /* it had not gone on yet: nothing to stop */
		else if (!s->gated)
			stop_channels(s, at_ns);
		return s->stopped_ns > at_ns ? s->stopped_ns - at_ns : 0;
	case SIM_GPREEMPT:
		return stop_context(s, at_ns);
	case SIM_KERNEL_STRICT:
	case SIM_KERNEL_TGS:
		return wait_graph(s, at_ns);
	case SIM_LAYER:
		return wait_layer(s, at_ns);
	case SIM_TIME_SLICE:
		return wait_turns(s, at_ns, work_ns);
	case SIM_ALONE:
	case SIM_SAME_ENGINE:
		break;
	}
	return 0;
}

void compute_on_done(struct sim *s, int64_t at_ns, bool drained)
{
	switch ((enum sim_compute)s->p.compute) {
	case SIM_GPREEMPT:
		s->off.open_ns = at_ns + s->p.resume_ns;
		break;
	case SIM_EDGE:
		s->off.open_ns = at_ns + s->p.resume_ns;
		s->gated = false;
		break;
	case SIM_KERNEL_TGS:
	case SIM_TIME_SLICE:
		s->off.open_ns = at_ns;
		break;
	case SIM_KERNEL_STRICT:
	case SIM_LAYER:
		if (drained)
			s->off.open_ns = at_ns;
		break;
	case SIM_CHANNEL:
		s->quiet_from = at_ns;
		break;
	case SIM_ALONE:
	case SIM_SAME_ENGINE:
		break;
	}
}

/* An engine that waits for memory has nothing that it could launch: its open requests are no reason to hold. */
static int64_t runnable_requests(const struct sim *s)
{
	return s->phase == PHASE_STALLED ? 0 : s->open_requests;
}

/* When the wake policy is to be asked: with a hint at zero open requests, else after a quiet cooldown. */
int64_t compute_wake_at(const struct sim *s)
{
	int64_t at;

	if (s->p.compute != SIM_CHANNEL || !s->gated || s->phase == PHASE_RUNNING)
		return NEVER;
	if (s->p.hinted && runnable_requests(s) > 0)
		return NEVER;
	at = s->p.hinted ? s->quiet_from : s->quiet_from + s->cooldown_ns;
	return at < s->wake_after_ns ? s->wake_after_ns : at;
}

void compute_wake(struct sim *s, int64_t at_ns)
{
	int64_t again;

	s->n.callbacks++;
	again = s->call(SIM_ON_WAKE, at_ns, runnable_requests(s), at_ns - s->quiet_from);
	if (again > at_ns) {
		s->wake_after_ns = again;
		return;
	}
	s->gated = false;
	s->off.open_ns = at_ns + s->p.resume_ns;
	sim_log(s, TRACE_WAKE, at_ns - s->quiet_from, s->open_requests);
}

#define TGS_SAMPLE_NS (50 * NS_PER_MS)

static double tgs_deviation(struct sim *s)
{
	struct tgs *c = &s->tgs;
	int64_t from = s->run_from > c->next_ns - TGS_SAMPLE_NS ? s->run_from : c->next_ns - TGS_SAMPLE_NS;

	if (s->phase == PHASE_RUNNING && s->now > from)
		c->seen += (double)(s->now - from);
	if (s->phase == PHASE_IDLE && c->seen <= 0)
		return 0.0; /* no work to protect: our charitable reading of the published code */
	if (c->seen > c->peak)
		c->peak = c->seen;
	return c->peak > 0 ? 1.0 - c->seen / c->peak : 0.0;
}

/* The rate controller of TGS, sampled every 50 ms; a unit is a launched thread block. */
void compute_tgs_sample(struct sim *s)
{
	struct tgs *c = &s->tgs;
	double full = 50.0 * s->p.tgs_units_per_ms;
	double deviation = tgs_deviation(s);

	c->bad = deviation >= 0.12 ? c->bad + 1 : 0;
	if (c->bad >= 20) {
		c->peak *= 0.8;
		c->limit /= 2;
		c->bad = 0;
	} else if (deviation >= 0.09) {
		c->limit /= 10;
		c->slow_start = true;
	} else if (deviation > 0.03) {
		c->limit = c->slow_start ? c->limit / 1.5 : c->limit * 0.92;
		c->slow_start = false;
	} else if (c->slow_start) {
		c->limit *= 1.5;
	} else {
		c->limit += 0.00025 * full > 1000 ? 0.00025 * full : 1000;
	}
	c->limit = c->limit > full ? full : c->limit < 1000 ? 1000 : c->limit;
	c->credit = c->credit + c->limit > c->limit ? c->limit : c->credit + c->limit;
	c->seen = 0;
	c->next_ns += TGS_SAMPLE_NS;
}

bool compute_may_start(struct sim *s)
{
	if (s->p.compute != SIM_KERNEL_TGS)
		return true;
	if (s->tgs.credit <= 0)
		return false;
	s->tgs.credit -= (double)s->off.length_ns / (double)NS_PER_MS * s->p.tgs_units_per_ms;
	return true;
}
