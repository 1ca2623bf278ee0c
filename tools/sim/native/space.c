/* A range of handle-sized slots: which are backed, how many blocks of each are used. Says nothing about what waits. */
#include <stdlib.h>

#include "core.h"

int space_init(struct space *sp, int32_t slots, int32_t per_slot)
{
	size_t n = (size_t)slots + 1;

	sp->slots = slots;
	sp->per_slot = per_slot;
	sp->used = calloc(n, sizeof(*sp->used));
	sp->handle = malloc(n * sizeof(*sp->handle));
	sp->ready_ns = calloc(n, sizeof(*sp->ready_ns));
	sp->room = calloc(n, sizeof(*sp->room));
	if (!sp->used || !sp->handle || !sp->ready_ns || !sp->room)
		return -1;
	for (size_t i = 0; i < n; i++)
		sp->handle[i] = NO_SLOT;
	return 0;
}

void space_free(struct space *sp)
{
	free(sp->used);
	free(sp->handle);
	free(sp->ready_ns);
	free(sp->room);
}

void space_back(struct space *sp, int32_t slot, int32_t handle, int64_t ready_ns)
{
	sp->handle[slot] = handle;
	sp->ready_ns[slot] = ready_ns;
	sp->used[slot] = 0;
	sp->room[slot] = sp->per_slot;
	sp->backed++;
	sp->free_blocks += sp->per_slot;
	if (slot < sp->hint)
		sp->hint = slot;
}

/* The slot must be empty: the caller has dealt with its blocks before. */
int32_t space_unback(struct space *sp, int32_t slot)
{
	int32_t handle = sp->handle[slot];

	sp->handle[slot] = NO_SLOT;
	sp->room[slot] = 0;
	sp->backed--;
	sp->free_blocks -= sp->per_slot;
	return handle;
}

int32_t space_lowest_unbacked(const struct space *sp)
{
	for (int32_t i = 0; i < sp->slots; i++)
		if (sp->handle[i] == NO_SLOT)
			return i;
	return NO_SLOT;
}

int32_t space_highest_empty(const struct space *sp)
{
	for (int32_t i = sp->slots; i-- > 0;)
		if (sp->handle[i] != NO_SLOT && sp->used[i] == 0)
			return i;
	return NO_SLOT;
}

int32_t space_lowest_with_room(struct space *sp)
{
	if (sp->free_blocks == 0)
		return NO_SLOT;
	for (int32_t i = sp->hint; i < sp->slots; i++) {
		if (sp->handle[i] != NO_SLOT && sp->used[i] < sp->per_slot) {
			sp->hint = i;
			return i;
		}
	}
	return NO_SLOT;
}

/* The column with most free blocks, lowest first: a request that starts there seldom shares it. The first pass is a
 * plain maximum, which compilers vectorise: this search was two fifths of a run. */
int32_t space_emptiest(const struct space *sp)
{
	int32_t most = 0;

	if (sp->free_blocks == 0)
		return NO_SLOT;
	for (int32_t i = 0; i < sp->slots; i++)
		most = sp->room[i] > most ? sp->room[i] : most;
	for (int32_t i = 0; most > 0 && i < sp->slots; i++)
		if (sp->room[i] == most)
			return i;
	return NO_SLOT;
}

void space_put(struct space *sp, int32_t slot)
{
	if (sp->used[slot]++ == 0)
		sp->busy++;
	sp->room[slot]--;
	sp->free_blocks--;
}

void space_drop(struct space *sp, int32_t slot)
{
	if (--sp->used[slot] == 0)
		sp->busy--;
	sp->room[slot]++;
	sp->free_blocks++;
	if (slot < sp->hint)
		sp->hint = slot;
}
