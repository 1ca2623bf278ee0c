/*
 * kernel.c - the part of Linux that the link of the shim uses, as a model: files and their numbers, SOCK_SEQPACKET, eventfds, memfds,
 * mappings, poll and the clock. Where the kernel has a choice, this does what net/unix/af_unix.c does.
 */
#include "kernel.h"

#include <linux/futex.h>
#include <stdarg.h>

#include <sanitizer/asan_interface.h>

#ifdef __clang__ /* libFuzzer is to look for what is new in the shim, not in here */
#pragma clang attribute push(__attribute__((no_sanitize("coverage"))), apply_to = function)
#endif

#define NUMBERS   1024
#define FIRST     3
#define MEMORIES  64
#define PASSED    4
#define EVENT_INO 7 /* of all eventfds */
#define LOOK_NS   100u

struct packet {
	struct packet *next;
	uint32_t length, count;
	struct kernel_file *passed[PASSED];
	unsigned char bytes[];
};

struct memory {
	uint32_t refs; /* its file, and mappings */
	uint32_t bytes;
	_Alignas(64) unsigned char at[VALVE_REGION_BYTES];
};

struct kernel_file {
	enum { SOCKET, BELL, MEMORY } kind;
	uint32_t refs;    /* numbers, packets that carry it, and the fuzzer */
	uint32_t numbers; /* of the process */
	uint64_t ino;
	int signal;
	uint64_t rung;         /* BELL */
	struct memory *memory; /* MEMORY */
	uint32_t seals;
	struct packet *first, **last; /* SOCKET: what was told and not read */
	bool is_connected, has_valved, reads_no_more, is_reset;
};

unsigned char *kernel_at[KERNEL_PLACES];

static struct {
	struct kernel_file *file[NUMBERS];
	uint32_t numbers, files, memories;
	uint64_t now_ns, next_ino;
	struct memory memory[MEMORIES];
} kernel;

/* ---- memory ---- */

static struct memory *new_memory(uint32_t bytes)
{
	CHECK(bytes <= VALVE_REGION_BYTES);
	for (uint32_t i = 0; i < MEMORIES; i++) {
		struct memory *memory = &kernel.memory[i];

		if (memory->refs)
			continue;
		ASAN_UNPOISON_MEMORY_REGION(memory->at, bytes);
		memory->refs = 1;
		memory->bytes = bytes;
		memset(memory->at, 0, bytes);
		kernel.memories++;
		return memory;
	}
	CHECK(!"memories");
	return NULL;
}

static void drop_memory(struct memory *memory)
{
	if (--memory->refs)
		return;
	ASAN_POISON_MEMORY_REGION(memory->at, sizeof(memory->at));
	kernel.memories--;
}

static struct memory *memory_at(const void *at)
{
	return (struct memory *)(void *)((unsigned char *)(uintptr_t)at - offsetof(struct memory, at));
}

static int place_of(const void *at)
{
	if (at == valve_pages)
		return KERNEL_LAUNCH;
	if (at == valve_pages + VALVE_CONTROL_BYTES)
		return KERNEL_REGION;
	CHECK(at == kernel_at[KERNEL_CONTROL]);
	return KERNEL_CONTROL;
}

static void put(enum kernel_place place, unsigned char *at)
{
	unsigned char *before = kernel_at[place];

	kernel_at[place] = at;
	if (before)
		drop_memory(memory_at(before));
}

void *kernel_map(void *at, size_t bytes, int flags, int number)
{
	struct memory *memory;

	if (flags & MAP_FIXED) { /* all pages at once, fresh */
		CHECK(at == valve_pages && bytes == VALVE_PAGES_BYTES);
		put(KERNEL_LAUNCH, new_memory(VALVE_CONTROL_BYTES)->at);
		put(KERNEL_REGION, new_memory(VALVE_REGION_BYTES)->at);
		put(KERNEL_CONTROL, new_memory(VALVE_CONTROL_BYTES)->at);
		return at;
	}
	if (flags & MAP_ANONYMOUS)
		return new_memory((uint32_t)bytes)->at;
	CHECK(kernel.file[number] && kernel.file[number]->kind == MEMORY);
	memory = kernel.file[number]->memory;
	CHECK(memory->bytes >= bytes); /* else a touch would be SIGBUS */
	memory->refs++;
	return memory->at;
}

