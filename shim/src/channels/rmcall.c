/*
 * rmcall.c - from ioctl bytes to the object map: wrapping, allocation, free. Layouts: proto/abi/nvrm.h. Controls and
 * UVM calls are in rmcontrol.c.
 *
 * Nothing is believed before the driver accepted it, except to prepare: rm_before reads arguments that the driver has
 * not seen yet, so every pointer is tried first (`readable`). What cannot be decoded for a class that matters sets
 * `incomplete` instead of being guessed at.
 */
#include <string.h>

#include "rmmap.h"

bool rm_fetch(struct rm_map *map, void *to, uint64_t from, size_t bytes)
{
	const void *pointer = (const void *)(uintptr_t)from;

	if (!pointer || !map->readable(pointer, bytes))
		return false;
	memcpy(to, pointer, bytes);
	return true;
}

bool rm_fetch_argument(struct rm_map *map, const struct rm_call *call, void *to, size_t bytes)
{
	return call->size == bytes && rm_fetch(map, to, (uintptr_t)call->argument, bytes);
}

/* ---- before ---- */

/* Any ioctl may come wrapped: {number, size, pointer} (kernel-open/nvidia/nv.c). */
static bool unwrap(struct rm_map *map, struct rm_call *call)
{
	struct nv_ioctl_xfer xfer;

	if (call->nr != NV_ESC_IOCTL_XFER_CMD)
		return true;
	if (!rm_fetch_argument(map, call, &xfer, sizeof(xfer)) || xfer.size > NV_XFER_MAX ||
	    xfer.cmd == NV_ESC_IOCTL_XFER_CMD)
		return false;
	call->nr = xfer.cmd;
	call->size = xfer.size;
	call->argument = (const void *)(uintptr_t)xfer.ptr;
	return true;
}

static void make_due(struct rm_map *map, uint32_t h_client, uint32_t handle)
{
	struct rm_object *started = rm_find(map, h_client, handle);

	if (!started || (started->kind != RM_GROUP && started->kind != RM_CHANNEL))
		return;
	started->scheduled = 1;
	for (uint32_t i = 0; i < map->used; i++) {
		struct rm_object *object = &map->objects[i];

		if (object->kind == RM_CHANNEL && object->h_client == h_client &&
		    (object == started || object->parent == handle))
			object->due = 1;
	}
}

/* Both commands have bEnable, or its opposite, as their first byte. */
static void look_for_enable(struct rm_map *map, const struct nvos54_control *control, struct rm_call *call)
{
	uint8_t first;
	bool schedules = control->cmd == NVA06C_CTRL_CMD_GPFIFO_SCHEDULE ||
	                 control->cmd == NVA06F_CTRL_CMD_GPFIFO_SCHEDULE;

	if (!schedules && control->cmd != NV2080_CTRL_CMD_FIFO_DISABLE_CHANNELS)
		return;
	if ((control->flags & NVOS54_FLAGS_FINN_SERIALIZED) || !rm_fetch(map, &first, control->params, 1)) {
		map->incomplete = 1;
		return;
	}
	call->is_enable = schedules ? first != 0 : first == 0;
	if (schedules && first)
		make_due(map, control->hClient, control->hObject);
}

void rm_before(struct rm_map *map, uint32_t request, const void *argument, struct rm_call *call)
{
	union {
		struct nvos00_free free;
		struct nvos54_control control;
	} body;

	*call = (struct rm_call){
	        .nr = NV_IOC_NR(request), .size = NV_IOC_SIZE(request), .argument = argument};
	if (NV_IOC_TYPE(request) != NV_IOC_MAGIC || !unwrap(map, call)) {
		call->nr = 0;
		return;
	}
	if (call->nr == NV_ESC_RM_FREE && rm_fetch_argument(map, call, &body.free, sizeof(body.free))) {
		call->h_client = body.free.hRoot;
		call->h_object = body.free.hObjectOld;
		call->free_number = rm_doom(map, call->h_client, call->h_object);
	} else if (call->nr == NV_ESC_RM_CONTROL &&
	           rm_fetch_argument(map, call, &body.control, sizeof(body.control))) {
		call->h_client = body.control.hClient;
		call->h_object = body.control.hObject;
		look_for_enable(map, &body.control, call);
	}
}

/* ---- after: allocations ---- */

struct alloc {
	uint32_t h_client, parent, handle, class, status;
	uint64_t params;
	bool is_finn;
};

