/*
 * fifo.c - the commands that decide what a channel may do. The one that Valve is built on is
 * NV2080_CTRL_CMD_FIFO_DISABLE_CHANNELS: a list of (hClient, hChannel) pairs of one GPU, of any
 * client. The driver keeps no record of which client disabled what. Only a second call or
 * SCHEDULE(bEnable = 1) enables again.
 */
#include "server.h"
#include <string.h>

struct gate {
	struct control *k;
	struct nv2080_fifo_disable_channels *p;
	struct channel *list[NV2080_DISABLE_CHANNELS_MAX];
	uint32_t n;
	struct fault_hit fault;
	struct gate_entry entry;
};

static uint32_t resolve_pair(struct gate *g, uint32_t i)
{
	struct control *k = g->k;
	struct client *owner = find_client(g->p->hClientList[i]);
	struct object *o = find_object(g->p->hClientList[i], g->p->hChannelList[i]);

	REFUSE_IF(!owner, NV_ERR_INVALID_CLIENT);
	REFUSE_IF(!o, NV_ERR_OBJECT_NOT_FOUND);
	REFUSE_IF(!o->channel || o->gpu != k->object->gpu, NV_ERR_INVALID_CHANNEL);
	if (!file_may_use(k->call->file, owner)) {
		if (knob(K_gsp_foreign) == FOREIGN_DENY)
			return (uint32_t)knob(K_gsp_status);
		if (knob(K_gsp_foreign) == FOREIGN_SILENT)
			return NV_OK;
	}
	g->list[g->n++] = o->channel;
	return NV_OK;
}

static uint32_t resolve(struct gate *g)
{
	uint32_t status = NV_OK;

	for (uint32_t i = 0; i < g->p->numChannels && status == NV_OK; i++)
		status = resolve_pair(g, i);
	if (status && knob(K_partial) == PARTIAL_NONE)
		g->n = 0;
	return status;
}

/* What the firmware takes beyond the round trip, all locks held. It is counted from the start of the call, so that a sleep
 * that ran over is not paid twice. */
static void take_time(const struct control *k, int64_t knob_ns)
{
	uint64_t more_ns = (uint64_t)(knob_ns + knob(K_runlist_us));

	charge_ns(model_to_real_ns(more_ns));
	sleep_until(k->locked_ns + model_to_real_ns(k->model_ns + more_ns));
}

/* Ends the preemption: every listed channel has stopped, and the time to save a context has passed. */
static uint32_t finish_disable(struct gate *g)
{
	bool stopped;

	if (g->p->bOnlyDisableScheduling || g->fault.late_ns)
		return NV_OK;
	stopped = channels_wait_stopped(g->list, g->n);
	g->entry.stopped_ns = now_ns();
	take_time(g->k, knob(K_preempt_us));
	return stopped ? NV_OK : NV_ERR_TIMEOUT;
}

/* With the fault "late" the call returns while the channels still run; the runlist stops them so
 * much later. */
static void apply(struct gate *g)
{
	bool off = g->p->bDisable, revoke = off && !g->p->bOnlyDisableScheduling && !g->fault.late_ns;

	for (uint32_t i = 0; i < g->n; i++) {
		if (off && g->fault.late_ns)
			g->list[i]->tsg->hold_until_ns = now_ns() + g->fault.late_ns;
		channel_set(g->list[i], g->list[i]->scheduled, off, revoke);
	}
	runlist_poke(g->k->object->gpu);
}

static uint32_t run_gate(struct gate *g)
{
	uint32_t status, revoked_status = NV_OK;

	if (!g->p->bDisable && !g->fault.silent)
		take_time(g->k, knob(K_enable_us));
	state_lock();
	status = resolve(g);
	if (!g->fault.silent)
		apply(g);
	state_unlock();
	g->entry.channels = g->n;
	if (g->p->bDisable && !g->fault.silent)
		revoked_status = finish_disable(g);
	return status ? status : revoked_status;
}

uint32_t fifo_disable_channels(struct control *k)
{
	struct gate g = {.k = k, .p = k->params};
	uint32_t status;

	g.entry = (struct gate_entry){.entry_ns = k->call->entry_ns,
	                              .locked_ns = k->locked_ns,
	                              .gpu = k->object->gpu->index,
	                              .on = !g.p->bDisable,
	                              .client = k->client->handle,
	                              .pid = k->call->pid};
	/* Routed to the firmware, the body of the driver is skipped and its check of the event with
	 * it. */
	REFUSE_IF(g.p->pRunlistPreemptEvent && knob(K_lock) != LOCK_ROUTE_TO_PHYSICAL,
	          NV_ERR_INSUFFICIENT_PERMISSIONS);
	if (!knob(K_gsp)) /* the open driver knows it only as a call to the firmware */
		return NV_ERR_NOT_SUPPORTED;
	REFUSE_IF(g.p->numChannels > NV2080_DISABLE_CHANNELS_MAX, NV_ERR_INVALID_ARGUMENT);
	g.fault = fault_at(g.p->bDisable ? "disable" : "enable", k->call, k->object->gpu);
	status = g.fault.has_status ? g.fault.status : run_gate(&g);
	g.entry.status = status;
	g.entry.done_ns = now_ns();
	journal_gate(&g.entry);
	return status;
}

