/*
 * kernel.c - the part of Linux that the link of the shim uses, as a model: files and their numbers, SOCK_SEQPACKET, eventfds, memfds,
 * poll and the clock; mappings are in kernel_pages.c. Where the kernel has a choice, this does what net/unix/af_unix.c does.
 */
#include "kernel_pages.h"

#include <linux/futex.h>
#include <stdarg.h>

#ifdef __clang__ /* libFuzzer is to look for what is new in the shim, not in here */
#pragma clang attribute push(__attribute__((no_sanitize("coverage"))), apply_to = function)
#endif

#define NUMBERS   1024
#define FIRST     3
#define PASSED    4
#define EVENT_INO 7 /* of all eventfds */
#define LOOK_NS   100u

struct packet {
	struct packet *next;
	uint32_t length, count;
	struct kernel_file *passed[PASSED];
	unsigned char bytes[];
};

struct kernel_file {
	enum { SOCKET, BELL, MEMORY } kind;
	uint32_t refs;    /* numbers, packets that carry it, and the fuzzer */
	uint32_t numbers; /* of the process */
	uint64_t ino;
	int signal;
	uint64_t rung;                /* BELL */
	struct kernel_memory *memory; /* MEMORY */
	uint32_t seals;
	struct packet *first, **last; /* SOCKET: what was told and not read */
	bool is_foreign;              /* the application's */
	bool is_connected, has_valved, reads_no_more, is_reset;
	uint64_t patience_ns; /* of a call that waits; 0: for ever */
};

static struct {
	struct kernel_file *file[NUMBERS];
	uint32_t numbers, files;
	uint64_t now_ns, next_ino;
	int limit, lowest; /* a bell above a limit that was lowered may stay: ownfd.c */
} kernel;
bool kernel_is_crowded;

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
		kernel_memory_drop(file->memory);
	kernel.files--;
	free(file);
}

struct kernel_file *kernel_memory(uint32_t bytes, uint32_t seals)
{
	struct kernel_file *file = new_file(MEMORY);

