/*
 * step.c - native steps (step.h). A step is launched like any kernel, so streams, events, gates and counters of launches
 * see it. Its executor then only waits. The members execute, each with an entry in the server's park table and
 * a count in `active` of its own. A member's word says where it stands:
 *
 *     RUNNING  counted in active
 *     PARKED   in the signal handler, not counted
 *     0        not a member; a thread that finds that after it was parked gives up the count that it took
 *
 * The word carries the thread's number, so that a late thread cannot mistake the next member of the slot for itself.
 * Nothing here allocates: members may be parked while they hold any lock of libc.
 */
#include "step.h"
#include "kernel.h"
#include "turn.h"

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <sched.h>
#include <signal.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#pragma weak emu_threads_of
#pragma weak emu_threads_watch

enum { STEPS = 8, MEMBERS = 256, LOOK_AGAIN_MS = 100 };
enum stage { FREE, CLAIMED, STARTED, DONE };
enum stance { RUNNING = 1, PARKED = 2, NOBODY = 3 /* claimed, of no thread */ };

struct member {
	uint64_t word; /* thread << 8 | stance */
	struct emu_park *park;
	uint64_t since_ns; /* of the running thread: busy time not yet in the books */
};
struct step {
	uint32_t stage; /* futex */
	uint32_t runner, depth;
	struct emu_channel *slot;
	struct emu_gpu *gpu;
	uint32_t cid;
	struct member member[MEMBERS];
};
static struct step steps[STEPS];

static void futex_wait(uint32_t *word, uint32_t value)
{
	struct timespec limit = {0, LOOK_AGAIN_MS * 1000000L};

	syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, &limit, NULL, 0);
}

