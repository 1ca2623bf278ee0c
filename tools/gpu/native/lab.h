/*
 * lab.h - what the programs of the GPU lab share: the clock, the table of channels that the tracer keeps, the page that a
 * workload beats in, and short text messages over unix sockets.
 *
 * The programs run on a real GPU and on the emulated one without a difference; gcc alone builds them.
 */
#ifndef VALVE_GPU_LAB_H
#define VALVE_GPU_LAB_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <time.h>

/* RAW: a clock that is never slewed, so that differences of a few microseconds mean something. */
static inline uint64_t now_ns(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC_RAW, &t);
	return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static inline void sleep_us(uint64_t us)
{
	struct timespec t = {(time_t)(us / 1000000u), (long)(us % 1000000u) * 1000};

	while (nanosleep(&t, &t)) {
	}
}

/*
 * The channels of one process. Written by the tracer inside it, read by the probe and the guard. The key is
 * (client, channel): handles repeat in every process.
 */
enum { TABLE_CHANNELS = 256, TABLE_CLIENTS = 16 };
#define TABLE_MAGIC 0x4254564cu
enum live { NEVER, LIVE, FREED };
struct table_channel {
	_Atomic uint32_t live;
	uint32_t client, channel, tsg; /* tsg 0: allocated straight under the device */
	uint32_t engine, cls, cid;     /* engine: the TSG's where there is one */
	uint32_t compute, copy,
	        is_uvm; /* class of a child ..C0, of a child ..B5; seen in UVM_REGISTER_CHANNEL */
};
struct table_client {
	_Atomic uint32_t live;
	uint32_t client, device, subdevice, instance;
	int32_t fd; /* of the allocation of the root, in the owner's descriptor table */
};
struct table {
	uint32_t magic, pid;
	_Atomic uint32_t channels, clients; /* high-water marks of the arrays */
	_Atomic uint32_t incomplete;        /* something could not be decoded: never guess, say so */
	_Atomic uint32_t app_disables, app_schedules, app_preempts, calls;
	struct table_client client[TABLE_CLIENTS];
	struct table_channel channel[TABLE_CHANNELS];
};

/* Three pages; the GPU writes the second and third. */
enum { BEAT_SLOTS = 512, BEAT_BYTES = 12288 };
#define BEAT_MAGIC 0x54414542u
struct beat {
	uint32_t magic, pid;
	_Atomic uint32_t ready, stop, done;
	_Atomic uint32_t gate;     /* 1: launch nothing new (the launch-gating rival; held) */
	uint32_t has_time, slots;  /* has_time: `at` is the GPU's clock, not only a mark */
	_Atomic uint64_t launches; /* calls made so far: stands still where a launch blocks */
	uint32_t is_mirrored;      /* the GPU writes elsewhere, and a thread copies it here */
	char pad0[4096 - 44];
	volatile uint64_t at;   /* GPU time of the last beat */
	volatile uint64_t mark; /* differs at every beat */
	char pad1[4096 - 16];
	volatile uint64_t slot[BEAT_SLOTS]; /* last written by each multiprocessor */
};
_Static_assert(offsetof(struct beat, gate) == 20 && offsetof(struct beat, launches) == 32,
               "beat: the lab's Python reads this");
_Static_assert(offsetof(struct beat, at) == 4096 && sizeof(struct beat) == BEAT_BYTES, "beat pages");

/* share.c: files and sockets */
enum { LINE = 65536 }; /* one message */
void *map_shared(const char *path, size_t bytes, bool create, bool writable);
struct table *map_table(const char *path);
uint32_t from_hex(const char *hex, uint8_t *bytes, uint32_t room); /* how many were there, at most room */
struct beat *map_beat(const char *path);
int sock_listen(const char *path);
int sock_connect(const char *path, unsigned patience_ms);
int sock_send(int s, const char *text, int fd);                     /* fd -1: none */
int sock_receive(int s, char text[LINE], int *fd, int patience_ms); /* 0, or -1: gone or too late */
int sock_ask(int s, const char *text, char answer[LINE], int *fd, int patience_ms);

#endif
