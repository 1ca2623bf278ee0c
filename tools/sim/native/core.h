/*
 * Inside of the replay core. Rooms: rng.c draws, space.c backs and hands out blocks, engine.c batches requests,
 * offline.c runs the offline side in the time it is given, compute.c decides which side waits at a launch,
 * run.c is the clock, api.c is what Python calls.
 *
 * Time moves in one direction only: every room is told the moment and advances `now` through sim_move(). Offline
 * work is simulated lazily, up to the moment at which anything else happens.
 */
#ifndef VALVE_SIM_CORE_H
#define VALVE_SIM_CORE_H

#include <stdbool.h>
#include <stddef.h>

#include "sim.h"

#define NEVER     INT64_MAX
#define NO_SLOT   (-1)
#define NS_PER_MS 1000000LL

enum stream {
	STREAM_GAP = 1,
	STREAM_STOP,
	STREAM_SKEW,
	STREAM_LENGTH,
	STREAM_LAYER,
	STREAM_ORDER,
	STREAM_SLICE
};

enum owner { OWNER_FREE, OWNER_ONLINE, OWNER_OFFLINE };

enum step_kind {
	TRACE_ARRIVE,
	TRACE_LAUNCH,
	TRACE_DONE,
	TRACE_GATE,
	TRACE_WAKE,
	TRACE_OFFLINE,
	TRACE_TAKE,
	TRACE_GIVE,
	TRACE_KILL,
	TRACE_PREEMPT
};

/* A growing array of records of `width` int64 each. */
struct series {
	int64_t *data;
	int64_t used;
	int64_t cap;
	int width;
};

struct request {
	int64_t arrive_ns;
	int64_t first_ns;
	int64_t last_ns;
	int32_t in_tok;
	int32_t out_tok;
	int32_t ctx;    /* tokens with KV in memory */
	int32_t target; /* tokens to compute before the next one is sampled */
	int32_t done;   /* output tokens given so far */
	int32_t useful; /* most tokens ever computed: each counts once */
	int32_t chunk;  /* tokens planned for the running iteration */
	int32_t blocks;
	int32_t cap;
	int32_t slot; /* the column this request fills */
	int32_t *block_slot;
};

/* A virtual range of slots (handle-sized), each backed by a handle or not. */
struct space {
	int32_t slots;
	int32_t per_slot;
	int32_t *used;
	int32_t *room; /* free blocks of a backed slot, 0 of another */
	int32_t *handle;
	int64_t *ready_ns; /* when the mapping of a backed slot is usable */
	int32_t backed;
	int32_t busy;
	int64_t free_blocks;
	int32_t hint; /* no backed slot below it has a free block */
};

struct engine {
	const struct sim_timing *timing;
	struct space *space;
	bool affine;      /* hand out blocks column by column */
	bool whole_first; /* admit only what fits whole */
	struct request **running;
	int32_t n_running;
	struct request **waiting; /* ring, oldest first */
	int64_t wait_head;
	int64_t wait_tail;
	int64_t wait_cap;
	int64_t preempted;
	int64_t ready_ns; /* latest mapping that the planned iteration waits for */
};

struct work {
	int64_t seqs;
	int64_t context;
	int64_t prefill;
	double pairs;
};

struct tgs {
	int64_t next_ns;
	double limit;
	double credit;
	double peak;
	double seen;
	int32_t bad;
	bool slow_start;
};

struct offline {
	struct engine engine;
	bool planned;
	int64_t t;       /* simulated up to here */
	int64_t open_ns; /* may run from here, NEVER when stopped */
	int64_t left_ns; /* of the running iteration, 0 when none */
	int64_t length_ns;
	int64_t dead_until;
	struct request *slab;
	int64_t made;
	int64_t useful;
	int64_t lost;
	int64_t finished;
	int32_t resident; /* UVM: handles in device memory */
};

enum phase { PHASE_IDLE, PHASE_READY, PHASE_RUNNING, PHASE_STALLED };