uint32_t fifo_channel_ids(struct control *k)
{
	struct nv2080_fifo_channel_unique_id *p = k->params;

	REFUSE_IF(p->numChannels == 0 || p->numChannels > 128, NV_ERR_INVALID_ARGUMENT);
	LOCKED(&S.state);
	for (uint32_t i = 0; i < p->numChannels; i++) {
		struct object *o = find_object(p->hClients[i], p->hChannels[i]);

		REFUSE_IF(!find_client(p->hClients[i]), NV_ERR_INVALID_CLIENT);
		REFUSE_IF(!o || !o->channel, NV_ERR_OBJECT_NOT_FOUND);
		p->channelUniqueIDs[i] = o->channel->cid;
	}
	return NV_OK;
}

uint32_t fifo_group_info(struct control *k)
{
	struct nv2080_channel_group_info *p = k->params;
	struct channel *ch;
	struct object *o;
	struct tsg *t;

	LOCKED(&S.state);
	o = find_object(p->hClient, p->hChannelOrTsg);
	t = o ? (o->channel ? o->channel->tsg : o->tsg) : NULL;
	p->numChannels = 0;
	if (t) {
		p->tsgId = t->id;
		TAILQ_FOREACH(ch, &t->channels, link)
			if (p->numChannels < 128)
				p->channelUniqueID[p->numChannels++] = ch->cid;
	}
	return t ? NV_OK : NV_ERR_OBJECT_NOT_FOUND;
}

/* bEnable = 0 disables and takes off the runlist; 1 puts on it and, unless told to skip that,
 * enables. */
static uint32_t schedule(const struct control *k, struct channel **list, uint32_t n)
{
	const struct nva06c_gpfifo_schedule *p = k->params;
	bool can_skip = k->size > 2;
	bool enables = p->bEnable && !(can_skip && p->bSkipEnable) && knob(K_schedule_enables);
	struct channel *ch;

	take_time(k, 0);
	state_lock();
	for (uint32_t i = 0; i < n; i++) {
		ch = list[i];
		channel_set(ch, p->bEnable, p->bEnable ? (enables ? false : ch->disabled) : true,
		            !p->bEnable);
	}
	if (n)
		runlist_poke(list[0]->tsg->gpu);
	state_unlock();
	return p->bEnable || channels_wait_stopped(list, n) ? NV_OK : NV_ERR_TIMEOUT;
}

enum { TSG_CHANNELS_MAX = 256 };

static uint32_t channels_of(const struct tsg *t, struct channel **list)
{
	struct channel *ch;
	uint32_t n = 0;

	LOCKED(&S.state);
	TAILQ_FOREACH(ch, &t->channels, link)
		if (n < TSG_CHANNELS_MAX)
			list[n++] = ch;
	return n;
}

uint32_t tsg_schedule(struct control *k)
{
	struct channel *list[TSG_CHANNELS_MAX];
	struct fault_hit fault = fault_at("schedule", k->call, k->object->gpu);

	if (fault.has_status)
		return fault.status;
	return schedule(k, list, channels_of(k->object->tsg, list));
}

uint32_t channel_schedule(struct control *k)
{
	return schedule(k, &k->object->channel, 1);
}

uint32_t tsg_bind(struct control *k)
{
	const struct nva06c_bind *p = k->params;
	struct channel *ch;

	LOCKED(&S.state);
	k->object->tsg->engine = p->engineType;
	TAILQ_FOREACH(ch, &k->object->tsg->channels, link)
		store(&ch->slot->engine, p->engineType);
	return NV_OK;
}

uint32_t tsg_set_timeslice(struct control *k)
{
	const struct nva06c_timeslice *p = k->params;

	REFUSE_IF(!p->timesliceUs, NV_ERR_INVALID_ARGUMENT);
	take_time(k, 0);
	LOCKED(&S.state);
	k->object->tsg->slice_us = p->timesliceUs;
	k->object->tsg->once_off = true; /* the group is forced off to apply it */
	runlist_poke(k->object->gpu);
	return NV_OK;
}

uint32_t tsg_get_timeslice(struct control *k)
{
	struct nva06c_timeslice *p = k->params;

	LOCKED(&S.state);
	p->timesliceUs =
	        k->object->tsg->slice_us ? k->object->tsg->slice_us : (uint64_t)knob(K_slice_us) / 1000u;
	return NV_OK;
}

uint32_t tsg_preempt(struct control *k)
{
	const struct nva06c_preempt *p = k->params;

	REFUSE_IF(p->bManualTimeout && p->timeoutUs > 1000000u, NV_ERR_INVALID_ARGUMENT);
	state_lock();
	k->object->tsg->once_off = true;
	runlist_poke(k->object->gpu);
	state_unlock();
	model_sleep_ns((uint64_t)knob(K_preempt_us));
	return NV_OK;
}

/* One way: only a new SCHEDULE brings the channel back. */
uint32_t channel_stop(struct control *k)
{
	struct channel *ch = k->object->channel;

	state_lock();
	channel_set(ch, false, ch->disabled, true);
	runlist_poke(ch->tsg->gpu);
	state_unlock();
	return channels_wait_stopped(&ch, 1) ? NV_OK : NV_ERR_TIMEOUT;
}

uint32_t work_submit_token(struct control *k)
{
	uint32_t token = k->object->channel->cid;

	memcpy(k->params, &token, sizeof token);
	return NV_OK;
}