static bool decode_alloc(struct rm_map *map, const struct rm_call *call, struct alloc *out)
{
	struct nvos21_alloc old;
	struct nvos64_alloc new;

	if (rm_fetch_argument(map, call, &new, sizeof(new)))
		*out = (struct alloc){new.hRoot,
		                      new.hObjectParent,
		                      new.hObjectNew,
		                      new.hClass,
		                      new.status,
		                      new.pAllocParms,
		                      new.flags &NVOS64_FLAGS_FINN_SERIALIZED};
	else if (rm_fetch_argument(map, call, &old, sizeof(old)))
		*out = (struct alloc){old.hRoot,  old.hObjectParent, old.hObjectNew, old.hClass,
		                      old.status, old.pAllocParms,   false};
	else
		return false;
	return true;
}

static bool fetch_params(struct rm_map *map, const struct alloc *alloc, void *to, size_t bytes)
{
	if (!alloc->is_finn && rm_fetch(map, to, alloc->params, bytes))
		return true;
	map->incomplete = 1;
	return false;
}

static void add_device(struct rm_map *map, const struct alloc *alloc)
{
	struct nv0080_alloc params = {0}; /* no parameters: instance 0 (S/class/cl0080.h) */
	struct rm_object *device;

	if (alloc->params && !fetch_params(map, alloc, &params, sizeof(params)))
		return;
	device = rm_insert(map, RM_DEVICE, alloc->h_client, alloc->parent, alloc->handle);
	if (device)
		device->instance = params.deviceId;
}

static void add_group(struct rm_map *map, const struct alloc *alloc)
{
	struct nv_channel_group_alloc params = {0};
	struct rm_object *added = rm_insert(map, RM_GROUP, alloc->h_client, alloc->parent, alloc->handle);

	if (!added || !alloc->params || !fetch_params(map, alloc, &params, sizeof(params)))
		return;
	added->engine = params.engineType;
	added->space = params.hVASpace;
}

static void add_share(struct rm_map *map, const struct alloc *alloc)
{
	struct nv_ctxshare_alloc params = {0};
	struct rm_object *added = rm_insert(map, RM_SHARE, alloc->h_client, alloc->parent, alloc->handle);

	if (added && alloc->params && fetch_params(map, alloc, &params, sizeof(params)))
		added->space = params.hVASpace;
}

/* A channel that joins a running group runs at once, without a SCHEDULE of its own: it is due now. */
static void add_channel(struct rm_map *map, const struct alloc *alloc)
{
	struct nv_channel_alloc params;
	struct rm_object *group = rm_find(map, alloc->h_client, alloc->parent);
	struct rm_object *added;

	/* Only what we read: the struct is 360 bytes up to 550. */
	if (!fetch_params(map, alloc, &params, offsetof(struct nv_channel_alloc, subDeviceId)))
		return;
	added = rm_insert(map, RM_CHANNEL, alloc->h_client, alloc->parent, alloc->handle);
	if (!added)
		return;
	added->engine = params.engineType;
	added->cid = params.cid;
	added->space = params.hVASpace;
	added->share = params.hContextShare;
	added->due = group && group->kind == RM_GROUP && group->scheduled;
}

/* An engine object tells what a channel is for; it may sit on the channel or on its group's. */
static void add_engine_object(struct rm_map *map, const struct alloc *alloc)
{
	struct rm_object *channel = rm_find(map, alloc->h_client, alloc->parent);

	if (!channel || channel->kind != RM_CHANNEL)
		return;
	if (NV_CLASS_IS_COMPUTE(alloc->class))
		channel->has_compute = 1;
	else
		channel->has_copy = 1;
	if (channel->reported && !rm_engine_of(map, channel))
		channel->reported = 0; /* we guessed before; now we know */
}

static void after_alloc(struct rm_map *map, int fd, const struct rm_call *call)
{
	struct alloc alloc;
	struct rm_object *client;

	if (!decode_alloc(map, call, &alloc) || alloc.status != NV_OK)
		return;
	switch (alloc.class) {
	case NV01_ROOT:
	case NV01_ROOT_NON_PRIV:
	case NV01_ROOT_CLIENT:
		client = rm_insert(map, RM_CLIENT, alloc.handle, 0, alloc.handle);
		if (client)
			client->fd = fd;
		return;
	case NV01_DEVICE_0:
		add_device(map, &alloc);
		return;
	case NV20_SUBDEVICE_0:
		rm_insert(map, RM_SUBDEVICE, alloc.h_client, alloc.parent, alloc.handle);
		return;
	case FERMI_VASPACE_A:
		rm_insert(map, RM_SPACE, alloc.h_client, alloc.parent, alloc.handle);
		return;
	case FERMI_CONTEXT_SHARE_A:
		add_share(map, &alloc);
		return;
	case KEPLER_CHANNEL_GROUP_A:
		add_group(map, &alloc);
		return;
	default:
		break;
	}
	if (alloc.class == MPS_COMPUTE)
		map->is_mps = 1;
	else if (NV_CLASS_IS_GPFIFO(alloc.class))
		add_channel(map, &alloc);
	else if (NV_CLASS_IS_COMPUTE(alloc.class) || NV_CLASS_IS_COPY(alloc.class))
		add_engine_object(map, &alloc);
}

