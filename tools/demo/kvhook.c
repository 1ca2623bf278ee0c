/* kvhook.c - see kvhook.h */
#include "kvhook.h"

#include "driver.h"
#include "region.h"

#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

/* Patience with a valved that took the call: it may own the cache already, and what is written there is lost then. */
enum { ANSWER_MS = 30000, MAX_FDS = 4 };
#define START_S 60.0
#define RETRY_S 0.5

/* ---- packets ---- */

struct packet {
	_Alignas(8) unsigned char bytes[VALVE_LINK_MAX];
	int length, fds[MAX_FDS], fd_count;
};

static const struct valve_link_header *header_of(const struct packet *packet)
{
	return (const void *)packet->bytes;
}

static void close_fds(struct packet *packet)
{
	while (packet->fd_count > 0)
		close(packet->fds[--packet->fd_count]);
}

static bool send_message(struct kvhook *hook, void *message, uint32_t bytes, uint16_t type)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	*(struct valve_link_header *)message = (struct valve_link_header){
	        .magic = VALVE_LINK_MAGIC,
	        .abi = VALVE_LINK_ABI,
	        .type = type,
	        .length = bytes,
	        .seq = ++hook->seq,
	        .sent_ns = (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec};
	return hook->socket >= 0 &&
	       send(hook->socket, message, bytes, MSG_DONTWAIT | MSG_NOSIGNAL) == (ssize_t)bytes;
}

static bool receive(struct kvhook *hook, struct packet *packet)
{
	_Alignas(struct cmsghdr) unsigned char room[CMSG_SPACE(MAX_FDS * sizeof(int))];
	struct iovec part = {packet->bytes, sizeof(packet->bytes)};
	struct msghdr head = {
	        .msg_iov = &part, .msg_iovlen = 1, .msg_control = room, .msg_controllen = sizeof(room)};

	packet->fd_count = 0;
	packet->length = (int)recvmsg(hook->socket, &head, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
	if (packet->length <= 0)
		return false;
	for (struct cmsghdr *at = CMSG_FIRSTHDR(&head); at; at = CMSG_NXTHDR(&head, at)) {
		if (at->cmsg_type != SCM_RIGHTS)
			continue;
		packet->fd_count = (int)((at->cmsg_len - CMSG_LEN(0)) / sizeof(int));
		memcpy(packet->fds, CMSG_DATA(at), (size_t)packet->fd_count * sizeof(int));
	}
	return packet->length >= (int)sizeof(struct valve_link_header);
}

/* Sends and waits for the packet that repeats the seq. Without one, there are no descriptors to close either. */
static bool ask(struct kvhook *hook, void *message, uint32_t bytes, uint16_t type, struct packet *answer)
{
	struct pollfd ready = {.fd = hook->socket, .events = POLLIN};

	answer->fd_count = 0;
	if (!send_message(hook, message, bytes, type))
		return false;
	while (poll(&ready, 1, ANSWER_MS) > 0 && receive(hook, answer)) {
		if (header_of(answer)->seq == hook->seq)
			return true;
		close_fds(answer);
	}
	close_fds(answer); /* of a packet too short to have a header */
	return false;
}

/* ---- the conversation ---- */

static int connect_link(void)
{
	const char *folder = getenv("VALVE_RUN_DIR");
	struct sockaddr_un address = {.sun_family = AF_UNIX};
	int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);

	snprintf(address.sun_path, sizeof(address.sun_path), "%s/link.sock", folder ? folder : "/run/valve");
	if (fd < 0 || !connect(fd, (struct sockaddr *)&address, sizeof(address)))
		return fd;
	close(fd);
	return -1;
}

static bool say_hello(struct kvhook *hook)
{
	struct valve_link_hello hello = {.abi_min = VALVE_LINK_ABI,
	                                 .abi_max = VALVE_LINK_ABI,
	                                 .features = VALVE_FEATURE_MEMORY,
	                                 .wanted_role = VALVE_ROLE_HOOK,
	                                 .build = "demo"};
	struct packet answer;
	bool ok = ask(hook, &hello, sizeof(hello), VALVE_LINK_HELLO, &answer) &&
	          header_of(&answer)->type == VALVE_LINK_WELCOME &&
	          (((struct valve_link_welcome *)(void *)answer.bytes)->features & VALVE_FEATURE_MEMORY);

	close_fds(&answer);
	return ok;
}

