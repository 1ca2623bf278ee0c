/*
 * link.c - the link socket to valved (proto/abi/link.h). Sending never blocks and reading belongs to the session, so
 * no application thread waits for valved except as it registers, and in valve_link_request, which offline processes alone
 * use. Both have a deadline. Every failure ends in "no link", and no link means pass-through.
 *
 * It knows no room above it: what valved sends goes to the handler that was given for its type (valve_link_handle).
 */
#include "settings.h"
#include "shim.h"

#include <errno.h>
#include <poll.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/time.h>

#ifndef VALVE_BUILD
#define VALVE_BUILD "unreleased"
#endif
#define WELCOME_FDS 4  /* control, region, doorbell, order */
#define WAIT_MS     10 /* for one turn in the kernel's queue of those that wait for valved's */
#define HANDLED     32 /* message types that valved may send are below that */

int valve_milliseconds_left(uint64_t deadline_ns)
{
	uint64_t now = now_ns();

	return now >= deadline_ns ? 0 : (int)((deadline_ns - now) / 1000000u) + 1;
}

/*
 * Where valved's queue is full, the kernel wakes those that wait in connect() in their order, one for each connection that
 * valved takes. Whoever only asks now and then finds it full again while others keep it so. The turn is given up after
 * WAIT_MS, and asked for anew: many may wait before us, and one that asks may find room that nobody woken has taken yet.
 */
static int wait_in_line(int fd, const struct sockaddr_un *address, uint64_t deadline_ns)
{
	int left_ms = valve_milliseconds_left(deadline_ns);
	struct timeval most = {.tv_usec = 1000 * (left_ms < 1 ? 1 : left_ms < WAIT_MS ? left_ms : WAIT_MS)};

	if (syscall(SYS_setsockopt, fd, SOL_SOCKET, SO_SNDTIMEO, &most, sizeof(most)) ||
	    syscall(SYS_connect, fd, address, sizeof(*address)))
		return -errno;
	return 0;
}

static int open_socket(uint64_t deadline_ns)
{
	struct sockaddr_un address;
	int err = valve_settings_socket(&address);
	int fd;

	if (err)
		return err;
	fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
	if (fd < 0)
		return -errno;
	fd = valve_own_high(fd);
	err = valve_own_can_tell(fd) ? -EAGAIN : -ENOSYS;
	while ((err == -EAGAIN || err == -EINTR) && (err = wait_in_line(fd, &address, deadline_ns)) &&
	       valve_milliseconds_left(deadline_ns))
		;
	if (!err)
		return fd;
	syscall(SYS_close, fd);
	return err == -EINTR ? -EAGAIN : err;
}

void valve_link_head(struct valve_link_header *header, uint32_t bytes, uint16_t type)
{
	uint32_t seq = add_full(&valve_shim.next_seq, 1);

	*header = (struct valve_link_header){.magic = VALVE_LINK_MAGIC,
	                                     .abi = VALVE_LINK_ABI,
	                                     .type = type,
	                                     .length = bytes,
	                                     .seq = seq ? seq : add_full(&valve_shim.next_seq, 1),
	                                     .sent_ns = now_ns()};
}

/* ---- HELLO ---- */

static int say_hello(int socket_fd, uint32_t wanted_role)
{
	struct valve_link_hello hello = {
	        .abi_min = VALVE_LINK_ABI,
	        .abi_max = VALVE_LINK_ABI,
	        .features = VALVE_FEATURE_GAPS | VALVE_FEATURE_SELF_GATE | VALVE_FEATURE_HOLD |
	                    VALVE_FEATURE_SCHEDULE_DONE | VALVE_FEATURE_MEMORY | VALVE_FEATURE_SPARSE |
	                    VALVE_FEATURE_KV_STEP | VALVE_FEATURE_GRANT | VALVE_FEATURE_KV_RUNS |
	                    VALVE_FEATURE_KEEP | (valve_shim.can_membarrier ? VALVE_FEATURE_PLAIN_COUNT : 0),
	        .wanted_role = wanted_role,
	        .driver = valve_shim.driver,
	        .build = VALVE_BUILD,
	};

	prctl(PR_GET_NAME, hello.comm);
	valve_link_head(&hello.header, sizeof(hello), VALVE_LINK_HELLO);
	return valve_packet_send(socket_fd, &hello, sizeof(hello), NULL, 0);
}

/* Only a version is what it is for good: a mode, a quota or a claim may change at any time. */
static int refused(const struct valve_link_refused *answer)
{
	switch (answer->code) {
	case VALVE_REFUSED_DRAINING:
		return -EAGAIN; /* another valved may come */
	case VALVE_REFUSED_VERSION:
		return VALVE_LINK_NEVER;
	case VALVE_REFUSED_QUOTA:
		return VALVE_LINK_NO_ROOM;
	default:
		return VALVE_LINK_NOT_NOW;
	}
}

