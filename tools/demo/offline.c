/*
 * offline.c - an offline batch job: units of work one after the other on a state in device memory, a few in flight. A unit
 * changes the state in place, so the checksum at the end proves that each was done once, whole and in order, however
 * often the job was stopped. A second stream may beat: counter and time of the last beat in a file that others map.
 */
#include "driver.h"
#include "options.h"

#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { MAX_FLIGHT = 64, PAGE = 4096 };

static double units, words = 4096, rounds = 8, unit_us = 5000, flight = 2, duration, report, device,
                     beat_us = 250;
static const char *heartbeat;

static const struct option options[] = {
        {"units", "units of work to do; 0: until told to stop", OPTION_NUMBER, &units},
        {"duration", "seconds after which no new unit is begun; 0: none", OPTION_NUMBER, &duration},
        {"unit-us", "GPU time of a unit", OPTION_NUMBER, &unit_us},
        {"words", "64-bit words of state", OPTION_NUMBER, &words},
        {"rounds", "passes over the state in a unit", OPTION_NUMBER, &rounds},
        {"in-flight", "units queued at a time", OPTION_NUMBER, &flight},
        {"heartbeat", "file to beat in: u64 beats, u64 CLOCK_MONOTONIC ns of the last, u64 stop", OPTION_TEXT,
         &heartbeat},
        {"beat-us", "GPU time between beats", OPTION_NUMBER, &beat_us},
        {"report", "seconds between progress lines; 0: none", OPTION_NUMBER, &report},
        {"device", "GPU", OPTION_NUMBER, &device},
        {0},
};

static volatile sig_atomic_t stop;

static void on_signal(int number)
{
	(void)number;
	stop = 1;
}

static uint64_t mix(uint64_t x)
{
	x ^= x >> 31;
	x *= 0xbf58476d1ce4e5b9ull;
	x ^= x >> 27;
	x *= 0x94d049bb133111ebull;
	return x ^ (x >> 33);
}

/* What the kernel emu_checksum_step must have made of a state of zeros after so many units. */
static uint64_t expected_hash(uint64_t done)
{
	uint64_t count = (uint64_t)words, passes = (uint64_t)rounds, hash = 0;
	uint64_t *state = calloc(count, sizeof(*state));

	for (uint64_t pass = 1; state && pass <= done * passes; pass++) {
		for (uint64_t i = 0; i < count; i++) {
			state[i] = mix(state[i] + pass * 0x9e3779b97f4a7c15ull + i);
			hash = mix(hash ^ state[i]);
		}
	}
	free(state);
	return hash;
}

static uint64_t *start_heartbeat(void)
{
	int fd = open(heartbeat, O_RDWR | O_CREAT | O_CLOEXEC, 0644);
	CUstream stream;

	if (fd < 0 || ftruncate(fd, PAGE)) {
		perror(heartbeat);
		exit(1);
	}
	uint64_t *page = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	close(fd);
	if (page == MAP_FAILED) {
		perror(heartbeat);
		exit(1);
	}
	memset(page, 0, PAGE);
	CHECK(cu.cuMemHostRegister(page, PAGE, 0));
	CHECK(cu.cuStreamCreate(&stream, 1));
	uint64_t args[] = {(uintptr_t)page, (uint64_t)beat_us, 0};
	cuda_launch(cuda_kernel("emu_heartbeat"), stream, args, 3);
	return page;
}

struct job {
	CUdeviceptr state;
	CUfunction step;
	CUstream stream;
	CUevent done[MAX_FLIGHT];
	uint64_t begun, finished;
	double start_s, reported_s, end_s;
};

static bool wants_more(const struct job *job)
{
	return !stop && (units <= 0 || job->begun < (uint64_t)units) &&
	       (duration <= 0 || now_s() - job->start_s < duration);
}

static void print_progress(struct job *job, double now)
{
	job->reported_s = now;
	printf("{\"t_s\": %.3f, \"now_s\": %.6f, \"units\": %llu}\n", job->reported_s - job->start_s,
	       job->reported_s, (unsigned long long)job->finished);
	fflush(stdout);
}

static void work(struct job *job)
{
	unsigned depth = (unsigned)flight;
	uint64_t args[] = {job->state, (uint64_t)words, (uint64_t)rounds, (uint64_t)unit_us};

	while (wants_more(job) || job->finished < job->begun) {
		while (wants_more(job) && job->begun - job->finished < depth) {
			cuda_launch(job->step, job->stream, args, 4);
			CHECK(cu.cuEventRecord(job->done[job->begun++ % depth], job->stream));
		}
		if (job->finished < job->begun)
			CHECK(cu.cuEventSynchronize(job->done[job->finished++ % depth]));
		double now = now_s();
		if (report > 0 && now - job->reported_s >= report)
			print_progress(job, now);
	}
	job->end_s = now_s(); /* what the check of the checksum takes is no work */
	if (report > 0)
		print_progress(job, job->end_s);
}

static int verdict(const struct job *job)
{
	uint64_t head[2] = {0};

	CHECK(cu.cuMemcpyDtoH(head, job->state, sizeof(head)));
	uint64_t expected = expected_hash(job->finished);
	bool ok = head[0] == job->finished && head[1] == expected;
	printf("{\"summary\": \"offline\", \"units\": %llu, \"wall_s\": %.3f, \"checksum\": \"%016llx\", "
	       "\"expected\": "
	       "\"%016llx\", \"ok\": %s}\n",
	       (unsigned long long)job->finished, job->end_s - job->start_s, (unsigned long long)head[1],
	       (unsigned long long)expected, ok ? "true" : "false");
	return ok ? 0 : 1;
}

int main(int argc, char **argv)
{
	struct sigaction action = {.sa_handler = on_signal, .sa_flags = (int)SA_RESETHAND};
	struct job job = {0};
	uint64_t *page = NULL;

	options_parse(argc, argv, options, "An offline batch job with a checksum, on the CUDA driver API.");
	if (flight < 1 || flight > MAX_FLIGHT || words < 1 || rounds < 1) {
		fprintf(stderr, "%s: in-flight is 1 to %d, words and rounds at least 1\n", argv[0],
		        MAX_FLIGHT);
		return 2;
	}
	sigaction(SIGTERM, &action, NULL);
	sigaction(SIGINT, &action, NULL);
	cuda_open((int)device);
	job.step = cuda_kernel("emu_checksum_step");
	CHECK(cu.cuStreamCreate(&job.stream, 1));
	for (unsigned i = 0; i < (unsigned)flight; i++)
		CHECK(cu.cuEventCreate(&job.done[i], CU_EVENT_DISABLE_TIMING));
	size_t bytes = 8 * ((size_t)words + 2);
	void *zeros = calloc(1, bytes);
	CHECK(cu.cuMemAlloc(&job.state, bytes));
	CHECK(cu.cuMemcpyHtoD(job.state, zeros, bytes));
	free(zeros);
	if (heartbeat)
		page = start_heartbeat();
	job.start_s = job.reported_s = now_s();
	work(&job);
	if (page)
		__atomic_store_n(&page[2], 1, __ATOMIC_RELEASE);
	return verdict(&job);
}
