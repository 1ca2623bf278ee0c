/*
 * spin.c - the GPU workload. Fixed total work and a checksum over all of its state; beats into a file that other processes
 * map. The same program runs on a real GPU (kernels as PTX) and on the emulated one (stand-ins of the same names).
 *
 *   alu full occupancy, 5 ms kernels    one  a single block       many 20 us kernels       graph replay of 20 nodes
 *   copy device to device               long one kernel of --ms   touch reads the helper's range all the time
 *   flood launches without ever waiting duty 1 ms of work, 1 ms idle, latencies            idle only the helper
 *   calibrate iterations per ms, us per copy
 *
 * With --held 1 it is ready, and begins its work when somebody clears the gate in its page.
 */
#include "gpu.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { LATENCIES = 20000, MARKS = 400000, SHIFT = 4096, GRAPH_NODES = 20, GRAPH_US = 50 };
static struct {
	const char *mode, *beat, *sock, *image, *gate, *mate;
	double ms, iterations_ms, one_iterations_ms, copy_us, copy_mib, held;
} option = {.mode = "alu",
            .ms = 1000,
            .iterations_ms = 20000,
            .one_iterations_ms = 100000,
            .copy_us = 40,
            .copy_mib = 64};
static struct beat *beat, *gate;
static struct beat_page page;
static CUstream stream;
static CUdeviceptr d_state, d_at, d_slot, d_sum, d_from, d_to, d_marks;
static unsigned long long checksum;
static double latency_us[LATENCIES];
static unsigned latencies;

static bool wants_stop(void)
{
	while (atomic_load(&beat->gate) && !atomic_load(&beat->stop))
		sleep_us(20); /* the launch-gating rival holds us */
	return atomic_load(&beat->stop) != 0;
}

static CUresult burn_on(CUstream where, unsigned blocks, double iterations)
{
	unsigned iters = iterations > 1 ? (unsigned)iterations : 1, beat_mask = 63, slot_mask = 4095;
	void *args[] = {&d_state, &iters, &d_at, &d_slot, &beat_mask, &slot_mask};

	atomic_fetch_add(&beat->launches, 1);
	return gpu.cuLaunchKernel(gpu.burn, blocks, 1, 1, THREADS, 1, 1, 0, where, args, NULL);
}

static CUresult burn(unsigned blocks, double iterations)
{
	return burn_on(stream, blocks, iterations);
}

static CUresult fill(CUdeviceptr at, unsigned words, unsigned seed)
{
	void *args[] = {&at, &words, &seed};

	return gpu.cuLaunchKernel(gpu.fill, gpu.blocks, 1, 1, THREADS, 1, 1, 0, stream, args, NULL);
}

static void add_sum(CUdeviceptr at, size_t bytes)
{
	unsigned words = (unsigned)(bytes / 4);
	unsigned long long part = 0;
	void *args[] = {&at, &words, &d_sum};

	CK(gpu.cuMemsetD32Async(d_sum, 0, 2, stream)); /* on the same stream: nothing else orders it */
	CK(gpu.cuLaunchKernel(gpu.sum, gpu.blocks, 1, 1, THREADS, 1, 1, 0, stream, args, NULL));
	CK(gpu.cuStreamSynchronize(stream));
	CK(gpu.cuMemcpyDtoH_v2(&part, d_sum, sizeof(part)));
	checksum = checksum * 1099511628211ull + part;
}

static void prepare(void)
{
	gpu_open(option.image);
	if (failure.code)
		return;
	beat->slots = gpu.multiprocessors;
	CK(gpu.cuStreamCreateWithPriority(&stream, 1, 0));
	CK(gpu.cuMemAlloc_v2(&d_state, (size_t)gpu.blocks * THREADS * 4));
	CK(gpu.cuMemAlloc_v2(&d_sum, 64));
	CK(beat_share(beat, &page));
	d_at = page.at;
	d_slot = page.slot;
	CK(fill(d_state, gpu.blocks * THREADS, 7));
	CK(burn(gpu.blocks, 64));
	CK(gpu.cuStreamSynchronize(stream));
	atomic_store(&beat->launches, 0);
}

