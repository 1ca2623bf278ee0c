/*
 * packet.c - one packet of the link: its bytes, the descriptors that ride on it, and whether it makes sense. Knows no
 * state of the shim, so tests/fuzz runs it alone.
 */
#include "packet.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#ifndef SYS_close_range
#define SYS_close_range 436
#endif

int valve_packet_send(int socket_fd, void *message, uint32_t bytes, const int *fds, uint32_t count)
{
	_Alignas(struct cmsghdr) unsigned char room[CMSG_SPACE(VALVE_LINK_FDS * sizeof(int))] = {0};
	struct iovec part = {message, bytes};
	struct msghdr packet = {.msg_iov = &part, .msg_iovlen = 1};

	if (count > VALVE_LINK_FDS)
		return -EMSGSIZE;
	if (count) {
		struct cmsghdr *rights = (struct cmsghdr *)(void *)room;

		packet.msg_control = room;
		packet.msg_controllen = CMSG_SPACE(count * sizeof(int));
		rights->cmsg_level = SOL_SOCKET;
		rights->cmsg_type = SCM_RIGHTS;
		rights->cmsg_len = CMSG_LEN(count * sizeof(int));
		memcpy(CMSG_DATA(rights), fds, count * sizeof(int));
	}
	/* Raw: sendmsg() is a cancellation point, and callers hold locks (atomics.h). */
	if (syscall(SYS_sendmsg, socket_fd, &packet, MSG_DONTWAIT | MSG_NOSIGNAL) == (long)bytes)
		return 0;
	return -errno;
}

int valve_packet_lend(int socket_fd, void *message, uint32_t bytes, const int *fds, uint32_t count,
                      uint32_t mark)
{
	struct valve_link_header *header = message;
	uint32_t trailer[VALVE_LINK_FDS + 2], size = (count + 2) * (uint32_t)sizeof(trailer[0]);
	struct iovec parts[] = {{message, bytes}, {trailer, size}};
	struct msghdr packet = {.msg_iov = parts, .msg_iovlen = 2};
	int err = 0;

	if (!count || count > VALVE_LINK_FDS || bytes + size > VALVE_LINK_MAX)
		return -EMSGSIZE;
	memcpy(trailer, fds, count * sizeof(int));
	trailer[count] = mark;
	trailer[count + 1] = count;
	for (uint32_t i = 0; mark && i < count; i++)
		if (syscall(SYS_fcntl, fds[i], F_SETSIG, mark))
			return -errno;
	header->type |= VALVE_LINK_LENT;
	header->length = bytes + size;
	if (syscall(SYS_sendmsg, socket_fd, &packet, MSG_DONTWAIT | MSG_NOSIGNAL) != (long)(bytes + size))
		err = -errno;
	header->type &= (uint16_t)~VALVE_LINK_LENT;
	header->length = bytes;
	return err;
}

/* Those of a packet have neighbouring numbers as a rule: one call for them, because the next order waits for it. */
void valve_fds_close(struct valve_fds *fds)
{
	for (uint32_t i = 0, n; i < fds->count; i += n) {
		int first = fds->at[i];

		for (n = 1; first >= 0 && i + n < fds->count && fds->at[i + n] == first + (int)n;)
			n++;
		if (n > 1 && !syscall(SYS_close_range, first, first + (int)n - 1, 0))
			continue;
		for (uint32_t k = i; first >= 0 && k < i + n; k++)
			syscall(SYS_close, fds->at[k]);
	}
	fds->count = 0;
}

static void collect(struct msghdr *packet, struct valve_fds *fds)
{
	for (struct cmsghdr *head = CMSG_FIRSTHDR(packet); head; head = CMSG_NXTHDR(packet, head)) {
		size_t passed = (head->cmsg_len - CMSG_LEN(0)) / sizeof(int);

		if (head->cmsg_level != SOL_SOCKET || head->cmsg_type != SCM_RIGHTS)
			continue;
		for (size_t i = 0; i < passed && fds->count < VALVE_LINK_FDS; i++)
			memcpy(&fds->at[fds->count++], CMSG_DATA(head) + i * sizeof(int), sizeof(int));
	}
}

