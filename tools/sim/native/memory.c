/*
 * Handles between three owners: the pool, online, offline. Which and how many is decided in Python (or, for the two
 * baselines that need no decision, by being elastic); here they change hands and pay for it.
 */
#include "core.h"

static int32_t pool_pop(struct sim *s, enum owner to)
{
	int32_t handle = s->free_handles[--s->n_free];

	s->owner[handle] = (int8_t)to;
	return handle;
}

static void pool_push(struct sim *s, int32_t handle)
{
	s->owner[handle] = OWNER_FREE;
	s->free_handles[s->n_free++] = handle;
}

/* Mappings are made one after another by one thread; each is usable when its own turn is over. */
static int64_t next_mapping(struct sim *s, int64_t cost_ns)
{
	if (s->remap_ns < s->now)
		s->remap_ns = s->now;
	s->remap_ns += cost_ns;
	return s->remap_ns;
}

int32_t sim_take_free(struct sim *s, int32_t n)
{
	int32_t taken = 0;

	while (taken < n && s->n_free > 0) {
		int32_t slot = space_lowest_unbacked(&s->online_space);

		if (slot == NO_SLOT)
			break;
		space_back(&s->online_space, slot, pool_pop(s, OWNER_ONLINE), next_mapping(s, s->p.map_ns));
		taken++;
	}
	return taken;
}

static void take_column(struct sim *s, int32_t column, int32_t slot)
{
	struct space *from = s->off.engine.space;
	int32_t handle;

	if (from->used[column] > 0) {
		engine_lose_slot(s, &s->off.engine, column);
		if (s->p.job == SIM_JOB_TRAIN)
			offline_drop_iteration(s);
	}
	handle = space_unback(from, column);
	s->owner[handle] = OWNER_ONLINE;
	space_back(&s->online_space, slot, handle, next_mapping(s, s->p.remap_ns));
}

int32_t sim_take_columns(struct sim *s, int32_t n, const int32_t *columns)
{
	int32_t taken = 0;

	for (int32_t i = 0; i < n; i++) {
		int32_t slot = space_lowest_unbacked(&s->online_space);

		if (slot == NO_SLOT)
			break;
		if (columns[i] < 0 || columns[i] >= s->offline_space.slots ||
		    s->offline_space.handle[columns[i]] == NO_SLOT) {
			sim_fail(s, "a column was taken that is not backed");
			break;
		}
		take_column(s, columns[i], slot);
		taken++;
	}
	sim_log(s, TRACE_TAKE, taken, s->online_space.backed);
	return taken;
}

int32_t sim_take_peak(struct sim *s)
{
	int32_t peak = s->polled_peak;

	s->polled_peak = s->online_space.busy;
	return peak;
}

int32_t sim_give(struct sim *s, int32_t n)
{
	int32_t given = 0;

	while (given < n) {
		int32_t slot = space_highest_empty(&s->online_space);

		if (slot == NO_SLOT)
			break;
		pool_push(s, space_unback(&s->online_space, slot));
		given++;
	}
	if (given)
		sim_log(s, TRACE_GIVE, given, s->online_space.backed);
	return given;
}

int32_t sim_back_offline(struct sim *s, int32_t n)
{
	int32_t backed = 0;

	while (backed < n && s->n_free > 0 && s->p.job != SIM_JOB_NONE) {
		int32_t slot = space_lowest_unbacked(&s->offline_space);

		if (slot == NO_SLOT)
			break;
		space_back(&s->offline_space, slot, pool_pop(s, OWNER_OFFLINE), 0);
		backed++;
	}
	return backed;
}

/* Whatever is mapped from here on waits so long first: for the end of an offline step. */
void sim_delay_mappings(struct sim *s, int64_t wait_ns)
{
	next_mapping(s, wait_ns);
}

