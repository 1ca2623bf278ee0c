/*
 * A program that computes on the CPU with OpenMP, each unit of work a native step: what a gate must stop in the middle.
 * Every round changes every word from its old value, so a lost, doubled or torn round changes the checksum for good.
 *   native_step UNITS ROUNDS PROGRESS_FILE        prints the checksum; the file holds a counter that moves as it computes
 */
#include <fcntl.h>
#include <omp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { WORDS = 1 << 16, CHUNK = 1024 };

typedef int launch_fn(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *,
                      void **, void **);
launch_fn cuLaunchKernel;
int cuInit(unsigned), cuDevicePrimaryCtxRetain(void **, int), cuCtxSetCurrent(void *), cuCtxSynchronize(void);
int cuMemAlloc_v2(uint64_t *, size_t), cuMemsetD8_v2(uint64_t, uint8_t, size_t);
int valve_emu_step_begin(launch_fn *), valve_emu_step_end(void);

static uint64_t mix(uint64_t x)
{
	x ^= x >> 31;
	x *= 0xbf58476d1ce4e5b9ull;
	x ^= x >> 27;
	x *= 0x94d049bb133111ebull;
	return x ^ (x >> 33);
}

static void must(int code, const char *what)
{
	if (code) {
		fprintf(stderr, "%s: %d\n", what, code);
		exit(1);
	}
}

static void one_round(uint64_t *words, uint64_t key, uint64_t *progress)
{
#pragma omp parallel for schedule(static)
	for (int chunk = 0; chunk < WORDS / CHUNK; chunk++) {
		for (int i = chunk * CHUNK; i < (chunk + 1) * CHUNK; i++)
			words[i] = mix(words[i] + key + (uint64_t)i);
		__atomic_add_fetch(progress, 1, __ATOMIC_RELAXED);
	}
}

int main(int argc, char **argv)
{
	uint64_t address, hash = 0, *words, *progress;
	void *context;
	int fd;

	if (argc != 4)
		return 2;
	fd = open(argv[3], O_RDWR);
	progress = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	omp_set_num_threads(3);
	must(cuInit(0), "cuInit");
	must(cuDevicePrimaryCtxRetain(&context, 0), "retain");
	must(cuCtxSetCurrent(context), "current");
	must(cuMemAlloc_v2(&address, WORDS * sizeof *words), "alloc");
	must(cuMemsetD8_v2(address, 0, WORDS * sizeof *words), "fill");
	words = (uint64_t *)address;
	for (int unit = 0; unit < atoi(argv[1]); unit++) {
		must(valve_emu_step_begin(cuLaunchKernel), "begin");
		for (int r = 0; r < atoi(argv[2]); r++)
			one_round(words, (uint64_t)(unit * 1000 + r), progress);
		must(valve_emu_step_end(), "end");
	}
	must(cuCtxSynchronize(), "synchronize");
	for (int i = 0; i < WORDS; i++)
		hash = mix(hash ^ words[i]);
	printf("%016llx\n", (unsigned long long)hash);
	return 0;
}