void *kernel_remap(void *from, size_t bytes, void *to)
{
	if (from == kernel_at[KERNEL_CONTROL]) /* old size 0: mapped twice */
		memory_at(from)->refs++;
	CHECK(memory_at(from)->bytes >= bytes);
	put(place_of(to), from);
	return to;
}

int kernel_unmap(void *at)
{
	drop_memory(memory_at(at));
	return 0;
}

/* ---- files ---- */

static struct kernel_file *new_file(int kind)
{
	struct kernel_file *file = calloc(1, sizeof(*file));

	file->kind = kind;
	file->refs = 1;
	file->ino = kind == BELL ? EVENT_INO : ++kernel.next_ino;
	file->last = &file->first;
	kernel.files++;
	return file;
}

void kernel_let_go(struct kernel_file *file)
{
	if (--file->refs)
		return;
	for (struct packet *packet = file->first, *next; packet; packet = next) {
		next = packet->next;
		for (uint32_t i = 0; i < packet->count; i++)
			kernel_let_go(packet->passed[i]);
		free(packet);
	}
	if (file->memory)
		drop_memory(file->memory);
	kernel.files--;
	free(file);
}

struct kernel_file *kernel_memory(uint32_t bytes, uint32_t seals)
{
	struct kernel_file *file = new_file(MEMORY);

	file->memory = new_memory(bytes);
	file->seals = seals;
	return file;
}

struct kernel_file *kernel_bell(void)
{
	return new_file(BELL);
}

void *kernel_bytes(const struct kernel_file *memory)
{
	return memory->memory->at;
}

void kernel_ring(struct kernel_file *bell)
{
	bell->rung++;
}

void kernel_ring_number(int number)
{
	kernel.file[number]->rung++;
}

static struct kernel_file *file_of(int number)
{
	return number >= 0 && number < NUMBERS ? kernel.file[number] : NULL;
}

/* Takes over the reference. */
static int new_number(struct kernel_file *file, int from)
{
	for (int number = from; number < NUMBERS; number++) {
		if (kernel.file[number])
			continue;
		kernel.file[number] = file;
		file->numbers++;
		kernel.numbers++;
		return number;
	}
	return -EMFILE;
}

static int close_number(int number)
{
	struct kernel_file *file = file_of(number);

	CHECK(file); /* closed twice: by then it may be another's */
	kernel.file[number] = NULL;
	kernel.numbers--;
	file->numbers--;
	kernel_let_go(file);
	return 0;
}

static int duplicate(int from, int to)
{
	struct kernel_file *file = file_of(from);

	if (!file || to >= NUMBERS)
		return -EBADF;
	CHECK(from != to);
	file->refs++;
	if (kernel.file[to])
		close_number(to);
	new_number(file, to);
	return to;
}

static int control(int number, int what, int value)
{
	struct kernel_file *file = file_of(number);

	if (!file)
		return -EBADF;
	switch (what) {
	case F_GETSIG:
		return file->signal;
	case F_SETSIG:
		file->signal = value;
		return 0;
	case F_GET_SEALS:
		return file->kind == MEMORY ? (int)file->seals : -EINVAL;
	case F_DUPFD_CLOEXEC:
		file->refs++;
		return new_number(file, value);
	}
	CHECK(!"fcntl");
	return 0;
}

static int look(int number, struct stat *now)
{
	const struct kernel_file *file = file_of(number);

	if (!file)
		return -EBADF;
	now->st_dev = (unsigned)file->kind + 1;
	now->st_ino = file->ino;
	return 0;
}

static int read_bell(int number, uint64_t *rung)
{
	struct kernel_file *file = file_of(number);

	if (!file)
		return -EBADF;
	CHECK(file->kind == BELL);
	*rung = file->rung;
	file->rung = 0;
	return *rung ? (int)sizeof(*rung) : -EAGAIN;
}

/* ---- sockets ---- */

static struct kernel_file *link_of(int number)
{
	struct kernel_file *file = file_of(number);

