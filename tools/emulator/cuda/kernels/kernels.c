/*
 * kernels.c - the built-in kernels: host functions that run in small steps and look at the grant between them, or wait
 * on it for as long as they are timed. All parameters are 64 bits wide. Durations are model microseconds.
 */
#include "kernel.h"
#include "turn.h"

#include <stdio.h>

#define STEP_BYTES 65536u
#define STEP_WORDS 4096u
#define PAGE       4096u
#define US         1000u
#define CHECKSUM_K 0x9e3779b97f4a7c15ull

#define STEP_OR_LEAVE(channel)                                                                           \
	do {                                                                                             \
		if (!turn_check(channel))                                                                \
			return CUDA_SUCCESS; /* the channel goes away; its context is being destroyed */ \
	} while (0)

/* (us) occupies the GPU */
static CUresult spin(struct channel *channel, const void *args)
{
	const uint64_t *us = args;

	turn_run(channel, real_ns(us[0] * US));
	return CUDA_SUCCESS;
}

/* (address, bytes, value) fills 64-bit words */
static CUresult fill(struct channel *channel, const void *args)
{
	const struct {
		uint64_t address, bytes, value;
	} *a = args;
	uint64_t *word = (uint64_t *)(uintptr_t)a->address;

	for (uint64_t i = 0; i < a->bytes / 8; i++) {
		if (i % (STEP_BYTES / 8) == 0)
			STEP_OR_LEAVE(channel);
		word[i] = a->value;
	}
	return CUDA_SUCCESS;
}

/* (to, from, bytes) */
static CUresult copy(struct channel *channel, const void *args)
{
	const struct {
		uint64_t to, from, bytes;
	} *a = args;

	for (uint64_t at = 0; at < a->bytes; at += STEP_BYTES) {
		uint64_t n = a->bytes - at < STEP_BYTES ? a->bytes - at : STEP_BYTES;
		STEP_OR_LEAVE(channel);
		memcpy((void *)(uintptr_t)(a->to + at), (const void *)(uintptr_t)(a->from + at), n);
	}
	return CUDA_SUCCESS;
}

/* (address, bytes, stride) reads one byte of each stride and writes it back: faults on any hole */
static CUresult touch(struct channel *channel, const void *args)
{
	const struct {
		uint64_t address, bytes, stride;
	} *a = args;
	uint64_t stride = a->stride ? a->stride : PAGE;

	for (uint64_t at = 0, n = 0; at < a->bytes; at += stride, n++) {
		volatile uint8_t *byte = (volatile uint8_t *)(uintptr_t)(a->address + at);
		if (n % 16 == 0)
			STEP_OR_LEAVE(channel);
		*byte = *byte;
	}
	return CUDA_SUCCESS;
}

/* (address, bytes, tag) writes the owner's tag at both ends of every page */
static CUresult tag(struct channel *channel, const void *args)
{
	const struct {
		uint64_t address, bytes, tag;
	} *a = args;

	for (uint64_t at = 0, n = 0; at < a->bytes; at += PAGE, n++) {
		volatile uint64_t *page = (volatile uint64_t *)(uintptr_t)(a->address + at);
		if (n % 16 == 0)
			STEP_OR_LEAVE(channel);
		page[0] = a->tag;
		page[PAGE / 8 - 1] = a->tag;
	}
	return CUDA_SUCCESS;
}

/* (address, bytes, tag, result) adds the number of pages that do not carry the tag to the 64-bit word at result */
static CUresult check(struct channel *channel, const void *args)
{
	const struct {
		uint64_t address, bytes, tag, result;
	} *a = args;
	uint64_t wrong = 0;

	for (uint64_t at = 0, n = 0; at < a->bytes; at += PAGE, n++) {
		volatile uint64_t *page = (volatile uint64_t *)(uintptr_t)(a->address + at);
		if (n % 16 == 0)
			STEP_OR_LEAVE(channel);
		wrong += page[0] != a->tag || page[PAGE / 8 - 1] != a->tag;
	}
	*(volatile uint64_t *)(uintptr_t)a->result += wrong;
	return CUDA_SUCCESS;
}

/*
 * (address, period_us, total_us) beats: counter at address, CLOCK_MONOTONIC of the last beat behind it. A total of 0
 * beats until the third word is not 0.
 */
static CUresult heartbeat(struct channel *channel, const void *args)
{
	const struct {
		uint64_t address, period_us, total_us;
	} *a = args;
	uint64_t *page = (uint64_t *)(uintptr_t)a->address;

	for (uint64_t us = 0; !a->total_us || us < a->total_us; us += a->period_us) {
		__atomic_store_n(&page[1], now_ns(), __ATOMIC_RELAXED);
		__atomic_store_n(&page[0], page[0] + 1, __ATOMIC_RELEASE);
		if (!a->total_us && __atomic_load_n(&page[2], __ATOMIC_ACQUIRE))
			break;
		if (!turn_run(channel, real_ns(a->period_us * US)))
			break;
	}
	return CUDA_SUCCESS;
}

static uint64_t mix(uint64_t x)
{
	x ^= x >> 31;
	x *= 0xbf58476d1ce4e5b9ull;
	x ^= x >> 27;
	x *= 0x94d049bb133111ebull;
	return x ^ (x >> 33);
}

/*
 * (state, words, rounds, us) one unit of work on state = {units done, hash, words...}. Every round changes every word
 * in place from its old value, so a step that is lost, doubled or run on other memory changes the hash for good.
 */
static CUresult checksum_step(struct channel *channel, const void *args)
{
	const struct {
		uint64_t state, words, rounds, us;
	} *a = args;
	uint64_t *state = (uint64_t *)(uintptr_t)a->state, *word = state + 2, hash = state[1];

	for (uint64_t r = 0; r < a->rounds; r++) {
		uint64_t key = (state[0] * a->rounds + r + 1) * CHECKSUM_K;
		for (uint64_t i = 0; i < a->words; i++) {
			if (i % STEP_WORDS == 0)
				STEP_OR_LEAVE(channel);
			word[i] = mix(word[i] + key + i);
			hash = mix(hash ^ word[i]);
		}
		if (!turn_run(channel, real_ns(a->us * US / a->rounds)))
			return CUDA_SUCCESS;
	}
	state[1] = hash;
	state[0]++;
	return CUDA_SUCCESS;
}

static const struct builtin builtins[] = {
        {"emu_spin", spin, 1},
        {"emu_fill", fill, 3},
        {"emu_copy", copy, 3},
        {"emu_touch", touch, 3},
        {"emu_tag", tag, 3},
        {"emu_check", check, 4},
        {"emu_heartbeat", heartbeat, 3},
        {"emu_checksum_step", checksum_step, 4},
};

const struct builtin *builtin_find(const char *name)
{
	for (size_t i = 0; i < sizeof(builtins) / sizeof(builtins[0]); i++)
		if (!strcmp(builtins[i].name, name))
			return &builtins[i];
	return NULL;
}
