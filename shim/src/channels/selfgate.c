/*
 * selfgate.c - path C: this process disables and enables its own channels, on its own driver file. Always allowed by
 * the driver, dies with the process. Called by the session (an order, or the lease) and when channels join a stopped
 * process. One buffer for all, under gate_lock.
 */
#include <errno.h>
#include <string.h>

#include "report.h"

#define INTERRUPTED_TRIES 16

struct batch {
	int fd;
	uint32_t next; /* object index where the following batch goes on */
	struct nvos54_control control;
	struct nv2080_fifo_disable_channels list;
};

static struct batch batch;

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
static bool fill_batch(bool disable, enum valve_gate_set set, const struct rm_object *device,
                       const struct rm_object *subdevice)
{
	struct nv2080_fifo_disable_channels *list = &batch.list;

	memset(list, 0, sizeof(*list));
	list->bDisable = disable;
	for (; batch.next < valve_rm.used && list->numChannels < NV2080_DISABLE_CHANNELS_MAX; batch.next++) {
		struct rm_object *channel = &valve_rm.objects[batch.next];

		if (!is_wanted(channel, disable, set) || rm_device_of(&valve_rm, channel) != device)
			continue;
		channel->held = disable;
		list->hClientList[list->numChannels] = channel->h_client;
		list->hChannelList[list->numChannels++] = channel->handle;
	}
	batch.control = (struct nvos54_control){.hClient = device->h_client,
	                                        .hObject = subdevice->handle,
	                                        .cmd = NV2080_CTRL_CMD_FIFO_DISABLE_CHANNELS,
	                                        .params = (uintptr_t)list,
	                                        .paramsSize = sizeof(*list)};
	return list->numChannels > 0;
}

/* The kernel takes its power lock interruptibly, before it does anything: EINTR means "not tried". */
static uint32_t issue(void)
{
	for (int tries = 0; tries < INTERRUPTED_TRIES; tries++) {
		if (valve_real_ioctl(batch.fd, NV_IOWR(NV_ESC_RM_CONTROL, sizeof(batch.control)),
		                     &batch.control) == 0)
			return batch.control.status;
		if (errno != EINTR)
			break;
	}
	return NV_ERR_INVALID_STATE;
}

/* Precondition: capture_lock is held, and given back around the driver call. */
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
		if (!subdevice || !client || client->fd < 0)
			return worst; /* no channel of ours runs on a device that was never taken up */
		if (!fill_batch(disable, set, device, subdevice))
			break;
		batch.fd = client->fd;
		valve_unlock(&valve_shim.capture_lock);
		status = issue();
		valve_lock(&valve_shim.capture_lock);
		worst = status ? status : worst;
	}
	return worst;
}

uint32_t valve_self_gate(bool disable, enum valve_gate_set set)
{
	uint32_t worst = 0;

	valve_tls.inside++;
	valve_lock(&valve_shim.gate_lock);
	valve_lock(&valve_shim.capture_lock);
	for (uint32_t i = 0; i < valve_rm.used; i++) {
		uint32_t status = valve_rm.objects[i].kind == RM_DEVICE ? gate_device(i, disable, set) : 0;

		worst = status ? status : worst;
	}
	valve_unlock(&valve_shim.capture_lock);
	valve_unlock(&valve_shim.gate_lock);
	valve_tls.inside--;
	return worst;
}
