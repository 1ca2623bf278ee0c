/*
 * selfgate.c - path C: this process disables and enables its own channels, on its own driver file. Always allowed by
 * the driver, dies with the process. Called by the session (an order, or the lease) and when channels join a stopped
 * process. One buffer for all, under gate_lock.
 *
 * What is believed follows what the driver answered. A channel counts as off (`held`) from before a disable is tried until
 * an enable of it came back well, so no refusal leaves one off that the shim forgot. A pass that missed something is
 * owed: the session makes it again, with backoff, for as long as it is wanted (link/session.c).
 *
 * A list that was refused is issued again in halves, as valved does (valved/native/reach_rm.c says why): one channel that ends
 * just now must not leave the others as they were.
 */
#include <string.h>

#include "ownfd.h"
#include "report.h"

#define RETRY_FIRST_NS 2000000u /* doubled at each failure in a row ... */
#define RETRY_TIMES    7u       /* ... so many times: 256 ms */

enum result { MISSED, SWITCHED, STALE, ENDED };

struct batch {
	int fd;
	uint32_t next; /* object index where the following batch goes on */
	uint32_t h_client, h_subdevice;
	bool skipped; /* a channel that is off may come back from a FREE that fails */
	uint8_t result[NV2080_DISABLE_CHANNELS_MAX];
	uint32_t cid
	        [NV2080_DISABLE_CHANNELS_MAX]; /* a handle may be another channel's by the time that it is answered */
	struct nv2080_fifo_disable_channels list, part;
};

static struct batch batch;

/* Of the last pass. Written under gate_lock; the session looks without it. */
static struct {
	uint32_t failures; /* so many in a row missed something, ... */
	uint64_t retry_ns; /* ... and the next one waits until then */
	bool disable;
} last;

/* An application's own disable is never undone. A second one of ours does no harm, and is what counts if the channel was
 * enabled since by a call that did not come by here. */
static bool is_wanted(const struct rm_object *channel, bool disable, enum valve_gate_set set)
{
	if (channel->kind != RM_CHANNEL || channel->dying || channel->unregistered)
		return false;
	if (!disable && channel->app_disabled)
		return false;
	if (!disable && set == VALVE_GATE_HELD)
		return channel->held; /* whatever it was taken for when it was stopped */
	return rm_is_compute(&valve_rm, channel);
}

/* Collects up to 64 channels of one device, from batch.next on. Returns false when there are none left. */
static bool fill_batch(bool disable, enum valve_gate_set set, const struct rm_object *device)
{
	struct nv2080_fifo_disable_channels *list = &batch.list;

	memset(list, 0, sizeof(*list));
	list->bDisable = disable;
	for (; batch.next < valve_rm.used && list->numChannels < NV2080_DISABLE_CHANNELS_MAX; batch.next++) {
		struct rm_object *channel = &valve_rm.objects[batch.next];

		batch.skipped |= !disable && channel->kind == RM_CHANNEL && channel->dying && channel->held;
		if (!is_wanted(channel, disable, set) || rm_device_of(&valve_rm, channel) != device)
			continue;
		channel->held =
		        1; /* to enable as well: until that came back, a valved that is gone may have it off */
		batch.cid[list->numChannels] = channel->cid;
		list->hClientList[list->numChannels] = channel->h_client;
		list->hChannelList[list->numChannels++] = channel->handle;
	}
	return list->numChannels > 0;
}

static uint32_t control(uint32_t command, void *params, uint32_t bytes)
{
	return valve_rm_control(batch.fd, (struct rm_name){batch.h_client, batch.h_subdevice}, command,
	                        params, bytes);
}

/* Asked in another way the driver knows no such channel either, and it is not the subdevice that it does not know. Before
 * branch 570 it cannot be asked. */
static bool has_ended(uint32_t at)
{
	struct nv2080_fifo_channel_unique_id query = {.numChannels = 1};
	struct nv2080_gpu_gid_info gid = {.flags = RM_GID_BINARY};

	query.hClients[0] = batch.list.hClientList[at];
	query.hChannels[0] = batch.list.hChannelList[at];
	return NV_STATUS_IS_STALE(
	               control(NV2080_CTRL_CMD_FIFO_QUERY_CHANNEL_UNIQUE_ID, &query, sizeof(query))) &&
	       control(NV2080_CTRL_CMD_GPU_GET_GID_INFO, &gid, sizeof(gid)) == NV_OK;
}

/* Switches list[from, from + count) and marks what came of it. The first refusal that is not staleness ends it: it concerns
 * every channel alike. */
static uint32_t issue(uint32_t from, uint32_t count)
{
	uint32_t status;

	memset(&batch.part, 0, sizeof(batch.part));
	batch.part.bDisable = batch.list.bDisable;
	batch.part.numChannels = count;
	memcpy(batch.part.hClientList, batch.list.hClientList + from, count * sizeof(uint32_t));
	memcpy(batch.part.hChannelList, batch.list.hChannelList + from, count * sizeof(uint32_t));
	status = control(NV2080_CTRL_CMD_FIFO_DISABLE_CHANNELS, &batch.part, sizeof(batch.part));
	if (status && count > 1) {
		status = issue(from, count / 2);
		return status ? status : issue(from + count / 2, count - count / 2);
	}
	for (uint32_t i = from; !status && i < from + count; i++)
		batch.result[i] = SWITCHED;
	if (!NV_STATUS_IS_STALE(status))
		return status;
	batch.result[from] = has_ended(from) ? ENDED : STALE;
	return NV_OK;
}

