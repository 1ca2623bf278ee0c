/*
 * trace.c - a preload that watches a program's driver calls. Written to a log, learnt into a table, and the program's
 * channels can be switched through it. The hooks take no lock but a short spin around the table.
 *
 *   VALVE_LAB_TRACE   append one JSON line a call        VALVE_LAB_TABLE   create the channel table (must not exist)
 *   VALVE_LAB_SOCK    serve requests (serve.c)           VALVE_LAB_GUARD   the guard's socket
 *   VALVE_LAB_BRANCH  branch of the driver
 */
#include "trace.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))
enum { FDS = 4096, LOG_FD = 900 };
struct tracer tracer = {.log = -1, .uvm = -1};
static _Atomic uint8_t kinds[FDS];
static int (*real_open)(const char *path, int flags, ...);
static int (*real_openat)(int dir, const char *path, int flags, ...);

int tracer_uvm(void)
{
	return atomic_load(&tracer.uvm);
}

static void resolve(void)
{
	if (tracer.ioctl)
		return;
	*(void **)&real_open = dlsym(RTLD_NEXT, "open");
	*(void **)&real_openat = dlsym(RTLD_NEXT, "openat");
	*(void **)&tracer.close = dlsym(RTLD_NEXT, "close");
	*(void **)&tracer.ioctl = dlsym(RTLD_NEXT, "ioctl");
}

static enum kind kind_of_path(const char *path)
{
	if (!path || strncmp(path, "/dev/nvidia", 11))
		return OTHER;
	if (!strcmp(path + 11, "ctl"))
		return CTL;
	if (!strcmp(path + 11, "-uvm"))
		return UVM;
	return path[11] >= '0' && path[11] <= '9' ? NODE : OTHER;
}

/* A descriptor may come by dup, by a socket, or by an open we do not see: then its name tells. */
static enum kind kind_of_fd(int fd)
{
	char link[32], path[64];
	struct stat info;

	if (fd < 0 || fd >= FDS)
		return OTHER;
	enum kind kind = (enum kind)atomic_load_explicit(&kinds[fd], memory_order_relaxed);
	if (kind > OTHER)
		return kind;
	if (fstat(fd, &info) || !S_ISCHR(info.st_mode))
		return OTHER;
	snprintf(link, sizeof(link), "/proc/self/fd/%d", fd);
	ssize_t n = readlink(link, path, sizeof(path) - 1);
	if (n <= 0)
		return OTHER;
	path[n] = 0;
	kind = kind_of_path(path);
	atomic_store_explicit(&kinds[fd], (uint8_t)kind, memory_order_relaxed);
	return kind;
}

/* RM's requests carry the type 'F', UVM's are small plain numbers or 0x3000000x: nothing else is looked at. */
static bool may_be_driver(unsigned long request)
{
	return NV_IOC_TYPE(request) == NV_IOC_MAGIC || request < 256 || (request & ~0xFul) == 0x30000000ul;
}

EXPORT int ioctl(int fd, unsigned long request, ...);
EXPORT int ioctl(int fd, unsigned long request, ...)
{
	struct seen seen;
	va_list list;

	va_start(list, request);
	void *arg = va_arg(list, void *);
	va_end(list);
	resolve();
	enum kind kind = may_be_driver(request) ? kind_of_fd(fd) : OTHER;
	if (kind <= OTHER)
		return tracer.ioctl(fd, request, arg);
	seen_before(&seen, kind, request, arg);
	struct call call = {.fd = fd, .kind = kind, .request = request, .arg = arg, .start_ns = now_ns()};
	call.code = tracer.ioctl(fd, request, arg);
	call.error = errno;
	call.ns = now_ns() - call.start_ns;
	if (kind == UVM && request == UVM_REGISTER_CHANNEL)
		atomic_store(&tracer.uvm, fd);
	table_saw(&call);
	log_call(&call, &seen);
	errno = call.error;
	return call.code;
}

static int opened(int fd, const char *path, uint64_t start_ns)
{
	int error = errno;
	enum kind kind = kind_of_path(path);

	if (fd >= 0 && fd < FDS)
		atomic_store(&kinds[fd], (uint8_t)(kind == OTHER ? UNKNOWN : kind));
	if (kind != OTHER && tracer.log >= 0)
		log_open(path, fd, start_ns);
	errno = error;
	return fd;
}

/* The mode travels only where open() looks at it. */
#define MODE_OF(flags)                                                   \
	mode_t mode = 0;                                                 \
	if (((flags) & O_CREAT) || ((flags) & O_TMPFILE) == O_TMPFILE) { \
		va_list list;                                            \
		va_start(list, flags);                                   \
		mode = va_arg(list, mode_t);                             \
		va_end(list);                                            \
	}                                                                \
	resolve();                                                       \
	uint64_t start_ns = now_ns()

#define OPEN_HOOK(name)                                                                    \
	EXPORT int name(const char *path, int flags, ...);                                 \
	EXPORT int name(const char *path, int flags, ...)                                  \
	{                                                                                  \
		MODE_OF(flags);                                                            \
		return opened(real_open(path, flags | O_LARGEFILE, mode), path, start_ns); \
	}
#define OPENAT_HOOK(name)                                                                         \
	EXPORT int name(int dir, const char *path, int flags, ...);                               \
	EXPORT int name(int dir, const char *path, int flags, ...)                                \
	{                                                                                         \
		MODE_OF(flags);                                                                   \
		return opened(real_openat(dir, path, flags | O_LARGEFILE, mode), path, start_ns); \
	}
OPEN_HOOK(open)
OPEN_HOOK(open64)
OPENAT_HOOK(openat)
OPENAT_HOOK(openat64)

EXPORT int close(int fd)
{
	resolve();
	if (fd >= 0 && fd == tracer.log)
		return 0; /* survive "close everything" loops */
	enum kind kind =
	        fd >= 0 && fd < FDS ? (enum kind)atomic_exchange(&kinds[fd], (uint8_t)UNKNOWN) : UNKNOWN;
	int code = tracer.close(fd), error = errno;
	if (kind > OTHER && tracer.log >= 0)
		log_close(fd);
	if (kind == CTL)
		table_closed(fd);
	errno = error;
	return code;
}

static void in_child(void)
{
	tracer.pid = getpid();
}

static void open_log(const char *path)
{
	int fd = path ? real_open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644) : -1;

	if (fd < 0)
		return;
	tracer.log = fcntl(fd, F_DUPFD_CLOEXEC, LOG_FD);
	if (tracer.log >= 0)
		tracer.close(fd);
	else
		tracer.log = fd;
}

__attribute__((constructor)) static void start(void)
{
	const char *path = getenv("VALVE_LAB_TABLE"), *sock = getenv("VALVE_LAB_SOCK");
	const char *branch = getenv("VALVE_LAB_BRANCH");

	resolve();
	tracer.pid = getpid();
	tracer.branch = branch ? (uint32_t)atoi(branch) : 580;
	pthread_atfork(NULL, NULL, in_child);
	open_log(getenv("VALVE_LAB_TRACE"));
	int fd = path ? real_open(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0644) : -1;
	if (fd < 0)
		return; /* not asked for, or a child of the workload: not the owner */
	tracer.close(fd);
	tracer.table = map_shared(path, sizeof(*tracer.table), true, true);
	if (!tracer.table)
		return;
	tracer.owner = tracer.pid;
	tracer.table->pid = (uint32_t)tracer.pid;
	tracer.table->magic = TABLE_MAGIC;
	if (sock)
		serve_start(sock, getenv("VALVE_LAB_GUARD"));
}