static bool tell_layout(struct kvhook *hook)
{
	const struct kvhook_shape *shape = hook->shape;
	struct valve_link_kv_layout layout;
	struct packet answer;

	for (uint32_t first = 0; first < shape->tensors; first += layout.count) {
		uint32_t left = shape->tensors - first;

		layout = (struct valve_link_kv_layout){.blocks = shape->blocks,
		                                       .block_tokens = shape->block_tokens,
		                                       .total = shape->tensors,
		                                       .first = first,
		                                       .count = left < VALVE_KV_TENSORS ? left
		                                                                        : VALVE_KV_TENSORS,
		                                       .pinned_count = shape->pinned};
		for (uint32_t i = 0; i < shape->pinned && i < 8; i++)
			layout.pinned[i] = i;
		memcpy(layout.tensor, shape->tensor + first, layout.count * sizeof(layout.tensor[0]));
		if (!ask(hook, &layout, sizeof(layout), VALVE_LINK_KV_LAYOUT, &answer))
			return false;
		close_fds(&answer);
		if (((struct valve_link_ack *)(void *)answer.bytes)->status) {
			fprintf(stderr, "valved refuses the KV layout (error %u)\n",
			        ((struct valve_link_ack *)(void *)answer.bytes)->status);
			return false;
		}
	}
	return true;
}

static bool map_files(struct kvhook *hook, const struct packet *answer)
{
	const struct valve_link_kv_table *told = (const void *)answer->bytes;
	const struct valve_kv_table *table;
	struct valve_kv_book *book;

	if (header_of(answer)->type != VALVE_LINK_KV_TABLE || answer->fd_count != 2)
		return false;
	table = mmap(NULL, told->table_bytes, PROT_READ, MAP_SHARED, answer->fds[0], 0);
	book = mmap(NULL, told->book_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, answer->fds[1], 0);
	if (table == MAP_FAILED || book == MAP_FAILED || table->magic != VALVE_KV_TABLE_MAGIC ||
	    table->blocks != hook->shape->blocks || book->magic != VALVE_KV_BOOK_MAGIC ||
	    book->rows < hook->shape->rows || book->row_blocks < hook->shape->row_blocks)
		return false;
	hook->next_table = table;
	hook->next_book = book;
	return true;
}

static bool attach(struct kvhook *hook)
{
	const struct kvhook_shape *shape = hook->shape;
	struct valve_link_kv_attach attach = {.abi_min = VALVE_KV_ABI,
	                                      .abi_max = VALVE_KV_ABI,
	                                      .mode = VALVE_KV_MODE_FULL,
	                                      .blocks = shape->blocks,
	                                      .block_tokens = shape->block_tokens,
	                                      .rows = shape->rows,
	                                      .row_blocks = shape->row_blocks,
	                                      .ranks = 1};
	struct packet answer;
	bool ok;

	snprintf(attach.engine, sizeof(attach.engine), "%s", shape->engine);
	if (!ask(hook, &attach, sizeof(attach), VALVE_LINK_KV_ATTACH, &answer))
		return false;
	ok = map_files(hook, &answer);
	close_fds(&answer);
	return ok;
}

/*
 * The table of a valved that is gone stays in use until there is another: its last word may be a loss that the engine has
 * not acted on yet, and what has no memory has none still. It is left mapped: a few pages, once per restart.
 */
static void leave(struct kvhook *hook)
{
	if (hook->socket >= 0)
		close(hook->socket);
	hook->socket = -1;
}

/* A conversation may take long: after a restart valved answers once the shim has said what it holds. */
static void *join_valved(void *given)
{
	struct kvhook *hook = given;
	bool joined;

	hook->socket = connect_link();
	joined = hook->socket >= 0 && say_hello(hook) && tell_layout(hook) && attach(hook);
	if (!joined)
		leave(hook);
	__atomic_store_n(&hook->joining, joined ? KVHOOK_JOINED : KVHOOK_NOT, __ATOMIC_RELEASE);
	return NULL;
}

