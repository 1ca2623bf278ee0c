/*
 * knocks.c - takes the connections that wait at valved's socket, and closes those that it does not want: many in one call, so
 * that a flood costs the loop a system call or two for each. Knows nothing else of the gate.
 */
#include "gate.h"

#include <errno.h>
#include <stdbool.h>
#include <sys/socket.h>
#include <unistd.h>

int valve_knocks_take(int listener, int32_t *found, int most)
{
	for (int count = 0; count < most; count++) {
		struct ucred who = {.pid = 0};
		socklen_t bytes = sizeof(who);
		int fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
		bool is_end = fd < 0 && (errno == EAGAIN || errno == EINTR || errno == ECONNABORTED);

		if (fd < 0)
			return count || is_end ? count : -errno;
		getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &who, &bytes);
		*found++ = fd;
		*found++ = who.pid;
		*found++ = (int32_t)who.uid;
	}
	return most;
}

void valve_knocks_close(const int32_t *fds, int count)
{
	for (int i = 0; i < count; i++)
		close(fds[i]);
}
