/*
 * standin.c - burn, fill and sum of kernels.cu as host functions for the emulated GPU. Same names, same parameters, same
 * use of the beat page; a step is what a pause cannot cut. They sleep rather than compute: a card has its own processors.
 */
#include <stdint.h>
#include <time.h>

/* The emulator's interface for kernels of one's own (its native.h), restated: rooms do not include each other. */
struct emu_native {
	uint32_t abi, arg_count;
	uint8_t arg_bytes[16];
	int (*step)(const void *args, uint64_t number);
};
#define EXPORT __attribute__((visibility("default")))
enum { ITERATIONS_A_STEP = 1024, STEP_US = 40, STATE = 64, SLOTS = 4, WORDS_A_STEP = 16384 };

static uint64_t now_ns(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

struct burn_args {
	uint32_t *state;
	uint32_t iters;
	volatile uint64_t *beat, *slot;
	uint32_t beat_mask, slot_mask;
};

static int burn(const void *args, uint64_t number)
{
	const struct burn_args *a = args;
	const struct timespec step = {0, STEP_US * 1000};

	for (uint32_t i = 0; i < STATE; i++) {
		uint32_t x = a->state[i] * 1664525u + 1013904223u + (uint32_t)number;
		a->state[i] = x ^ x >> 13;
	}
	nanosleep(&step, NULL);
	a->beat[0] = now_ns();
	a->beat[1] = a->beat[1] + 1;
	for (uint32_t i = 0; i < SLOTS; i++)
		a->slot[i] = a->beat[1];
	return (number + 1) * ITERATIONS_A_STEP < a->iters;
}

static int fill(const void *args, uint64_t number)
{
	const struct {
		uint32_t *p;
		uint32_t n, seed;
	} *a = args;
	uint64_t at = number * WORDS_A_STEP, end = at + WORDS_A_STEP < a->n ? at + WORDS_A_STEP : a->n;

	for (; at < end; at++)
		a->p[at] = ((uint32_t)at + a->seed) * 2654435761u;
	return end < a->n;
}

static int sum(const void *args, uint64_t number)
{
	const struct {
		const uint32_t *p;
		uint32_t n;
		uint64_t *out;
	} *a = args;
	uint64_t at = number * WORDS_A_STEP, end = at + WORDS_A_STEP < a->n ? at + WORDS_A_STEP : a->n,
	         part = 0;

	for (; at < end; at++)
		part += (uint64_t)a->p[at] * (2 * (at & 0xffff) + 1);
	__atomic_fetch_add(a->out, part, __ATOMIC_RELAXED);
	return end < a->n;
}

EXPORT extern const struct emu_native emu_native_burn, emu_native_fill, emu_native_sum;
const struct emu_native emu_native_burn = {1, 6, {8, 4, 8, 8, 4, 4}, burn};
const struct emu_native emu_native_fill = {1, 3, {8, 4, 4}, fill};
const struct emu_native emu_native_sum = {1, 3, {8, 4, 8}, sum};
