/*
 * cells.c - memory for the books of addresses, not libc's. While a native step is parked (step.h) one of its threads may
 * hold a lock of malloc; a thread that moves memory in this process meanwhile must not need it. On a card there is no
 * such danger: there a gate stops no thread of the process.
 */
#include "vmm.h"

#include <stdlib.h>
#include <sys/mman.h>

#define CELL_BYTES 256u
#define CHUNK      65536u

_Static_assert(sizeof(struct range) <= CELL_BYTES && sizeof(struct vmm_handle) <= CELL_BYTES, "cells");

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct cell {
	struct cell *next;
} *unused;

void *pages_new(size_t bytes)
{
	void *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	if (at == MAP_FAILED)
		abort();
	return at;
}

void pages_free(void *at, size_t bytes)
{
	if (at)
		munmap(at, bytes);
}

static void add_chunk(void)
{
	uint8_t *chunk = pages_new(CHUNK);

	for (size_t at = 0; at < CHUNK; at += CELL_BYTES) {
		struct cell *cell = (struct cell *)(void *)(chunk + at);
		cell->next = unused;
		unused = cell;
	}
}

void *cell_new(void)
{
	pthread_mutex_lock(&lock);
	if (!unused)
		add_chunk();
	struct cell *cell = unused;
	unused = cell->next;
	pthread_mutex_unlock(&lock);
	return memset(cell, 0, CELL_BYTES);
}

void cell_free(void *at)
{
	struct cell *cell = at;

	if (!cell)
		return;
	LOCKED(&lock);
	cell->next = unused;
	unused = cell;
}
