/*
 * parts.c - an order as it waits in the queue, and what is carried out of it at a time: neighbouring runs of one range.
 * Both forms of a packet, KV_ORDER and KV_RUNS, wait in the same one. Knows nothing of threads and of the driver.
 */
#include "memory.h"

#include <errno.h>
#include <string.h>

/* Takes the descriptors over. */
static void begin(struct valve_queued *order, uint16_t op, uint16_t how, struct valve_fds *fds)
{
	memset(order, 0, offsetof(struct valve_queued, run));
	order->op = op;
	order->how = how;
	order->refused = fds->cut ? EMFILE : 0;
	order->fds = *fds;
	fds->count = 0;
}

void valve_queued_order(struct valve_queued *order, const struct valve_link_kv_entries *packet,
                        struct valve_fds *fds)
{
	begin(order, packet->op, packet->how, fds);
	order->number = packet->order;
	order->range = packet->range;
	order->runs = packet->count;
	order->is_single = true;
	for (uint32_t i = 0; i < packet->count; i++)
		order->run[i] = (struct valve_kv_run){.handle = packet->entry[i].handle,
		                                      .range = packet->range,
		                                      .slot = packet->entry[i].slot,
		                                      .count = 1,
		                                      .flags = packet->entry[i].flags};
}
_Static_assert(VALVE_KV_ENTRIES <= VALVE_KV_RUNS, "an order of entries is one of runs");

void valve_queued_runs(struct valve_queued *order, const struct valve_link_kv_runs *packet,
                       struct valve_fds *fds)
{
	begin(order, packet->op, packet->how, fds);
	order->number = packet->order;
	order->runs = packet->count;
	order->is_single = packet->count > 0;
	memcpy(order->run, packet->run, packet->count * sizeof(packet->run[0]));
	for (uint32_t i = 1; i < packet->count; i++)
		order->is_single &= packet->run[i].range == packet->run[0].range;
}

/* As many of the run's slots as there is room for. */
static void add(struct valve_queued *order, struct valve_kv_order *part)
{
	struct valve_cursor *next = &order->next;
	const struct valve_kv_run *run = &order->run[next->run];

	for (; next->slot < run->count && part->count < VALVE_KV_ENTRIES; next->slot++) {
		part->entry[part->count++] = (struct valve_kv_entry){.handle = run->handle + next->slot,
		                                                     .slot = run->slot + next->slot,
		                                                     .flags = run->flags};
		if (order->op == VALVE_KV_BACK && !(run->flags & VALVE_KV_CREATE) && !order->refused)
			part->fds.at[part->fds.count++] = order->fds.at[next->fd++];
	}
	if (next->slot == run->count) {
		next->slot = 0;
		next->run++;
	}
}

/* The next part; an order without slots has one. Its descriptors stay the order's. false: there is none any more. */
bool valve_queued_next(struct valve_queued *order, struct valve_kv_order *part)
{
	if (order->next.run >= order->runs && order->next.has_begun)
		return false;
	part->number = order->number;
	part->generation = order->generation;
	part->op = order->op;
	part->how = order->how;
	part->refused = order->refused;
	part->range = order->runs ? order->run[order->next.run].range : order->range;
	part->count = part->fds.count = 0;
	while (order->next.run < order->runs && order->run[order->next.run].range == part->range &&
	       part->count < VALVE_KV_ENTRIES)
		add(order, part);
	order->next.has_begun = true;
	return true;
}