static void begin_joining(struct kvhook *hook)
{
	pthread_t thread;

	if (now_s() - hook->tried_s < RETRY_S)
		return;
	hook->tried_s = now_s();
	hook->joining = KVHOOK_UNDER_WAY;
	if (pthread_create(&thread, NULL, join_valved, hook))
		hook->joining = KVHOOK_NOT;
	else
		pthread_detach(thread);
}

static bool is_there(struct kvhook *hook)
{
	struct packet late;

	if (hook->socket < 0)
		return false;
	while (receive(hook, &late))
		close_fds(&late);
	return late.length < 0 && (errno == EAGAIN || errno == EINTR);
}

static bool is_joining(const struct kvhook *hook)
{
	return __atomic_load_n(&hook->joining, __ATOMIC_ACQUIRE) == KVHOOK_UNDER_WAY;
}

void kvhook_poll(struct kvhook *hook)
{
	if (is_joining(hook))
		return;
	if (hook->joining == KVHOOK_JOINED) {
		hook->joining = KVHOOK_NOT;
		hook->table = hook->next_table;
		hook->book = hook->next_book;
		hook->sessions++;
	}
	if (is_there(hook))
		return;
	leave(hook);
	begin_joining(hook);
}

void kvhook_open(struct kvhook *hook, const struct kvhook_shape *shape)
{
	double start_s = now_s();

	*hook = (struct kvhook){.shape = shape, .socket = -1};
	kvhook_poll(hook);
	while (is_joining(hook) && now_s() - start_s < START_S)
		sleep_s(0.001);
	kvhook_poll(hook);
}

void kvhook_need(struct kvhook *hook)
{
	struct valve_link_kv_need need = {.wanted_blocks = hook->book ? hook->book->wanted_blocks : 0};

	if (hook->book && !is_joining(hook))
		send_message(hook, &need, sizeof(need), VALVE_LINK_KV_NEED);
}

/* ---- table and book ---- */

uint64_t kvhook_epoch(const struct kvhook *hook)
{
	return __atomic_load_n(&hook->table->epoch, __ATOMIC_ACQUIRE);
}

bool kvhook_has_news(const struct kvhook *hook)
{
	return kvhook_epoch(hook) != hook->seen_epoch && !hook->table->detached;
}

const uint32_t *kvhook_entries(const struct kvhook *hook)
{
	return (const uint32_t *)(const void *)((const char *)hook->table + hook->table->entry_offset);
}

const uint32_t *kvhook_columns(const struct kvhook *hook)
{
	return (const uint32_t *)(const void *)((const char *)hook->table + hook->table->column_offset);
}

uint8_t *kvhook_offered(const struct kvhook *hook)
{
	return (uint8_t *)hook->book + hook->book->offered_offset;
}

void kvhook_seen(struct kvhook *hook, uint64_t epoch)
{
	hook->seen_epoch = epoch;
	if (hook->book)
		__atomic_store_n(&hook->book->epoch_seen, epoch, __ATOMIC_RELEASE);
}

void kvhook_row(struct kvhook *hook, uint32_t row, uint64_t request, const uint32_t *cells, uint32_t count,
                uint32_t tokens)
{
	char *base = (char *)hook->book;
	struct valve_kv_row *head;
	uint32_t *cell;

	if (!hook->book || row >= hook->book->rows)
		return;
	head = (struct valve_kv_row *)(void *)(base + hook->book->head_offset) + row;
	cell = (uint32_t *)(void *)(base + hook->book->cell_offset) + (size_t)row * hook->book->row_blocks;
	count = count < hook->book->row_blocks ? count : hook->book->row_blocks;
	head->blocks = 0; /* a reader between the stores sees an empty row, not a wrong one */
	memcpy(cell, cells, count * sizeof(*cell));
	head->request = request;
	head->tokens = tokens;
	__atomic_store_n(&head->blocks, count, __ATOMIC_RELEASE);
}