/* A valved is there, and would take this process if it had room for it, or came to it. */
bool valve_link_would_take(int err)
{
	return err == VALVE_LINK_NO_ROOM || err == -ETIMEDOUT || err == -EAGAIN || err == -EPIPE;
}

static int await_welcome(int socket_fd, uint64_t deadline_ns, struct valve_link_welcome *welcome,
                         struct valve_fds *fds)
{
	_Alignas(8) unsigned char packet[VALVE_LINK_MAX];
	struct pollfd waiting = {.fd = socket_fd, .events = POLLIN};
	const struct valve_link_header *header = (const void *)packet;
	int length, before;

	do {
		if (is_refused(syscall(SYS_poll, &waiting, 1, valve_milliseconds_left(deadline_ns))))
			sleep_ns(REFUSED_NAP_NS);
		length = valve_packet_receive(socket_fd, packet, sizeof(packet), fds);
	} while (length == -EAGAIN && valve_milliseconds_left(deadline_ns));
	/* It closed the link with our HELLO unread: the kernel tells that first, and then what was said before. */
	if (length == -ECONNRESET &&
	    (before = valve_packet_receive(socket_fd, packet, sizeof(packet), fds)) > 0)
		length = before;
	if (length == -EAGAIN)
		return -ETIMEDOUT;
	if (length <= 0)
		return length ? length : -EPIPE;
	if (valve_packet_is(header, length, VALVE_LINK_REFUSED, sizeof(struct valve_link_refused)))
		return refused((const void *)packet);
	if (!valve_packet_is(header, length, VALVE_LINK_WELCOME, sizeof(*welcome)))
		return -EPROTO;
	memcpy(welcome, packet, sizeof(*welcome));
	return 0;
}

/* A container may have a time namespace, and a preload (libfaketime) may make up the time. What valved wrote after it heard us
 * and before we heard it does not lie between the two then. Nothing tells more exactly by how much the clocks differ: ours is
 * behind by as long as that took. */
static void follow_clock(uint64_t asked_ns, uint64_t told_ns)
{
	uint64_t now = now_ns();

	if (told_ns && (told_ns < asked_ns || told_ns > now))
		store_relaxed(&valve_shim.clock_ns, valve_shim.clock_ns + told_ns - now);
}

static bool is_welcome_sane(const struct valve_link_welcome *welcome, const struct valve_fds *fds)
{
	return welcome->abi == VALVE_LINK_ABI && welcome->control_bytes == VALVE_CONTROL_BYTES &&
	       welcome->region_bytes == VALVE_REGION_BYTES && fds->count >= WELCOME_FDS && !fds->cut &&
	       (welcome->role == VALVE_ROLE_ONLINE || welcome->role == VALVE_ROLE_OFFLINE);
}

static void adopt(int socket_fd, const struct valve_link_welcome *welcome, struct valve_fds *fds)
{
	valve_own_take(VALVE_OWN_DOORBELL, fds->at[2]);
	valve_own_take(VALVE_OWN_ORDER, fds->at[3]);
	fds->at[2] = fds->at[3] = -1;
	valve_own_take(VALVE_OWN_LINK, socket_fd);
	store_relaxed(&valve_shim.link_generation, valve_shim.link_generation + 1);
	valve_shim.daemon_features = welcome->features;
	store_release(&valve_shim.role, welcome->role);
}

/* Precondition: no other thread connects (the first open of nvidiactl, or the session). */
int valve_link_connect(uint32_t wanted_role, int timeout_ms)
{
	uint64_t deadline_ns = now_ns() + (uint64_t)timeout_ms * 1000000u;
	struct valve_link_welcome welcome = {0};
	uint64_t asked_ns;
	struct valve_fds fds = {.count = 0};
	int socket_fd = open_socket(deadline_ns);
	int err;

	if (socket_fd < 0)
		return socket_fd;
	asked_ns = now_ns();
	err = say_hello(socket_fd, wanted_role);
	if (!err)
		err = await_welcome(socket_fd, deadline_ns, &welcome, &fds);
	if (!err && !is_welcome_sane(&welcome, &fds))
		err = -EPROTO;
	if (!err) {
		follow_clock(asked_ns, welcome.header.sent_ns);
		store_relaxed(&valve_shim.must_fence,
		              !valve_shim.can_membarrier || !(welcome.features & VALVE_FEATURE_PLAIN_COUNT));
		valve_lock(&valve_shim.probe_lock); /* capture_depth moves with the region */
		err = valve_map_pages(fds.at[0], fds.at[1], welcome.role);
		valve_unlock(&valve_shim.probe_lock);
	}
	if (!err) {
		valve_lock(&valve_shim.link_lock);
		adopt(socket_fd, &welcome, &fds);
		valve_unlock(&valve_shim.link_lock);
		socket_fd = -1;
	}
	valve_fds_close(&fds); /* mappings outlive their descriptors */
	if (socket_fd >= 0)
		syscall(SYS_close, socket_fd);
	return err;
}

