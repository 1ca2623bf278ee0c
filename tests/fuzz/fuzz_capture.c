/*
 * fuzz_capture.c - the ioctl parser against any bytes. An input is a sequence of calls; pointers inside arguments are
 * offsets into the input's own tail, so that nested parameters are reached, and anything else must be found unreadable.
 *
 * With clang: -fsanitize=fuzzer,address,undefined. Elsewhere main() replays the files (or folders' files) named on the
 * command line and, with -r N SEED, N inputs of its own making.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "rm.h"

#define OBJECTS  64 /* few: a full map is part of the test */
#define ARGUMENT 64 /* bytes of a call's argument block */
#define ARENA    4096

static unsigned char arena[ARENA];

static bool in_arena(const void *pointer, size_t bytes)
{
	uintptr_t at = (uintptr_t)pointer, first = (uintptr_t)arena;

	return at >= first && bytes <= ARENA && at - first <= ARENA - bytes;
}

/* Books: what the map holds must be consistent whatever came in. */
static void check(struct rm_map *map)
{
	if (map->used > map->capacity)
		abort();
	for (uint32_t i = 0; i < map->used; i++) {
		const struct rm_object *object = &map->objects[i];

		if (object->kind == RM_CHANNEL) {
			rm_device_of(map, object);
			rm_group_of(map, object);
			if (rm_is_compute(map, object) && rm_engine_of(map, object) &&
			    !NV_ENGINE_IS_GR(rm_engine_of(map, object)))
				abort();
		}
		if (object->kind == RM_NONE && object->dying)
			abort();
	}
}

/* A pointer field points into the arena in most cases: its low half is taken as an offset. */
static void aim(unsigned char *argument, size_t at)
{
	uint64_t value;

	memcpy(&value, argument + at, sizeof(value));
	if (value >> 63)
		return; /* a wild one */
	value = (uintptr_t)arena + (value % ARENA);
	memcpy(argument + at, &value, sizeof(value));
}

static void one_call(struct rm_map *map, const unsigned char *data)
{
	unsigned char *argument = arena;
	struct rm_call call;
	uint32_t request;
	int fd = data[4] % 4;

	memcpy(&request, data, sizeof(request));
	memcpy(argument, data + 8, ARGUMENT);
	if (data[5] & 1)
		request = (request & 0x3FFF00FFu) |
		          0xC0004600u; /* a driver's request, so that most are looked at */
	if (data[5] & 2)
		aim(argument, (request & 0xFF) == NV_ESC_IOCTL_XFER_CMD ? 8 : 16);
	if (data[5] & 4) {
		rm_after_uvm(map, request & 0xFF, argument);
		return;
	}
	rm_before(map, request, argument, &call);
	check(map);
	rm_after(map, fd, &call, !(data[5] & 8));
	if (data[5] & 16)
		rm_bury(map, rm_closing(map, fd));
}

int LLVMFuzzerTestOneInput(const unsigned char *data, size_t size);

int LLVMFuzzerTestOneInput(const unsigned char *data, size_t size)
{
	static struct rm_object objects[OBJECTS];
	struct rm_map map = {.objects = objects, .capacity = OBJECTS, .readable = in_arena};
	const size_t step = 8 + ARGUMENT;

	memset(objects, 0, sizeof(objects));
	memset(arena, 0, sizeof(arena));
	if (size > step)
		memcpy(arena + ARGUMENT, data, size < ARENA - ARGUMENT ? size : ARENA - ARGUMENT);
	for (; size >= step; data += step, size -= step) {
		one_call(&map, data);
		check(&map);
	}
	rm_set_version(&map, (const char *)memcpy(arena, "580.159.04", 11));
	return 0;
}

#ifndef FUZZER
static unsigned char input[1 << 16];

static void replay(const char *path)
{
	FILE *file = fopen(path, "rb");
	size_t size = file ? fread(input, 1, sizeof(input), file) : 0;

	if (!file)
		exit(2);
	fclose(file);
	LLVMFuzzerTestOneInput(input, size);
}

static uint32_t random_word(uint32_t *state)
{
	*state ^= *state << 13;
	*state ^= *state >> 17;
	*state ^= *state << 5;
	return *state;
}

/* Inputs that look like a driver's traffic: the numbers, sizes and classes that are known, handles of a small set. */
static size_t invent(uint32_t *state)
{
	static const uint32_t requests[] = {0xc020462b, 0xc030462b, 0xc0104629, 0xc020462a,
	                                    0xc01c4634, 0xc01046d3, 0xc04846d2};
	static const uint32_t words[] = {0x41,       0x80,       0x2080,     0x90F1,     0x9067,
	                                 0xA06C,     0xC86F,     0xCBC0,     0xC8B5,     0x2080110b,
	                                 0xa06c0101, 0xa06c0102, 0x2080014a, 0xC1D00001, 0xC1D00002,
	                                 0x5c000001, 0x5c000002, 0};
	size_t calls = 1 + random_word(state) % 40, step = 8 + ARGUMENT;

	for (size_t i = 0; i < calls * step; i += 4) {
		uint32_t word = words[random_word(state) % (sizeof(words) / sizeof(words[0]))];

		if (random_word(state) % 4 == 0)
			word = random_word(state);
		if (i % step == 0)
			word = requests[random_word(state) % (sizeof(requests) / sizeof(requests[0]))];
		memcpy(input + i, &word, sizeof(word));
		if (i % step == 4)
			input[i + 1] = (unsigned char)(random_word(state) % 32);
		if (i % step >= 8 && random_word(state) % 3 == 0)
			memset(input + i, 0, 4);
	}
	return calls * step;
}

int main(int argc, char **argv)
{
	uint32_t state;
	long count;

	if (argc == 4 && !strcmp(argv[1], "-r")) {
		count = strtol(argv[2], NULL, 10);
		state = (uint32_t)strtoul(argv[3], NULL, 10) | 1u;
		for (long i = 0; i < count; i++)
			LLVMFuzzerTestOneInput(input, invent(&state));
		printf("%ld inputs\n", count);
		return 0;
	}
	for (int i = 1; i < argc; i++)
		replay(argv[i]);
	printf("%d inputs\n", argc - 1);
	return 0;
}
#endif
