/*
 * rmcontrol.c - what controls, dups and UVM calls tell about objects that are already in the map.
 */
#include <string.h>

#include "rmmap.h"

/* A group, VA space or share may live on in a second client under a second handle (MPS, IPC). Channels cannot. */
void rm_after_dup(struct rm_map *map, const struct rm_call *call)
{
	struct nvos55_dup body;
	struct rm_object *source, *copy;

	if (!rm_fetch_argument(map, call, &body, sizeof(body)) || body.status != NV_OK)
		return;
	source = rm_find(map, body.hClientSrc, body.hObjectSrc);
	if (!source || (source->kind != RM_GROUP && source->kind != RM_SPACE && source->kind != RM_SHARE))
		return;
	copy = rm_insert(map, (enum rm_kind)source->kind, body.hClient, body.hParent, body.hObject);
	source = rm_find(map, body.hClientSrc, body.hObjectSrc);
	if (!copy || !source || copy == source)
		return;
	copy->engine = source->engine;
	copy->scheduled = source->scheduled;
}

static void after_app_gate(struct rm_map *map, const struct nvos54_control *control)
{
	struct nv2080_fifo_disable_channels params;

	if (!rm_fetch(map, &params, control->params, sizeof(params)) ||
	    params.numChannels > NV2080_DISABLE_CHANNELS_MAX) {
		map->incomplete = 1;
		return;
	}
	for (uint32_t i = 0; i < params.numChannels; i++) {
		struct rm_object *channel = rm_find(map, params.hClientList[i], params.hChannelList[i]);

		if (!channel || channel->kind != RM_CHANNEL ||
		    channel->app_disabled == (params.bDisable != 0))
			continue;
		channel->app_disabled = params.bDisable != 0;
		channel->note_due = 1;
	}
}

static void take_mark(struct rm_object *channel)
{
	if (!channel->app_disabled)
		return;
	channel->app_disabled = 0;
	channel->note_due = 1;
}

/* GPFIFO_SCHEDULE(1) enables, too, unless it is told to skip that: what the application had disabled before runs again, and
 * is gated again. */
static void after_schedule(struct rm_map *map, const struct nvos54_control *control)
{
	const struct rm_object *started = rm_find(map, control->hClient, control->hObject);
	struct nva06c_gpfifo_schedule params = {0};
	size_t bytes = control->paramsSize < sizeof(params) ? 1 : sizeof(params); /* 2 up to branch 570 */

	if (!started || !rm_fetch(map, &params, control->params, bytes) || !params.bEnable ||
	    params.bSkipEnable)
		return;
	for (uint32_t i = 0; i < map->used; i++) {
		struct rm_object *channel = &map->objects[i];

		if (channel->kind == RM_CHANNEL && channel->h_client == control->hClient &&
		    (channel == started || channel->parent == started->handle))
			take_mark(channel);
	}
}

/* A group may learn its engine only here (seen with some drivers). Channels that were told of before are told again. */
static void after_bind(struct rm_map *map, const struct nvos54_control *control)
{
	struct rm_object *bound = rm_find(map, control->hClient, control->hObject);
	struct nva06c_bind params;

	if (!bound || (bound->kind != RM_GROUP && bound->kind != RM_CHANNEL) ||
	    !rm_fetch(map, &params, control->params, sizeof(params)) || bound->engine == params.engineType)
		return;
	bound->engine = params.engineType;
	for (uint32_t i = 0; i < map->used; i++) {
		struct rm_object *channel = &map->objects[i];

		if (channel->kind == RM_CHANNEL && channel->h_client == control->hClient &&
		    (channel == bound || channel->parent == bound->handle))
			channel->reported = 0;
	}
}

static void learn_uuid(struct rm_map *map, struct rm_object *device, const uint8_t *uuid)
{
	if (!device || (device->has_uuid && !memcmp(device->uuid, uuid, sizeof(device->uuid))))
		return;
	memcpy(device->uuid, uuid, sizeof(device->uuid));
	device->has_uuid = 1;
	device->reported = 0;
	for (uint32_t i = 0; i < map->used; i++)
		if (map->objects[i].kind == RM_CHANNEL && rm_device_of(map, &map->objects[i]) == device)
			map->objects[i].reported = 0;
}

static void after_gid(struct rm_map *map, const struct nvos54_control *control)
{
	struct rm_object *subdevice = rm_find(map, control->hClient, control->hObject);
	struct nv2080_gpu_gid_info info;

	if (!subdevice || !rm_fetch(map, &info, control->params, sizeof(info)) ||
	    info.flags != RM_GID_BINARY || info.length != 16)
		return; /* other forms: text, or a longer hash */
	learn_uuid(map, rm_device_of(map, subdevice), info.data);
}

void rm_after_control(struct rm_map *map, const struct rm_call *call)
{
	struct nvos54_control control;

	if (!rm_fetch_argument(map, call, &control, sizeof(control)) || control.status != NV_OK)
		return;
	switch (control.cmd) {
	case NV2080_CTRL_CMD_FIFO_DISABLE_CHANNELS:
	case NVA06C_CTRL_CMD_BIND:
	case NVA06F_CTRL_CMD_BIND:
		if (control.flags & NVOS54_FLAGS_FINN_SERIALIZED)
			map->incomplete = 1;
		else if (control.cmd == NV2080_CTRL_CMD_FIFO_DISABLE_CHANNELS)
			after_app_gate(map, &control);
		else
			after_bind(map, &control);
		return;
	case NVA06C_CTRL_CMD_GPFIFO_SCHEDULE:
	case NVA06F_CTRL_CMD_GPFIFO_SCHEDULE:
		if (!(control.flags & NVOS54_FLAGS_FINN_SERIALIZED)) /* else it was noted before the call */
			after_schedule(map, &control);
		return;
	case NV2080_CTRL_CMD_GPU_GET_GID_INFO:
		if (!(control.flags & NVOS54_FLAGS_FINN_SERIALIZED))
			after_gid(map, &control);
		return;
	default:
		return;
	}
}

void rm_after_uvm(struct rm_map *map, uint32_t request, const void *argument)
{
	struct uvm_register_channel added;
	struct uvm_unregister_channel_590 gone;
	struct rm_object *channel;

	if (request == UVM_REGISTER_CHANNEL && rm_fetch(map, &added, (uintptr_t)argument, sizeof(added))) {
		channel = rm_find(map, added.hClient, added.hChannel);
		if (added.rmStatus != NV_OK || !channel || channel->kind != RM_CHANNEL)
			return;
		learn_uuid(map, rm_device_of(map, channel), added.gpuUuid);
		channel->due = 1;
	} else if (request == UVM_UNREGISTER_CHANNEL &&
	           rm_fetch(map, &gone, (uintptr_t)argument + rm_unregister_at(map), sizeof(gone))) {
		/* Its FREE follows and takes it away; until then it is stopped for good, so it need not be gated. */
		channel = rm_find(map, gone.hClient, gone.hChannel);
		if (gone.rmStatus == NV_OK && channel && channel->kind == RM_CHANNEL)
			channel->unregistered = 1;
	}
}