static void prepare_copy(void)
{
	static uint64_t marks[MARKS];
	size_t bytes = (size_t)option.copy_mib << 20;

	for (unsigned i = 0; i < MARKS; i++)
		marks[i] = i + 1;
	CK(gpu.cuMemAlloc_v2(&d_from, bytes));
	CK(gpu.cuMemAlloc_v2(&d_to, bytes));
	CK(gpu.cuMemAlloc_v2(&d_marks, sizeof(marks)));
	CK(gpu.cuMemcpyHtoD_v2(d_marks, marks, sizeof(marks)));
	CK(fill(d_from, (unsigned)(bytes / 4), 1));
	CK(fill(d_to, (unsigned)(bytes / 4), 2));
	CK(gpu.cuCtxSynchronize()); /* the copy of the marks went by another stream */
	beat->has_time = 0;         /* the beat is a copied number, not a clock */
}

/* Contents move by SHIFT bytes a step, so a copy that is lost or done twice changes the sum. */
static CUresult copy_step(unsigned i)
{
	size_t bytes = ((size_t)option.copy_mib << 20) - SHIFT;
	CUdeviceptr to = i & 1 ? d_from : d_to, from = (i & 1 ? d_to : d_from) + SHIFT;
	CUresult code = gpu.cuMemcpyDtoDAsync_v2(to, from, bytes, stream);

	atomic_fetch_add(&beat->launches, 1);
	if (code)
		return code;
	return gpu.cuMemcpyDtoHAsync_v2((void *)(uintptr_t)page.mark, d_marks + 8ull * (i % MARKS), 8,
	                                stream);
}

static void kernels(unsigned blocks, double us, unsigned sync_every)
{
	unsigned n = (unsigned)(option.ms * 1000 / us);
	double per_ms = blocks == 1 ? option.one_iterations_ms : option.iterations_ms;

	for (unsigned i = 0; i < n && !wants_stop(); i++) {
		CK(burn(blocks, per_ms * us / 1000));
		if (i % sync_every == sync_every - 1)
			CK(gpu.cuStreamSynchronize(stream));
	}
}

static void mode_alu(void)
{
	kernels(gpu.blocks, 5000, 16);
}

static void mode_one(void)
{
	kernels(1, 5000, 16);
}

static void mode_many(void)
{
	kernels(gpu.blocks, 20, 256);
}

static void mode_long(void)
{
	kernels(gpu.blocks, option.ms * 1000, 1);
}

static void mode_flood(void)
{
	kernels(gpu.blocks, 200, ~0u);
}

/* A kernel that reads the helper's range is running or queued nearly always, so a hole in it would fault. */
static void mode_touch(void)
{
	unsigned words = VMM_SLOTS * VMM_SLOT_BYTES / 4;
	void *args[] = {&vmm_pool.slot[0].at, &words, &d_sum};

	for (unsigned i = 0; i < (unsigned)(option.ms * 2) && !wants_stop(); i++) {
		CK(burn(gpu.blocks, option.iterations_ms * 0.2));
		CK(gpu.cuLaunchKernel(gpu.sum, gpu.blocks, 1, 1, THREADS, 1, 1, 0, stream, args, NULL));
		if (i % 16 == 15)
			CK(gpu.cuStreamSynchronize(stream));
	}
}

static void mode_graph(void)
{
	CUgraphExec exec;
	CUgraph graph;

	CK(gpu.cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_RELAXED));
	for (int i = 0; i < GRAPH_NODES; i++)
		CK(burn(gpu.blocks, option.iterations_ms * GRAPH_US / 1000 + i));
	CK(gpu.cuStreamEndCapture(stream, &graph));
	CK(gpu.cuGraphInstantiateWithFlags(&exec, graph, 0));
	unsigned n = (unsigned)(option.ms * 1000 / (GRAPH_NODES * GRAPH_US));
	for (unsigned i = 0; i < n && !wants_stop(); i++) {
		CK(gpu.cuGraphLaunch(exec, stream));
		if (i % 8 == 7)
			CK(gpu.cuStreamSynchronize(stream));
	}
}

