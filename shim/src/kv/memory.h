/*
 * memory.h - KV memory inside the shim (proto/abi/kv.h). In the flow: an engine allocates its cache, valved says what
 * is mapped there, and later orders change it under the engine's feet.
 *
 *   alloc.c    cuMemAlloc in a bracket makes a range, tells valved, and returns once it is backed
 *   orders.c   valved's orders, one after the other, on a thread of their own: the session stays free to read
 *   parts.c    what of an order is carried out at a time
 *   zeroing.c  the answer to an order, once what it maps is zero
 *   vmm.c      what an order does to slots, in as few driver calls as they allow (cost is per call, not per byte)
 *   places.c   a context with ranges: its zero page, its stream, the driver calls we make
 *   ranges.c   the book of ranges
 *   announce.c what a new valved is told
 *   scratch.c  memory on which valved tries what it will do to ranges from outside
 *   answers.c  questions about addresses: a range of many mappings answers as the one allocation that it stands for
 *
 * Locks: each range's own guards its slots and is held while they are mapped and unmapped, so its holder may sit in a
 * driver call that waits for the gate; the book's guards which ranges exist and is a leaf. All driver calls go past our
 * own hooks: nothing here counts as the application's work.
 */
#ifndef VALVE_MEMORY_H
#define VALVE_MEMORY_H

#include "kv.h"
#include "shim.h"

#pragma GCC visibility push(hidden)

#define VALVE_RANGES 1024u
#define VALVE_PLACES 16u
#define VALVE_ZEROINGS \
	256u /* orders whose memory is being cleared at a time: one for each range of an engine that is lent to */

/* X(name, parameters): what we ask of the driver */
#define VALVE_KV_CALLS(X)                                                              \
	X(cuCtxGetCurrent, (CUcontext *))                                              \
	X(cuCtxSetCurrent, (CUcontext))                                                \
	X(cuCtxGetDevice, (CUdevice *))                                                \
	X(cuCtxSynchronize, (void))                                                    \
	X(cuDeviceGetUuid, (CUuuid *, CUdevice))                                       \
	X(cuThreadExchangeStreamCaptureMode, (int *))                                  \
	X(cuStreamCreate, (CUstream *, unsigned))                                      \
	X(cuStreamSynchronize, (CUstream))                                             \
	X(cuEventCreate, (CUevent *, unsigned))                                        \
	X(cuEventRecord, (CUevent, CUstream))                                          \
	X(cuEventQuery, (CUevent))                                                     \
	X(cuMemsetD32Async, (CUdeviceptr, unsigned, size_t, CUstream))                 \
	X(cuMemGetAllocationGranularity, (size_t *, const CUmemAllocationProp *, int)) \
	X(cuMemAddressReserve, (CUdeviceptr *, size_t, size_t, CUdeviceptr, uint64_t)) \
	X(cuMemAddressFree, (CUdeviceptr, size_t))                                     \
	X(cuMemCreate, (uint64_t *, size_t, const CUmemAllocationProp *, uint64_t))    \
	X(cuMemRelease, (uint64_t))                                                    \
	X(cuMemMap, (CUdeviceptr, size_t, size_t, uint64_t, uint64_t))                 \
	X(cuMemUnmap, (CUdeviceptr, size_t))                                           \
	X(cuMemSetAccess, (CUdeviceptr, size_t, const CUmemAccessDesc *, size_t))      \
	X(cuMemExportToShareableHandle, (void *, uint64_t, int, uint64_t))             \
	X(cuMemImportFromShareableHandle, (uint64_t *, void *, int))                   \
	X(cuMemRetainAllocationHandle, (uint64_t *, void *))

struct valve_kv_calls {
#define X(name, parameters) CUresult(*name) parameters;
	VALVE_KV_CALLS(X)
#undef X
};
extern struct valve_kv_calls valve_cu; /* filled by valve_place_here, before anything else is called */

enum valve_scratch_state {
	SCRATCH_NONE,
	SCRATCH_RESTS,  /* maps its own handle, with the pattern */
	SCRATCH_ZERO,   /* tried: it must read zero */
	SCRATCH_OWN,    /* mapped again: it must read the pattern */
	SCRATCH_MENDED, /* a trial has failed, and the pattern is being written for the next one */
};