	file->memory = kernel_memory_new(bytes);
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

static struct kernel_file *file_of(int number)
{
	return number >= 0 && number < NUMBERS ? kernel.file[number] : NULL;
}

/* Takes over the reference, or leaves it. */
static int new_number(struct kernel_file *file, int from)
{
	for (int number = from; number < kernel.limit; number++) {
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

	CHECK(file && !file->is_foreign); /* closed twice: by then it may be another's */
	kernel.file[number] = NULL;
	kernel.numbers--;
	file->numbers--;
	kernel_let_go(file);
	return 0;
}

void kernel_steal(int number, bool reuse)
{
	struct kernel_file *file = file_of(number);

	if (!file || file->is_foreign)
		return;
	close_number(number);
	if (!reuse)
		return;
	kernel.file[number] = new_file(BELL);
	kernel.file[number]->is_foreign = true;
	kernel.file[number]->numbers++;
	kernel.numbers++;
}

void kernel_limit(int numbers, bool no_memory)
{
	kernel.limit = numbers;
	kernel.lowest = numbers < kernel.lowest ? numbers : kernel.lowest;
	kernel_pages_fail(no_memory);
}

int kernel_open(void)
{
	struct kernel_file *file = new_file(BELL);
	int number = new_number(file, FIRST);

	if (number < 0)
		kernel_let_go(file);
	return number;
}

const struct kernel_file *kernel_look(int number, int *signal)
{
	const struct kernel_file *file = file_of(number);

	*signal = file ? file->signal : -1;
	return file;
}

static int duplicate(int from, int to)
{
	struct kernel_file *file = file_of(from);

	if (!file || to >= kernel.limit)
		return -EBADF;
	CHECK(from != to && !file->is_foreign);
	file->refs++;
	if (kernel.file[to])
		close_number(to);
	return new_number(file, to);
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
		CHECK(!file->is_foreign);
		file->signal = value;
		return 0;
	case F_GET_SEALS:
		return file->kind == MEMORY ? (int)file->seals : -EINVAL;
	case F_DUPFD_CLOEXEC:
		CHECK(!file->is_foreign);
		if (value >= kernel.limit)
			return -EINVAL;
		if ((value = new_number(file, value)) >= 0)
			file->refs++;
		return value;
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
	CHECK(file->kind == BELL && !file->is_foreign);
	*rung = file->rung;
	file->rung = 0;
	return *rung ? (int)sizeof(*rung) : -EAGAIN;
}

struct kernel_memory *kernel_memory_of(int number)
{
	struct kernel_file *file = file_of(number);

	CHECK(file && file->kind == MEMORY);
	return file->memory;
}

/* ---- sockets ---- */

static struct kernel_file *link_of(int number)
{
	struct kernel_file *file = file_of(number);

	CHECK(!file || (file->kind == SOCKET && !file->is_foreign));
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

	if (err == -EAGAIN || err == -EINTR) { /* no room, and it waits; or a signal comes */
		CHECK(link->patience_ns);      /* nobody would end it */
		kernel_pass(err == -EINTR ? 1 : link->patience_ns);
	}
	if (err)
		return err;
	link->refs++;
	link->is_connected = link->has_valved = true;
	return 0;
}

static int set_patience(int number, int level, int what, const struct timeval *most)
{
	struct kernel_file *link = link_of(number);

	CHECK(level == SOL_SOCKET && what == SO_SNDTIMEO && most->tv_usec < 1000000);
	if (!link)
		return -EBADF;
	link->patience_ns = (uint64_t)most->tv_sec * 1000000000u + (uint64_t)most->tv_usec * 1000u;
	return 0;
}

static int send_packet(int number, const struct msghdr *packet)
{
	_Alignas(8) unsigned char words[VALVE_LINK_MAX];
	struct kernel_file *link = link_of(number);
	uint32_t bytes = 0;
	int err;

	if (!link)
		return -EBADF;
	if ((err = take_error(link)))
		return err;
	if (!link->has_valved)
		return link->is_connected ? -EPIPE : -ENOTCONN;
	if (packet->msg_controllen && kernel_is_crowded)
		return -ETOOMANYREFS;
	for (size_t i = 0; i < packet->msg_iovlen; i++) {
		CHECK(bytes + packet->msg_iov[i].iov_len <= sizeof(words));
		memcpy(words + bytes, packet->msg_iov[i].iov_base, packet->msg_iov[i].iov_len);
		bytes += (uint32_t)packet->msg_iov[i].iov_len;
	}
	err = valved_hears(link, words, bytes);
	return err ? err : (int)bytes;
}

static void pass(struct packet *packet, struct msghdr *to)
{
	struct cmsghdr *head = to->msg_control;
	uint32_t count = 0;

	CHECK(to->msg_controllen >= CMSG_SPACE(PASSED * sizeof(int)));
	for (uint32_t i = 0; i < packet->count; i++) {
		int number = new_number(packet->passed[i], FIRST);

		if (number < 0) {
			to->msg_flags |= MSG_CTRUNC;
			kernel_let_go(packet->passed[i]);
			continue;
		}
		memcpy(CMSG_DATA(head) + count++ * sizeof(int), &number, sizeof(int));
	}
	to->msg_controllen = count ? CMSG_SPACE(count * sizeof(int)) : 0;
	if (count)
		*head = (struct cmsghdr){CMSG_LEN(count * sizeof(int)), SOL_SOCKET, SCM_RIGHTS};
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
	       packet->length > to->msg_iov[0].iov_len ? to->msg_iov[0].iov_len : packet->length);
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

uint64_t kernel_now(void)
{
	return kernel.now_ns;
}

int kernel_clock(struct timespec *now)
{
	kernel_enters();
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
	CHECK(!file->is_foreign);
	if (file->kind == BELL)
		return file->rung ? wanted & POLLIN : 0;
	CHECK(file->kind == SOCKET);
	if (file->is_reset)
		is |= POLLERR;
	if (file->is_connected && !file->has_valved)
		is |= POLLHUP | POLLIN;
	if (file->first || file->reads_no_more)
		is |= POLLIN;
	if (valved_has_room())
		is |= POLLOUT;
	return (short)(is & (wanted | POLLERR | POLLHUP));
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

static int sleep_for(const struct timespec *span)
{
	kernel_pass((uint64_t)span->tv_sec * 1000000000u + (uint64_t)span->tv_nsec);
	return 0;
}

/* Nobody would wake the only thread: it waits for a time. */
static int wait_on(int operation, const struct timespec *most)
{
	CHECK(operation == FUTEX_WAKE || most);
	if (operation == FUTEX_WAKE)
		return 0;
	sleep_for(most);
	return -ETIMEDOUT;
}

/* ---- the entry ---- */

static int enter(long number, va_list list)
{
	int fd = 0, value, what;
	void *at;

	if (number != SYS_futex && number != SYS_clock_nanosleep && number != SYS_poll)
		fd = va_arg(list, int);
	switch (number) {
	case SYS_membarrier:
	case SYS_kcmp: /* one table */
		return 0;
	case SYS_gettid:
	case SYS_getpid:
		return 1;
	case SYS_close:
		return close_number(fd);
	case SYS_close_range:
		for (value = va_arg(list, int); fd <= value; fd++)
			close_number(fd);
		return 0;
	case SYS_connect:
		return dial(fd);
	case SYS_setsockopt:
		value = va_arg(list, int);
		what = va_arg(list, int);
		return set_patience(fd, value, what, va_arg(list, const struct timeval *));
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
	case SYS_clock_nanosleep:
		va_arg(list, int);
		va_arg(list, int);
		return sleep_for(va_arg(list, const struct timespec *));
	case SYS_futex:
		at = va_arg(list, void *);
		what = va_arg(list, int);
		value = va_arg(list, int);
		return wait_on(what, what == FUTEX_WAIT ? va_arg(list, const struct timespec *) : NULL);
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

	kernel_enters();
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
	struct kernel_file *file = new_file(SOCKET);
	int number = new_number(file, FIRST);

	if (number >= 0)
		return number;
	kernel_let_go(file);
	errno = EMFILE;
	return -1;
}

off_t kernel_size(int number)
{
	const struct kernel_file *file = file_of(number);

	return file && file->kind == MEMORY ? (off_t)file->memory->bytes : -1;
}

void kernel_end(void)
{
	for (int number = FIRST; number < NUMBERS; number++) {
		struct kernel_file *file = kernel.file[number];

		if (!file || !(file->is_foreign || (file->kind == BELL && number >= kernel.lowest)))
			continue;
		file->is_foreign = false;
		close_number(number);
	}
	CHECK(!kernel.numbers && !kernel.files);
	kernel_pages_end();
}

void kernel_begin(void)
{
	kernel.now_ns = 100000000000000u; /* a day: further than any lease */
	kernel.next_ino = EVENT_INO;
	kernel.lowest = NUMBERS;
	kernel_is_crowded = false;
}

#ifdef __clang__
#pragma clang attribute pop
#endif