static void mode_copy(void)
{
	unsigned n = (unsigned)(option.ms * 1000 / (option.copy_us > 1 ? option.copy_us : 1));

	for (unsigned i = 0; i < n && !wants_stop(); i++) {
		CK(copy_step(i));
		if (i % 64 == 63)
			CK(gpu.cuStreamSynchronize(stream));
	}
	CK(gpu.cuStreamSynchronize(stream));
	add_sum(d_from, (size_t)option.copy_mib << 20);
	add_sum(d_to, (size_t)option.copy_mib << 20);
}

/* Work of a lower (or the same) priority beside the duty, in this very process: all that stream priorities can do. */
static void *mate(void *unused)
{
	int least = 0, greatest = 0;
	CUstream own;

	(void)unused;
	gpu.cuCtxSetCurrent(gpu.context);
	gpu.cuCtxGetStreamPriorityRange(&least, &greatest);
	if (gpu.cuStreamCreateWithPriority(&own, 1, strcmp(option.mate, "low") ? greatest : least))
		return NULL;
	while (!atomic_load(&beat->done) && !failure.code) {
		for (int i = 0; i < 4; i++)
			burn_on(own, gpu.blocks, option.iterations_ms * 5);
		gpu.cuStreamSynchronize(own);
	}
	return NULL;
}

static void one_duty(void)
{
	uint64_t start = now_ns();

	if (gate)
		atomic_store(&gate->gate, 1);
	CK(burn(gpu.blocks, option.iterations_ms));
	CK(gpu.cuStreamSynchronize(stream));
	if (gate)
		atomic_store(&gate->gate, 0);
	if (latencies < LATENCIES)
		latency_us[latencies++] = (double)(now_ns() - start) / 1e3;
}

static void mode_duty(void)
{
	int least = 0, greatest = 0;
	pthread_t thread;

	gate = option.gate ? map_beat(option.gate) : NULL;
	if (option.mate) {
		CK(gpu.cuCtxGetStreamPriorityRange(&least, &greatest));
		CK(gpu.cuStreamCreateWithPriority(&stream, 1, greatest));
		pthread_create(&thread, NULL, mate, NULL);
		sleep_us(50000);
	}
	for (unsigned i = 0; i < (unsigned)(option.ms / 2) && !wants_stop() && !failure.code; i++) {
		one_duty();
		sleep_us(1000);
	}
	if (option.mate) {
		atomic_store(&beat->done, 1);
		pthread_join(thread, NULL);
	}
}

static void mode_idle(void)
{
	uint64_t until = now_ns() + (uint64_t)(option.ms * 1e6);

	while (!wants_stop() && now_ns() < until)
		sleep_us(1000);
}

static double timed_burn(unsigned blocks, unsigned iterations)
{
	uint64_t start = now_ns();

	gpu_check(burn(blocks, iterations), "calibrate");
	gpu_check(gpu.cuStreamSynchronize(stream), "calibrate");
	return (double)(now_ns() - start) / 1e6;
}

/* The fastest of several rounds counts: clocks have come up by then, and no other work was in the way. */
static void mode_calibrate(void)
{
	enum { ITERATIONS = 1 << 19, ROUNDS = 4, COPIES = 50 };
	double full = 0, one = 0, copy_us = 1e9;

	for (int i = 0; i < ROUNDS && !failure.code; i++) {
		double now_full = ITERATIONS / timed_burn(gpu.blocks, ITERATIONS);
		double now_one = ITERATIONS / timed_burn(1, ITERATIONS);
		full = now_full > full ? now_full : full;
		one = now_one > one ? now_one : one;
	}
	prepare_copy();
	for (int k = 0; k < ROUNDS && !failure.code; k++) {
		uint64_t start = now_ns();
		for (unsigned i = 0; i < COPIES; i++)
			CK(copy_step(i));
		CK(gpu.cuStreamSynchronize(stream));
		double us = (double)(now_ns() - start) / 1e3 / COPIES;
		copy_us = us < copy_us ? us : copy_us;
	}
	printf("\"iterations_ms\": %.0f, \"one_iterations_ms\": %.0f, \"copy_us\": %.2f, "
	       "\"multiprocessors\": %u, ",
	       full, one, copy_us, gpu.multiprocessors);
}

