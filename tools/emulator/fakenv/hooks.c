/*
 * hooks.c - the names we put in front of libc's. Each hook asks one question (is this path or fd
 * the driver's?) and otherwise returns what libc returned. Programs built against glibc before 2.33
 * reach stat through __xstat; both are here. With VALVE_EMU_DIR unset every hook is a plain call of
 * libc.
 */
#include "fakenv.h"
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#define EXPORT   __attribute__((visibility("default")))
#define NV_MAJOR 195

const struct real *fake_real(void)
{
	static struct real real;
	static int known;

	if (__atomic_load_n(&known, __ATOMIC_ACQUIRE))
		return &real;
	/* Two threads may both look up: they store the same addresses. */
	*(void **)&real.openat = dlsym(RTLD_NEXT, "openat");
	*(void **)&real.ioctl = dlsym(RTLD_NEXT, "ioctl");
	*(void **)&real.mmap = dlsym(RTLD_NEXT, "mmap");
	*(void **)&real.access = dlsym(RTLD_NEXT, "access");
	*(void **)&real.faccessat = dlsym(RTLD_NEXT, "faccessat");
	*(void **)&real.open = dlsym(RTLD_NEXT, "open");
	__atomic_store_n(&known, 1, __ATOMIC_RELEASE);
	return &real;
}

/* The mode travels only where open() looks at it (fcntl.h: O_CREAT, O_TMPFILE). */
#define MODE_OF(flags)                                                   \
	mode_t mode = 0;                                                 \
	if (((flags) & O_CREAT) || ((flags) & O_TMPFILE) == O_TMPFILE) { \
		va_list list;                                            \
		va_start(list, flags);                                   \
		mode = va_arg(list, mode_t);                             \
		va_end(list);                                            \
	}

#define OPEN_HOOK(name)                                                                                    \
	EXPORT int name(const char *path, int flags, ...)                                                  \
	{                                                                                                  \
		MODE_OF(flags)                                                                             \
		return fake_is_ours(path) ? fake_open(path, flags) : fake_real()->open(path, flags, mode); \
	}
#define OPENAT_HOOK(name)                                                                \
	EXPORT int name(int dir, const char *path, int flags, ...)                       \
	{                                                                                \
		MODE_OF(flags)                                                           \
		return fake_is_ours(path) ? fake_open(path, flags)                       \
		                          : fake_real()->openat(dir, path, flags, mode); \
	}
OPEN_HOOK(open)
OPEN_HOOK(open64)
OPENAT_HOOK(openat)
OPENAT_HOOK(openat64)

/* What _FORTIFY_SOURCE calls when open() has no mode. */
EXPORT int __open_2(const char *path, int flags);
EXPORT int __open64_2(const char *path, int flags);
EXPORT int __openat_2(int dir, const char *path, int flags);
EXPORT int __openat64_2(int dir, const char *path, int flags);

EXPORT int __open_2(const char *path, int flags)
{
	return open(path, flags);
}
EXPORT int __open64_2(const char *path, int flags)
{
	return open(path, flags);
}
EXPORT int __openat_2(int dir, const char *path, int flags)
{
	return openat(dir, path, flags);
}
EXPORT int __openat64_2(int dir, const char *path, int flags)
{
	return openat(dir, path, flags);
}

/* UVM's requests are small plain numbers, RM's carry the type byte 'F': everything else skips the
 * look at the fd. */
static bool may_be_driver(unsigned long request)
{
	return ((request >> 8) & 0xFF) == 'F' || request < 0x100 || request - 0x30000001ul < 2;
}

EXPORT int ioctl(int fd, unsigned long request, ...)
{
	struct node node;
	va_list list;
	void *arg;

	va_start(list, request);
	arg = va_arg(list, void *);
	va_end(list);
	if (may_be_driver(request) && fake_node_of_fd(fd, &node))
		return fake_ioctl(&node, request, arg);
	return fake_real()->ioctl(fd, request, arg);
}

static void *map_node(void *at, size_t length, int protection, int flags, int fd, off_t offset)
{
	struct node node;

	if (fd >= 0 && !(flags & MAP_ANONYMOUS) && fake_node_of_fd(fd, &node)) {
		flags = (flags & ~MAP_PRIVATE) | MAP_SHARED | MAP_ANONYMOUS;
		return fake_real()->mmap(at, length, protection, flags, -1, 0);
	}
	return fake_real()->mmap(at, length, protection, flags, fd, offset);
}
EXPORT void *mmap(void *at, size_t length, int protection, int flags, int fd, off_t offset)
{
	return map_node(at, length, protection, flags, fd, offset);
}
EXPORT void *mmap64(void *at, size_t length, int protection, int flags, int fd, off_t offset)
{
	return map_node(at, length, protection, flags, fd, offset);
}

/* access() and stat() on one of our paths: the node's existence, or the server's file for
 * /proc/driver/nvidia. */
static int ask(const char *path, int how)
{
	char proc[4096];
	enum emu_kind kind;
	uint32_t minor;

	if (fake_proc_path(path, proc, sizeof proc))
		return fake_real()->access(proc, how);
	if (fake_node_exists(path, &minor, &kind))
		return 0;
	errno = ENOENT;
	return -1;
}
EXPORT int access(const char *path, int how)
{
	return fake_is_ours(path) ? ask(path, how) : fake_real()->access(path, how);
}
EXPORT int faccessat(int dir, const char *path, int how, int flags)
{
	return fake_is_ours(path) ? ask(path, how) : fake_real()->faccessat(dir, path, how, flags);
}

