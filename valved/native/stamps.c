/*
 * stamps.c - a bounded ring of events: many native producers, one consumer (the caller). A full ring drops the new
 * stamp and counts it; no producer ever waits. A loud stamp wakes the caller; the others lie there until it asks, or until
 * a quarter of the ring is full.
 *
 * Each cell carries a turn: 2 * lap when free for that lap, 2 * lap + 1 when filled.
 */
#include "internal.h"

#include <sys/eventfd.h>

int stamps_open(struct stamp_ring *ring)
{
	ring->fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	return ring->fd < 0 ? -errno : 0;
}

void stamps_close(struct stamp_ring *ring)
{
	close_fd(ring->fd);
}

void stamp_push(struct stamp_ring *ring, const struct valve_stamp *stamp, bool loud)
{
	uint64_t at = load_relaxed(&ring->head); /* only a guess: the swap below decides */
	struct stamp_cell *cell;
	uint64_t one = 1;

	for (;;) {
		uint64_t turn;

		cell = &ring->cell[at % STAMPS];
		turn = load_acquire(&cell->turn); /* pairs with the consumer's release: the cell is free */
		if (turn == 2 * (at / STAMPS)) {
			if (compare_swap(&ring->head, &at, at + 1))
				break;
		} else if (turn < 2 * (at / STAMPS)) {
			add_fetch(&ring->lost, 1); /* full: not drained for thousands of edges */
			return;
		} else {
			at = load_relaxed(&ring->head);
		}
	}
	cell->stamp = *stamp;
	store_release(&cell->turn, 2 * (at / STAMPS) + 1); /* pairs with the acquire in valve_stamps_take */
	if (!loud && !load_full(&ring->prompt) && at - load_relaxed(&ring->tail) < STAMPS / 4)
		return;
	if (write(ring->fd, &one, sizeof one) < 0)
		return; /* the counter is full: then it is readable, which is all we want */
}

int valve_stamps_fd(struct valve_gate *gate)
{
	return gate->stamps.fd;
}

uint32_t valve_stamps_lost(struct valve_gate *gate)
{
	return load_relaxed(&gate->stamps.lost);
}

uint32_t valve_stamps_take(struct valve_gate *gate, struct valve_stamp *out, uint32_t max)
{
	struct stamp_ring *ring = &gate->stamps;
	uint64_t pending;
	uint32_t count = 0;

	/* Clear the eventfd first: a stamp pushed from here on makes it readable again. */
	if (read(ring->fd, &pending, sizeof pending) < 0 && errno != EAGAIN)
		return 0;
	while (count < max) {
		struct stamp_cell *cell = &ring->cell[ring->tail % STAMPS];
		uint64_t lap = ring->tail / STAMPS;

		if (load_acquire(&cell->turn) != 2 * lap + 1)
			break;
		out[count++] = cell->stamp;
		store_release(&cell->turn, 2 * lap + 2);
		store_relaxed(&ring->tail, ring->tail + 1);
	}
	return count;
}
