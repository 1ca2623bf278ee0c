/*
 * capture.c - hooks on open and ioctl: which descriptors are the driver's, and what goes through them (closing.c: how they
 * end). libcuda reaches the kernel by these dynamic symbols; launches do not enter it, so nothing here costs anything at
 * work.
 *
 * Each hook: guard, real call, record. Two exceptions, and why: a FREE (and a close) is recorded before the real call,
 * because the handle may be in use again the moment it returns; a SCHEDULE of an offline process waits before, because
 * valved must know the channels before they can run, and must not have a closed gate opened under it.
 */
#include "keep.h"
#include "report.h"
#include "watched.h"

#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <string.h>

#define OBJECTS           8192
#define INTERRUPTED_TRIES 16

static uint32_t uvm_fd;                   /* and 1, of the file with the channels; 0: none yet */
static struct rm_object objects[OBJECTS]; /* untouched pages until a driver is opened */

/* The kernel copies 8 aligned bytes from there before it refuses the impossible `how`; a fault says EFAULT instead. */
static bool is_mapped(uintptr_t at)
{
	return syscall(SYS_rt_sigprocmask, ~0, at & ~(uintptr_t)7, NULL, 8) == 0 || errno != EFAULT;
}

static bool is_readable(const void *pointer, size_t bytes)
{
	uintptr_t first = (uintptr_t)pointer, last = first + bytes - 1;

	if (last < first)
		return false;
	for (uintptr_t at = first; at < last; at += VALVE_PAGE)
		if (!is_mapped(at))
			return false;
	return is_mapped(last);
}

struct rm_map valve_rm = {.objects = objects, .capacity = OBJECTS, .readable = is_readable};

void valve_capture_reset(void)
{
	valve_watched_reset();
	valve_ends_forget();
	if (uvm_fd)
		uvm_fd = 0;
	if (valve_rm.version || valve_rm.used || valve_rm.incomplete) {
		rm_reset(&valve_rm);
		valve_self_gate_reset();
	}
}

/* ---- the real calls ---- */

static struct {
	int (*open)(const char *, int, ...);
	int (*open64)(const char *, int, ...);
	int (*openat)(int, const char *, int, ...);
	int (*openat64)(int, const char *, int, ...);
	int (*ioctl)(int, unsigned long, ...);
} real;

#define FIND(name) ((void)(real.name = (__typeof__(real.name))valve_next(#name)))

/*
 * dlsym may call back into open() (an allocator that reads /proc at its first use): such a nested call, and one in a
 * world where the symbol cannot be found, goes to the kernel directly. Before the program runs (interpose.c): later it would
 * take away what a dlerror() of the program is to say.
 */
bool valve_capture_find(void)
{
	static uint32_t found;

	if (load_acquire(&found))
		return true;
	if (valve_tls.inside)
		return false;
	valve_tls.inside++;
	FIND(open);
	FIND(open64);
	FIND(openat);
	FIND(openat64);
	FIND(ioctl);
	valve_tls.inside--;
	store_release(&found, real.open && real.openat && real.ioctl);
	return load_relaxed(&found);
}

/* A call of our own: no hook sees it. The kernel takes its power lock interruptibly, before it does anything: EINTR means "not
 * tried". */
static int call_driver(int fd, uint32_t nr, void *argument, uint32_t bytes)
{
	int result = -1;

	for (int tries = 0; tries < INTERRUPTED_TRIES && result; tries++) {
		result = real.ioctl(fd, NV_IOWR(nr, bytes), argument);
		if (result && errno != EINTR)
			break;
	}
	return result;
}

uint32_t valve_rm_control(int fd, struct rm_name object, uint32_t command, void *params, uint32_t bytes)
{
	struct nvos54_control call = {.hClient = object.h_client,
	                              .hObject = object.handle,
	                              .cmd = command,
	                              .params = (uintptr_t)params,
	                              .paramsSize = bytes};

	return call_driver(fd, NV_ESC_RM_CONTROL, &call, sizeof(call)) ? NV_ERR_INVALID_STATE : call.status;
}

uint32_t valve_rm_free(int fd, struct rm_name object, uint32_t h_parent)
{
	struct nvos00_free call = {
	        .hRoot = object.h_client, .hObjectParent = h_parent, .hObjectOld = object.handle};

	return call_driver(fd, NV_ESC_RM_FREE, &call, sizeof(call)) ? NV_ERR_INVALID_STATE : call.status;
}

/* ---- open ---- */

static enum valve_watched kind_of_path(const char *path)
{
	if (!path || strncmp(path, "/dev/nvidia", 11) != 0)
		return WATCHED_NOT;
	if (!strcmp(path + 11, "ctl"))
		return WATCHED_CTL;
	return strcmp(path + 11, "-uvm") ? WATCHED_NOT : WATCHED_UVM;
}