static void fill_node(enum emu_kind kind, uint32_t minor, struct stat *st)
{
	memset(st, 0, sizeof *st);
	st->st_mode = S_IFCHR | 0666;
	st->st_nlink = 1;
	st->st_rdev = makedev(kind == EMU_UVM ? 510 : NV_MAJOR, minor);
}

static int stat_node(const char *path, struct stat *st)
{
	enum emu_kind kind;
	uint32_t minor;

	if (!fake_node_exists(path, &minor, &kind)) {
		errno = ENOENT;
		return -1;
	}
	fill_node(kind, minor, st);
	return 0;
}

/* struct stat and struct stat64 are one on x86-64, so the pairs share a body. */
#define STAT_HOOK(name, parameters, path, st, ...)                           \
	EXPORT int name parameters;                                          \
	EXPORT int name parameters                                           \
	{                                                                    \
		static int(*next) parameters;                                \
		char proc[4096];                                             \
		if (!next)                                                   \
			*(void **)&next = dlsym(RTLD_NEXT, #name);           \
		if (fake_is_ours(path)) {                                    \
			if (!fake_proc_path(path, proc, sizeof proc))        \
				return stat_node(path, (struct stat *)(st)); \
			path = proc;                                         \
		}                                                            \
		return next(__VA_ARGS__);                                    \
	}
#undef stat64
#undef lstat64
STAT_HOOK(stat, (const char *path, struct stat *st), path, st, path, st)
STAT_HOOK(lstat, (const char *path, struct stat *st), path, st, path, st)
STAT_HOOK(stat64, (const char *path, struct stat64 *st), path, st, path, st)
STAT_HOOK(lstat64, (const char *path, struct stat64 *st), path, st, path, st)
STAT_HOOK(fstatat, (int dir, const char *path, struct stat *st, int flags), path, st, dir, path, st, flags)
STAT_HOOK(fstatat64, (int dir, const char *path, struct stat64 *st, int flags), path, st, dir, path, st,
          flags)
STAT_HOOK(__xstat, (int v, const char *path, struct stat *st), path, st, v, path, st)
STAT_HOOK(__xstat64, (int v, const char *path, struct stat64 *st), path, st, v, path, st)
STAT_HOOK(__lxstat, (int v, const char *path, struct stat *st), path, st, v, path, st)
STAT_HOOK(__lxstat64, (int v, const char *path, struct stat64 *st), path, st, v, path, st)

/* A descriptor of ours is a device to every process that holds it, also to one it was passed to. Which open it is
 * (device and inode) stays the socket's: two descriptors of one open compare equal. */
#define FSTAT_HOOK(name, parameters, fd, st, ...)                                       \
	EXPORT int name parameters;                                                     \
	EXPORT int name parameters                                                      \
	{                                                                               \
		static int(*next) parameters;                                           \
		struct node node;                                                       \
		struct stat file;                                                       \
		int rc;                                                                 \
		if (!next)                                                              \
			*(void **)&next = dlsym(RTLD_NEXT, #name);                      \
		rc = next(__VA_ARGS__);                                                 \
		if (rc == 0 && S_ISSOCK((st)->st_mode) && fake_node_of_fd(fd, &node)) { \
			fill_node(node.kind, node.minor, &file);                        \
			(st)->st_mode = file.st_mode;                                   \
			(st)->st_rdev = file.st_rdev;                                   \
		}                                                                       \
		return rc;                                                              \
	}
#undef fstat64
FSTAT_HOOK(fstat, (int fd, struct stat *st), fd, st, fd, st)
FSTAT_HOOK(fstat64, (int fd, struct stat64 *st), fd, st, fd, st)
FSTAT_HOOK(__fxstat, (int v, int fd, struct stat *st), fd, st, v, fd, st)
FSTAT_HOOK(__fxstat64, (int v, int fd, struct stat64 *st), fd, st, v, fd, st)

/* What coreutils and the standard libraries of newer languages call. */
EXPORT int statx(int dir, const char *restrict path, int flags, unsigned mask, struct statx *restrict out)
{
	static int (*next)(int, const char *, int, unsigned, struct statx *);
	char proc[4096];
	struct node node;
	struct stat st;

	if (!next)
		*(void **)&next = dlsym(RTLD_NEXT, "statx");
	if ((flags & AT_EMPTY_PATH) && fake_node_of_fd(dir, &node))
		fill_node(node.kind, node.minor, &st);
	else if (!fake_is_ours(path))
		return next(dir, path, flags, mask, out);
	else if (fake_proc_path(path, proc, sizeof proc))
		return next(dir, proc, flags, mask, out);
	else if (stat_node(path, &st))
		return -1;
	*out = (struct statx){.stx_mask = STATX_TYPE | STATX_MODE | STATX_NLINK,
	                      .stx_mode = (uint16_t)st.st_mode,
	                      .stx_nlink = 1,
	                      .stx_rdev_major = major(st.st_rdev),
	                      .stx_rdev_minor = minor(st.st_rdev)};
	return 0;
}

/* The lock of a node lies on a file of the emulated machine and lives until this process ends or unlocks it: the fd that
 * stands for a node is another one at each open. */
EXPORT int flock(int fd, int operation)
{
	static int locks[EMU_GPUS];
	int (*real)(int, int) = NULL;
	struct node node;
	char path[4096];
	int *lock;

	*(void **)&real = dlsym(RTLD_NEXT, "flock");
	if (!fake_dir() || !fake_node_of_fd(fd, &node) || node.kind != EMU_NODE || node.minor >= EMU_GPUS)
		return real(fd, operation);
	lock = &locks[node.minor];
	if (*lock <= 0) {
		snprintf(path, sizeof path, "%s/lock-%u", fake_dir(), node.minor);
		*lock = fake_real()->open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
	}
	return *lock < 0 ? -1 : real(*lock, operation);
}