	CHECK(!file || file->kind == SOCKET);
	return file;
}

static int take_error(struct kernel_file *link)
{
	bool is_reset = link->is_reset;

	link->is_reset = false;
	return is_reset ? -ECONNRESET : 0;
}

static int dial(int number)
{
	struct kernel_file *link = link_of(number);
	int err = valved_accepts(link);

	if (err)
		return err;
	link->refs++;
	link->is_connected = link->has_valved = true;
	return 0;
}

static int send_packet(int number, const struct msghdr *packet)
{
	struct kernel_file *link = link_of(number);
	int err;

	if (!link)
		return -EBADF;
	if ((err = take_error(link)))
		return err;
	if (!link->has_valved)
		return link->is_connected ? -EPIPE : -ENOTCONN;
	CHECK(!packet->msg_controllen);
	err = valved_hears(link, packet->msg_iov[0].iov_base, (uint32_t)packet->msg_iov[0].iov_len);
	return err ? err : (int)packet->msg_iov[0].iov_len;
}

static void pass(struct packet *packet, struct msghdr *to)
{
	struct cmsghdr *head = to->msg_control;

	if (!packet->count) {
		to->msg_controllen = 0;
		return;
	}
	CHECK(to->msg_controllen >= CMSG_SPACE(PASSED * sizeof(int)));
	for (uint32_t i = 0; i < packet->count; i++) {
		int number = new_number(packet->passed[i], FIRST);

		memcpy(CMSG_DATA(head) + i * sizeof(int), &number, sizeof(int));
	}
	*head = (struct cmsghdr){CMSG_LEN(packet->count * sizeof(int)), SOL_SOCKET, SCM_RIGHTS};
	to->msg_controllen = CMSG_SPACE(packet->count * sizeof(int));
}

static int receive_packet(int number, struct msghdr *to)
{
	struct kernel_file *link = link_of(number);
	struct packet *packet;
	int err, length;

	if (!link)
		return -EBADF;
	if ((err = take_error(link)))
		return err;
	packet = link->first;
	if (!packet)
		return link->has_valved && !link->reads_no_more ? -EAGAIN : 0;
	link->first = packet->next;
	link->last = link->first ? link->last : &link->first;
	length = (int)packet->length;
	to->msg_flags = packet->length > to->msg_iov[0].iov_len ? MSG_TRUNC : 0;
	memcpy(to->msg_iov[0].iov_base, packet->bytes,
	       to->msg_flags ? to->msg_iov[0].iov_len : packet->length);
	pass(packet, to);
	free(packet);
	return length;
}

bool kernel_tell(struct kernel_file *link, const void *bytes, uint32_t length,
                 struct kernel_file *const *files, uint32_t count)
{
	struct packet *packet;

	if (!link->numbers || link->reads_no_more)
		return false;
	packet = calloc(1, sizeof(*packet) + length);
	packet->length = length;
	packet->count = count;
	memcpy(packet->bytes, bytes, length);
	for (uint32_t i = 0; i < count; i++) {
		packet->passed[i] = files[i];
		files[i]->refs++;
	}
	*link->last = packet;
	link->last = &packet->next;
	return true;
}

void kernel_hang_up(struct kernel_file *link, bool unread)
{
	link->has_valved = false;
	link->is_reset |= unread;
	kernel_let_go(link);
}

static int shut(int number)
{
	struct kernel_file *link = link_of(number);

	if (!link)
		return -EBADF;
	link->reads_no_more = true;
	return link->is_connected ? 0 : -ENOTCONN;
}

/* ---- time ---- */

void kernel_pass(uint64_t ns)
{
	kernel.now_ns += ns;
	kernel_waits();
}

int kernel_clock(struct timespec *now)
{
	kernel.now_ns += LOOK_NS;
	now->tv_sec = (time_t)(kernel.now_ns / 1000000000u);
	now->tv_nsec = (long)(kernel.now_ns % 1000000000u);
	return 0;
}

