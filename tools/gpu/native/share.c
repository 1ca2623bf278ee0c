/* share.c - see lab.h. A message is one packet of text, so it arrives whole or not at all. */
#include "lab.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

void *map_shared(const char *path, size_t bytes, bool create, bool writable)
{
	int fd = open(path, (writable ? O_RDWR : O_RDONLY) | O_CLOEXEC | (create ? O_CREAT : 0), 0644);
	void *at = MAP_FAILED;
	struct stat info;

	if (fd < 0)
		return NULL;
	if (!create || !ftruncate(fd, (off_t)bytes)) {
		if (!fstat(fd, &info) && info.st_size >= (off_t)bytes)
			at = mmap(NULL, bytes, PROT_READ | (writable ? PROT_WRITE : 0), MAP_SHARED, fd, 0);
	}
	close(fd);
	return at == MAP_FAILED ? NULL : at;
}

uint32_t from_hex(const char *hex, uint8_t *bytes, uint32_t room)
{
	uint32_t n = 0;

	for (; n < room && sscanf(hex + 2 * n, "%2hhx", &bytes[n]) == 1; n++)
		;
	return n;
}

struct table *map_table(const char *path)
{
	struct table *table = map_shared(path, sizeof(*table), false, false);

	return table && table->magic == TABLE_MAGIC ? table : NULL;
}

struct beat *map_beat(const char *path)
{
	struct beat *beat = map_shared(path, sizeof(*beat), false, true);

	return beat && beat->magic == BEAT_MAGIC ? beat : NULL;
}

static struct sockaddr_un address_of(const char *path)
{
	struct sockaddr_un address = {.sun_family = AF_UNIX};

	snprintf(address.sun_path, sizeof(address.sun_path), "%s", path);
	return address;
}

int sock_listen(const char *path)
{
	struct sockaddr_un address = address_of(path);
	int s = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);

	if (s < 0)
		return -1;
	unlink(path);
	if (bind(s, (struct sockaddr *)&address, sizeof(address)) || listen(s, 16)) {
		close(s);
		return -1;
	}
	return s;
}

int sock_connect(const char *path, unsigned patience_ms)
{
	struct sockaddr_un address = address_of(path);
	uint64_t until = now_ns() + patience_ms * 1000000ull;

	for (;;) {
		int s = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);

		if (s < 0)
			return -1;
		if (!connect(s, (struct sockaddr *)&address, sizeof(address)))
			return s;
		close(s);
		if (now_ns() > until)
			return -1;
		sleep_us(2000);
	}
}

int sock_send(int s, const char *text, int fd)
{
	struct iovec body = {(void *)(uintptr_t)text, strlen(text)};
	union {
		struct cmsghdr head;
		char bytes[CMSG_SPACE(sizeof(int))];
	} control = {0};
	struct msghdr message = {.msg_iov = &body, .msg_iovlen = 1};

	if (fd >= 0) {
		message.msg_control = control.bytes;
		message.msg_controllen = sizeof(control.bytes);
		control.head.cmsg_level = SOL_SOCKET;
		control.head.cmsg_type = SCM_RIGHTS;
		control.head.cmsg_len = CMSG_LEN(sizeof(int));
		memcpy(CMSG_DATA(&control.head), &fd, sizeof(fd));
	}
	return sendmsg(s, &message, MSG_NOSIGNAL) == (ssize_t)body.iov_len ? 0 : -1;
}

int sock_receive(int s, char text[LINE], int *fd, int patience_ms)
{
	struct pollfd ready = {s, POLLIN, 0};
	struct iovec body = {text, LINE - 1};
	union {
		struct cmsghdr head;
		char bytes[CMSG_SPACE(sizeof(int))];
	} control = {0};
	struct msghdr message = {.msg_iov = &body,
	                         .msg_iovlen = 1,
	                         .msg_control = control.bytes,
	                         .msg_controllen = sizeof(control.bytes)};
	int r, got = -1;

	while ((r = poll(&ready, 1, patience_ms)) < 0 && errno == EINTR) {
	}
	ssize_t n = r > 0 ? recvmsg(s, &message, MSG_CMSG_CLOEXEC) : -1;
	if (n <= 0)
		return -1;
	text[n] = 0;
	if (message.msg_controllen && control.head.cmsg_type == SCM_RIGHTS)
		memcpy(&got, CMSG_DATA(&control.head), sizeof(got));
	if (fd)
		*fd = got;
	else if (got >= 0)
		close(got);
	return 0;
}

int sock_ask(int s, const char *text, char answer[LINE], int *fd, int patience_ms)
{
	if (sock_send(s, text, -1))
		return -1;
	return sock_receive(s, answer, fd, patience_ms);
}