static void query_driver(int fd)
{
	struct nv_ioctl_rm_api_version query = {.cmd = '2'}; /* query: the driver fills in its own version */

	if (valve_rm.branch)
		return;
	if (call_driver(fd, NV_ESC_CHECK_VERSION_STR, &query, sizeof(query)) == 0) {
		query.versionString[sizeof(query.versionString) - 1] = 0;
		rm_set_version(&valve_rm, query.versionString);
	}
	if (!valve_rm.branch) {
		char text[32] = "";
		int file = (int)syscall(SYS_openat, AT_FDCWD, "/sys/module/nvidia/version",
		                        O_RDONLY | O_CLOEXEC);

		if (file >= 0 && syscall(SYS_read, file, text, sizeof(text) - 1) > 0)
			rm_set_version(&valve_rm, text);
		if (file >= 0)
			syscall(SYS_close, file);
	}
	valve_shim.driver = valve_rm.version;
	if (!rm_is_known_branch(&valve_rm))
		valve_note(VALVE_NOTE_UNKNOWN_DRIVER, 0, 0,
		           "channels of this driver version are not captured");
}

/* Registered first, whatever the number: without room to watch it, the process is a client without channels. */
static void watch_fd(int fd, const char *path)
{
	enum valve_watched kind = kind_of_path(path);
	int saved_errno = errno;
	bool is_watched;

	if (fd < 0 || kind == WATCHED_NOT || valve_tls.inside || !valve_begin_process())
		return;
	valve_tls.inside++;
	is_watched = valve_watch(fd, kind);
	if (kind == WATCHED_CTL) {
		query_driver(fd);
		valve_register();
	}
	if (!is_watched)
		valve_note(VALVE_NOTE_INCOMPLETE_MAP, 0, 0, "too many files of the driver are open");
	valve_tls.inside--;
	errno = saved_errno;
}

static mode_t mode_argument(int flags, va_list *more)
{
	return (flags & O_CREAT) || (flags & O_TMPFILE) == O_TMPFILE ? (mode_t)va_arg(*more, unsigned) : 0;
}

#define OPEN_BODY(call, fallback)                             \
	va_list more;                                         \
	mode_t mode;                                          \
	int fd;                                               \
                                                              \
	va_start(more, flags);                                \
	mode = mode_argument(flags, &more);                   \
	va_end(more);                                         \
	fd = valve_capture_find() ? (call) : (int)(fallback); \
	watch_fd(fd, path);                                   \
	return fd

VALVE_EXPORT int open(const char *path, int flags, ...)
{
	OPEN_BODY(real.open(path, flags, mode), syscall(SYS_openat, AT_FDCWD, path, flags, mode));
}

VALVE_EXPORT int open64(const char *path, int flags, ...)
{
	OPEN_BODY((real.open64 ? real.open64 : real.open)(path, flags, mode),
	          syscall(SYS_openat, AT_FDCWD, path, flags, mode));
}

VALVE_EXPORT int openat(int folder, const char *path, int flags, ...)
{
	OPEN_BODY(real.openat(folder, path, flags, mode), syscall(SYS_openat, folder, path, flags, mode));
}

VALVE_EXPORT int openat64(int folder, const char *path, int flags, ...)
{
	OPEN_BODY((real.openat64 ? real.openat64 : real.openat)(folder, path, flags, mode),
	          syscall(SYS_openat, folder, path, flags, mode));
}

/* What open() becomes in a caller that was compiled with fortification. */
VALVE_EXPORT int __open_2(const char *path, int flags)
{
	return open(path, flags);
}

VALVE_EXPORT int __open64_2(const char *path, int flags)
{
	return open64(path, flags);
}

/* ---- ioctl ---- */

static void note_uvm(int fd, unsigned long request, const void *argument)
{
	const struct uvm_register_channel *params = argument;

	valve_report_uvm((uint32_t)request, argument);
	if (request == UVM_REGISTER_CHANNEL && params->rmStatus == 0)
		store_relaxed(&uvm_fd, (uint32_t)fd + 1);
}

int valve_capture_uvm_fd(void)
{
	int fd = (int)load_relaxed(&uvm_fd) - 1;

	return valve_watched(fd) == WATCHED_UVM ? fd : -1;
}

static int uvm_ioctl(int fd, unsigned long request, void *argument)
{
	int result = real.ioctl(fd, request, argument);

	valve_tls.inside++;
	if (result == 0)
		note_uvm(fd, request, argument);
	valve_tls.inside--;
	return result;
}

/* Not `inside` while the driver is at it: a handler of the program may make calls of its own meanwhile, or jump out for good. */
static int control_ioctl(int fd, unsigned long request, void *argument)
{
	struct rm_call call;
	struct rm_wish wish;
	int result;

	valve_tls.inside++;
	valve_report_before((uint32_t)request, argument, &call);
	if (valve_keep_refuses(fd, &call, &wish)) {
		valve_tls.inside--;
		return 0;
	}
	valve_tls.inside--;
	result = real.ioctl(fd, request, argument);
	valve_tls.inside++;
	valve_report_after(fd, &call, result == 0);
	if (result == 0 && wish.bytes)
		valve_keep_check(fd, &wish);
	valve_tls.inside--;
	return result;
}

VALVE_EXPORT int ioctl(int fd, unsigned long request, ...)
{
	enum valve_watched kind;
	void *argument;
	va_list more;

	va_start(more, request);
	argument = va_arg(more, void *);
	va_end(more);
	if (!valve_capture_find())
		return (int)syscall(SYS_ioctl, fd, request, argument);
	kind = valve_watched(fd);
	if (kind == WATCHED_NOT)
		return real.ioctl(fd, request, argument);
	return kind == WATCHED_UVM ? uvm_ioctl(fd, request, argument) : control_ioctl(fd, request, argument);
}
