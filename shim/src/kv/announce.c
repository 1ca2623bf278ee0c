/*
 * announce.c - what valved is told of ranges outside orders: that they exist, what is mapped there (a new valved), what is
 * pinned, and that they are gone. On the memory thread, but for the first announcement of a range (alloc.c).
 */
#include "memory.h"

#include <errno.h>
#include <string.h>

#define ANSWER_MS 5000
#define STEP_NS \
	20000000u /* between two questions to a valved that does not answer, and two looks for descriptors */

static uint32_t waiting;  /* threads that wait for a valved before a step */
static uint32_t heeded;   /* ranges up to this id: valved has said that a step meets no hole unawares */
static uint32_t asked;    /* generation of the link by which a step was last asked about, 0: none */
static uint64_t again_ns; /* the memory thread's: when it looks for descriptors again */
static uint32_t telling;  /* a valved is being told: what is marked as told may be unsent */

static bool is_linked(void)
{
	return load_acquire(&valve_shim.state) == VALVE_STATE_LINKED &&
	       (valve_shim.daemon_features & VALVE_FEATURE_MEMORY);
}

/* Something a new valved does not know: the id of a range, or 0. */
static uint32_t due(void)
{
	return is_linked() ? valve_range_untold(load_acquire(&valve_shim.link_generation)) : 0;
}

/* The launches of a step that was told EAGAIN may be under way, and a new valved has not heard of it. */
static bool owes_question(void)
{
	uint32_t by = load_acquire(&asked);

	return by && is_linked() && (valve_shim.daemon_features & VALVE_FEATURE_KV_STEP) &&
	       by != load_acquire(&valve_shim.link_generation) &&
	       valve_range_newest_elastic() > load_relaxed(&heeded);
}

bool valve_announce_due(void)
{
	return due() || owes_question();
}

/* A new valved does not know yet what launches that are held for its predecessor would compute with. */
bool valve_announce_is_behind(void)
{
	return valve_announce_due() || load_acquire(&telling);
}

/* 0: heeded. EAGAIN: valved holds our launches from here on. */
static int ask(uint32_t newest)
{
	struct valve_link_kv_step step = {.range = newest};
	int err = valve_link_request_fds(&step, sizeof(step), VALVE_LINK_KV_STEP, NULL, 0, ANSWER_MS, NULL);

	if (!err)
		store_relaxed(&heeded, newest);
	return err;
}

void valve_announce_describe(const struct valve_range *range, uint32_t held,
                             struct valve_link_kv_range *message)
{
	*message = (struct valve_link_kv_range){
	        .range = range->id,
	        .base = range->base,
	        .handle_bytes = range->handle_bytes,
	        .slots = range->slots,
	        .flags = range->flags | (range->id <= load_relaxed(&heeded) ? VALVE_KV_HEEDED : 0),
	        .held = held};
	memcpy(message->gpu_uuid, &range->place->uuid, sizeof(message->gpu_uuid));
}

/*
 * A step over an elastic range whose holes no hook heeds would compute with the zero page. Asked before a step until
 * valved says that a hook reads the table, or that no hole is left; until then it holds our launches. While there is no
 * valved no process can say so: an offline process with a hole waits for one (link/orphan.c). valved before 0.2 does not know
 * the question.
 */
void valve_announce_step(void)
{
	uint32_t newest = valve_range_newest_elastic();
	bool is_counted = false;

	if (newest <= load_relaxed(&heeded) || load_relaxed(&valve_shim.role) != VALVE_ROLE_OFFLINE)
		return;
	for (;;) {
		uint32_t generation = load_acquire(&valve_shim.link_generation);
		int err = -ENOTCONN;

		if (is_linked() && !valve_announce_due()) { /* a new valved hears of the past first */
			if (!(valve_shim.daemon_features & VALVE_FEATURE_KV_STEP))
				break;
			store_release(&asked, generation); /* before the answer: the link may go with it */
			err = ask(newest);
		}
		if (!err || err == -EAGAIN) /* EAGAIN: what is launched now waits until valved lets it */
			break;
		if (!is_linked() && valve_orders_left_no_hole())
			break; /* no process can take any of it */
		if (!is_counted)
			add_full(&waiting, 1);
		is_counted = true;
		valve_say(
		        "waiting for valved before an engine step: no hook reads the table of the KV memory");
		sleep_ns(STEP_NS);
	}
	if (is_counted)
		add_full(&waiting, (uint32_t)-1);
}

bool valve_announce_is_waiting(void)
{
	return load_relaxed(&waiting) > 0;
}

void valve_announce_reset(void)
{
	store_relaxed(&heeded, 0);
	store_relaxed(&waiting, 0);
	store_relaxed(&asked, 0);
	store_relaxed(&telling, 0);
	again_ns = 0;
}

/* Backed slots from *next on, with a descriptor each; fewer, or none, where the process has no room for more. */
static void gather(const struct valve_range *range, uint32_t *next, struct valve_link_kv_entries *held,
                   struct valve_fds *fds)
{
	for (; *next < range->slots && held->count < VALVE_KV_ENTRIES; ++*next) {
		if (range->slot[*next] != SLOT_BACKED)
			continue;
		fds->at[fds->count] = valve_vmm_export(range, *next);
		if (fds->at[fds->count] < 0)
			return;
		fds->count++;
		held->entry[held->count++] =
		        (struct valve_kv_entry){.handle = range->handle[*next], .slot = *next};
	}
}

