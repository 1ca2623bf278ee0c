/*
 * fakerm.c - a preload that stands behind the shim and says yes: /dev/nvidia* open as memfds, RM_ALLOC hands out
 * handles, every other ioctl succeeds. Calls that gate channels are written to FAKERM_LOG, one line each.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "nvrm.h"

static uint32_t next_handle = 0xC1D00001u;
static uint32_t next_cid = 100;
static uint32_t interrupted; /* questions about the version that a signal cut short */

static void log_line(const char *line)
{
	const char *path = getenv("FAKERM_LOG");
	int fd = path ? (int)syscall(2, path, O_WRONLY | O_CREAT | O_APPEND, 0600) : -1;

	if (fd < 0)
		return;
	if (write(fd, line, strlen(line)) < 0)
		abort();
	close(fd);
}

static int can_read(uint64_t address)
{
	return !syscall(14, ~0, address & ~7ull, NULL, 8) || errno != EFAULT;
}

static int is_ours(const char *path)
{
	return path && !strncmp(path, "/dev/nvidia", 11);
}

static int fake_open(const char *path)
{
	return memfd_create(path + 5, MFD_CLOEXEC);
}

int open(const char *path, int flags, ...)
{
	static int (*real)(const char *, int, ...);
	va_list more;
	int mode;

	va_start(more, flags);
	mode = va_arg(more, int);
	va_end(more);
	if (is_ours(path))
		return fake_open(path);
	if (!real)
		real = (int (*)(const char *, int, ...))dlsym(RTLD_NEXT, "open");
	return real(path, flags, mode);
}

int open64(const char *path, int flags, ...)
{
	va_list more;
	int mode;

	va_start(more, flags);
	mode = va_arg(more, int);
	va_end(more);
	return open(path, flags, mode);
}

int openat(int folder, const char *path, int flags, ...)
{
	static int (*real)(int, const char *, int, ...);
	va_list more;
	int mode;

	va_start(more, flags);
	mode = va_arg(more, int);
	va_end(more);
	if (is_ours(path))
		return fake_open(path);
	if (!real)
		real = (int (*)(int, const char *, int, ...))dlsym(RTLD_NEXT, "openat");
	return real(folder, path, flags, mode);
}

static void log_gate(const struct nvos54_control *control)
{
	const struct nv2080_fifo_disable_channels *list = (const void *)(uintptr_t)control->params;
	char line[2048];
	int at = snprintf(line, sizeof(line), "%s client=%x object=%x n=%u",
	                  list->bDisable ? "disable" : "enable", control->hClient, control->hObject,
	                  list->numChannels);

	for (uint32_t i = 0; i < list->numChannels; i++)
		at += snprintf(line + at, sizeof(line) - (size_t)at, " %x", list->hChannelList[i]);
	snprintf(line + at, sizeof(line) - (size_t)at, "\n");
	log_line(line);
}

static void serve_control(struct nvos54_control *control)
{
	const char *status = getenv("FAKERM_GATE_STATUS");

	control->status = can_read(control->params) ? NV_OK : NV_ERR_INVALID_ARGUMENT;
	if (control->status)
		return;
	if (control->cmd == NV2080_CTRL_CMD_FIFO_DISABLE_CHANNELS) {
		log_gate(control);
		control->status = status ? (uint32_t)atoi(status) : NV_OK;
	} else if (control->cmd == NV2080_CTRL_CMD_FIFO_QUERY_CHANNEL_UNIQUE_ID &&
	           getenv("FAKERM_QUERY_STATUS")) {
		control->status = (uint32_t)atoi(getenv("FAKERM_QUERY_STATUS"));
	} else if (control->cmd == NV2080_CTRL_CMD_GPU_GET_GID_INFO && getenv("FAKERM_GID_STATUS")) {
		control->status = (uint32_t)atoi(getenv("FAKERM_GID_STATUS"));
	} else if (control->cmd == NVA06C_CTRL_CMD_GPFIFO_SCHEDULE ||
	           control->cmd == NVA06F_CTRL_CMD_GPFIFO_SCHEDULE) {
		log_line("schedule\n");
	}
}

static uint32_t serve_alloc(uint32_t *handle, uint32_t class, uint64_t params)
{
	if (params && !can_read(params))
		return NV_ERR_INVALID_ARGUMENT;
	if (!*handle)
		*handle = next_handle++;
	if (NV_CLASS_IS_GPFIFO(class) && params)
		((struct nv_channel_alloc *)(uintptr_t)params)->cid = next_cid++;
	return NV_OK;
}

static int serve(unsigned long request, void *argument)
{
	const char *raising = getenv("FAKERM_RAISES"); /* at a call of this number */
	struct nv_ioctl_xfer *xfer = argument;
	struct nvos21_alloc *old = argument;
	struct nvos64_alloc *new = argument;

	if (raising && (uint32_t)atoi(raising) == NV_IOC_NR(request))
		raise(SIGUSR1);
	switch (NV_IOC_NR(request)) {
	case NV_ESC_IOCTL_XFER_CMD:
		return serve(NV_IOWR(xfer->cmd, xfer->size), (void *)(uintptr_t)xfer->ptr);
	case NV_ESC_CHECK_VERSION_STR:
		if (getenv("FAKERM_INTERRUPTED") &&
		    interrupted++ < (uint32_t)atoi(getenv("FAKERM_INTERRUPTED"))) {
			errno = EINTR;
			return -1;
		}
		strcpy(((struct nv_ioctl_rm_api_version *)argument)->versionString,
		       getenv("FAKERM_VERSION") ? getenv("FAKERM_VERSION") : "580.159.04");
		return 0;
	case NV_ESC_RM_ALLOC:
		if (NV_IOC_SIZE(request) == sizeof(*old)) {
			old->status = serve_alloc(&old->hObjectNew, old->hClass, old->pAllocParms);
		} else {
			new->status = serve_alloc(&new->hObjectNew, new->hClass, new->pAllocParms);
		}
		return 0;
	case NV_ESC_RM_FREE:
		((struct nvos00_free *)argument)->status =
		        getenv("FAKERM_FREE_FAILS") ? NV_ERR_INVALID_STATE : NV_OK;
		return 0;
	case NV_ESC_RM_CONTROL:
		serve_control(argument);
		return 0;
	case NV_ESC_RM_DUP_OBJECT:
		((struct nvos55_dup *)argument)->status = NV_OK;
		return 0;
	default:
		return 0; /* UVM: status words of zeroed arguments already say "fine" */
	}
}

int ioctl(int fd, unsigned long request, ...)
{
	char link[64], name[64];
	ssize_t length;
	void *argument;
	va_list more;

	va_start(more, request);
	argument = va_arg(more, void *);
	va_end(more);
	snprintf(link, sizeof(link), "/proc/self/fd/%d", fd);
	length = readlink(link, name, sizeof(name) - 1);
	name[length > 0 ? length : 0] = 0;
	if (strncmp(name, "/memfd:nvidia", 13) != 0)
		return (int)syscall(16, fd, request, argument);
	return serve(request, argument);
}
