/*
 * kvhook.h - an engine hook in C, as small as it gets: registers where KV blocks lie, reads the table, keeps the book
 * (proto/abi/kv.h). Polled by the engine's own thread between steps; without a valved every call does nothing.
 */
#ifndef VALVE_DEMO_KVHOOK_H
#define VALVE_DEMO_KVHOOK_H

#include <stdbool.h>

#include "link.h"

struct kvhook_shape {
	const char *engine;
	uint32_t blocks, block_tokens;
	uint32_t rows, row_blocks; /* of the book */
	uint32_t tensors, pinned;  /* block 0 .. pinned - 1 are never taken */
	const struct valve_kv_tensor *tensor;
};

enum kvhook_joining { KVHOOK_NOT, KVHOOK_UNDER_WAY, KVHOOK_JOINED };

struct kvhook {
	const struct kvhook_shape *shape;
	int socket;
	uint32_t seq, sessions; /* sessions: tables had so far */
	uint32_t joining;       /* kvhook_joining: the word that the joining thread and the engine's share */
	double tried_s;
	const struct valve_kv_table *table; /* NULL: not attached */
	struct valve_kv_book *book;
	uint64_t seen_epoch;
	const struct valve_kv_table *next_table; /* of the joining thread */
	struct valve_kv_book *next_book;
};

/* Waits for a valved that took the call, once, so that the engine starts with what it may use. */
void kvhook_open(struct kvhook *hook, const struct kvhook_shape *shape);
/* Notices a valved that came or went. Never waits: a thread does, and tries twice a second. */
void kvhook_poll(struct kvhook *hook);
void kvhook_need(struct kvhook *hook); /* valved should look at the book now */

/* Of the table; precondition: attached. */
bool kvhook_has_news(const struct kvhook *hook);
uint64_t kvhook_epoch(const struct kvhook *hook); /* read before the entries */
const uint32_t *kvhook_entries(const struct kvhook *hook);
const uint32_t *kvhook_columns(const struct kvhook *hook);

/* Of the book; nothing happens while not attached. */
uint8_t *kvhook_offered(const struct kvhook *hook);
void kvhook_seen(struct kvhook *hook, uint64_t epoch);
void kvhook_row(struct kvhook *hook, uint32_t row, uint64_t request, const uint32_t *cells, uint32_t count,
                uint32_t tokens); /* request 0: the row is free */

#endif
