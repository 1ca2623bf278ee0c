/*
 * core.h - what the files of the stand-in libcuda share: contexts, channels, streams, work and the one lock.
 *
 * A call makes a `struct work`, work_submit() queues it on a channel of the stream's context, and that channel's
 * executor thread runs it while the server grants the channel (emu.h). A stream is a timeline: a count of work
 * submitted and done; everything that orders work (events, default-stream rules, joins) is a dependency on
 * "timeline T has done N". One lock (emu.lock) guards queues, timelines, captures and the object lists; it is never
 * held while work runs, while an ioctl is issued, or while a thread sleeps. Memory books have a lock of their own
 * (memory.h); order: emu.lock, then memory.
 */
#ifndef EMU_CUDA_CORE_H
#define EMU_CUDA_CORE_H

#include <pthread.h>
#include <stdbool.h>
#include <string.h>

#include "emu.h"
#include "guards.h"
#include "nvrm.h"
#include "types.h"

/* What cuGetProcAddress knows of an entry point (proc.c). */
struct entry {
	const char *symbol;
	void (*function)(void);
	int since; /* the first version of CUDA that has it, as in NVIDIA's cudaTypedefs.h */
};
/* The linker puts them side by side, as the section "entries". */
#define ENTRY(first_version, name)                                                                       \
	static const struct entry entry_##name __attribute__((used, section("entries"), aligned(8))) = { \
	        .symbol = #name, .function = (void (*)(void))name, .since = first_version};
/* Declares, lists and opens the definition of an exported entry point. */
#define CUAPI(since, name, ...)                                            \
	__attribute__((visibility("default"))) CUresult name(__VA_ARGS__); \
	ENTRY(since, name)                                                 \
	CUresult name(__VA_ARGS__)
/* Ends the function with the error of a call that fails. */
#define TRY(call)                      \
	do {                           \
		CUresult error = call; \
		if (error)             \
			return error;  \
	} while (0)

/* Defines a function that says what a handle stands for: NULL when it is none, or of another kind. */
#define HANDLE(name, handle_type, type, magic_word)                             \
	type *name(handle_type handle)                                          \
	{                                                                       \
		type *object = (type *)(uintptr_t)handle;                       \
		return object && object->magic == (magic_word) ? object : NULL; \
	}
/* Takes an item out of a list; one that is not in it is left alone. */
#define UNLINK(list, item)                                             \
	for (__typeof__(list) *at = &(list); *at; at = &(*at)->next) { \
		if (*at == (item)) {                                   \
			*at = (item)->next;                            \
			break;                                         \
		}                                                      \
	}

enum { MAX_DEVICES = (int)EMU_GPUS, MAX_COMPUTE = 32, COPY_ENGINES = 2, CONTEXT_STACK = 32 };
enum lane { LANE_COMPUTE, LANE_COPY };

#define MAGIC_CONTEXT 0x43435458u
#define MAGIC_STREAM  0x5354524du
#define MAGIC_EVENT   0x45564e54u
#define MAGIC_GRAPH   0x47525048u
#define MAGIC_USER    0x55534552u
#define MAGIC_EXEC    0x47455843u

/* Settings from VALVE_EMU_CUDA="name=value,..."; they live on the process's page, where others may change them. */
#define SETTINGS_OF(X)                                                                                      \
	X(kernel_us, 10)   /* how long a kernel that the emulator does not know runs */                     \
	X(h2d_mbps, 25000) /* copies between host and card */                                               \
	X(unmap_waits, 0)  /* 1: cuMemUnmap waits for the context's work (a deadlock when gated) */         \
	X(launch_locks,                                                                                     \
	  0)             /* 1: a launch that blocks on a full queue keeps out the calls that move memory */ \
	X(exit_waits, 0) /* 1: process exit waits for queued work, so a gated process hangs in exit */      \
	X(xfer, 0)       /* 1: wrap RM calls in NV_ESC_IOCTL_XFER_CMD */
enum setting {
#define X(name, value) SETTING_##name,
	SETTINGS_OF(X)
#undef X
	        SETTINGS
};

struct device {
	int ordinal, fd;
	uint32_t minor, gpu_id, instance, h_device, h_subdevice;
	uint32_t domain, bus, slot;
	uint8_t uuid[16];
	struct emu_gpu *board;
	struct context *primary;
	unsigned primary_refs, primary_flags;
	struct pool *default_pool, *pool;
};

/* A stream's order. Outlives the stream while events or queued work point at it. */
struct timeline {
	uint64_t submitted, done;
	uint64_t wake_at; /* the least count that a blocked caller waits for; all ones: none does */
	uint32_t bell;    /* futex of those callers */
	uint32_t refs;
};
struct dependency {
	struct timeline *line;
	uint64_t seq;
};
struct dependencies {
	struct dependency *at;
	unsigned count, room;
};

struct work;
struct channel;
/* Runs on the executor. Work with on_gpu starts inside a turn (turn.h); the result other than 0 kills the context. */
typedef CUresult work_fn(struct work *work, struct channel *channel);
struct work {
	struct work *next;
	work_fn *run;
	void (*drop)(struct work *work); /* frees what the payload owns */
	struct timeline *line;
	uint64_t seq;
	struct dependencies deps;
	bool on_gpu, is_launch;
	int node_type; /* CUgraphNodeType when captured; below 0: may not be */
	unsigned refs; /* a captured node is shared by its graph and what was made of it */
};