/* Precondition: capture_lock is held. "No such channel" is believed of one that is on its way out here, too (a FREE marks it
 * first), and of one that the driver has no number for. Said of any other it is a refusal. */
static uint32_t conclude(uint32_t status)
{
	for (uint32_t i = 0; i < batch.list.numChannels; i++) {
		struct rm_object *channel =
		        rm_find(&valve_rm, batch.list.hClientList[i], batch.list.hChannelList[i]);

		if (!channel || channel->kind != RM_CHANNEL)
			continue;
		if (batch.result[i] == SWITCHED && !batch.list.bDisable)
			channel->held = 0;
		if (batch.result[i] == ENDED && batch.cid[i] == channel->cid)
			channel->unregistered = 1;
		if (batch.result[i] == STALE && !channel->dying)
			status = status ? status : NV_ERR_OBJECT_NOT_FOUND;
	}
	return status;
}

/* Precondition: capture_lock is held, and given back around the driver calls. */
static uint32_t gate_batch(void)
{
	uint32_t status;

	memset(batch.result, 0, sizeof(batch.result));
	valve_unlock(&valve_shim.capture_lock);
	status = issue(0, batch.list.numChannels);
	valve_lock(&valve_shim.capture_lock);
	return conclude(status);
}

/* Precondition: capture_lock is held, and given back around the driver calls. */
static uint32_t gate_device(uint32_t index, bool disable, enum valve_gate_set set)
{
	uint32_t worst = 0;

	for (batch.next = 0; batch.next < valve_rm.used;) {
		const struct rm_object *device = &valve_rm.objects[index];
		const struct rm_object *subdevice, *client;
		uint32_t status;

		if (device->kind != RM_DEVICE || device->dying)
			return worst;
		subdevice = rm_subdevice_of(&valve_rm, device);
		client = rm_find(&valve_rm, device->h_client, device->h_client);
		if (!fill_batch(disable, set, device))
			break;
		if (!subdevice || !client || client->fd < 0)
			return NV_ERR_INVALID_STATE; /* gone, and its channels are not: they cannot be reached */
		batch.fd = client->fd;
		batch.h_client = device->h_client;
		batch.h_subdevice = subdevice->handle;
		status = gate_batch();
		worst = status ? status : worst;
	}
	return worst;
}

static void remember(bool disable, bool missed)
{
	uint32_t before = disable == last.disable ? last.failures : 0;

	last.disable = disable;
	store_relaxed(&last.retry_ns,
	              now_ns() + ((uint64_t)RETRY_FIRST_NS << (before < RETRY_TIMES ? before : RETRY_TIMES)));
	store_relaxed(&last.failures, missed ? before + 1 : 0);
}

/* Precondition: gate_lock is held. */
static uint32_t gate_all(bool disable, enum valve_gate_set set)
{
	uint32_t worst = 0;

	valve_tls.inside++;
	batch.skipped = false;
	valve_lock(&valve_shim.capture_lock);
	for (uint32_t i = 0; i < valve_rm.used; i++) {
		uint32_t status = valve_rm.objects[i].kind == RM_DEVICE ? gate_device(i, disable, set) : 0;

		worst = status ? status : worst;
	}
	valve_unlock(&valve_shim.capture_lock);
	remember(disable, worst || batch.skipped);
	valve_tls.inside--;
	return worst;
}

uint32_t valve_self_gate(bool disable, enum valve_gate_set set)
{
	uint32_t worst;

	valve_lock(&valve_shim.gate_lock);
	worst = gate_all(disable, set);
	valve_unlock(&valve_shim.gate_lock);
	return worst;
}

/* Channels that came while we are stopped. Looked at under the lock: the stop may be ending on another thread, and what is
 * disabled after its enable would stay off. While the driver refuses, the session's next try takes them in: no
 * call of the application is one more. */
void valve_self_gate_join(void)
{
	const uint64_t one = 1;
	uint32_t worst = 0;

	valve_lock(&valve_shim.gate_lock);
	if (load_relaxed(&valve_shim.self_stopped) &&
	    (!last.disable || !last.failures || now_ns() >= last.retry_ns))
		worst = gate_all(true, VALVE_GATE_ALL);
	valve_unlock(&valve_shim.gate_lock);
	if (worst && syscall(SYS_write, valve_own(VALVE_OWN_ORDER), &one, sizeof(one)) < 0)
		return; /* the session finds it at its next turn */
}

/* From here on valved enables what we had disabled of what it has taken: that stands in its plan. The rest we owe an enable. */
void valve_self_gate_hand_over(void)
{
	bool owes = false;

	valve_lock(&valve_shim.gate_lock);
	store_relaxed(&valve_shim.self_stopped, 0);
	valve_lock(&valve_shim.capture_lock);
	for (uint32_t i = 0; i < valve_rm.used; i++) {
		struct rm_object *channel = &valve_rm.objects[i];

		if (channel->kind == RM_CHANNEL && channel->taken)
			channel->held = 0;
		owes |= channel->kind == RM_CHANNEL && channel->held;
	}
	valve_unlock(&valve_shim.capture_lock);
	remember(false, owes);
	valve_unlock(&valve_shim.gate_lock);
}

uint32_t valve_self_gate_owes(void)
{
	return load_relaxed(&last.failures);
}

uint64_t valve_self_gate_due_ns(void)
{
	return load_relaxed(&last.failures) ? load_relaxed(&last.retry_ns) : UINT64_MAX;
}

/* In a forked child: no channel is its own. */
void valve_self_gate_reset(void)
{
	memset(&last, 0, sizeof(last));
}
