/* mute.c - opens the driver with a stderr on which a message would do harm, or none. Usage: mute WAY FILE */
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

static int full_pipe(void)
{
	char block[4096] = {0};
	int ends[2];

	if (pipe(ends) || fcntl(ends[1], F_SETFL, O_NONBLOCK))
		return -1;
	while (write(ends[1], block, sizeof(block)) > 0)
		;
	return fcntl(ends[1], F_SETFL, 0) ? -1 : ends[1];
}

/* The lowest number that is free is 2 from here on. */
static int taken_by(const char *way, const char *file)
{
	int ends[2];

	close(2);
	if (!strcmp(way, "connection"))
		return socketpair(AF_UNIX, SOCK_STREAM, 0, ends) ? -1 : ends[0];
	return open(file, O_RDWR | O_CREAT | (strcmp(way, "journal") ? 0 : O_APPEND), 0600);
}

int main(int argc, char **argv)
{
	const char *way = argc > 2 ? argv[1] : "";
	int ends[2], stderr_now = 2;
	char line[8], heard[8];

	alarm(100);
	if (!strcmp(way, "gone")) {
		stderr_now = pipe(ends) || close(ends[0]) ? -1 : dup2(ends[1], 2);
	} else if (!strcmp(way, "full")) {
		stderr_now = dup2(full_pipe(), 2);
	} else if (!strcmp(way, "made so")) {
		stderr_now = dup2(open(argv[2], O_RDWR | O_CREAT, 0600), 2);
	} else {
		stderr_now = taken_by(way, argv[2]);
	}
	if (stderr_now != 2 || open("/dev/nvidiactl", O_RDWR) < 0)
		return 1;
	puts("alive");
	fflush(stdout);
	if (!fgets(line, sizeof(line), stdin))
		line[0] = 0;
	/* socketpair() gave the lowest two that were free: the other end is the next number */
	return strcmp(way, "connection") == 0 && recv(3, heard, sizeof(heard), MSG_DONTWAIT) > 0 ? 2 : 0;
}
