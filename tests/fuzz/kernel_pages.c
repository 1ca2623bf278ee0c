/*
 * kernel_pages.c - memory and its mappings for kernel.c. The three fixed addresses of the shim are entries of a table (kernel.h). What was
 * unmapped is poisoned: ASan names whoever reads it.
 */
#include "kernel_pages.h"

#include <sanitizer/asan_interface.h>

#ifdef __clang__
#pragma clang attribute push(__attribute__((no_sanitize("coverage"))), apply_to = function)
#endif

#define MEMORIES 64

unsigned char *kernel_at[KERNEL_PLACES];

static struct {
	uint32_t used;
	bool fail;
	struct kernel_memory memory[MEMORIES];
} pages;

struct kernel_memory *kernel_memory_new(uint32_t bytes)
{
	CHECK(bytes <= VALVE_REGION_BYTES);
	for (uint32_t i = 0; i < MEMORIES; i++) {
		struct kernel_memory *memory = &pages.memory[i];

		if (memory->refs)
			continue;
		ASAN_UNPOISON_MEMORY_REGION(memory->at, bytes);
		memory->refs = 1;
		memory->bytes = bytes;
		memset(memory->at, 0, bytes);
		pages.used++;
		return memory;
	}
	CHECK(!"memories");
	return NULL;
}

void kernel_memory_drop(struct kernel_memory *memory)
{
	if (--memory->refs)
		return;
	ASAN_POISON_MEMORY_REGION(memory->at, sizeof(memory->at));
	pages.used--;
}

static struct kernel_memory *memory_at(const void *at)
{
	return (struct kernel_memory *)(void *)((unsigned char *)(uintptr_t)at -
	                                        offsetof(struct kernel_memory, at));
}

static int place_of(const void *at)
{
	if (at == valve_pages)
		return KERNEL_LAUNCH;
	if (at == valve_pages + VALVE_CONTROL_BYTES)
		return KERNEL_REGION;
	CHECK(at == kernel_at[KERNEL_CONTROL]);
	return KERNEL_CONTROL;
}

static void put(enum kernel_place place, unsigned char *at)
{
	unsigned char *before = kernel_at[place];

	kernel_at[place] = at;
	if (before)
		kernel_memory_drop(memory_at(before));
}

void *kernel_map(void *at, size_t bytes, int flags, int number)
{
	struct kernel_memory *memory;

	if (flags & MAP_FIXED) { /* all pages at once, fresh */
		CHECK(at == valve_pages && bytes == VALVE_PAGES_BYTES);
		put(KERNEL_LAUNCH, kernel_memory_new(VALVE_CONTROL_BYTES)->at);
		put(KERNEL_REGION, kernel_memory_new(VALVE_REGION_BYTES)->at);
		put(KERNEL_CONTROL, kernel_memory_new(VALVE_CONTROL_BYTES)->at);
		return at;
	}
	if (pages.fail) {
		errno = ENOMEM;
		return MAP_FAILED;
	}
	if (flags & MAP_ANONYMOUS)
		return kernel_memory_new((uint32_t)bytes)->at;
	memory = kernel_memory_of(number);
	CHECK(memory->bytes >= bytes); /* else a touch would be SIGBUS */
	memory->refs++;
	return memory->at;
}

void *kernel_remap(void *from, size_t bytes, void *to)
{
	if (pages.fail) {
		errno = ENOMEM;
		return MAP_FAILED;
	}
	CHECK(memory_at(from)->bytes >= bytes);
	if (!to) { /* old size 0: mapped twice */
		memory_at(from)->refs++;
		return from;
	}
	put(place_of(to), from);
	return to;
}

int kernel_unmap(void *at)
{
	kernel_memory_drop(memory_at(at));
	return 0;
}

void kernel_pages_fail(bool fail)
{
	pages.fail = fail;
}

void kernel_pages_end(void)
{
	for (int place = 0; place < KERNEL_PLACES; place++)
		put((enum kernel_place)place, NULL);
	CHECK(!pages.used);
}

#ifdef __clang__
#pragma clang attribute pop
#endif