static void set_stage(struct step *step, enum stage stage)
{
	__atomic_store_n(&step->stage, (uint32_t)stage, __ATOMIC_SEQ_CST);
	syscall(SYS_futex, &step->stage, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
}

static uint32_t stage_of(struct step *step)
{
	return __atomic_load_n(&step->stage, __ATOMIC_SEQ_CST);
}

static uint32_t my_tid(void)
{
	return (uint32_t)syscall(SYS_gettid);
}

static uint64_t word_of(uint32_t tid, enum stance stance)
{
	return (uint64_t)tid << 8 | (uint64_t)stance;
}

static bool swap(uint64_t *word, uint64_t from, uint64_t to)
{
	return __atomic_compare_exchange_n(word, &from, to, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
}

static bool is_alive(const struct step *step)
{
	return __atomic_load_n(&step->slot->cid, __ATOMIC_SEQ_CST) == step->cid;
}

static void leave(struct step *step)
{
	sparse_refresh();
	if (is_alive(step))
		turn_leave(step->slot, step->gpu);
}

static void count_busy(struct step *step, struct member *m, uint32_t tid)
{
	if (tid == __atomic_load_n(&step->runner, __ATOMIC_RELAXED))
		__atomic_add_fetch(&step->slot->busy_ns, now_ns() - m->since_ns, __ATOMIC_RELAXED);
}

/* A thread that enters or takes out members must not be parked half way: a member that is counted and not yet, or no
 * longer, found would never stop. Past libfakenv, which keeps the signal out of masks. */
static uint64_t hold_signal(void)
{
	uint64_t park = 1ull << (EMU_PARK_SIGNAL - 1), before = 0;

	syscall(SYS_rt_sigprocmask, SIG_BLOCK, &park, &before, sizeof(park));
	return before;
}

static void let_signal(uint64_t before)
{
	syscall(SYS_rt_sigprocmask, SIG_SETMASK, &before, NULL, sizeof(before));
}

/* ---- the executor's side ---- */

static CUresult step_kernel(struct channel *channel, const void *args)
{
	struct step *step = *(struct step *const *)args;

	if (stage_of(step) != CLAIMED) /* its caller gave up */
		return CUDA_SUCCESS;
	step->slot = channel->slot;
	step->gpu = channel->gpu;
	step->cid = channel->cid;
	turn_end(channel);
	set_stage(step, STARTED);
	while (stage_of(step) == STARTED && !__atomic_load_n(&channel->stop, __ATOMIC_ACQUIRE))
		futex_wait(&step->stage, STARTED);
	if (stage_of(step) == DONE)
		set_stage(step, FREE);
	return CUDA_SUCCESS;
}

/* ---- members ---- */

static struct member *member_of(uint32_t tid, struct step **out)
{
	for (int i = 0; i < STEPS; i++) {
		if (stage_of(&steps[i]) != STARTED)
			continue;
		for (int k = 0; k < MEMBERS; k++) {
			*out = &steps[i];
			if (__atomic_load_n(&steps[i].member[k].word, __ATOMIC_SEQ_CST) >> 8 == tid)
				return &steps[i].member[k];
		}
	}
	return NULL;
}

/* Parks as often as the grant is taken away. Called with all signals blocked. */
static void obey(struct step *step, struct member *m, uint32_t tid)
{
	while (!__atomic_load_n(&step->slot->grant, __ATOMIC_SEQ_CST) && is_alive(step)) {
		if (!swap(&m->word, word_of(tid, RUNNING), word_of(tid, PARKED)))
			return;
		count_busy(step, m, tid);
		leave(step);
		bool joined = turn_join(step->slot, step->cid, &m->word, word_of(tid, PARKED));
		if (!swap(&m->word, word_of(tid, PARKED), word_of(tid, RUNNING))) {
			if (joined)
				leave(step);
			return;
		}
		if (!joined)
			return;
		m->since_ns = now_ns();
	}
}

static void on_park(int number, siginfo_t *info, void *where)
{
	uint32_t tid = my_tid();
	int saved = errno;
	struct step *step;
	struct member *m = member_of(tid, &step);

	(void)number, (void)info, (void)where;
	if (m)
		obey(step, m, tid);
	errno = saved;
}

static struct emu_park *park_entry(uint32_t cid, uint32_t tid)
{
	for (uint32_t i = 0; i < EMU_PARKS; i++) {
		struct emu_park *p = &emu.board->park[i];
		uint32_t none = 0;

		if (!__atomic_compare_exchange_n(&p->cid, &none, cid, false, __ATOMIC_SEQ_CST,
		                                 __ATOMIC_SEQ_CST))
			continue;
		p->pid = (uint32_t)getpid();
		p->tid = tid;
		__atomic_store_n(&p->ready, 1, __ATOMIC_SEQ_CST);
		return p;
	}
	return NULL;
}

/* Counted before the caller looks at the grant: the server clears that before it looks at the count. */
static bool enrol(struct step *step, uint32_t tid)
{
	for (int i = 0; i < MEMBERS; i++) {
		struct member *m = &step->member[i];

		if (!swap(&m->word, 0, NOBODY))
			continue;
		m->park = park_entry(step->cid, tid);
		m->since_ns = now_ns();
		if (!m->park) {
			__atomic_store_n(&m->word, 0, __ATOMIC_SEQ_CST);
			return false;
		}
		__atomic_add_fetch(&step->slot->parks, 1, __ATOMIC_SEQ_CST);
		__atomic_add_fetch(&step->slot->active, 1, __ATOMIC_SEQ_CST);
		__atomic_store_n(&m->word, word_of(tid, RUNNING), __ATOMIC_SEQ_CST);
		return true;
	}
	return false;
}

/* The slot stays claimed until the park entry is given back: a thread may end while its step does. */
static void retire(struct step *step, struct member *m)
{
	uint64_t word;

	do {
		word = __atomic_load_n(&m->word, __ATOMIC_SEQ_CST);
		if (!(word >> 8))
			return;
	} while (!swap(&m->word, word, NOBODY));
	if (is_alive(step)) { /* else the server has taken the entry back */
		__atomic_store_n(&m->park->ready, 0, __ATOMIC_SEQ_CST);
		__atomic_store_n(&m->park->cid, 0, __ATOMIC_SEQ_CST);
		__atomic_sub_fetch(&step->slot->parks, 1, __ATOMIC_SEQ_CST);
	}
	if ((word & 0xff) == RUNNING) {
		count_busy(step, m, (uint32_t)(word >> 8));
		leave(step);
	} else if (is_alive(step)) {
		turn_nudge(
		        step->slot); /* it must be out of the handler before the next step's signal comes */
	}
	__atomic_store_n(&m->word, 0, __ATOMIC_SEQ_CST);
}

static void signal_members(struct step *step)
{
	for (int i = 0; i < MEMBERS; i++) {
		uint32_t tid = (uint32_t)(__atomic_load_n(&step->member[i].word, __ATOMIC_SEQ_CST) >> 8);
		if (tid)
			syscall(SYS_tgkill, getpid(), tid, EMU_PARK_SIGNAL);
	}
}

static bool is_member(void)
{
	struct step *step;

	return member_of(my_tid(), &step);
}

/* A thread that a member starts is one from its first instruction on. */
static void thread_joins(uint32_t creator)
{
	uint64_t mask = hold_signal();
	uint32_t tid = my_tid();
	struct step *step;

	if (!member_of(tid, &step) && member_of(creator, &step) && enrol(step, tid) &&
	    !__atomic_load_n(&step->slot->grant, __ATOMIC_SEQ_CST))
		syscall(SYS_tgkill, getpid(), tid, EMU_PARK_SIGNAL);
	let_signal(mask);
}

static void thread_leaves(void)
{
	uint64_t mask = hold_signal();
	struct step *step;
	struct member *m = member_of(my_tid(), &step);

	if (m)
		retire(step, m);
	let_signal(mask);
}

/* ---- begin and end ---- */

static void prepare(void)
{
	struct sigaction action = {.sa_sigaction = on_park, .sa_flags = SA_SIGINFO | SA_RESTART | SA_ONSTACK};
	sigset_t park;

	sigfillset(&action.sa_mask);
	sigaction(EMU_PARK_SIGNAL, &action, NULL);
	sigemptyset(&park);
	sigaddset(&park, EMU_PARK_SIGNAL);
	pthread_sigmask(SIG_UNBLOCK, &park, NULL);
	if (emu_threads_watch)
		emu_threads_watch(is_member, thread_joins, thread_leaves);
}

static struct step *step_of(uint32_t runner)
{
	for (int i = 0; i < STEPS; i++)
		if (stage_of(&steps[i]) == STARTED &&
		    __atomic_load_n(&steps[i].runner, __ATOMIC_RELAXED) == runner)
			return &steps[i];
	return NULL;
}

static struct step *claim(uint32_t runner)
{
	for (int i = 0; i < STEPS; i++) {
		uint32_t none = FREE;

		if (!__atomic_compare_exchange_n(&steps[i].stage, &none, CLAIMED, false, __ATOMIC_SEQ_CST,
		                                 __ATOMIC_SEQ_CST))
			continue;
		__atomic_store_n(&steps[i].runner, runner, __ATOMIC_RELAXED); /* other threads read it */
		steps[i].depth = 1;
		return &steps[i];
	}
	return NULL;
}

static void finish(struct step *step)
{
	uint64_t mask = hold_signal();

	for (int i = 0; i < MEMBERS; i++)
		retire(step, &step->member[i]);
	set_stage(step, DONE);
	let_signal(mask);
}

/* Threads that ended while they were entered have looked too early whether they are members. */
static void drop_ended(struct step *step, uint32_t runner, const uint32_t *entered, uint32_t n)
{
	uint32_t alive[MEMBERS], count = emu_threads_of(runner, alive, MEMBERS), k;

	for (uint32_t i = 0; i < n; i++) {
		for (k = 0; k < count && alive[k] != entered[i];)
			k++;
		struct step *of;
		struct member *m = k == count ? member_of(entered[i], &of) : NULL;
		if (m && of == step)
			retire(step, m);
	}
}

/* The thread that begins a step and what OpenMP started for it. Threads that cannot be stopped must not run. */
static CUresult enrol_all(struct step *step, uint32_t runner)
{
	uint32_t tids[MEMBERS], n = emu_threads_of ? emu_threads_of(runner, tids, MEMBERS) : 0;
	uint64_t mask = hold_signal();
	bool all = enrol(step, runner);

	for (uint32_t i = 0; i < n; i++)
		all = enrol(step, tids[i]) && all;
	if (n)
		drop_ended(step, runner, tids, n);
	if (!all)
		finish(step);
	else if (!__atomic_load_n(&step->slot->grant, __ATOMIC_SEQ_CST))
		signal_members(step);
	let_signal(mask);
	return all ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

/* As any kernel: queued in the default stream, run when the channel is granted. */
static CUresult start(struct step *step, struct context *ctx, launch_fn *launch)
{
	static const struct builtin kernel = {"emu_step", step_kernel, 1};
	static struct function function = {.magic = MAGIC_FUNCTION, .builtin = &kernel};
	void *params[] = {&step};
	CUresult result =
	        launch((CUfunction)(void *)&function, 1, 1, 1, 1, 1, 1, 0, CU_STREAM_LEGACY, params, NULL);

	while (!result && stage_of(step) == CLAIMED) {
		futex_wait(&step->stage, CLAIMED);
		result = ctx->sticky;
	}
	uint32_t waiting = CLAIMED;
	if (!result || !__atomic_compare_exchange_n(&step->stage, &waiting, FREE, false, __ATOMIC_SEQ_CST,
	                                            __ATOMIC_SEQ_CST))
		return CUDA_SUCCESS;
	return result;
}

CUresult valve_emu_step_begin(launch_fn *launch)
{
	uint32_t runner = my_tid();
	struct step *step = step_of(runner);
	struct context *ctx;
	CUresult result;

	if (step) {
		step->depth++;
		return CUDA_SUCCESS;
	}
	result = context_current(&ctx);
	step = result ? NULL : claim(runner);
	if (!step)
		return result ? result : CUDA_ERROR_OUT_OF_MEMORY;
	prepare();
	result = start(step, ctx, launch ? launch : cuLaunchKernel);
	return result ? result : enrol_all(step, runner);
}

CUresult valve_emu_step_end(void)
{
	struct step *step = step_of(my_tid());

	REFUSE_IF(!step, CUDA_ERROR_INVALID_VALUE);
	if (--step->depth)
		return CUDA_SUCCESS;
	finish(step);
	return CUDA_SUCCESS;
}
