/*
 * nodes.c - which paths and which fds are the driver's. A node is recognised by the path of open(),
 * an fd by the abstract name of its socket, which travels with dup, fork and SCM_RIGHTS; so nothing
 * is remembered per process and close() needs no hook.
 */
#include "fakenv.h"
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#define DEV        "/dev/nvidia"
#define PROC       "/proc/driver/nvidia"
#define NAME_START "valve-emu/"

const char *fake_dir(void)
{
	static const char *dir;
	static int known;

	if (!__atomic_load_n(&known, __ATOMIC_ACQUIRE)) {
		const char *value = secure_getenv(EMU_ENV_DIR);

		dir = value && *value ? value : NULL;
		__atomic_store_n(&known, 1, __ATOMIC_RELEASE);
	}
	return dir;
}

bool fake_is_ours(const char *path)
{
	return path && path[0] == '/' &&
	       (strncmp(path, DEV, sizeof DEV - 1) == 0 || strncmp(path, PROC, sizeof PROC - 1) == 0) &&
	       fake_dir();
}

const char *fake_proc_path(const char *path, char *out, size_t size)
{
	if (strncmp(path, PROC, sizeof PROC - 1) != 0)
		return NULL;
	snprintf(out, size, "%s/proc%s", fake_dir(), path + sizeof PROC - 1);
	return out;
}

bool fake_node_exists(const char *path, uint32_t *minor, enum emu_kind *kind)
{
	const char *rest = path + sizeof DEV - 1;
	const struct emu_board *board;
	char *end;

	*minor = 255;
	*kind = EMU_CTL;
	if (strcmp(rest, "ctl") == 0)
		return true;
	*minor = 0;
	*kind = EMU_UVM;
	if (strcmp(rest, "-uvm") == 0)
		return true;
	*kind = EMU_NODE;
	if (*rest < '0' || *rest > '9')
		return false;
	*minor = (uint32_t)strtoul(rest, &end, 10);
	board = fake_board();
	return *end == 0 && board && *minor < board->gpus;
}

/* A socket that stands for a node gets the name by which any holder of the fd finds the file again.
 */
static int open_node(enum emu_kind kind, uint32_t minor, int flags)
{
	struct emu_welcome welcome;
	struct sockaddr_un name = {.sun_family = AF_UNIX};
	int fd = fake_connect(kind, minor, EMU_NO_FILE, &welcome), length;

	if (fd < 0)
		return -1;
	length = snprintf(name.sun_path + 1, sizeof name.sun_path - 1, EMU_NAME_FORMAT, welcome.nonce,
	                  (unsigned)kind, minor, (unsigned long long)welcome.file);
	if (bind(fd, (struct sockaddr *)&name,
	         (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)length))) {
		close(fd);
		return -1;
	}
	if (!(flags & O_CLOEXEC))
		fcntl(fd, F_SETFD, 0);
	return fd;
}

static int open_special(const char *rest)
{
	struct {
		struct emu_call call;
		char room[256];
	} message = {.call = {.file = EMU_NO_FILE, .other = EMU_NO_FILE}};
	unsigned long long file;
	struct emu_reply *reply;
	int fd = -1, rc;

	if (strcmp(rest, "board") == 0)
		message.call.op = EMU_OP_BOARD;
	else if (strcmp(rest, "state") == 0)
		message.call.op = EMU_OP_STATE;
	else if (strcmp(rest, "procs") == 0)
		message.call.op = EMU_OP_PROCS;
	else if (sscanf(rest, "mem/%llu/%u/%u", &file, &message.call.h_client, &message.call.h_memory) == 3) {
		message.call.op = EMU_OP_MEMORY;
		message.call.file = file;
	} else if (sscanf(rest, "fault/%u/%u/%llx", &message.call.h_client, &message.call.h_memory, &file) ==
	           3) {
		message.call.op = EMU_OP_FAULT;
		message.call.nodes = file;
	} else {
		errno = ENOENT;
		return -1;
	}
	rc = fake_call(&message, sizeof message.call, sizeof message, &reply, &fd, NULL);
	if (rc) {
		errno = -rc;
		return -1;
	}
	return fd;
}

int fake_open(const char *path, int flags)
{
	char proc[4096];
	enum emu_kind kind;
	uint32_t minor;

	if (fake_proc_path(path, proc, sizeof proc))
		return fake_real()->open(proc, flags);
	if (strncmp(path, DEV "-emu-", sizeof DEV + 4) == 0)
		return open_special(path + sizeof DEV + 4);
	if (!fake_node_exists(path, &minor, &kind)) {
		errno = ENOENT;
		return -1;
	}
	return open_node(kind, minor, flags);
}

bool fake_node_of_fd(int fd, struct node *out)
{
	struct sockaddr_un name = {.sun_family = AF_UNSPEC};
	socklen_t size = sizeof name - 1; /* one zero byte stays behind the name */
	int saved = errno;
	char *at;

	if (!fake_dir())
		return false;
	if (getsockname(fd, (struct sockaddr *)&name, &size)) {
		errno = saved;
		return false;
	}
	at = name.sun_path + 1;
	if (name.sun_family != AF_UNIX || name.sun_path[0] ||
	    strncmp(at, NAME_START, sizeof NAME_START - 1) != 0)
		return false;
	out->nonce = (uint32_t)strtoul(at + sizeof NAME_START - 1, &at, 16);
	out->kind = (enum emu_kind)strtoul(at + 1, &at, 10);
	out->minor = (uint32_t)strtoul(at + 1, &at, 10);
	out->file = strtoull(at + 1, &at, 10);
	return *at == 0;
}

/* Bit N: this process holds a fd of /dev/nvidiaN. The driver looks into the caller's fd table for
 * the same answer (kernel-open/nvidia/nv.c), which is why a fd that was inherited or passed counts.
 */
uint64_t fake_nodes_held(void)
{
	uint64_t held = 0;
	struct dirent *entry;
	struct node node;
	DIR *fds = opendir("/proc/self/fd");

	if (!fds)
		return 0;
	while ((entry = readdir(fds)) != NULL) {
		if (fake_node_of_fd(atoi(entry->d_name), &node) && node.kind == EMU_NODE && node.minor < 64)
			held |= 1ull << node.minor;
	}
	closedir(fds);
	return held;
}