/* ---- before: memory ---- */

static bool decode_memory(struct rm_map *map, const struct rm_call *call, struct rm_wish *out)
{
	uint64_t at = (uintptr_t)call->argument;
	struct nvos32_alloc_size heap;
	struct alloc alloc;

	if (call->nr == NV_ESC_RM_VID_HEAP_CONTROL) {
		if (call->size < sizeof(heap) || !rm_fetch(map, &heap, at, sizeof(heap)) ||
		    heap.function != NVOS32_FUNCTION_ALLOC_SIZE || NVOS32_ATTR_IS_SYSTEM(heap.attr) ||
		    (heap.flags & NVOS32_ALLOC_FLAGS_VIRTUAL))
			return false;
		out->h_parent = heap.hObjectParent;
		out->h_client = heap.hRoot;
		out->bytes = heap.size;
		out->handle_at = at + offsetof(struct nvos32_alloc_size, hMemory);
		out->status_at = at + offsetof(struct nvos32_alloc_size, status);
		return true;
	}
	if (call->nr != NV_ESC_RM_ALLOC || !decode_alloc(map, call, &alloc) ||
	    alloc.class != NV01_MEMORY_LOCAL_USER || alloc.is_finn ||
	    !rm_fetch(map, &out->bytes, alloc.params + offsetof(struct nv_memory_alloc, size),
	              sizeof(out->bytes)))
		return false;
	out->h_parent = alloc.parent;
	out->h_client = alloc.h_client;
	out->handle_at = at + offsetof(struct nvos64_alloc, hObjectNew); /* where NVOS21 has it, too */
	out->status_at =
	        at + (call->size == sizeof(struct nvos64_alloc) ? offsetof(struct nvos64_alloc, status)
	                                                        : offsetof(struct nvos21_alloc, status));
	return true;
}

/* False for everything else, and where it cannot be told of which card. */
bool rm_wants_memory(struct rm_map *map, const struct rm_call *call, struct rm_wish *out)
{
	const struct rm_object *object, *subdevice;

	if (!decode_memory(map, call, out))
		return false;
	object = rm_find(map, out->h_client, out->h_parent);
	if (object && object->kind != RM_DEVICE)
		object = rm_device_of(map, object);
	subdevice = object ? rm_subdevice_of(map, object) : NULL;
	if (!subdevice)
		return false;
	out->h_subdevice = subdevice->handle;
	out->has_uuid = object->has_uuid;
	memcpy(out->uuid, object->uuid, sizeof(out->uuid));
	return true;
}

/* ---- after: the rest ---- */

static void after_free(struct rm_map *map, const struct rm_call *call, bool ok)
{
	struct nvos00_free body;

	if (!call->free_number)
		return;
	if (ok && rm_fetch_argument(map, call, &body, sizeof(body)) && body.status == NV_OK)
		rm_bury(map, call->free_number);
	else
		rm_spare(map, call->free_number);
}

static void after_version(struct rm_map *map, const struct rm_call *call)
{
	struct nv_ioctl_rm_api_version body;

	if (!rm_fetch_argument(map, call, &body, sizeof(body)))
		return;
	body.versionString[sizeof(body.versionString) - 1] = 0;
	rm_set_version(map, body.versionString);
}

void rm_after(struct rm_map *map, int fd, const struct rm_call *call, bool ok)
{
	if (call->nr == NV_ESC_RM_FREE) {
		after_free(map, call, ok);
		return;
	}
	if (!ok)
		return;
	switch (call->nr) {
	case NV_ESC_RM_ALLOC:
		after_alloc(map, fd, call);
		break;
	case NV_ESC_RM_DUP_OBJECT:
		rm_after_dup(map, call);
		break;
	case NV_ESC_RM_CONTROL:
		rm_after_control(map, call);
		break;
	case NV_ESC_CHECK_VERSION_STR:
		after_version(map, call);
		break;
	default:
		break;
	}
}