/* Room for all that one packet may carry (VALVE_LINK_FDS): more descriptors come only as "cut". */
int valve_packet_receive(int socket_fd, void *message, size_t room, struct valve_fds *fds)
{
	_Alignas(struct cmsghdr) unsigned char control[CMSG_SPACE(VALVE_LINK_FDS * sizeof(int))];
	struct iovec part = {message, room};
	struct msghdr packet = {
	        .msg_iov = &part, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof(control)};
	long length = syscall(SYS_recvmsg, socket_fd, &packet, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);

	fds->count = 0;
	fds->cut = false;
	if (length < 0)
		return -errno;
	collect(&packet, fds);
	fds->cut = packet.msg_flags & MSG_CTRUNC;
	if (!(packet.msg_flags & MSG_TRUNC))
		return (int)length;
	valve_fds_close(fds);
	return -EPROTO;
}

bool valve_packet_is(const struct valve_link_header *header, int length, uint16_t type, size_t bytes)
{
	return length == (int)bytes && header->magic == VALVE_LINK_MAGIC && header->type == type &&
	       header->length == (uint32_t)length;
}

static bool is_sane_entry(const struct valve_link_kv_entries *order, uint32_t i)
{
	const uint32_t known = order->op == VALVE_KV_BACK ? VALVE_KV_CREATE | VALVE_KV_ZERO : 0;

	return !(order->entry[i].flags & ~known);
}

/* What no valved would send ends the link; what is merely too late or out of range is answered by name (vmm.c). */
bool valve_packet_is_order(const struct valve_link_kv_entries *order, int length, const struct valve_fds *fds)
{
	uint32_t passed = 0;

	if (!valve_packet_is(&order->header, length, VALVE_LINK_KV_ORDER, sizeof(*order)) ||
	    order->op < VALVE_KV_BACK || order->op > VALVE_KV_TRY || order->how > VALVE_KV_OUTSIDE ||
	    order->count > VALVE_KV_ENTRIES ||
	    (order->how == VALVE_KV_OUTSIDE && order->op != VALVE_KV_QUARANTINE &&
	     order->op != VALVE_KV_TRY) ||
	    (order->op == VALVE_KV_TRY && (order->count || order->how == VALVE_KV_AT_STEP)))
		return false;
	for (uint32_t i = 0; i < order->count; i++) {
		if (!is_sane_entry(order, i))
			return false;
		passed += order->op == VALVE_KV_BACK && !(order->entry[i].flags & VALVE_KV_CREATE);
	}
	return fds->cut ? fds->count <= passed : fds->count == passed;
}

static bool are_apart(const struct valve_kv_run *one, const struct valve_kv_run *other)
{
	return one->range != other->range || one->slot + one->count <= other->slot ||
	       other->slot + other->count <= one->slot;
}

static bool is_sane_run(const struct valve_link_kv_runs *order, uint32_t i)
{
	const struct valve_kv_run *run = &order->run[i];
	const uint32_t known = order->op == VALVE_KV_BACK ? VALVE_KV_CREATE | VALVE_KV_ZERO : 0;

	if ((run->flags & ~known) || run->slot > VALVE_KV_MAX_BLOCKS || run->count > VALVE_KV_MAX_BLOCKS ||
	    !run->count)
		return false;
	for (uint32_t j = 0; order->op == VALVE_KV_BACK && j < i; j++)
		if (!are_apart(run, &order->run[j]))
			return false;
	return true;
}

bool valve_packet_is_runs(const struct valve_link_kv_runs *order, int length, const struct valve_fds *fds)
{
	uint32_t passed = 0, slots = 0;

	if (!valve_packet_is(&order->header, length, VALVE_LINK_KV_RUNS, sizeof(*order)) ||
	    order->op < VALVE_KV_BACK || order->op > VALVE_KV_UNBACK || order->how > VALVE_KV_OUTSIDE ||
	    (order->how == VALVE_KV_OUTSIDE && order->op != VALVE_KV_QUARANTINE) || order->count < 1 ||
	    order->count > VALVE_KV_RUNS)
		return false;
	for (uint32_t i = 0; i < order->count; i++) {
		if (!is_sane_run(order, i))
			return false;
		slots += order->run[i].count;
		if (order->op == VALVE_KV_BACK && !(order->run[i].flags & VALVE_KV_CREATE))
			passed += order->run[i].count;
	}
	if (slots > (order->op == VALVE_KV_BACK ? VALVE_KV_ENTRIES : VALVE_KV_MAX_BLOCKS))
		return false;
	return fds->cut ? fds->count <= passed : fds->count == passed;
}
