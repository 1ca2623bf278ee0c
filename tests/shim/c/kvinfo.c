/*
 * kvinfo.c - how much memory is free, asked while another thread gets a range: between any two looks at the book of ranges. All
 * ranges are backed, so what the driver has free is what is free.
 */
#include "memory.h"

#include <stdio.h>
#include <string.h>

#define FREE_BYTES (10ull << 30)
#define TOTAL      (16ull << 30)
#define LOOKS      8

struct valve_shim valve_shim = {.state = VALVE_STATE_LINKED,
                                .role = VALVE_ROLE_OFFLINE,
                                .daemon_features = VALVE_FEATURE_MEMORY | VALVE_FEATURE_KV_FREE};
unsigned char valve_pages[VALVE_PAGES_BYTES] __attribute__((aligned(4096)));

static struct valve_place place = {.handle_bytes = 2 << 20};
static uint32_t looks, comes_at;

static void come(void)
{
	struct valve_range *range = valve_range_new(&place, 64 * place.handle_bytes, 0);

	memset(range->slot, SLOT_BACKED, range->slots);
}

void valve_lock(struct valve_lock *lock)
{
	(void)lock;
	if (++looks != comes_at)
		return;
	comes_at = 0;
	come();
}

void valve_unlock(struct valve_lock *lock)
{
	(void)lock;
}

void valve_lock_reset(struct valve_lock *lock)
{
	(void)lock;
}

void valve_say(const char *text)
{
	(void)text;
}

void valve_announce_pin(const struct valve_range *range, uint64_t offset, uint64_t bytes)
{
	(void)range, (void)offset, (void)bytes;
}

bool valve_announce_may_leave(const struct valve_range *range, uint64_t offset, uint64_t bytes)
{
	(void)range, (void)offset, (void)bytes;
	return true;
}

const volatile struct valve_kv_free *valve_kv_free_of(const uint8_t *gpu_uuid)
{
	(void)gpu_uuid;
	return NULL;
}

static CUresult fine(void)
{
	return CUDA_SUCCESS;
}

void *valve_real_symbol(const char *name)
{
	(void)name;
	return (void *)(uintptr_t)fine;
}

static CUresult driver_info(uintptr_t available, uintptr_t total, uintptr_t a2, uintptr_t a3, uintptr_t a4,
                            uintptr_t a5)
{
	(void)a2, (void)a3, (void)a4, (void)a5;
	*(size_t *)available = FREE_BYTES;
	*(size_t *)total = TOTAL;
	return CUDA_SUCCESS;
}

int main(void)
{
	struct valve_entry entry = {.target = (void *)(uintptr_t)driver_info};

	for (uint32_t at = 1; at <= LOOKS; at++) {
		size_t available = 0, total = 0;

		looks = 0;
		comes_at = at;
		valve_on_cuMemGetInfo((uintptr_t)&available, (uintptr_t)&total, 0, 0, 0, 0, &entry);
		if (available != FREE_BYTES || total != TOTAL)
			printf("at look %u: %zu of %zu are free\n", at, available, total);
	}
	puts("asked");
	return 0;
}
