/*
 * own.c - the RM client that an issuer speaks through. A status of "no such object" may speak of the channels that a
 * call names or of the caller itself: after a reset of the card or a reload of the driver our client is gone, and every
 * list would look like channels that have ended, that is like a stop that went well. So code that is told that everything
 * is stale asks here first. The GPU's issuer alone.
 */
#include "internal.h"

static bool own_speaks(const struct gpu *gpu)
{
	return gpu->info.status == 0 &&
	       rm_speaks(&gpu->gate->os, gpu->own.ctl, gpu->own.h_client, gpu->own.h_subdevice);
}

/* Our own client was gone, and there is a new one: the call is worth repeating. */
bool own_revived(struct gpu *gpu)
{
	struct valve_gpu_info info = gpu->info; /* what the caller thread reads stays as it is */

	if (info.status || own_speaks(gpu))
		return false;
	rm_close(&gpu->gate->os, &gpu->own);
	return rm_open(&gpu->gate->os, &info, &gpu->own) == 0;
}

/* Pairs whose status said "stale": which of them are channels that ended? Asked afterwards, in the name of the client that made
 * the call: one that has a say now had it then. Where it has none any more (a workload's file without its client), through our
 * own client. */
uint64_t own_confirms(struct gpu *gpu, const struct plan_step *step, uint64_t stale)
{
	const struct nv2080_fifo_disable_channels *list = &step->off;
	uint32_t cid;

	if (step->ops == &reach_own)
		return stale && own_speaks(gpu) ? stale : 0;
	if (!stale || rm_speaks(&gpu->gate->os, step->fd, step->h_client, step->h_subdevice))
		return stale;
	if (gpu->info.status || !gpu->gate->branch || !gpu->gate->branch->has_unique_id)
		return 0;
	for (uint32_t at = 0; at < list->numChannels; at++)
		if ((stale & 1ull << at) &&
		    !rm_is_stale(rm_unique_id(&gpu->gate->os, &gpu->own, list->hClientList[at],
		                              list->hChannelList[at], &cid)))
			stale &= ~(1ull << at);
	return own_speaks(gpu) ? stale : 0;
}

/* The driver's number of a channel. Only a client that still means something is believed that there is none. */
int own_unique_id(struct gpu *gpu, uint32_t h_client, uint32_t h_channel, uint32_t *cid)
{
	int rc = rm_unique_id(&gpu->gate->os, &gpu->own, h_client, h_channel, cid);

	if (rm_is_stale(rc) && own_revived(gpu))
		rc = rm_unique_id(&gpu->gate->os, &gpu->own, h_client, h_channel, cid);
	return rm_is_stale(rc) && !own_speaks(gpu) ? NV_ERR_INVALID_STATE : rc;
}
