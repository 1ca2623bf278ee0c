/*
 * reach_rm.c - the two rungs that are one ioctl from valved: with our own RM client, whose lists name foreign
 * channels, and on the workload's own nvidiactl file, passed over the link. Both are the same control,
 * NV2080_CTRL_CMD_FIFO_DISABLE_CHANNELS; only fd, client and subdevice differ.
 *
 * Partial failure. What the driver has done with the rest of a list when it refuses one pair is not documented, and
 * may differ between firmware versions. So nothing is assumed: disable and enable are idempotent, a refused list is
 * issued again in halves until the pairs that are refused alone are found, and those that are merely stale (freed
 * between arm and gate) are dropped from the plan. A refusal that is not staleness ends the search at once, because
 * it concerns every pair alike. One stale channel among 64 costs 13 calls, once. If all pairs of a list look stale, the
 * caller itself may be what is gone, and nothing is dropped before that is ruled out (own.c).
 */
#include "internal.h"

#include <string.h>

typedef struct nv2080_fifo_disable_channels lists;

int step_issue(struct gpu *gpu, const struct plan_step *step, lists *params)
{
	const struct rm_client *own = &gpu->own;

	if (step->ops == &reach_own)
		return rm_switch(&gpu->gate->os, own->ctl, own->h_client, own->h_subdevice, params);
	return rm_switch(&gpu->gate->os, step->fd, step->h_client, step->h_subdevice, params);
}

/* An enable makes no further call once a stop is due. */
static bool is_cut(const struct gpu *gpu, const lists *params)
{
	return !params->bDisable && gpu_is_awaited(gpu);
}

/* Precondition: [from, from + count) was refused as a whole. Marks stale pairs in *stale, switches the others. */
static int search(struct gpu *gpu, const struct plan_step *step, const lists *all, uint32_t from,
                  uint32_t count, uint64_t *stale)
{
	uint32_t half[2] = {count / 2, count - count / 2};

	for (int side = 0; side < 2; side++) {
		lists part = {.bDisable = all->bDisable, .numChannels = half[side]};
		int rc;

		if (half[side] == 0)
			continue;
		if (is_cut(gpu, all))
			return -ECANCELED;
		memcpy(part.hClientList, all->hClientList + from, half[side] * sizeof *part.hClientList);
		memcpy(part.hChannelList, all->hChannelList + from, half[side] * sizeof *part.hChannelList);
		rc = step_issue(gpu, step, &part);
		if (rc && half[side] > 1)
			rc = search(gpu, step, all, from, half[side], stale);
		else if (rm_is_stale(rc)) {
			*stale |= 1ull << from;
			rc = 0;
		}
		if (rc)
			return rc;
		from += half[side];
	}
	return 0;
}

/* Switches what can be switched. Marks stale pairs in *stale. */
static int attempt(struct gpu *gpu, const struct plan_step *step, lists *params, uint64_t *stale)
{
	int rc = step_issue(gpu, step, params);

	*stale = 0;
	if (rc && params->numChannels > 1)
		return search(gpu, step, params, 0, params->numChannels, stale);
	if (!rm_is_stale(rc))
		return rc;
	*stale = 1;
	return 0;
}

static int switch_channels(struct gpu *gpu, struct plan_step *step, bool stop)
{
	lists *params = stop ? &step->off : &step->on;
	uint32_t count = params->numChannels;
	uint64_t stale, all = count ? UINT64_MAX >> (64 - count) : 0;
	int rc;

	if (count == 0)
		return 0;
	rc = attempt(gpu, step, params, &stale);
	if (rc == 0 && stale == all && is_cut(gpu, params))
		rc = -ECANCELED;
	if (rc == 0 && stale == all && step->ops == &reach_own && own_revived(gpu))
		rc = attempt(gpu, step, params, &stale);
	if (rc == -ECANCELED)
		return rc; /* what is stale is not known: the caller itself may be what is gone */
	if (rc == 0 && stale == all &&
	    !own_believes(gpu, step, params->hClientList[0], params->hChannelList[0]))
		return NV_ERR_INVALID_STATE; /* of the caller's: no channel is said to be gone */
	for (uint32_t at = count; at-- > 0;) {
		if (stale & 1ull << at)
			plan_drop(step, at);
	}
	return rc;
}

static int nothing_left(struct gpu *gpu, struct plan_step *step)
{
	(void)gpu, (void)step;
	return 0;
}

const struct reach_ops reach_own = {"channel-own", switch_channels, nothing_left};
const struct reach_ops reach_fd = {"channel-fd", switch_channels, nothing_left};