/* The job dies with everything it has not finished; a restart begins every request anew. */
void sim_kill_offline(struct sim *s, int64_t back_at_ns, int64_t took_ns)
{
	struct engine *e = &s->off.engine;

	engine_requeue_all(s, e);
	for (int64_t i = e->wait_head; i < e->wait_tail; i++) {
		struct request *r = e->waiting[i & (e->wait_cap - 1)];

		r->done = 0;
		r->target = r->in_tok;
	}
	offline_drop_iteration(s);
	for (int32_t slot = 0; slot < e->space->slots; slot++)
		if (e->space->handle[slot] != NO_SLOT)
			pool_push(s, space_unback(e->space, slot));
	s->off.dead_until = back_at_ns;
	if (s->remap_ns < s->now)
		s->remap_ns = s->now;
	s->remap_ns += took_ns;
	sim_log(s, TRACE_KILL, back_at_ns, 0);
}

static bool take_from_same_engine(struct sim *s)
{
	if (s->off.engine.n_running > 0) {
		engine_preempt_newest(s, &s->off.engine);
		return true;
	}
	return false;
}

bool memory_online_room(struct sim *s, int64_t lacking_blocks)
{
	struct space *sp = &s->online_space;
	int64_t before = sp->free_blocks;

	if (s->p.compute == SIM_SAME_ENGINE)
		return take_from_same_engine(s);
	if (sp->backed == sp->slots)
		return false;
	if (s->p.online_elastic) {
		if (s->n_free == 0)
			return false;
		space_back(sp, space_lowest_unbacked(sp), pool_pop(s, OWNER_ONLINE), 0);
		return true;
	}
	s->n.callbacks++;
	s->call(SIM_ON_SHORT, s->now, (lacking_blocks + sp->per_slot - 1) / sp->per_slot, 0);
	return sp->free_blocks > before;
}

bool memory_offline_room(struct sim *s)
{
	/* A stalled online engine is served first: what is freed is not offline's to grow into. */
	if (!s->p.offline_elastic || s->n_free == 0 || s->phase == PHASE_STALLED)
		return false;
	return sim_back_offline(s, 1) == 1;
}

void memory_slot_emptied(struct sim *s, struct engine *e, int32_t slot)
{
	const struct space *sp = e->space;
	bool elastic = s->p.offline_elastic != 0;

	if (e == &s->online)
		elastic = s->p.online_elastic && sp->backed - sp->busy > s->p.online_reserve;
	if (elastic)
		pool_push(s, space_unback(e->space, slot));
}

void memory_after_plan(struct sim *s)
{
	const struct space *sp = &s->online_space;
	int64_t second = s->now / 1000000000LL;

	if (second != s->usage_second) {
		series_add(&s->usage, s->usage_second, s->usage_peak, 0, 0);
		s->usage_second = second;
		s->usage_peak = 0;
	}
	if (sp->busy > s->usage_peak)
		s->usage_peak = sp->busy;
	if (sp->busy > s->polled_peak)
		s->polled_peak = sp->busy;
	if (s->p.pressure_ratio <= 0 || sp->backed == sp->slots)
		return;
	if (sp->busy > 0 && sp->busy >= s->p.pressure_ratio * sp->backed) {
		s->n.callbacks++;
		s->call(SIM_ON_PRESSURE, s->now, 0, 0);
	}
}

int64_t uvm_online_wait(struct sim *s)
{
	int32_t over = s->online_space.busy + s->off.resident - s->p.handles;

	if (!s->p.uvm || over <= 0)
		return 0;
	if (over > s->off.resident)
		over = s->off.resident;
	s->off.resident -= over;
	return (int64_t)((double)over * s->p.uvm_evict_ns);
}

/* Pages that came to lie on the host are faulted in; what exceeds the card is faulted in again every iteration. */
int64_t uvm_offline_wait(struct sim *s)
{
	int32_t room = s->p.handles - s->online_space.busy;
	int32_t wanted = s->off.engine.space->busy;
	int32_t over = wanted > room ? wanted - room : 0;
	int32_t fit = wanted - over;
	int32_t faults = fit > s->off.resident ? fit - s->off.resident : 0;

	if (!s->p.uvm)
		return 0;
	s->off.resident += faults;
	return (int64_t)((double)(faults + over) * s->p.uvm_fault_ns);
}
