/*
 * keep.c - memory that online services will need is not for an offline process. valved writes into the control page how much
 * of each card must stay free (region.h, keep_bytes). An allocation that would leave less gets the answer of a full card
 * instead of going to the driver: whatever made it, a context, a pool, a graph or a kernel that is loaded. libcuda knows
 * that answer, and makes CUDA_ERROR_OUT_OF_MEMORY of it.
 *
 * KV memory is not counted here. valved has decided on it before the shim allocates it (kv/alloc.c, kv/orders.c).
 */
#include "keep.h"

#include <errno.h>
#include <string.h>

static const struct {
	uint32_t branch, entries;
} lists[] = {NV_FB_INFO_TABLE};

static bool ask(int fd, const struct rm_wish *wish, uint32_t command, void *params, uint32_t bytes)
{
	return valve_rm_control(fd, (struct rm_name){wish->h_client, wish->h_subdevice}, command, params,
	                        bytes) == NV_OK;
}

static bool find_uuid(int fd, struct rm_wish *wish)
{
	struct nv2080_gpu_gid_info gid = {.flags = RM_GID_BINARY};

	if (wish->has_uuid)
		return true;
	if (!ask(fd, wish, NV2080_CTRL_CMD_GPU_GET_GID_INFO, &gid, sizeof(gid)))
		return false;
	memcpy(wish->uuid, gid.data, sizeof(wish->uuid));
	return true;
}

static bool find_free(int fd, const struct rm_wish *wish, uint64_t *bytes)
{
	struct nv2080_fb_get_info info = {.count = 1, .entry = {{.index = NV2080_FB_INFO_INDEX_HEAP_FREE}}};
	uint32_t entries = 0;

	for (size_t i = 0; i < sizeof(lists) / sizeof(lists[0]); i++)
		if (valve_rm.branch >= lists[i].branch)
			entries = lists[i].entries;
	if (!entries ||
	    !ask(fd, wish, NV2080_CTRL_CMD_FB_GET_INFO_V2, &info,
	         offsetof(struct nv2080_fb_get_info, entry) + entries * (uint32_t)sizeof(info.entry[0])))
		return false;
	*bytes = (uint64_t)info.entry[0].data << 10;
	return true;
}

static bool leaves_too_little(int fd, const struct rm_wish *wish, uint64_t bytes)
{
	uint64_t keep = valve_kept_bytes(wish->uuid), available;

	return keep && find_free(fd, wish, &available) && (bytes > available || available - bytes < keep);
}

static void answer_full(const struct rm_wish *wish)
{
	const uint32_t full = NV_ERR_NO_MEMORY;

	memcpy((void *)(uintptr_t)wish->status_at, &full, sizeof(full));
	valve_say("no more device memory: the rest of this card is kept for online services (valve status)");
}

static bool decode(const struct rm_call *call, struct rm_wish *wish)
{
	bool is_wish;

	valve_lock(&valve_shim.capture_lock);
	is_wish = rm_wants_memory(&valve_rm, call, wish);
	valve_unlock(&valve_shim.capture_lock);
	return is_wish;
}

/* True: the call was answered and must not be made. Where the driver does not say what is free, nothing is refused. */
bool valve_keep_refuses(int fd, const struct rm_call *call, struct rm_wish *wish)
{
	int saved_errno = errno;
	bool refuses = false;

	wish->bytes = 0;
	if (!valve_is_offline() || valve_tls.pool_depth || load_relaxed(&valve_shim.state) == VALVE_STATE_OFF)
		return false;
	if (!decode(call, wish) || !find_uuid(fd, wish))
		wish->bytes = 0;
	else if (leaves_too_little(fd, wish, wish->bytes)) {
		answer_full(wish);
		refuses = true;
	}
	errno = saved_errno;
	return refuses;
}

/* Two processes may have found the same memory free. Whoever sees too little now gives back what it has just got. */
void valve_keep_check(int fd, const struct rm_wish *wish)
{
	struct rm_name made = {.h_client = wish->h_client};
	int saved_errno = errno;
	uint32_t status;

	memcpy(&status, (const void *)(uintptr_t)wish->status_at, sizeof(status));
	if (status == NV_OK && leaves_too_little(fd, wish, 0)) {
		memcpy(&made.handle, (const void *)(uintptr_t)wish->handle_at, sizeof(made.handle));
		if (valve_rm_free(fd, made, wish->h_parent) == NV_OK)
			answer_full(wish);
	}
	errno = saved_errno;
}
