/*
 * interpose.c - how calls come to us, and how we find the real ones.
 *
 * A program reaches the driver by four doors (measured with CUDA 13.0's runtime, static and shared alike):
 *   1. dlopen("libcuda.so.1") and dlsym on that handle. Runtimes up to 11.2 fetch every function so, later ones only
 *      cuGetProcAddress. Our dlopen answers with libvalve-cuda.so, an empty library that needs libvalve.so and
 *      libcuda.so.1 in this order: dlsym on the handle finds a hooked name here and everything else in the driver. So
 *      dlsym itself is not hooked, and with it go glibc's two versions of dlsym and every recursion through it.
 *   2. cuGetProcAddress (11.3) and _v2 (12.0): getproc.c.
 *   3. Direct link: the preload stands first in the global scope, so its exported names win.
 *   4. cuGetExportTable: private tables, no launches. Not touched.
 * RTLD_DEEPBIND would bind libcuda's open() and ioctl() past us, so it is taken off for libcuda. dlmopen escapes.
 */
#include "shim.h"

#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/auxv.h>

/* dlsym moved from libdl to libc in 2.34 under a new version; the old one exists in both (README.md). */
__asm__(".symver dlsym, dlsym@GLIBC_2.2.5");
__asm__(".symver dlerror, dlerror@GLIBC_2.2.5");

#define CUDA_PART "libvalve-cuda.so"
#define CPU_BITS  8192

struct valve_shim valve_shim;

VALVE_HIDDEN void *(*valve_real_dlopen)(const char *, int);

struct redirect {
	void *handle; /* non-NULL: the answer */
	long flags;   /* for the real call */
};
VALVE_HIDDEN struct redirect valve_dlopen(const char *file, int flags);

void *valve_next(const char *name)
{
	return dlsym(RTLD_NEXT, name);
}

bool valve_is_secure(void)
{
	return getauxval(AT_SECURE) != 0;
}

/* ---- door 1 ---- */

static bool names_libcuda(const char *file)
{
	const char *slash = strrchr(file, '/');
	const char *base = slash ? slash + 1 : file;

	return !strcmp(base, "libcuda.so.1") || !strcmp(base, "libcuda.so");
}

/* The CUDA part lies beside the preload. Returns 0 or -errno. */
static int cuda_part_path(char *path, size_t room)
{
	int (*address_info)(const void *, Dl_info *) = (int (*)(const void *, Dl_info *))valve_next("dladdr");
	Dl_info self;
	const char *slash;
	size_t folder;

	if (!address_info || !address_info(valve_pages, &self) || !self.dli_fname)
		return -ENOENT;
	slash = strrchr(self.dli_fname, '/');
	folder = slash ? (size_t)(slash - self.dli_fname) + 1 : 0;
	if (folder + sizeof(CUDA_PART) > room)
		return -ENAMETOOLONG;
	memcpy(path, self.dli_fname, folder);
	memcpy(path + folder, CUDA_PART, sizeof(CUDA_PART));
	return 0;
}

/* Opens the CUDA part; a path given with a slash is opened itself first, so that this very driver satisfies it. */
static void *open_cuda_part(const char *file, int flags)
{
	char path[512];
	void *driver = valve_real_dlopen(strchr(file, '/') ? file : "libcuda.so.1",
	                                 strchr(file, '/') ? flags : RTLD_LAZY | RTLD_NOLOAD);

	if (!driver && (strchr(file, '/') || (flags & RTLD_NOLOAD)))
		return NULL;
	if (cuda_part_path(path, sizeof(path)))
		return NULL;
	return valve_real_dlopen(path, flags & ~RTLD_NOLOAD);
}

/*
 * NULL handle: the caller's own dlopen goes on, from the caller's own address, so that its RUNPATH counts. Only a
 * driver that is found by nothing but the caller's RUNPATH ends up there, and its exported names are missed.
 */
struct redirect valve_dlopen(const char *file, int flags)
{
	struct redirect out = {NULL, flags};

	if (!valve_real_dlopen)
		valve_real_dlopen = (void *(*)(const char *, int))valve_next("dlopen");
	if (!file || !valve_real_dlopen || valve_tls.inside || !names_libcuda(file))
		return out;
	out.flags = flags & ~RTLD_DEEPBIND;
	valve_tls.inside++;
	out.handle = open_cuda_part(file, (int)out.flags);
	valve_tls.inside--;
	return out;
}

/* ---- the real driver ---- */

void *valve_real_symbol(const char *name)
{
	void *driver = NULL, *found;

	valve_tls.inside++;
	if (!valve_real_dlopen)
		valve_real_dlopen = (void *(*)(const char *, int))valve_next("dlopen");
	if (valve_real_dlopen)
		driver = valve_real_dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
	/* Never dlsym(NULL): that is RTLD_DEFAULT and would find ourselves, for ever. */
	found = driver ? dlsym(driver, name) : dlsym(RTLD_NEXT, name);
	valve_tls.inside--;
	return found;
}

bool valve_has_ptds_suffix(const char *name)
{
	size_t length = strlen(name);

	return length > 5 && (!strcmp(name + length - 5, "_ptsz") || !strcmp(name + length - 5, "_ptds"));
}

/* From CUDA 12.5 one event covers a whole context; before, per-thread default streams are out of reach. */
static bool must_mark_ptds(void)
{
	static uint32_t answer; /* 0 unknown, 1 no, 2 yes */

	if (!load_relaxed(&answer))
		store_relaxed(&answer, valve_real_symbol("cuCtxRecordEvent") ? 1 : 2);
	return load_relaxed(&answer) == 2;
}