/* The slots from `next` on. Where there is no descriptor for the first one it is tried again (valve_announce_rest). */
static void tell_held(uint32_t id, uint32_t generation, uint32_t next)
{
	struct valve_range *range;

	while ((range = valve_range_hold(id))) {
		struct valve_link_kv_entries held = {.range = id, .op = VALVE_KV_BACK};
		struct valve_fds fds = {.count = 0};
		bool is_here = !valve_place_enter(range->place, NULL);

		gather(range, &next, &held, &fds);
		range->untold_from = is_here && next < range->slots ? next + 1 : 0;
		valve_unlock(&range->lock);
		if (held.count && generation == load_acquire(&valve_shim.link_generation))
			valve_link_request_fds(&held, sizeof(held), VALVE_LINK_KV_HELD, fds.at, fds.count,
			                       ANSWER_MS, NULL);
		valve_fds_close(&fds);
		if (!held.count || generation != load_acquire(&valve_shim.link_generation))
			return;
	}
}

/* What there was no descriptor for. True: there is more, and the thread comes again. */
bool valve_announce_rest(void)
{
	uint32_t generation = load_acquire(&valve_shim.link_generation);
	struct valve_range *range;
	bool is_left = false;

	if (now_ns() < again_ns)
		return true;
	for (uint32_t i = 0; is_linked() && (range = valve_range_at(i)); i++) {
		if (load_acquire(&range->state) != RANGE_LIVE || !range->untold_from ||
		    load_relaxed(&range->generation) != generation)
			continue;
		tell_held(range->id, generation, range->untold_from - 1);
		is_left |= range->untold_from != 0;
	}
	again_ns = is_left ? now_ns() + STEP_NS : 0;
	return is_left;
}

void valve_announce_pin(const struct valve_range *range, uint64_t offset, uint64_t bytes)
{
	struct valve_link_kv_span span = {.range = range->id, .offset = offset, .bytes = bytes};

	valve_link_send(&span, sizeof(span), VALVE_LINK_KV_PIN, -1);
}

/*
 * Before a device learns of the memory's address. Where valved takes memory from outside, a word that crosses with it would
 * come too late, so it is waited for; a span that is not all ours any more stays here.
 */
bool valve_announce_may_leave(const struct valve_range *range, uint64_t offset, uint64_t bytes)
{
	struct valve_link_kv_span span = {.range = range->id, .offset = offset, .bytes = bytes};
	uint64_t last = (offset + bytes - 1) / range->handle_bytes;
	int err;

	for (uint64_t i = offset / range->handle_bytes; i <= last && i < range->slots; i++)
		if (range->slot[i] == SLOT_SPARSE)
			return false;
	if (!valve_scratch_is_wanted())
		return true;
	err = valve_link_request_fds(&span, sizeof(span), VALVE_LINK_KV_PIN, NULL, 0, ANSWER_MS, NULL);
	return !err || err == -ENOTCONN || err == -EPIPE; /* no valved: it cannot take anything either */
}

static void tell_pins(const struct valve_range *range)
{
	for (uint32_t first = 0, count; first < range->slots; first += count ? count : 1) {
		for (count = 0; first + count < range->slots && range->pinned[first + count];)
			count++;
		if (count)
			valve_announce_pin(range, first * range->handle_bytes, count * range->handle_bytes);
	}
}

static void announce(uint32_t id)
{
	uint32_t generation = load_acquire(&valve_shim.link_generation);
	struct valve_range *range = valve_range_hold(id);
	struct valve_link_kv_range message;

	if (!range)
		return;
	valve_range_told(range, generation);
	range->stays |= valve_scratch_is_wanted();
	valve_announce_describe(range, valve_range_backed(range), &message);
	valve_unlock(&range->lock);
	if (valve_orders_send(&message, sizeof(message), VALVE_LINK_KV_RANGE, NULL, generation))
		return;
	if (message.held)
		tell_held(id, generation, 0);
	range = valve_range_hold(id);
	if (!range)
		return;
	tell_pins(range);
	if (memchr(range->slot, SLOT_SPARSE, range->slots))
		valve_orders_settle();
	valve_unlock(&range->lock);
}

/* The question of a step that its predecessor held, once more: then this valved holds what was launched. */
static void ask_again(void)
{
	uint32_t generation = load_acquire(&valve_shim.link_generation);
	int err = ask(valve_range_newest_elastic());

	if (!err || err == -EAGAIN)
		store_release(&asked, generation);
	else
		sleep_ns(STEP_NS);
}

void valve_announce_ranges(void)
{
	uint32_t id;

	store_release(&telling, 1);
	while ((id = due()))
		announce(id);
	if (owes_question())
		ask_again();
	store_release(&telling, 0);
}

/* A range that is unmapped: its entry is free once valved was told, or is gone. */
bool valve_announce_end(struct valve_range *range)
{
	struct valve_link_kv_span span = {.range = range->id};

	if (valve_link_send_fds(&span, sizeof(span), VALVE_LINK_KV_RANGE_DEL, NULL, 0, range->generation) ==
	    -EAGAIN)
		return false;
	valve_range_drop(range);
	return true;
}

bool valve_announce_ends(void)
{
	struct valve_range *range;
	bool due = false;

	for (uint32_t i = 0; (range = valve_range_at(i)); i++)
		if (load_acquire(&range->state) == RANGE_UNTOLD)
			due |= !valve_announce_end(range);
	return due;
}