/* A part of one: slots of one range. */
struct valve_kv_order {
	uint64_t number;
	uint32_t range, generation, count;
	uint16_t op, how;
	uint32_t refused; /* errno value: answered, not carried out */
	struct valve_fds fds;
	struct valve_kv_entry entry[VALVE_KV_ENTRIES];
};

struct valve_answering;

/* Where the next part of an order begins. */
struct valve_cursor {
	uint32_t run, slot, fd;
	bool has_begun;
};

/* An order that waits, or is at work. */
struct valve_queued {
	uint64_t number;
	uint32_t range, generation, runs; /* range: of an order without slots */
	uint16_t op, how;
	uint32_t refused; /* as of a part */
	bool is_single;   /* one range */
	bool is_waiting;  /* its place in the queue is taken */
	struct valve_cursor next;
	struct valve_answering *answering;
	struct valve_fds fds;
	struct valve_kv_run run[VALVE_KV_RUNS];
};

struct valve_scratch {
	uint32_t state;      /* valve_scratch_state */
	uint32_t generation; /* of the link by which it was told */
	CUdeviceptr at;
	uint64_t handle;
	CUdeviceptr beside; /* right behind it: memory that a trial must leave as it is */
	uint64_t beside_handle;
	uint64_t beside_bytes;
	uint32_t *seen; /* pinned host memory: what was read */
	CUevent event;
	uint64_t number; /* of the order that wants the trial */
	uint32_t order_generation;
	uint32_t failed; /* errno value and driver's result of one that is being mended */
	CUresult cu_result;
};

/* A context in which ranges were made. Lives as long as the context. */
struct valve_place {
	CUcontext context; /* NULL: free */
	bool is_primary;
	int device;
	CUuuid uuid;
	uint64_t handle_bytes;
	uint64_t zero; /* the handle of the zero page: quarantined slots show it, all the same one */
	CUstream stream;
	CUevent event[VALVE_ZEROINGS];
	struct valve_scratch scratch;
};

enum valve_kv_slot {
	SLOT_HOLE, /* nothing is mapped */
	SLOT_ZERO, /* the zero page */
	SLOT_BARE, /* mapped, not accessible: while an order is carried out, or what a driver left of it */
	SLOT_CLEARING, /* a handle that is still being zeroed: not valved's word yet */
	SLOT_BACKED,
	SLOT_SPARSE, /* made so by valved: libcuda thinks the old handle is there, and unmapping lets go of it */
};

enum valve_range_state { RANGE_FREE, RANGE_BORN, RANGE_LIVE, RANGE_GOING, RANGE_UNTOLD };

struct valve_range {
	struct valve_lock lock;
	uint32_t state; /* valve_range_state, under the book's lock */
	uint32_t id;
	uint32_t generation; /* of the link by which it was told; under the book's lock */
	uint32_t flags;
	uint32_t slots;
	uint32_t clearing;    /* orders whose zeroing is under way. Futex word */
	uint32_t untold_from; /* 1 + the first slot that it was not told with, 0: none. The memory thread's */
	uint32_t progress;    /* orders carried out, for the thread that waits for the ACK */
	uint64_t base, bytes, handle_bytes;
	bool stays; /* its addresses are not given back: a valved that takes memory from outside knows them */
	struct valve_place *place;
	uint64_t *handle; /* valved's name of what backs the slot */
	uint8_t *slot;    /* valve_kv_slot */
	uint8_t *pinned;
};

/* What never changes while a range is there. */
struct valve_range_view {
	uint64_t base, bytes;
	uint32_t id;
	int device;
	CUcontext context;
};

struct valve_outcome {
	uint32_t done, status;
	CUresult cu_result;
	bool zeroing;          /* not done before its memset is */
	struct valve_fds made; /* of handles created here */
};

/* places.c */
struct valve_place *
valve_place_here(uint64_t handle_bytes); /* of the current context; NULL when it cannot be */
int valve_place_capture_mode(int mode);
void valve_places_drain(void);
void valve_place_forget(struct valve_place *place);
struct valve_place *valve_place_at(uint32_t index);
CUresult valve_place_enter(const struct valve_place *place, CUcontext *before);
void valve_places_reset(void);

