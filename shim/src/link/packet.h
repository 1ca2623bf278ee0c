/* packet.h - one packet of the link socket (proto/abi/link.h) with its descriptors. */
#ifndef VALVE_PACKET_H
#define VALVE_PACKET_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "link.h"

#pragma GCC visibility push(hidden)

struct valve_fds {
	uint32_t count;
	bool cut; /* some were lost: this process has no room for more descriptors */
	int at[VALVE_LINK_FDS];
};

/* What is done with a message of valved. It takes over the descriptors it needs; -errno ends the link. */
typedef int valve_link_handler(const struct valve_link_header *packet, int length, struct valve_fds *fds);

/* 0 or -errno, -EAGAIN when the other side has not read what came before. Neither blocks. */
int valve_packet_send(int socket_fd, void *message, uint32_t bytes, const int *fds, uint32_t count);
/* The same packet with the numbers of the descriptors, where it may not carry them. `mark`: put on each file; 0: on none. */
int valve_packet_lend(int socket_fd, void *message, uint32_t bytes, const int *fds, uint32_t count,
                      uint32_t mark);
/* Length, 0 at end of file, or -errno. The descriptors are the caller's to close. */
int valve_packet_receive(int socket_fd, void *message, size_t room, struct valve_fds *fds);
void valve_fds_close(struct valve_fds *fds);

bool valve_packet_is(const struct valve_link_header *header, int length, uint16_t type, size_t bytes);
bool valve_packet_is_runs(const struct valve_link_kv_runs *order, int length, const struct valve_fds *fds);
bool valve_packet_is_order(const struct valve_link_kv_entries *order, int length,
                           const struct valve_fds *fds);

#pragma GCC visibility pop
#endif
