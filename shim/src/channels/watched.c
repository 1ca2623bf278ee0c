/*
 * watched.c - the driver's descriptors, in a small hash by number: a data loader or a busy server has thousands of files
 * open when it takes up CUDA. Every ioctl and close of the process asks here, so looking takes no lock; what was never
 * watched costs a load. Inode and device tell whether the number still is that file.
 */
#include "watched.h"

#include "shim.h"

#include <string.h>

#define PLACES 256u /* control and uvm files of one process: some ten */

struct place {
	uint32_t number; /* and 1; 0: never used, so a search ends here */
	uint32_t kind;   /* valve_watched; NOT: free again */
	struct valve_file file;
};

static struct place places[PLACES];
static struct valve_lock lock; /* adding */
static uint32_t ever;

static struct place *next_place(int fd, uint32_t step)
{
	return &places[((uint32_t)fd * 2654435761u / 16u + step) % PLACES];
}

static struct place *find(int fd)
{
	for (uint32_t step = 0; step < PLACES; step++) {
		struct place *place = next_place(fd, step);
		uint32_t number = load_acquire(&place->number);

		if (number == (uint32_t)fd + 1 && load_acquire(&place->kind) != WATCHED_NOT)
			return place;
		if (!number)
			return NULL;
	}
	return NULL;
}

/* Where nobody can tell, the hooks on close are believed: a driver's file that counts for none would run unseen. */
static bool is_same_file(int fd, const struct place *place)
{
	return valve_file_is(fd, place->file.dev, place->file.ino) != VALVE_OTHER_FILE;
}

/* Free, or left over from a file that was closed behind our back. Precondition: lock is held. */
static struct place *free_place(int fd)
{
	for (uint32_t step = 0; step < PLACES; step++) {
		struct place *place = next_place(fd, step);

		if (place->kind == WATCHED_NOT || !is_same_file((int)place->number - 1, place))
			return place;
	}
	return NULL;
}

bool valve_watch(int fd, enum valve_watched kind)
{
	struct valve_file file = {0};
	struct place *place;

	if (valve_file_of(fd, &file) == -EBADF)
		return true;
	valve_lock(&lock);
	place = find(fd);
	if (!place)
		place = free_place(fd);
	if (place) {
		store_release(&place->kind, WATCHED_NOT);
		store_relaxed(&place->file.dev, file.dev);
		store_relaxed(&place->file.ino, file.ino);
		store_release(&place->number, (uint32_t)fd + 1);
		store_release(&place->kind, (uint32_t)kind);
		store_release(&ever, 1); /* from now on ioctl and close look */
	}
	valve_unlock(&lock);
	return place;
}

enum valve_watched valve_watched(int fd)
{
	const struct place *place;

	if (!load_acquire(&ever) || valve_tls.inside || fd < 0)
		return WATCHED_NOT;
	place = find(fd);
	/* A vfork child tidies up before exec: its descriptors, our memory. Other numbers were closed behind our back. */
	if (!place || valve_shim.pid != (uint32_t)syscall(SYS_getpid) || !is_same_file(fd, place))
		return WATCHED_NOT;
	return (enum valve_watched)load_relaxed(&place->kind);
}

int valve_watched_from(int first)
{
	int lowest = -1;

	for (uint32_t i = 0; load_acquire(&ever) && i < PLACES; i++) {
		int fd = (int)load_acquire(&places[i].number) - 1;

		if (fd >= first && (lowest < 0 || fd < lowest) && valve_watched(fd))
			lowest = fd;
	}
	return lowest;
}

void valve_unwatch(int fd)
{
	struct place *place = find(fd);

	if (place)
		store_release(&place->kind, WATCHED_NOT);
}

bool valve_watches(void)
{
	return load_acquire(&ever);
}

void valve_watched_reset(void)
{
	valve_lock_reset(&lock);
	if (!ever)
		return;
	memset(places, 0, sizeof(places));
	ever = 0;
}