static const struct mode {
	const char *name;
	void (*run)(void);
} modes[] = {{"alu", mode_alu},   {"one", mode_one},     {"many", mode_many},          {"long", mode_long},
             {"copy", mode_copy}, {"flood", mode_flood}, {"touch", mode_touch},        {"graph", mode_graph},
             {"duty", mode_duty}, {"idle", mode_idle},   {"calibrate", mode_calibrate}};

static int parse(int argc, char **argv)
{
	for (int i = 1; i + 1 < argc; i += 2) {
		const char *name = argv[i], *value = argv[i + 1];
		const char **text = !strcmp(name, "--mode")    ? &option.mode
		                    : !strcmp(name, "--beat")  ? &option.beat
		                    : !strcmp(name, "--sock")  ? &option.sock
		                    : !strcmp(name, "--image") ? &option.image
		                    : !strcmp(name, "--gate")  ? &option.gate
		                    : !strcmp(name, "--mate")  ? &option.mate
		                                               : NULL;
		double *number = !strcmp(name, "--ms")                  ? &option.ms
		                 : !strcmp(name, "--iterations-ms")     ? &option.iterations_ms
		                 : !strcmp(name, "--one-iterations-ms") ? &option.one_iterations_ms
		                 : !strcmp(name, "--copy-us")           ? &option.copy_us
		                 : !strcmp(name, "--copy-mib")          ? &option.copy_mib
		                 : !strcmp(name, "--held")              ? &option.held
		                                                        : NULL;
		if (text)
			*text = value;
		else if (number)
			*number = atof(value);
		else
			return fprintf(stderr, "spin: what is %s?\n", name);
	}
	return option.beat && option.image ? 0 : fprintf(stderr, "spin: needs --beat and --image\n");
}

static void run(const struct mode *mode)
{
	prepare();
	if (!failure.code && mode->run == mode_copy)
		prepare_copy();
	if (!failure.code && option.sock && helper_start(option.sock))
		fprintf(stderr, "spin: no helper\n");
	atomic_store(&beat->gate, option.held != 0);
	if (!failure.code)
		atomic_store(&beat->ready, 1);
	if (!failure.code)
		mode->run();
	if (!failure.code)
		gpu_check(gpu.cuStreamSynchronize(stream), "last synchronize");
	if (!failure.code)
		add_sum(d_state, (size_t)gpu.blocks * THREADS * 4);
	atomic_store(&beat->done, 1);
}

int main(int argc, char **argv)
{
	const struct mode *mode = modes, *end = modes + sizeof(modes) / sizeof(modes[0]);

	if (parse(argc, argv))
		return 2;
	setsid(); /* must not die with the group of the lab while its channels may be off */
	beat = map_shared(option.beat, sizeof(*beat), true, true);
	while (mode < end && strcmp(mode->name, option.mode))
		mode++;
	if (!beat || mode == end)
		return 2;
	memset(beat, 0, sizeof(*beat));
	beat->pid = (uint32_t)getpid();
	beat->has_time = 1;
	beat->magic = BEAT_MAGIC;
	uint64_t start = now_ns();
	printf("{\"mode\": \"%s\", ", option.mode);
	run(mode);
	printf("\"checksum\": \"%016llx\", \"launches\": %llu, \"wall_ms\": %.1f, \"stopped\": %u, "
	       "\"error\": %d, "
	       "\"where\": \"%s\", \"latency_us\": [",
	       checksum, (unsigned long long)beat->launches, (double)(now_ns() - start) / 1e6, beat->stop,
	       failure.code, failure.where ? failure.where : "");
	for (unsigned i = 0; i < latencies; i++)
		printf("%s%.1f", i ? ", " : "", latency_us[i]);
	printf("]}\n");
	fflush(stdout);
	if (!failure.code)
		gpu.cuDevicePrimaryCtxRelease_v2(0);
	return failure.code ? 3 : 0;
}
