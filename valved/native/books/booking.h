/*
 * The books of time, in C because there may be a thousand stamps a second. valve_book_take books a batch of those that
 * have nothing unusual about them; valved/gate/edges.py says the same stamp by stamp, and works on the same books of
 * services. Pure: writes what the caller gave, allocates nothing.
 */
#ifndef VALVE_NATIVE_BOOKING_H
#define VALVE_NATIVE_BOOKING_H

#include <stdint.h>

enum { VALVE_BOOK_BUCKETS = 21 }; /* of the histogram of delays */

/* An online service: ServiceBook of valved/gate/online.py says what its numbers mean. */
struct valve_book_service {
	uint64_t id;
	int64_t since_ns, seen_ns, watch_since_ns;
	int64_t woken_epoch, epoch, epoch_delay_ns;
	int64_t freed_ns, held_ns, unseen_ns, aged_ns, delay_ns;
	int64_t preemptions, leaked;
	_Bool holding, watching, unclaimed;
	/* For one batch. */
	_Bool stopped;         /* out: it preempted somebody */
	uint32_t gpus;         /* mask of its GPUs */
	uint32_t booked, held; /* out: of these, those that it held, and holds now */
};

/* A GPU, for one batch. `sum`s begin as zeros: what the batch adds. */
struct valve_book_gpu {
	int64_t since_ns;
	int64_t harvest_sum, gated_sum, open_sum, left_sum, delay_sum;
	uint32_t holders, channels;
	uint32_t online; /* holders that are in the table of services */
	uint32_t gates;
	uint32_t latency[VALVE_BOOK_BUCKETS], pad0;
};

/* What is left for the caller to do after a stamp. A note is 8 * the stamp's place + these. */
enum valve_book_note {
	VALVE_BOOK_HIT = 1,   /* open requests were preempted */
	VALVE_BOOK_LOCKS = 2, /* one of several GPUs of a service was stopped */
	VALVE_BOOK_WOKEN = 3, /* requests ended their part in a preemption, or were counted */
	VALVE_BOOK_LEARN = 4, /* the service wants a new rule */
};

struct valve_book {
	struct valve_book_service **services; /* by id, rising */
	struct valve_book_gpu *gpus;
	const uint64_t *holders;  /* ids, GPU after GPU */
	const int64_t *bounds_ns; /* of the histogram, VALVE_BOOK_BUCKETS - 1 */
	uint32_t *notes;          /* out: room for twice as many as there are stamps */
	uint32_t *changed; /* out: services that preempted somebody, or hold other GPUs; room for all */
	uint32_t service_count, gpu_count, note_count, changed_count;
	uint32_t stops, wakes, refused; /* sums */
};

/* Books stamps (struct valve_stamp of native/gate.h) from `at` on. Returns the place of the first that it leaves to the
 * caller, or `count`. */
uint32_t valve_book_take(struct valve_book *book, const uint8_t *stamps, uint32_t at, uint32_t count);

#endif