static short state_of(int number, short wanted)
{
	const struct kernel_file *file = file_of(number);
	short is = 0;

	if (number < 0)
		return 0;
	if (!file)
		return POLLNVAL;
	if (file->kind == BELL)
		return file->rung ? wanted & POLLIN : 0;
	CHECK(file->kind == SOCKET);
	if (file->is_reset)
		is |= POLLERR;
	if (file->is_connected && !file->has_valved)
		is |= POLLHUP | POLLIN;
	if (file->first || file->reads_no_more)
		is |= POLLIN;
	return (short)((is | POLLOUT) & (wanted | POLLERR | POLLHUP));
}

static int wait_ready(struct pollfd *ready, int count, int timeout_ms)
{
	int found = 0;

	CHECK(timeout_ms >= 0); /* nobody would end it */
	for (int turn = 0; turn < 2 && !found; turn++) {
		if (turn)
			kernel_pass((uint64_t)timeout_ms * 1000000u);
		for (int i = 0; i < count; i++) {
			ready[i].revents = state_of(ready[i].fd, ready[i].events);
			found += ready[i].revents != 0;
		}
	}
	return found;
}

static int wait_on(int operation)
{
	CHECK(operation == FUTEX_WAKE); /* nobody would wake the only thread */
	return 0;
}

static int sleep_for(const struct timespec *span)
{
	kernel_pass((uint64_t)span->tv_sec * 1000000000u + (uint64_t)span->tv_nsec);
	return 0;
}

/* ---- the entry ---- */

static int enter(long number, va_list list)
{
	int fd = 0, value;
	void *at;

	if (number != SYS_futex && number != SYS_nanosleep && number != SYS_poll)
		fd = va_arg(list, int);
	switch (number) {
	case SYS_membarrier:
		return 0;
	case SYS_getpid:
		return 1;
	case SYS_close:
		return close_number(fd);
	case SYS_connect:
		return dial(fd);
	case SYS_shutdown:
		return shut(fd);
	case SYS_dup3:
		return duplicate(fd, va_arg(list, int));
	case SYS_fstat:
		return look(fd, va_arg(list, struct stat *));
	case SYS_read:
		return read_bell(fd, va_arg(list, uint64_t *));
	case SYS_sendmsg:
		return send_packet(fd, va_arg(list, const struct msghdr *));
	case SYS_recvmsg:
		return receive_packet(fd, va_arg(list, struct msghdr *));
	case SYS_fcntl:
		value = va_arg(list, int);
		return control(fd, value,
		               value == F_SETSIG || value == F_DUPFD_CLOEXEC ? va_arg(list, int) : 0);
	case SYS_nanosleep:
		return sleep_for(va_arg(list, const struct timespec *));
	case SYS_futex:
		at = va_arg(list, void *);
		return wait_on(va_arg(list, int));
	case SYS_poll:
		at = va_arg(list, void *);
		value = va_arg(list, int);
		return wait_ready(at, value, va_arg(list, int));
	}
	CHECK(!"a call that the model does not know");
	return 0;
}

long kernel_call(long number, ...)
{
	va_list list;
	int result;

	va_start(list, number);
	result = enter(number, list);
	va_end(list);
	if (result >= 0)
		return result;
	errno = -result;
	return -1;
}

int kernel_socket(void)
{
	return new_number(new_file(SOCKET), FIRST);
}

off_t kernel_size(int number)
{
	const struct kernel_file *file = file_of(number);

	return file && file->kind == MEMORY ? (off_t)file->memory->bytes : -1;
}

void kernel_end(void)
{
	for (int place = 0; place < KERNEL_PLACES; place++)
		put((enum kernel_place)place, NULL);
	CHECK(!kernel.numbers && !kernel.files && !kernel.memories);
}

void kernel_begin(void)
{
	kernel.now_ns = 100000000000000u; /* a day: further than any lease */
	kernel.next_ino = EVENT_INO;
	ASAN_POISON_MEMORY_REGION(valve_pages, VALVE_PAGES_BYTES);
}

const char *__asan_default_options(void);

/* What was freed is few and small: more of it only costs cache misses. */
const char *__asan_default_options(void)
{
	return "quarantine_size_mb=4:malloc_context_size=3";
}

#ifdef __clang__
#pragma clang attribute pop
#endif