/* ---- after the welcome ---- */

int valve_link_send(void *message, uint32_t bytes, uint16_t type, int fd)
{
	return valve_link_send_fds(message, bytes, type, &fd, fd >= 0, valve_shim.link_generation);
}

/* To that very valved: what was meant for one that is gone never reaches its successor. */
int valve_link_send_fds(void *message, uint32_t bytes, uint16_t type, const int *fds, uint32_t count,
                        uint32_t generation)
{
	int err = -ENOTCONN;
	int link;

	valve_link_head(message, bytes, type);
	valve_lock(&valve_shim.link_lock);
	link = generation == valve_shim.link_generation ? valve_own(VALVE_OWN_LINK) : -1;
	if (link >= 0)
		err = valve_link_post(link, message, bytes, fds, count, type != VALVE_LINK_KV_DONE);
	valve_unlock(&valve_shim.link_lock);
	return err;
}

static int take_ack(const struct valve_link_ack *ack, int length)
{
	if (!valve_packet_is(&ack->header, length, VALVE_LINK_ACK, sizeof(*ack)) || ack->status > 4095 ||
	    !ack->header.seq)   /* which no request has: it would answer all of them */
		return -EPROTO; /* not our valved's words: better none than wrong ones */
	if (ack->status == VALVE_LINK_UNFETCHED)
		store_relaxed(&valve_shim.daemon_features,
		              valve_shim.daemon_features & ~(uint32_t)VALVE_FEATURE_FETCH);
	valve_link_answer(ack->header.seq, 1, ack->status);
	valve_ending_answer(ack->header.seq);
	return 0;
}

static valve_link_handler *handlers[HANDLED];

/* Precondition: no link yet. An ACK's handler is called after the thread that waited for it. */
void valve_link_handle(uint16_t type, valve_link_handler *handler)
{
	if (type < HANDLED)
		handlers[type] = handler;
}

/* Returns 0, or -errno: those are no words of a valved. */
static int dispatch(const struct valve_link_header *packet, int length, struct valve_fds *fds)
{
	uint16_t type = length >= (int)sizeof(*packet) ? packet->type : 0;
	valve_link_handler *handler = type < HANDLED ? handlers[type] : NULL;
	int err = 0;

	if (type == VALVE_LINK_ACK)
		err = fds->cut ? -EPROTO : take_ack((const void *)packet, length);
	else if (!handler)
		err = -EPROTO;
	return !err && handler ? handler(packet, length, fds) : err;
}

/* Under the lock, so that the number stays ours while it is read from. */
static int receive_packet(void *packet, size_t room, struct valve_fds *fds)
{
	int link, length = -ENOTCONN;

	fds->count = 0;
	valve_lock(&valve_shim.link_lock);
	link = valve_own(VALVE_OWN_LINK);
	if (link >= 0)
		length = valve_packet_receive(link, packet, room, fds);
	valve_unlock(&valve_shim.link_lock);
	return length;
}

int valve_link_receive(void)
{
	_Alignas(8) unsigned char packet[VALVE_LINK_MAX];

	for (;;) {
		struct valve_fds fds;
		int length = receive_packet(packet, sizeof(packet), &fds);
		int err;

		if (length == -EAGAIN)
			return 0;
		if (length <= 0)
			return length ? length : -EPIPE;
		err = dispatch((const void *)packet, length, &fds);
		valve_fds_close(&fds); /* those that no handler took */
		if (err)
			return err;
	}
}

/*
 * What valved said before it went is in the socket still, and some of it must be heard (orders.c). Nothing comes after: a
 * valved that hung and goes on is told that the shim does not read. If it died with words of ours unread, the first
 * call says so instead of giving what is there.
 */
static void read_to_the_end(void)
{
	int link = valve_own(VALVE_OWN_LINK);

	if (link < 0)
		return;
	syscall(SYS_shutdown, link, SHUT_RD);
	while (valve_link_receive() == -ECONNRESET)
		;
}

void valve_link_drop(void)
{
	read_to_the_end();
	valve_lock(&valve_shim.link_lock);
	valve_own_close(VALVE_OWN_LINK);
	store_relaxed(&valve_shim.link_generation, valve_shim.link_generation + 1);
	valve_unlock(&valve_shim.link_lock);
	valve_link_answer(0, 2, 0);
}
