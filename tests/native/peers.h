/* peers.h - clients of a gate whose two pages a test program uses through the gate's own mapping. */
#ifndef VALVE_TESTS_PEERS_H
#define VALVE_TESTS_PEERS_H

#include "internal.h"

#include <stdlib.h>
#include <sys/eventfd.h>
#include <sys/mman.h>

static inline int peer_memory(size_t bytes)
{
	int fd = memfd_create("peer", MFD_CLOEXEC);

	if (fd < 0 || ftruncate(fd, (off_t)bytes) < 0)
		abort();
	return fd;
}

/* The gate maps regions read-only; a client needs the same address writable. */
static inline struct valve_client *peer_new(struct valve_gate *gate, uint64_t id, uint32_t role,
                                            int32_t service, int *doorbell)
{
	int control = peer_memory(VALVE_CONTROL_BYTES), region = peer_memory(VALVE_REGION_BYTES);
	struct valve_client *client;

	*doorbell = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
	client = valve_client_new(gate, id, role, service, 0, control, region, *doorbell,
	                          eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
	if (!client || mprotect(client->region, VALVE_REGION_BYTES, PROT_READ | PROT_WRITE) < 0)
		abort();
	store_relaxed(&client->region->slot_offset, VALVE_SLOT_OFFSET);
	store_relaxed(&client->region->slot_count, 2);
	store_release(&client->region->magic, VALVE_REGION_MAGIC);
	close(control);
	close(region);
	return client;
}

static inline void peer_ring(int doorbell)
{
	uint64_t one = 1;

	if (write(doorbell, &one, sizeof one) < 0)
		abort();
}

#endif
