/*
 * calls.c - one request to the server and its answer. Each thread has a connection of its own, made
 * at its first call and again after fork, so that a thread that waits inside the driver blocks
 * no other thread. No allocation after the first call of a thread, no stdio: executors may be parked
 * anywhere while we run.
 */
#include "fakenv.h"
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

/* A program may close fds it does not know (daemons do). We then must not write into whatever took
 * the number, so the socket's inode is compared before each use. */
struct connection {
	int fd;
	pid_t pid;
	ino_t inode;
};
static __thread struct connection mine = {-1, 0, 0};
static pthread_key_t at_exit_key;
static pthread_once_t key_once = PTHREAD_ONCE_INIT;

/* Keep out of the way of programs that count on low fd numbers. */
enum { FD_FLOOR = 700 };

static int send_all(int fd, const void *data, size_t size)
{
	ssize_t n;

	do
		n = send(fd, data, size, MSG_NOSIGNAL);
	while (n < 0 && errno == EINTR);
	return n == (ssize_t)size ? 0 : -1;
}

ssize_t fake_receive(int fd, void *data, size_t size, int *passed_fd)
{
	union {
		struct cmsghdr align;
		char room[CMSG_SPACE(sizeof(int))];
	} control;
	struct iovec iov = {data, size};
	struct msghdr msg = {.msg_iov = &iov,
	                     .msg_iovlen = 1,
	                     .msg_control = control.room,
	                     .msg_controllen = sizeof control.room};
	struct cmsghdr *head;
	ssize_t n;

	do
		n = recvmsg(fd, &msg, MSG_CMSG_CLOEXEC);
	while (n < 0 && errno == EINTR);
	head = n >= 0 ? CMSG_FIRSTHDR(&msg) : NULL;
	if (head && head->cmsg_type == SCM_RIGHTS && passed_fd)
		memcpy(passed_fd, CMSG_DATA(head), sizeof *passed_fd);
	return n;
}

int fake_connect(enum emu_kind kind, uint32_t minor, uint64_t file, struct emu_welcome *welcome)
{
	struct emu_hello hello = {EMU_WIRE_MAGIC, kind, minor, 0, file};
	struct sockaddr_un address = {.sun_family = AF_UNIX};
	int fd, high;

	if ((size_t)snprintf(address.sun_path, sizeof address.sun_path, "%s/%s", fake_dir(), EMU_SOCKET) >=
	    sizeof address.sun_path) {
		errno = ENAMETOOLONG;
		return -1;
	}
	fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
	if (fd < 0)
		return -1;
	if (kind == EMU_CALLS || kind == EMU_PAGES) {
		high = fcntl(fd, F_DUPFD_CLOEXEC, FD_FLOOR);
		if (high >= 0) {
			close(fd);
			fd = high;
		}
	}
	if (connect(fd, (struct sockaddr *)&address, sizeof address) || send_all(fd, &hello, sizeof hello) ||
	    fake_receive(fd, welcome, sizeof *welcome, NULL) != (ssize_t)sizeof *welcome) {
		close(fd);
		errno = ENODEV; /* no server: as a node whose driver is not loaded */
		return -1;
	}
	if (welcome->error) {
		close(fd);
		errno = welcome->error;
		return -1;
	}
	return fd;
}

/* By number: our own fstat would ask what the socket stands for, a system call more at each driver call. */
static int plain_fstat(int fd, struct stat *st)
{
	return (int)syscall(SYS_fstat, fd, st);
}

static bool still_ours(const struct connection *c)
{
	struct stat st;

	return c->fd >= 0 && c->pid == getpid() && plain_fstat(c->fd, &st) == 0 && S_ISSOCK(st.st_mode) &&
	       st.st_ino == c->inode;
}

static void thread_gone(void *unused)
{
	(void)unused;
	if (still_ours(&mine))
		close(mine.fd);
	mine.fd = -1;
}

static void make_key(void)
{
	pthread_key_create(&at_exit_key, thread_gone);
}

static int connection_of_thread(void)
{
	struct emu_welcome welcome;
	struct stat st;

	if (still_ours(&mine))
		return mine.fd;
	mine.fd = fake_connect(EMU_CALLS, 0, EMU_NO_FILE, &welcome);
	if (mine.fd < 0 || plain_fstat(mine.fd, &st))
		return -1;
	mine.pid = getpid();
	mine.inode = st.st_ino;
	pthread_once(&key_once, make_key);
	pthread_setspecific(at_exit_key, &mine);
	return mine.fd;
}

int fake_call(void *message, size_t size, size_t capacity, struct emu_reply **reply, int *fd_out,
              struct emu_page_op *op_out)
{
	struct emu_page_op op = {0};
	int fd = connection_of_thread(), passed = -1;
	struct emu_reply *head = message;
	ssize_t n;

	if (fd < 0)
		return -ENODEV;
	if (send_all(fd, message, size))
		return -ENODEV;
	n = fake_receive(fd, message, capacity, &passed);
	if (n < (ssize_t)sizeof *head)
		return -ENODEV;
	if ((size_t)n >= sizeof *head + head->arg_size + head->params_size + sizeof op)
		memcpy(&op, (char *)message + n - sizeof op, sizeof op);
	if (op_out)
		*op_out = op;
	if (fd_out)
		*fd_out = passed;
	else if (passed >= 0)
		close(passed);
	*reply = head;
	return -head->error;
}

static const struct emu_board *map_board(void)
{
	union {
		struct emu_call call;
		char room[512];
	} message = {.call = {.op = EMU_OP_BOARD, .file = EMU_NO_FILE, .other = EMU_NO_FILE}};
	struct emu_reply *reply;
	void *at = MAP_FAILED;
	int fd = -1;

	if (fake_call(&message, sizeof message.call, sizeof message, &reply, &fd, NULL) == 0 && fd >= 0)
		at = mmap(NULL, sizeof(struct emu_board), PROT_READ, MAP_SHARED, fd, 0);
	if (fd >= 0)
		close(fd);
	return at == MAP_FAILED ? NULL : at;
}

const struct emu_board *fake_board(void)
{
	static const struct emu_board *board;
	const struct emu_board *seen = __atomic_load_n(&board, __ATOMIC_ACQUIRE);

	if (!seen) {
		seen = map_board(); /* two threads may both map it: one mapping is then simply
		                       unused */
		__atomic_store_n(&board, seen, __ATOMIC_RELEASE);
	}
	return seen;
}

uint32_t fake_branch(void)
{
	const struct emu_board *board = fake_board();

	return board ? board->driver[0] : 580;
}
