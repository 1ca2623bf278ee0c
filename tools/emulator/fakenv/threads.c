/*
 * threads.c - which threads belong to a native step: those that an OpenMP library started for the thread that runs it, and
 * those that are started during it. Names do not tell, so pthread_create is watched: which thread created it, and
 * whether its start routine lies in such a library. A thread that must be stopped by a signal must not be able to block
 * it, so the signal is taken out of every mask that is set.
 */
#include "fakenv.h"
#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))

enum { THREADS = 4096 };
struct thread {
	uint32_t tid, creator, pid; /* tid 0: free */
};
static struct thread openmp[THREADS];
static bool (*joins)(void);
static void (*joined)(uint32_t creator);
static void (*left)(void);

enum origin { PROGRAM, OPENMP, OURS };
struct start {
	void *(*routine)(void *);
	void *argument;
	uint32_t creator;
	enum origin origin;
	bool joins; /* asked when it is made: a step that begins before it runs is none of its business */
};

static uint32_t my_tid(void)
{
	return (uint32_t)syscall(SYS_gettid);
}

/* Threads of the driver and of the shim serve the step: they are never part of it. */
static enum origin origin_of(void *(*routine)(void *))
{
	static const struct {
		const char *library;
		enum origin origin;
	} known[] = {{"libgomp", OPENMP}, {"libomp", OPENMP},   {"libiomp", OPENMP},
	             {"libcuda.", OURS},  {"libfakenv.", OURS}, {"libvalve", OURS}};
	const char *name;
	Dl_info info;

	if (!dladdr((void *)(uintptr_t)routine, &info) || !info.dli_fname)
		return PROGRAM;
	name = strrchr(info.dli_fname, '/');
	name = name ? name + 1 : info.dli_fname;
	for (size_t i = 0; i < sizeof known / sizeof known[0]; i++)
		if (strncmp(name, known[i].library, strlen(known[i].library)) == 0)
			return known[i].origin;
	return PROGRAM;
}

/* What the parent's threads were means nothing in a forked child. */
static bool is_free(const struct thread *t)
{
	return !__atomic_load_n(&t->tid, __ATOMIC_SEQ_CST) || t->pid != (uint32_t)getpid();
}

static void remember(uint32_t creator)
{
	static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
	uint32_t i = 0;

	LOCKED(&lock);
	while (i < THREADS && !is_free(&openmp[i]))
		i++;
	if (i < THREADS) {
		openmp[i].creator = creator;
		openmp[i].pid = (uint32_t)getpid();
		__atomic_store_n(&openmp[i].tid, my_tid(), __ATOMIC_RELEASE);
	}
}

/* First out of the table, then out of the step: a reader that finds a thread there afterwards knows that it is still to
 * leave. */
static void forget(void *unused)
{
	uint32_t tid = my_tid();

	(void)unused;
	for (uint32_t i = 0; i < THREADS; i++)
		if (__atomic_load_n(&openmp[i].tid, __ATOMIC_SEQ_CST) == tid)
			__atomic_store_n(&openmp[i].tid, 0, __ATOMIC_SEQ_CST);
	if (__atomic_load_n(&left, __ATOMIC_SEQ_CST))
		left();
}

static void *trampoline(void *argument)
{
	struct start s = *(struct start *)argument;
	void *result;

	free(argument);
	if (s.origin == OPENMP)
		remember(s.creator);
	pthread_cleanup_push(forget, NULL);
	if (s.joins)
		joined(s.creator);
	result = s.routine(s.argument);
	pthread_cleanup_pop(1);
	return result;
}

typedef int create_fn(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *);

EXPORT int pthread_create(pthread_t *restrict out, const pthread_attr_t *restrict attributes,
                          void *(*routine)(void *), void *restrict argument)
{
	static create_fn *next;
	enum origin origin = fake_dir() ? origin_of(routine) : OURS;
	struct start *s = origin == OURS ? NULL : malloc(sizeof *s);
	int error;

	if (!next)
		*(void **)&next = dlsym(RTLD_NEXT, "pthread_create");
	if (!s)
		return next(out, attributes, routine, argument);
	*s = (struct start){routine, argument, my_tid(), origin,
	                    __atomic_load_n(&joins, __ATOMIC_ACQUIRE) && joins()};
	error = next(out, attributes, trampoline, s);
	if (error)
		free(s);
	return error;
}

EXPORT uint32_t emu_threads_of(uint32_t creator, uint32_t *tids, uint32_t room)
{
	uint32_t n = 0;

	for (uint32_t i = 0; i < THREADS && n < room; i++)
		if (!is_free(&openmp[i]) && openmp[i].creator == creator)
			tids[n++] = openmp[i].tid;
	return n;
}

EXPORT void emu_threads_watch(bool (*on_create)(void), void (*on_start)(uint32_t), void (*on_end)(void))
{
	__atomic_store_n(&left, on_end, __ATOMIC_RELEASE);
	__atomic_store_n(&joined, on_start, __ATOMIC_RELEASE);
	__atomic_store_n(&joins, on_create, __ATOMIC_RELEASE); /* last: who reads it finds the others */
}

/* ---- masks ---- */

static const sigset_t *without_park(int how, const sigset_t *set, sigset_t *room)
{
	if (!set || how == SIG_UNBLOCK || !fake_dir() || !sigismember(set, EMU_PARK_SIGNAL))
		return set;
	*room = *set;
	sigdelset(room, EMU_PARK_SIGNAL);
	return room;
}

int fake_sigmask(int how, const sigset_t *set, sigset_t *before)
{
	static int (*next)(int, const sigset_t *, sigset_t *);

	if (!next)
		*(void **)&next = dlsym(RTLD_NEXT, "pthread_sigmask");
	return next(how, set, before);
}

EXPORT int pthread_sigmask(int how, const sigset_t *restrict set, sigset_t *restrict before)
{
	sigset_t room;

	return fake_sigmask(how, without_park(how, set, &room), before);
}

EXPORT int sigprocmask(int how, const sigset_t *restrict set, sigset_t *restrict before)
{
	static int (*next)(int, const sigset_t *, sigset_t *);
	sigset_t room;

	if (!next)
		*(void **)&next = dlsym(RTLD_NEXT, "sigprocmask");
	return next(how, without_park(how, set, &room), before);
}