struct channel {
	struct context *ctx;
	struct emu_channel *slot;
	struct emu_gpu *gpu;
	uint32_t h_channel, cid;
	struct work *head, **tail;
	unsigned queued;
	pthread_cond_t has_work, has_space;
	pthread_t thread;
	bool started, stop, in_turn;
	uint64_t turn_start_ns;
	struct channel *next; /* all channels of the process */
};

struct graph;
struct capture {
	struct graph *graph;
	struct stream *origin;
	pthread_t thread;
	uint64_t id;
	int mode, status;
	unsigned refs; /* streams and events that are part of it */
	struct capture *next;
};
struct node_set {
	unsigned *at, count, room;
};

struct stream {
	uint32_t magic;
	struct context *ctx;
	struct timeline *line;
	unsigned flags, id;
	int priority;
	void *green; /* the green context that made it */
	struct channel *compute, *copy, *last;
	struct dependencies waits; /* joined to the next work */
	struct capture *capture;
	struct node_set tips; /* nodes that the next captured node follows */
	pthread_t owner;      /* of a per-thread default stream */
	bool is_per_thread;
	struct stream *next;
};

/* One recording of an event: what must be done for it to have happened. Work in flight keeps its own. */
struct mark {
	struct dependencies after;
	uint64_t time_ns;
	unsigned refs;
};
struct event {
	uint32_t magic;
	struct context *ctx;
	unsigned flags;
	struct mark *mark;
	struct capture *capture;
	struct node_set tips;
};

struct context {
	uint32_t magic;
	struct device *dev;
	bool is_primary;
	_Atomic CUresult sticky; /* set by a fault: every later call returns it */
	unsigned flags, next_stream, peers;
	uint64_t id;
	uint32_t h_vaspace, h_group, h_share, h_copy_group[COPY_ENGINES], next_handle;
	struct channel compute[MAX_COMPUTE], copy[COPY_ENGINES];
	unsigned computes;
	struct stream *streams, *legacy;
	struct dependencies orphans; /* work of streams that were destroyed before it was done */
	uint64_t limits[10];
	int cache_config;
	struct context *next;
};

/* The library's writable state, but for the books of memory (memory.h). */
struct emu {
	pthread_mutex_t lock;
	bool ready, forked;
	int ctl, uvm;
	uint32_t h_client;
	struct emu_board *board;
	struct emu_setting *settings;
	struct device device[MAX_DEVICES];
	int devices;
	struct channel *channels;
	struct context *contexts;
	struct capture *captures;
	uint64_t next_id;
};
extern struct emu emu;

/* process.c */
void settings_read(void);
uint64_t setting(enum setting which);
void meter_end(const enum emu_cost *cost);
enum emu_cost meter_begin(enum emu_cost cost);
void meter_model(uint64_t real);
void sparse_refresh(void);
bool api_lock(void); /* what `launch_locks` is about; whether it was taken */
void api_unlock(const bool *was_taken);
#define API_LOCKED __attribute__((cleanup(api_unlock), unused)) const bool api_locked = api_lock()
/* The rest of the block is time spent in the driver, published under that name. */
#define METERED(cost) \
	__attribute__((cleanup(meter_end))) const enum emu_cost metered = meter_begin(EMU_COST_##cost)

/* driver.c */
CUresult driver_check(void);            /* initialised, and not a forked child */
void sleep_model_ns(uint64_t model_ns); /* sleeps what the model says, scaled, never spins */
uint64_t real_ns(uint64_t model_ns);

/* context.c */
CUresult context_current(struct context **out); /* also returns the sticky error */
bool context_valid(const void *handle);

/* device.c */
struct device *device_at(CUdevice dev);
CUresult device_of(CUdevice handle, struct device **out); /* after driver_check() */

/* channel.c */
CUresult channels_create(struct context *ctx);
void channels_destroy(struct context *ctx);

/* stream.c */
CUresult stream_resolve(CUstream handle, struct stream **out);
struct stream *stream_make(struct context *ctx, unsigned flags, int priority);
int priority_clamp(int priority);
void stream_free_locked(struct stream *stream);
CUresult stream_wait_locked(struct stream *stream); /* for all of it; the lock is given up meanwhile */
void context_work_locked(struct context *ctx, struct dependencies *out); /* all that was submitted */
CUresult context_wait(struct context *ctx);

/* timeline.c */
struct timeline *timeline_new(void);
struct timeline *timeline_ref(struct timeline *line);
void timeline_unref(struct timeline *line);
void timeline_wait(struct timeline *line, uint64_t seq); /* without emu.lock */
void timeline_advance(struct timeline *line, uint64_t seq);
void deps_add(struct dependencies *deps, struct timeline *line, uint64_t seq);
void deps_copy(struct dependencies *into, const struct dependencies *from);
void deps_wait(struct dependencies *deps); /* without emu.lock; empties them */
bool deps_met(struct dependencies *deps);  /* forgets those that are met */
void deps_clear(struct dependencies *deps);

/* work.c */
void *zeroed(size_t bytes); /* memory for books of ours; ends the process when there is none */
void *work_new(size_t size, work_fn *run);
struct work *work_ref(struct work *work);
void work_free(struct work *work); /* gives one reference up; under emu.lock or before anyone else knows it */
/* Takes the work whatever happens. A capturing stream gets a graph node instead. */
CUresult work_submit(struct stream *stream, enum lane lane, struct work *work);
CUresult work_submit_wait(struct stream *stream, enum lane lane, struct work *work);
uint64_t work_enqueue_locked(struct stream *stream, enum lane lane, struct work *work);
void *executor_main(void *channel);

#endif