void *valve_bind(struct valve_entry *entry, void *real, bool ptds)
{
	void *jump = ptds && must_mark_ptds() ? (void *)(uintptr_t)valve_ptds_detour : real;

	store_release(&entry->target, real); /* before `real`: the detour reads it */
	store_release(&entry->real, jump);
	return jump;
}

/* ---- fork, threads ---- */

/* Weak: musl has no such symbol, and a strong one (or pthread_atfork) would keep every musl program from starting. */
extern int __register_atfork(void (*)(void), void (*)(void), void (*)(void), void *) __attribute__((weak));

/* Where the program may run: what it was started with, before its threads bind themselves to cores. 0 bytes: unknown. */
static struct {
	unsigned long mask[CPU_BITS / (8 * sizeof(unsigned long))];
	long bytes;
} started_on;

__attribute__((constructor)) static void valve_start(void)
{
	started_on.bytes = syscall(SYS_sched_getaffinity, 0, sizeof(started_on.mask), started_on.mask);
	valve_say_start();
	valve_capture_find();
	valve_closing_find();
	valve_alone_find();
	dlerror(); /* that an old libc has no closefrom is no news for the program */
	if (__register_atfork)
		__register_atfork(NULL, NULL, valve_after_fork, NULL);
}

/*
 * A new thread inherits policy and cores of the thread that made it, which is the application's, in its call to the driver.
 * A real-time one, bound to one core, would have us compete with it there, or starve behind it.
 */
static void *begin(void *run)
{
	const int priority = 0;
	long policy = syscall(SYS_sched_getscheduler, 0) & ~SCHED_RESET_ON_FORK;

	if (policy == SCHED_FIFO || policy == SCHED_RR)
		syscall(SYS_sched_setscheduler, 0, SCHED_OTHER, &priority);
	if (started_on.bytes > 0)
		syscall(SYS_sched_setaffinity, 0, started_on.bytes, started_on.mask);
	return ((void *(*)(void *))(uintptr_t)run)(NULL);
}

/* By name: before glibc 2.34 these live in libpthread, which a process with CUDA has and others need not. */
#define PTHREAD_CALLS(X)                                                                    \
	X(pthread_create, (pthread_t *, const pthread_attr_t *, void *(*)(void *), void *)) \
	X(pthread_attr_init, (pthread_attr_t *))                                            \
	X(pthread_attr_getstacksize, (const pthread_attr_t *, size_t *))                    \
	X(pthread_attr_setstacksize, (pthread_attr_t *, size_t))                            \
	X(pthread_attr_setdetachstate, (pthread_attr_t *, int))                             \
	X(pthread_attr_destroy, (pthread_attr_t *))

/* What glibc takes from a stack for the program's thread-local variables, or from what it is asked for; others take it elsewhere. */
static size_t taken_of_stack(const pthread_attr_t *how)
{
	size_t (*minstack)(const pthread_attr_t *) =
	        (size_t(*)(const pthread_attr_t *))dlsym(RTLD_DEFAULT, "__pthread_get_minstack");

	return minstack ? minstack(how) : 0;
}

/* Raised by what the thread itself does, and forced upon it: blocked, they end the process, past the program's handler. A
 * sandbox answers system calls by one (SECCOMP_RET_TRAP), those of our threads and of pthread_create(), too. */
static const int forced[] = {SIGSYS, SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP};

/*
 * The stack is what the program's threads have, within bounds: not less than driver calls are known to do with, where a program
 * with many threads has set a few pages (ulimit -s, pthread_setattr_default_np); and not more than is usual, where a stack of
 * gigabytes would not fit in what the process may have, or be locked into memory (mlockall). `most` is less for the one thread
 * that every program with a driver has, and that calls no libcuda.
 */
int valve_spawn(void *(*run)(void *), size_t most)
{
	struct {
#define X(name, parameters) int(*name) parameters;
		PTHREAD_CALLS(X)
#undef X
	} call;
	bool all_there = true;
	sigset_t all, before;
	pthread_attr_t how;
	pthread_t thread;
	size_t bytes = 0, taken;
	int err;

#define X(name, parameters)                                        \
	call.name = (int(*) parameters)dlsym(RTLD_DEFAULT, #name); \
	all_there &= call.name != NULL;
	PTHREAD_CALLS(X)
#undef X
	if (!all_there || call.pthread_attr_init(&how))
		return -ENOSYS;
	call.pthread_attr_setdetachstate(&how, PTHREAD_CREATE_DETACHED);
	taken = taken_of_stack(&how);
	if (!call.pthread_attr_getstacksize(&how, &bytes) &&
	    (bytes < VALVE_STACK_LEAST + taken || bytes > most + taken))
		call.pthread_attr_setstacksize(
		        &how, taken + (bytes < VALVE_STACK_LEAST + taken ? VALVE_STACK_LEAST : most));
	sigfillset(&all);
	for (size_t i = 0; i < sizeof(forced) / sizeof(forced[0]); i++)
		sigdelset(&all, forced[i]);
	sigprocmask(SIG_SETMASK, &all, &before); /* per thread on Linux; the new thread inherits it */
	err = call.pthread_create(&thread, &how, begin, (void *)(uintptr_t)run);
	sigprocmask(SIG_SETMASK, &before, NULL);
	call.pthread_attr_destroy(&how);
	return -err;
}
