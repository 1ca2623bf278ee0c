/*
 * wire.c - connections. Each is greeted, becomes a file, a caller, a page thread or an admin, and
 * callers get a thread of their own: a call that waits for a lock or sleeps a latency blocks
 * exactly the thread that made it.
 */
#include "server.h"
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <unistd.h>

int send_with_fd(int sock, const void *data, size_t size, int fd)
{
	union {
		struct cmsghdr align;
		char room[CMSG_SPACE(sizeof(int))];
	} control = {0};
	struct iovec iov = {(void *)(uintptr_t)data, size};
	struct msghdr msg = {.msg_iov = &iov, .msg_iovlen = 1};
	struct cmsghdr *head;
	ssize_t n;

	if (fd >= 0) {
		msg.msg_control = control.room;
		msg.msg_controllen = sizeof control.room;
		head = CMSG_FIRSTHDR(&msg);
		head->cmsg_level = SOL_SOCKET;
		head->cmsg_type = SCM_RIGHTS;
		head->cmsg_len = CMSG_LEN(sizeof(int));
		memcpy(CMSG_DATA(head), &fd, sizeof fd);
	}
	do
		n = sendmsg(sock, &msg, MSG_NOSIGNAL);
	while (n < 0 && errno == EINTR);
	return n == (ssize_t)size ? 0 : -1;
}

static ssize_t receive(int sock, void *data, size_t size)
{
	ssize_t n;

	do
		n = recv(sock, data, size, 0);
	while (n < 0 && errno == EINTR);
	return n;
}

/* Text for a reader outside, as a memfd that can be read and closed like any file. */
static int text_fd(void (*write)(FILE *))
{
	int fd = memfd_create("valve-emu-text", MFD_CLOEXEC);
	FILE *out = fd < 0 ? NULL : fdopen(dup(fd), "w");

	if (!out)
		return -1;
	write(out);
	fclose(out);
	lseek(fd, 0, SEEK_SET);
	return fd;
}

static int memory_behind(const struct call *c)
{
	struct object *o;
	int fd = -1;

	LOCKED(&S.state);
	o = find_object(c->head.h_client, c->head.h_memory);
	if (o && o->memory && c->file && file_may_use(c->file, o->client))
		fd = memory_fd(o->memory);
	return fd;
}

/* The access took its context along, as an unserviceable fault does: only the kernel log tells of it. */
static void report_fault(const struct call *c)
{
	char text[256];
	uint64_t at = c->head.nodes;
	struct channel *channel;

	snprintf(text, sizeof text,
	         "Ch %08x, intr 00000000. MMU Fault: ENGINE GRAPHICS GPCCLIENT_T1_0 faulted @ 0x%x_%08x. "
	         "Fault is of type FAULT_PDE ACCESS_TYPE_VIRT_%s",
	         c->head.h_client, (unsigned)(at >> 32), (unsigned)at, c->head.h_memory ? "WRITE" : "READ");
	LOCKED(&S.state);
	channel = channel_of_slot(c->head.h_client % EMU_CHANNELS);
	if (channel && channel->pid == c->pid) {
		xid(channel->tsg->gpu, 31, c->pid, text);
		S.mmu_faults++;
	}
}

static int look_up(struct call *c)
{
	switch (c->head.op) {
	case EMU_OP_BOARD:
		return fcntl(S.board_fd, F_DUPFD_CLOEXEC, 0);
	case EMU_OP_MEMORY:
		return memory_behind(c);
	case EMU_OP_STATE:
		return text_fd(snapshot_json);
	case EMU_OP_PROCS:
		return text_fd(snapshot_procs);
	case EMU_OP_FAULT:
		report_fault(c);
		return -1;
	default:
		return -1;
	}
}

static void answer(int sock, struct call *c, char *room)
{
	struct emu_reply reply = {0};
	size_t size;
	int fd = c->memfd;

	take_charges();
	if (c->head.op == EMU_OP_IOCTL)
		reply.error = c->file ? driver_ioctl(c) : EBADF;
	else {
		c->memfd = look_up(c);
		reply.error = c->memfd < 0 ? ENOENT : 0;
	}
	fd = c->memfd;
	reply.model_ns = take_charges();
	reply.arg_size = c->head.op == EMU_OP_IOCTL ? c->head.arg_size : 0;
	reply.params_size = c->head.op == EMU_OP_IOCTL ? c->params_out : 0;
	memcpy(room, &reply, sizeof reply);
	memmove(room + sizeof reply, c->arg, reply.arg_size);
	memmove(room + sizeof reply + reply.arg_size, c->params, reply.params_size);
	size = sizeof reply + reply.arg_size + reply.params_size;
	if (c->page.kind) {
		memcpy(room + size, &c->page, sizeof c->page);
		size += sizeof c->page;
	}
	send_with_fd(sock, room, size, fd);
	if (fd >= 0)
		close(fd);
}

/* Request and answer live in one buffer: the answer's header is smaller, so the body only ever
 * moves down. */
