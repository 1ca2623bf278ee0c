/*
 * zeroing.c - the answer to an order, and the zeroing that it waits for. In the flow: orders.c carries out an order part by
 * part -> its memory is zeroed by the GPU, beside later orders -> KV_DONE, once, when all of it is.
 *
 * If one part's zeroing fails, the whole order is undone: no slot of it counts as valved's before its answer is sent. All
 * of this is the memory thread's own.
 */
#include "memory.h"

#include <errno.h>
#include <string.h>

struct valve_answering {
	uint64_t number;
	uint32_t generation;
	uint32_t pending; /* events that are awaited: one a place, behind all its parts */
	bool is_used, is_complete, failed;
	struct valve_outcome out; /* of the parts up to now */
};

struct zeroing {
	struct valve_range *range; /* NULL: free */
	struct valve_answering *answering;
	struct valve_kv_order part;
	uint32_t done;
	bool has_ended;
	bool failed; /* no event tells of it */
};

static struct {
	uint32_t zeroings;
	struct valve_answering
	        answering[VALVE_ZEROINGS + 1]; /* each has a zeroing, or is the order at work */
	struct zeroing zeroing[VALVE_ZEROINGS];
} all;

uint32_t valve_zeroings(void)
{
	return all.zeroings;
}

struct valve_answering *valve_answering_begin(const struct valve_queued *order)
{
	struct valve_answering *answering = all.answering;

	while (answering->is_used)
		answering++;
	*answering = (struct valve_answering){
	        .number = order->number, .generation = order->generation, .is_used = true};
	return answering;
}

/* ---- the end of an order ---- */

static void settle(struct zeroing *zeroing, bool keep)
{
	struct valve_range *range = zeroing->range;

	valve_lock(&range->lock);
	valve_place_enter(range->place, NULL);
	valve_vmm_cleared(range, &zeroing->part, zeroing->done, keep);
	valve_unlock(&range->lock);
	add_full(&range->progress, 1);
}

static void let_go(struct zeroing *zeroing)
{
	struct valve_range *range = zeroing->range;

	zeroing->range = NULL;
	all.zeroings--;
	add_full(&range->clearing, (uint32_t)-1); /* last: from here on the range may be freed */
	futex_wake(&range->clearing, 1);
}

static void finish(struct valve_answering *answering)
{
	bool keep = !answering->failed && answering->generation == load_acquire(&valve_shim.link_generation);

	for (size_t i = 0; all.zeroings && i < VALVE_ZEROINGS; i++)
		if (all.zeroing[i].range && all.zeroing[i].answering == answering)
			settle(&all.zeroing[i], keep);
	if (answering->failed) {
		valve_fds_close(&answering->out.made);
		answering->out = (struct valve_outcome){.status = EIO, .cu_result = CUDA_ERROR_UNKNOWN};
	}
	valve_orders_report(answering->number, answering->generation, &answering->out);
	for (size_t i = 0; all.zeroings && i < VALVE_ZEROINGS; i++)
		if (all.zeroing[i].range && all.zeroing[i].answering == answering)
			let_go(&all.zeroing[i]);
	answering->is_used = false;
}

/* An event behind all that was submitted to its place. */
static void record(size_t i)
{
	struct valve_place *place = all.zeroing[i].range->place;
	CUresult result = valve_place_enter(place, NULL);

	if (!result && !place->event[i])
		result = valve_cu.cuEventCreate(&place->event[i], CU_EVENT_DISABLE_TIMING);
	if (!result)
		result = valve_cu.cuEventRecord(place->event[i], place->stream);
	all.zeroing[i].failed = result != CUDA_SUCCESS;
	all.zeroing[i].has_ended = false;
	all.zeroing[i].answering->pending++;
}

/* No part of it is to come. A place has one stream: its first part's event stands for the others there. */
void valve_answering_end(struct valve_answering *answering)
{
	uint32_t recorded = 0; /* a bit for each place */

	for (size_t i = 0; all.zeroings && i < VALVE_ZEROINGS; i++) {
		uint32_t place;

		if (!all.zeroing[i].range || all.zeroing[i].answering != answering)
			continue;
		place = 1u << (all.zeroing[i].range->place - valve_place_at(0));
		if (!(recorded & place))
			record(i);
		recorded |= place;
	}
	answering->is_complete = true;
	if (!answering->pending)
		finish(answering);
}
_Static_assert(VALVE_PLACES <= 32, "recorded");

bool valve_zeroings_end(void)
{
	bool moved = false;

	for (size_t i = 0; all.zeroings && i < VALVE_ZEROINGS; i++) {
		struct zeroing *zeroing = &all.zeroing[i];
		CUresult result;

		if (!zeroing->range || zeroing->has_ended)
			continue;
		result = zeroing->failed ? CUDA_ERROR_UNKNOWN
		                         : valve_cu.cuEventQuery(zeroing->range->place->event[i]);
		if (result == CUDA_ERROR_NOT_READY)
			continue;
		zeroing->has_ended = true;
		zeroing->answering->failed |= result != CUDA_SUCCESS;
		zeroing->answering->pending--;
		if (zeroing->answering->is_complete && !zeroing->answering->pending)
			finish(zeroing->answering);
		moved = true;
	}
	return moved;
}

/* ---- its parts ---- */

/* Precondition: one is free. Its end is that of the whole order: no event of its own. */
static void begin(struct valve_answering *answering, struct valve_range *range,
                  const struct valve_kv_order *part, uint32_t done)
{
	size_t i = 0;

	while (all.zeroing[i].range)
		i++;
	all.zeroing[i].range = range;
	all.zeroing[i].answering = answering;
	memcpy(&all.zeroing[i].part, part,
	       offsetof(struct valve_kv_order, entry) + part->count * sizeof(part->entry[0]));
	all.zeroing[i].done = done;
	all.zeroing[i].has_ended = true;
	all.zeroings++;
	add_full(&range->clearing, 1);
}

/*
 * Precondition: the range's lock is held; a place is free where this is BACK. What is backed waits for its order's end even if
 * nothing of it is zeroed, where another part may still fail (`may_fail`). NULL: the range is gone.
 */
void valve_answering_add(struct valve_answering *answering, struct valve_range *range,
                         const struct valve_kv_order *part, struct valve_outcome *out, bool may_fail)
{
	struct valve_outcome *sum = &answering->out;

	for (uint32_t i = 0; i < out->made.count; i++)
		sum->made.at[sum->made.count++] = out->made.at[i];
	out->made.count = 0;
	if (range && (out->zeroing || (may_fail && part->op == VALVE_KV_BACK && out->done)))
		begin(answering, range, part, out->done);
	if (sum->status)
		return;
	sum->done += out->done;
	sum->status = out->status;
	sum->cu_result = out->cu_result;
}

/* In a forked child. */
void valve_zeroings_reset(void)
{
	for (size_t i = 0; i < VALVE_ZEROINGS; i++)
		if (all.zeroing[i].range)
			all.zeroing[i].range = NULL;
	for (size_t i = 0; i <= VALVE_ZEROINGS; i++) {
		if (!all.answering[i].is_used) /* its page may be untouched, and stays so */
			continue;
		valve_fds_close(&all.answering[i].out.made);
		all.answering[i].is_used = false;
	}
	all.zeroings = 0;
}