/* ranges.c */
struct valve_range *valve_range_new(struct valve_place *place, uint64_t bytes, uint32_t flags);
struct valve_range *valve_range_at(uint32_t index);
struct valve_range *valve_range_hold(uint32_t id);            /* locked; NULL: not there */
struct valve_range *valve_range_containing(uint64_t address); /* locked */
bool valve_range_turn(struct valve_range *range, enum valve_range_state from, enum valve_range_state to);
struct valve_range *valve_range_claim(uint64_t base); /* for freeing: LIVE to GOING */
void valve_range_drop(struct valve_range *range);     /* the entry is free again */
void valve_range_told(struct valve_range *range, uint32_t generation);
uint32_t valve_range_untold(uint32_t generation);
uint32_t valve_range_newest_elastic(void);
uint32_t valve_range_backed(const struct valve_range *range);
bool valve_ranges_are_whole(void);
bool valve_range_look(uint64_t address, struct valve_range_view *out);
uint64_t valve_ranges_bytes(int device);
uint64_t valve_ranges_bare_bytes(int device);
void valve_ranges_reset(void);

/* vmm.c. Precondition of all: the range's lock is held and its context is current */
void valve_vmm_carry_out(struct valve_range *range, struct valve_kv_order *order, struct valve_outcome *out);
bool valve_vmm_must_wait(const struct valve_range *range, const struct valve_kv_order *order);
void valve_vmm_cleared(struct valve_range *range, const struct valve_kv_order *order, uint32_t done,
                       bool keep);
CUresult valve_vmm_fill(struct valve_range *range); /* the zero page into every hole */
void valve_vmm_empty(struct valve_range *range);
void valve_vmm_settle(
        struct valve_range *range); /* sparse slots become what libcuda can know of: the zero page */
int valve_vmm_export(const struct valve_range *range, uint32_t slot); /* a descriptor, or -1 */

/* parts.c */
void valve_queued_order(struct valve_queued *order, const struct valve_link_kv_entries *packet,
                        struct valve_fds *fds);
void valve_queued_runs(struct valve_queued *order, const struct valve_link_kv_runs *packet,
                       struct valve_fds *fds);
bool valve_queued_next(struct valve_queued *order, struct valve_kv_order *part);

/* zeroing.c */
uint32_t valve_zeroings(void); /* under way */
bool valve_zeroings_end(void); /* those whose event says so. true: some did */
void valve_zeroings_reset(void);
struct valve_answering *valve_answering_begin(const struct valve_queued *order);
void valve_answering_add(struct valve_answering *answering, struct valve_range *range,
                         const struct valve_kv_order *part, struct valve_outcome *out, bool may_fail);
void valve_answering_end(struct valve_answering *answering);

/* orders.c */
int valve_orders_start(void);
void valve_orders_report(uint64_t number, uint32_t generation, struct valve_outcome *out);
int valve_orders_send(void *message, uint32_t bytes, uint16_t type, const struct valve_fds *fds,
                      uint32_t generation); /* 0 or -errno; waits for room, in the end without a link */
void valve_orders_settle(void);             /* sparse slots, at the next step */
bool valve_orders_are_over(void);           /* the process exits: nothing of that will end any more */
void valve_orders_reset(void);

/* announce.c */
bool valve_announce_due(void);
void valve_announce_ranges(void);
bool valve_announce_rest(void);
void valve_announce_describe(const struct valve_range *range, uint32_t held,
                             struct valve_link_kv_range *message);
void valve_announce_pin(const struct valve_range *range, uint64_t offset, uint64_t bytes);
bool valve_announce_end(struct valve_range *range); /* false: the socket is full */
void valve_announce_step(void);                     /* an engine step is about to begin */
void valve_announce_reset(void);
bool valve_announce_ends(void); /* true when some are still due */
bool valve_announce_may_leave(const struct valve_range *range, uint64_t offset, uint64_t bytes);

/* scratch.c */
bool valve_scratch_is_wanted(void); /* this valved takes memory of this process from outside */
void valve_scratch_make(struct valve_place *place);
void valve_scratch_forget(struct valve_place *place);
void valve_scratch_reset(void);
bool valve_scratch_announce(void);
void valve_scratch_try(const struct valve_queued *order);
bool valve_scratch_go_on(uint32_t *pending);

#pragma GCC visibility pop
#endif