struct sim {
	struct sim_params p;
	sim_callback call;
	const char *error;
	int64_t now;
	int32_t *free_handles;
	int32_t n_free;
	int8_t *owner;
	struct space online_space;
	struct space offline_space;
	struct engine online;
	struct offline off;
	struct request *requests;
	int64_t n_requests;
	int64_t next_arrival;
	int64_t open_requests;
	int64_t n_lengths;
	int32_t *len_in;
	int32_t *len_out;
	enum phase phase;
	int64_t event_ns; /* the online side's next event in its phase */
	int64_t since_arrival;
	int64_t busy_from;
	int64_t idle_from;
	int64_t quiet_from;
	bool gated;
	int64_t stopped_ns;    /* when the last stop is over */
	int64_t wake_after_ns; /* a refused wake is asked again from here */
	int64_t cooldown_ns;
	int64_t gap_floor_ns;
	int64_t tick_ns;
	int64_t remap_ns;
	struct tgs tgs;
	int64_t run_from;
	int64_t run_to;
	int64_t usage_second;
	int64_t usage_peak;
	int32_t polled_peak;
	struct series gates;
	struct series idles;
	struct series usage;
	struct series log;
	struct sim_totals n;
};

/* rng.c: draws are a function of (seed, stream, a, b), so that two policies see the same world. */
double draw_unit(uint64_t seed, enum stream stream, uint64_t a, uint64_t b);
double draw_normal(uint64_t seed, enum stream stream, uint64_t a, uint64_t b);
int64_t draw_lognormal(uint64_t seed, enum stream stream, uint64_t a, uint64_t b, double median, double sigma,
                       double max);

/* space.c */
int space_init(struct space *sp, int32_t slots, int32_t per_slot);
void space_free(struct space *sp);
void space_back(struct space *sp, int32_t slot, int32_t handle, int64_t ready_ns);
int32_t space_unback(struct space *sp, int32_t slot);
int32_t space_lowest_unbacked(const struct space *sp);
int32_t space_highest_empty(const struct space *sp);
int32_t space_lowest_with_room(struct space *sp);
int32_t space_emptiest(const struct space *sp);
void space_put(struct space *sp, int32_t slot);
void space_drop(struct space *sp, int32_t slot);

/* engine.c */
int engine_init(struct engine *e, const struct sim_timing *timing, struct space *space);
void engine_free(struct engine *e);
int engine_wait(struct engine *e, struct request *r, bool front);
struct work engine_plan(struct sim *s, struct engine *e, int64_t budget);
bool engine_reserve(struct sim *s, struct engine *e, struct request *r, int64_t tokens);
void engine_commit(struct sim *s, struct engine *e, int64_t at_ns);
void engine_forget_blocks(struct sim *s, struct engine *e, struct request *r, int32_t keep);
void engine_lose_slot(struct sim *s, struct engine *e, int32_t slot);
void engine_requeue_all(struct sim *s, struct engine *e);
void engine_preempt_newest(struct sim *s, struct engine *e);
void engine_drop_prefixes(struct sim *s, struct engine *e);
void request_free(struct request *r);
double work_ns(const struct sim_timing *t, const struct work *w);
int64_t blocks_for(const struct sim *s, int64_t tokens);

/* memory.c: handles between the pool, online and offline */
bool memory_online_room(struct sim *s, int64_t lacking_blocks);
bool memory_offline_room(struct sim *s);
void memory_slot_emptied(struct sim *s, struct engine *e, int32_t slot);
void memory_after_plan(struct sim *s);
int64_t uvm_online_wait(struct sim *s);
int64_t uvm_offline_wait(struct sim *s);

/* offline.c */
int offline_init(struct sim *s);
void offline_free(struct sim *s);
void offline_advance(struct sim *s, int64_t to_ns);
void offline_drop_iteration(struct sim *s);
void offline_request_done(struct sim *s, struct request *r);

/* compute.c */
void compute_on_hint(struct sim *s, int64_t at_ns);
int64_t compute_on_launch(struct sim *s, int64_t at_ns, int64_t work_ns);
void compute_on_done(struct sim *s, int64_t at_ns, bool drained);
int64_t compute_wake_at(const struct sim *s);
void compute_wake(struct sim *s, int64_t at_ns);
void compute_tgs_sample(struct sim *s);
bool compute_may_start(struct sim *s);

/* run.c */
void sim_move(struct sim *s, int64_t to_ns);
void sim_fail(struct sim *s, const char *why);
void sim_log(struct sim *s, enum step_kind kind, int64_t a, int64_t b);
int series_add(struct series *x, int64_t a, int64_t b, int64_t c, int64_t d);
void accept_arrivals(struct sim *s);
void same_engine_run(struct sim *s);

#endif
