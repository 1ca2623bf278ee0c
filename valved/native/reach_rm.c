/*
 * reach_rm.c - the two rungs that are one ioctl from valved: with our own RM client, whose lists name foreign
 * channels, and on the workload's own nvidiactl file, passed over the link. Both are the same control,
 * NV2080_CTRL_CMD_FIFO_DISABLE_CHANNELS; only fd, client and subdevice differ.
 *
 * Partial failure. What the driver has done with the rest of a list when it refuses one pair is not documented, and
 * may differ between firmware versions. So nothing is assumed: disable and enable are idempotent, a refused list is
 * issued again in halves until the pairs that are refused alone are found, and those that are merely stale (freed
 * between arm and gate) are dropped from the plan, and no later plan names them. A refusal that is not staleness ends the
 * search at once, because it concerns every pair alike. One stale channel among 64 costs 13 calls, once, whether they are of one
 * client or of 64. What looks stale may be so because the caller itself is gone, and nothing is dropped before that is ruled out
 * (own.c).
 *
 * A client decides how many pairs of its own are refused. So a stop searches no list before all lists were issued, and
 * what was refused was issued again in parts, until no client keeps channels of another one on. One that frees channels
 * without a word again and again gets lists of its own (valve_entry.apart).
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

static int issue_part(struct gpu *gpu, const struct plan_step *step, const lists *all, uint32_t from,
                      uint32_t count)
{
	lists part = {.bDisable = all->bDisable, .numChannels = count};

	memcpy(part.hClientList, all->hClientList + from, count * sizeof *part.hClientList);
	memcpy(part.hChannelList, all->hChannelList + from, count * sizeof *part.hChannelList);
	return step_issue(gpu, step, &part);
}

/* Precondition: [from, from + count) was refused as a whole. Marks stale pairs in *stale, switches the others. */
static int search(struct gpu *gpu, const struct plan_step *step, const lists *all, uint32_t from,
                  uint32_t count, uint64_t *stale)
{
	uint32_t half[2] = {count / 2, count - count / 2};

	for (int side = 0; side < 2; from += half[side++]) {
		int rc;

		if (half[side] == 0)
			continue;
		if (is_cut(gpu, all))
			return -ECANCELED;
		rc = issue_part(gpu, step, all, from, half[side]);
		if (rc && half[side] > 1)
			rc = search(gpu, step, all, from, half[side], stale);
		else if (rm_is_stale(rc)) {
			*stale |= 1ull << from;
			rc = 0;
		}
		if (rc)
			return rc;
	}
	return 0;
}

static uint64_t pairs(uint32_t from, uint32_t count)
{
	return count ? UINT64_MAX >> (64 - count) << from : 0;
}

/* What came of a list. Precondition: it was issued, and searched where it was refused. -ECANCELED: what is stale is not known. */
static int conclude(struct gpu *gpu, struct plan_step *step, int rc, uint64_t stale)
{
	uint64_t gone = rc == -ECANCELED ? 0 : own_confirms(gpu, step, stale);

	for (uint32_t at = step->off.numChannels; at-- > 0;) {
		if (gone & 1ull << at)
			plan_lose(gpu, step, at);
	}
	return rc || gone == stale ? rc : NV_ERR_INVALID_STATE; /* the caller itself is what is gone */
}

/* ---- enable ---- */

/* Enables what can be enabled. Marks stale pairs in *stale. */
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

static int enable(struct gpu *gpu, struct plan_step *step)
{
	lists *params = &step->on;
	uint64_t stale;
	int rc;

	if (!params->numChannels)
		return 0;
	rc = attempt(gpu, step, params, &stale);
	if (rc == 0 && stale && is_cut(gpu, params))
		rc = -ECANCELED;
	if (rc == 0 && stale && step->ops == &reach_own && own_revived(gpu))
		rc = attempt(gpu, step, params, &stale);
	return conclude(gpu, step, rc, stale);
}

/* ---- stop ---- */

/* Returns what needs no search: the refusal of a single pair that is not stale. */
static int issue_whole(struct gpu *gpu, struct plan_step *step)
{
	uint32_t count = step->off.numChannels;
	int rc = count ? step_issue(gpu, step, &step->off) : 0;
	bool is_known = !rc || (count == 1 && !rm_is_stale(rc));

	step->refused = is_known ? 0 : pairs(0, count);
	return is_known ? rc : 0;
}

/* How many pairs from there on are of one client. */
static uint32_t same_client(const struct plan_step *step, uint32_t from)
{
	uint32_t to = from + 1;

	while (to < step->off.numChannels && step->owner[to] == step->owner[from])
		to++;
	return to - from;
}

/* How many pairs are the first half of these, in whole clients; all of them are one client's. */
static uint32_t first_half(const struct plan_step *step, uint32_t from, uint32_t count)
{
	uint32_t half = same_client(step, from), next = half;

	while (next < count && next <= count / 2) {
		half = next;
		next += same_client(step, from + next);
	}
	return half;
}

/* Precondition: [from, from + count) was refused as a whole. Clients whose pairs alone are not refused have nothing to do
 * with it: they are found in halves, since as a rule one is to blame. */
static void issue_halves(struct gpu *gpu, struct plan_step *step, uint32_t from, uint32_t count)
{
	uint32_t half = first_half(step, from, count), sizes[2] = {half, count - half};

	for (int side = 0; side < 2 && half < count; from += sizes[side++]) {
		if (issue_part(gpu, step, &step->off, from, sizes[side]))
			issue_halves(gpu, step, from, sizes[side]);
		else
			step->refused &= ~pairs(from, sizes[side]);
	}
}

static void issue_apart(struct gpu *gpu, struct plan_step *step)
{
	if (step->refused)
		issue_halves(gpu, step, 0, step->off.numChannels);
}

/* What is refused of the others. */
static int search_apart(struct gpu *gpu, struct plan_step *step, uint64_t *stale)
{
	int status = 0;

	*stale = 0;
	for (uint32_t from = 0, count; step->refused && from < step->off.numChannels; from += count) {
		int rc;

		count = same_client(step, from);
		if (!(step->refused & 1ull << from))
			continue;
		rc = search(gpu, step, &step->off, from, count, stale);
		status = status ? status : rc;
	}
	return status;
}

static int begin(struct gpu *gpu, struct plan_step *step, bool stop)
{
	if (!stop)
		return enable(gpu, step);
	return issue_whole(gpu, step);
}

static int finish(struct gpu *gpu, struct plan_step *step)
{
	uint64_t stale;
	int rc;

	if (!step->refused)
		return 0;
	rc = search_apart(gpu, step, &stale);
	if (rc == 0 && stale && step->ops == &reach_own && own_revived(gpu)) {
		int single = issue_whole(gpu, step);

		issue_apart(gpu, step);
		rc = search_apart(gpu, step, &stale);
		rc = single ? single : rc;
	}
	return conclude(gpu, step, rc, stale);
}

const struct reach_ops reach_own = {"channel-own", begin, issue_apart, finish};
const struct reach_ops reach_fd = {"channel-fd", begin, issue_apart, finish};