void calls_serve(int sock, pid_t pid, uid_t uid)
{
	char *room = aligned_alloc(64, EMU_MESSAGE_MAX);
	struct call c;
	ssize_t n;

	while (room && (n = receive(sock, room, EMU_MESSAGE_MAX)) >= (ssize_t)sizeof c.head) {
		memset(&c, 0, sizeof c);
		memcpy(&c.head, room, sizeof c.head);
		if (c.head.arg_size > NV_XFER_MAX || c.head.params_size > EMU_PARAMS_MAX ||
		    (size_t)n != sizeof c.head + c.head.arg_size + c.head.params_size)
			break;
		c.entry_ns = now_ns();
		c.pid = pid;
		c.uid = uid;
		c.memfd = -1;
		c.arg = room + sizeof c.head;
		c.params = c.arg + c.head.arg_size;
		c.file = c.head.file == EMU_NO_FILE ? NULL : file_get(c.head.file);
		c.other = c.head.other == EMU_NO_FILE ? NULL : file_get(c.head.other);
		answer(sock, &c, room);
		if (c.file)
			file_put(c.file);
		if (c.other)
			file_put(c.other);
	}
	free(room);
}

static int open_error(const struct emu_hello *hello)
{
	if (hello->kind < EMU_CTL || hello->kind > EMU_ADMIN)
		return EINVAL;
	if (hello->kind == EMU_NODE && hello->minor >= S.gpus)
		return ENXIO;
	if (hello->kind == EMU_NODE && load(&S.gpu[hello->minor].board->lost))
		return EIO;
	return 0;
}

static bool welcome(int sock, int error, const struct file *f)
{
	struct emu_welcome w = {.nonce = S.nonce, .file = f ? f->id : EMU_NO_FILE, .error = error};

	return send_with_fd(sock, &w, sizeof w, -1) == 0 && !error;
}

/* The connection over which the pages of a uvm file's owner are changed. Under the lock of the thread that changes
 * them, so that no thread waits on the former connection, and nothing is sent on this one before the welcome. */
static bool keep_pages(int sock, uint64_t id, pid_t pid)
{
	struct file *f = file_get(id);
	bool kept = false;

	if (f && f->uvm) {
		pthread_mutex_lock(&f->uvm->lock);
		if (f->uvm->initialised && f->uvm->owner == pid && welcome(sock, 0, NULL)) {
			if (f->uvm->pages >= 0)
				close(f->uvm->pages);
			f->uvm->pages = sock;
			kept = true;
		}
		pthread_mutex_unlock(&f->uvm->lock);
	}
	if (f)
		file_put(f);
	return kept || welcome(sock, EPERM, NULL);
}

/* False: the server has no use for the connection. What is kept, as a file or of one, is closed with that file. */
static bool greet(int sock, struct emu_hello *hello, const struct ucred *peer)
{
	struct file *f;
	int error;

	if (receive(sock, hello, sizeof *hello) != sizeof *hello || hello->magic != EMU_WIRE_MAGIC)
		return false;
	error = open_error(hello);
	if (!error && hello->kind == EMU_PAGES)
		return keep_pages(sock, hello->file, peer->pid);
	if (error || hello->kind > EMU_UVM)
		return welcome(sock, error, NULL);
	f = file_new((enum emu_kind)hello->kind, hello->minor, sock, peer->pid, peer->uid);
	if (!f)
		return welcome(sock, ENOMEM, NULL);
	welcome(sock, 0, f);
	file_put(f);
	return true;
}

void *connection_thread(void *argument)
{
	int sock = (int)(intptr_t)argument;
	struct emu_hello hello = {0};
	struct ucred peer = {0};
	socklen_t size = sizeof peer;

	prctl(PR_SET_TIMERSLACK, 1);
	getsockopt(sock, SOL_SOCKET, SO_PEERCRED, &peer, &size);
	if (!greet(sock, &hello, &peer)) {
		close(sock);
		return NULL;
	}
	if (hello.kind == EMU_CALLS)
		calls_serve(sock, peer.pid, peer.uid);
	else if (hello.kind == EMU_ADMIN)
		admin_serve(sock);
	else
		return NULL; /* kept */
	close(sock);
	return NULL;
}

/* The letter that /proc gives it; 0: there is no such process. */
static char state_of(pid_t pid)
{
	char path[32], text[512];
	const char *state;
	ssize_t n;
	int fd;

	snprintf(path, sizeof path, "/proc/%d/stat", pid);
	fd = open(path, O_RDONLY | O_CLOEXEC);
	if (fd < 0)
		return 0;
	n = read(fd, text, sizeof text - 1);
	close(fd);
	text[n > 0 ? n : 0] = 0;
	state = strrchr(text, ')');
	return state ? state[2] : 0;
}

bool process_gone(pid_t pid)
{
	char state = state_of(pid);

	return !state || state == 'Z' || state == 'X';
}

bool process_stands(pid_t pid)
{
	char state = state_of(pid);

	return state == 'T' || state == 't';
}
