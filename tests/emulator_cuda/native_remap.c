/*
 * A native step whose threads allocate all the time, and beside it a thread that moves device memory when told to: what
 * an engine and the shim do in one process. The page: word 0 counts steps, word 1 is the round that was asked for, word 2
 * the round that is done, word 3 ends the program. Prints how many rounds found foreign bytes.
 *   native_remap PAGE_FILE
 */
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define BYTES (2u << 20)

typedef int launch_fn(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *,
                      void **, void **);
launch_fn cuLaunchKernel;
int cuInit(unsigned), cuDevicePrimaryCtxRetain(void **, int), cuCtxSetCurrent(void *);
int valve_emu_step_begin(launch_fn *), valve_emu_step_end(void);
int cuMemAddressReserve(uint64_t *, size_t, size_t, uint64_t, unsigned long long);
int cuMemCreate(uint64_t *, size_t, const void *, unsigned long long), cuMemRelease(uint64_t);
int cuMemMap(uint64_t, size_t, size_t, uint64_t, unsigned long long), cuMemUnmap(uint64_t, size_t);
int cuMemSetAccess(uint64_t, size_t, const void *, size_t);

static uint64_t *page, address, handle[2], wrong;

static void must(int code, const char *what)
{
	if (code) {
		fprintf(stderr, "%s: %d\n", what, code);
		_exit(1);
	}
}

static void map(uint64_t which)
{
	static const int read_write[] = {1, 0, 3};

	must(cuMemMap(address, BYTES, 0, which, 0), "map");
	must(cuMemSetAccess(address, BYTES, read_write, 1), "access");
}

/* No allocation, no stdio: the step's threads may stand still with any lock of libc in their hands. */
static void *mover(void *unused)
{
	struct timespec nap = {0, 50000};
	static const int device_memory[8] = {1, 1, 1, 0};
	uint64_t spare;

	for (uint64_t round = 0; !page[3]; nanosleep(&nap, NULL)) {
		if (__atomic_load_n(&page[1], __ATOMIC_SEQ_CST) == round)
			continue;
		round++;
		wrong += *(volatile uint64_t *)address != round - 1;
		must(cuMemUnmap(address, BYTES), "unmap");
		must(cuMemCreate(&spare, BYTES, device_memory, 0), "create");
		must(cuMemRelease(spare), "release");
		map(handle[round % 2]);
		*(volatile uint64_t *)address = round;
		__atomic_store_n(&page[2], round, __ATOMIC_SEQ_CST);
	}
	return unused;
}

static void allocate(unsigned seed)
{
	void *kept[64] = {0};

	for (int i = 0; i < 2000; i++) {
		void **at = &kept[rand_r(&seed) % 64];
		free(*at);
		*at = malloc(1u + (unsigned)rand_r(&seed) % 5000u);
	}
	for (int i = 0; i < 64; i++)
		free(kept[i]);
}

int main(int argc, char **argv)
{
	static const int device_memory[8] = {1, 1, 1, 0};
	pthread_t thread;
	void *context;

	if (argc != 2)
		return 2;
	page = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, open(argv[1], O_RDWR), 0);
	must(cuInit(0), "cuInit");
	must(cuDevicePrimaryCtxRetain(&context, 0), "retain");
	must(cuCtxSetCurrent(context), "current");
	must(cuMemAddressReserve(&address, BYTES, 0, 0, 0), "reserve");
	for (int i = 0; i < 2; i++)
		must(cuMemCreate(&handle[i], BYTES, device_memory, 0), "create");
	map(handle[0]);
	pthread_create(&thread, NULL, mover, NULL);
	while (!__atomic_load_n(&page[3], __ATOMIC_SEQ_CST)) {
		must(valve_emu_step_begin(cuLaunchKernel), "begin");
#pragma omp parallel for num_threads(3)
		for (int i = 0; i < 3; i++)
			allocate((unsigned)page[0] * 3u + (unsigned)i);
		must(valve_emu_step_end(), "end");
		__atomic_add_fetch(&page[0], 1, __ATOMIC_SEQ_CST);
	}
	pthread_join(thread, NULL);
	printf("%llu\n", (unsigned long long)wrong);
	return 0;
}
