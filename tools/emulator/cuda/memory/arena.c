/* arena.c - hands out address space. The whole arena is reserved once, so nothing else of the process lands in it. */
#include "memory.h"

#include <sys/mman.h>

struct memory memory = {.lock = PTHREAD_MUTEX_INITIALIZER, .next_area = ARENA_BASE};

static bool has_arena(void)
{
	if (memory.has_arena)
		return true;
	void *at = mmap((void *)ARENA_BASE, ARENA_BYTES, PROT_NONE,
	                MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE, -1, 0);
	memory.has_arena = at == (void *)ARENA_BASE;
	if (memory.has_arena)
		madvise(at, ARENA_BYTES, MADV_DONTFORK);
	else if (at != MAP_FAILED)
		munmap(at, ARENA_BYTES);
	return memory.has_arena;
}

static bool fits(uint64_t base, uint64_t bytes)
{
	return base >= ARENA_BASE && base + bytes <= ARENA_BASE + ARENA_BYTES &&
	       !book_overlaps(&memory.areas, base, bytes);
}

/* The first free stretch at or above `from`; 0 when there is none. */
static uint64_t search(uint64_t from, uint64_t bytes, uint64_t alignment)
{
	uint64_t base = (from + alignment - 1) / alignment * alignment;

	while (base + bytes <= ARENA_BASE + ARENA_BYTES) {
		unsigned i = book_index(&memory.areas, base);
		if (i >= memory.areas.count || memory.areas.at[i]->base >= base + bytes)
			return base;
		uint64_t end = memory.areas.at[i]->base + memory.areas.at[i]->bytes;
		base = (end + alignment - 1) / alignment * alignment;
	}
	return 0;
}

struct range *area_take(enum range_kind kind, uint64_t bytes, uint64_t alignment, uint64_t wanted)
{
	struct range *area = cell_new();
	uint64_t base = 0;

	pthread_mutex_lock(&memory.lock);
	if (bytes <= ARENA_BYTES && has_arena()) {
		if (wanted && wanted % alignment == 0 && fits(wanted, bytes))
			base = wanted;
		if (!base)
			base = search(memory.next_area, bytes, alignment);
		if (!base) /* the arena is walked upwards first, so that a stale pointer rarely hits a new owner */
			base = search(ARENA_BASE, bytes, alignment);
	}
	if (base) {
		area->kind = kind; /* before others can find it */
		area->base = base;
		area->bytes = bytes;
		area->id = ++memory.next_id;
		book_add(&memory.areas, area);
		memory.next_area = base + bytes;
	}
	pthread_mutex_unlock(&memory.lock);
	if (!base)
		cell_free(area);
	return base ? area : NULL;
}

void area_give(struct range *area)
{
	pthread_mutex_lock(&memory.lock);
	book_remove(&memory.areas, area);
	pthread_mutex_unlock(&memory.lock);
	cell_free(area);
}
