/*
 * plan.c - builds what an edge walks, while nothing is at stake: argument blocks for disable and enable in chunks of
 * 64 (the driver's list size), grouped by the call that reaches them. Caller thread only.
 */
#include "internal.h"

#include <stdlib.h>
#include <string.h>

static const struct reach_ops *const ops_of[] = {
        [VALVE_REACH_OWN] = &reach_own,
        [VALVE_REACH_FD] = &reach_fd,
        [VALVE_REACH_SELF] = &reach_self,
        [VALVE_REACH_HOLD] = &reach_hold,
};

static bool shares_step(const struct valve_entry *a, const struct valve_entry *b)
{
	if (a->reach != b->reach || a->keep_off != b->keep_off)
		return false;
	if ((a->apart || b->apart) && a->client != b->client)
		return false;
	if (a->reach == VALVE_REACH_OWN)
		return true;
	if (a->reach == VALVE_REACH_FD)
		return a->fd == b->fd && a->h_target == b->h_target;
	return a->client == b->client; /* an order: one per process */
}

static void step_open(struct plan_step *step, const struct valve_entry *entry)
{
	step->ops = ops_of[entry->reach];
	step->fd = entry->fd;
	step->h_client = entry->h_target;
	step->h_subdevice = entry->h_subdevice;
	step->keep_off = entry->keep_off;
	step->off.bDisable = 1; /* everything else stays 0: see the field comments in nvrm.h */
}

static void step_add(struct plan_step *step, const struct valve_entry *entry)
{
	uint32_t at = step->off.numChannels;

	step->owner[at] = entry->client;
	step->off.hClientList[at] = step->on.hClientList[at] = entry->h_client;
	step->off.hChannelList[at] = step->on.hChannelList[at] = entry->h_channel;
	step->off.numChannels = at + 1;
	step->on.numChannels = step->keep_off ? 0 : at + 1;
}

static uint32_t count_steps(const struct valve_entry *entries, uint32_t count)
{
	uint32_t steps = 0, in_step = 0;

	for (uint32_t i = 0; i < count; i++) {
		if (i == 0 || in_step == CHUNK || !shares_step(&entries[i - 1], &entries[i])) {
			steps++;
			in_step = 0;
		}
		in_step++;
	}
	return steps;
}

static bool begins_client(const struct valve_entry *entries, uint32_t i)
{
	return entries[i].client && (i == 0 || entries[i].client != entries[i - 1].client);
}

static struct plan *plan_alloc(uint32_t steps, uint32_t clients)
{
	size_t head = sizeof(struct plan) + steps * sizeof(struct plan_step);
	struct plan *plan = calloc(1, head + clients * sizeof(struct valve_client *));

	if (plan)
		plan->client = (struct valve_client **)(void *)((char *)plan + head);
	return plan;
}

/* A plan for the entries (sorted as gate.h says); NULL for none or without memory. */
struct plan *plan_new(struct gpu *gpu, const struct valve_entry *entries, uint32_t count)
{
	uint32_t steps = count_steps(entries, count), clients = 0;
	struct plan *plan;
	struct plan_step *step;

	if (steps == 0)
		return NULL;
	for (uint32_t i = 0; i < count; i++)
		clients += begins_client(entries, i);
	plan = plan_alloc(steps, clients);
	if (!plan)
		return NULL;
	step = plan->step;
	step_open(step, &entries[0]);
	for (uint32_t i = 0; i < count; i++) {
		if (i > 0 && (step->off.numChannels == CHUNK || !shares_step(&entries[i - 1], &entries[i])))
			step_open(++step, &entries[i]);
		step_add(step, &entries[i]);
		if (begins_client(entries, i)) {
			plan->client[plan->clients++] = entries[i].client;
			entries[i].client->refs++;
		}
	}
	plan->steps = steps;
	gpu->gate->generation++;
	for (uint32_t i = 0; i < steps; i++)
		plan->step[i].plan = gpu->gate->generation;
	return plan;
}

void plan_free(struct plan *plan)
{
	for (uint32_t i = 0; plan && i < plan->clients; i++) {
		plan->client[i]->refs--;
		client_reap(plan->client[i]);
	}
	free(plan);
}

/* `from`: where to look first, and where it was found. All plans of a GPU name clients in one order, so one after the
 * other is found at once. */
bool plan_names(const struct plan *plan, const struct valve_client *client, uint32_t *from)
{
	for (uint32_t i = 0; plan && i < plan->clients; i++) {
		uint32_t at = (*from + i) % plan->clients;

		if (plan->client[at] == client) {
			*from = at;
			return true;
		}
	}
	return false;
}

bool plan_has(const struct plan *plan, uint32_t h_client, uint32_t h_channel)
{
	for (uint32_t i = 0; plan && i < plan->steps; i++) {
		const struct nv2080_fifo_disable_channels *list = &plan->step[i].off;

		for (uint32_t k = 0; k < list->numChannels; k++)
			if (list->hClientList[k] == h_client && list->hChannelList[k] == h_channel)
				return true;
	}
	return false;
}

static void close_up(uint32_t *list, uint32_t at, uint32_t last)
{
	memmove(list + at, list + at + 1, (last - at) * sizeof *list);
}

/* The others stay in their order, client by client. */
void plan_drop(struct plan_step *step, uint32_t at)
{
	uint32_t last = step->off.numChannels - 1;

	store_relaxed(&step->off.numChannels, last); /* the watchdog may count them */
	step->on.numChannels = step->keep_off ? 0 : last;
	close_up(step->off.hClientList, at, last);
	close_up(step->off.hChannelList, at, last);
	close_up(step->on.hClientList, at, last);
	close_up(step->on.hChannelList, at, last);
	memmove(step->owner + at, step->owner + at + 1, (last - at) * sizeof *step->owner);
}

/* The driver says that this channel has ended. The caller is told, so that no later plan names it. */
void plan_lose(struct gpu *gpu, struct plan_step *step, uint32_t at)
{
	uint32_t head = load_relaxed(&gpu->gone_head); /* no other thread writes it */

	if (head - load_acquire(&gpu->gone_tail) < GONE) {
		gpu->gone[head % GONE] =
		        (struct valve_gone){.client = step->owner[at] ? step->owner[at]->id : 0,
		                            .h_client = step->off.hClientList[at],
		                            .h_channel = step->off.hChannelList[at],
		                            .plan = step->plan};
		store_release(&gpu->gone_head, head + 1); /* pairs with the acquire in valve_gpu_gone */
	}
	plan_drop(step, at);
}

uint32_t valve_gpu_gone(struct valve_gate *gate, uint32_t index, struct valve_gone *out, uint32_t max)
{
	struct gpu *gpu = &gate->gpu[index];
	uint32_t tail = gpu->gone_tail, count = 0;

	while (count < max && tail != load_acquire(&gpu->gone_head))
		out[count++] = gpu->gone[tail++ % GONE];
	store_release(&gpu->gone_tail, tail); /* pairs with the acquire in plan_lose: those cells are free */
	return count;
}

uint32_t valve_gate_plans(struct valve_gate *gate)
{
	return gate->generation;
}

uint32_t plan_channels(const struct plan *plan)
{
	uint32_t channels = 0;

	for (uint32_t i = 0; plan && i < plan->steps; i++)
		channels += load_relaxed(&plan->step[i].off.numChannels);
	return channels;
}
