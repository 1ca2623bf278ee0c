/*
 * meter.c - how long this process stands in the driver and what that costs it of a core, by kind of call, where others can
 * read it: a bench tells the driver's time from the program's, the product knows nothing of it. The page also carries the settings of the stand-in libcuda, so that
 * they can be changed while the process runs.
 */
#include "fakenv.h"
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))

static struct emu_process *page;
static pid_t page_of; /* a forked child gets a page of its own */

static __thread struct {
	uint32_t depth, thread;
	enum emu_cost cost;
	uint64_t begin_ns, model_ns, begin_cpu_ns;
} call;

static uint64_t own_cpu_ns(void)
{
	struct timespec t;

	clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
	return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static struct emu_process *make_page(void)
{
	static const char *const names[EMU_COSTS] = {
#define X(name, text) text,
	        EMU_COSTS_OF(X)
#undef X
	};
	char path[4096], wanted[4096];
	struct emu_process *made = MAP_FAILED;
	int fd;

	snprintf(wanted, sizeof wanted, "%s/process-%d", fake_dir(), getpid());
	snprintf(path, sizeof path, "%s/.process-%d", fake_dir(), getpid());
	fd = fake_real()->open(path, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
	if (fd >= 0 && ftruncate(fd, sizeof *made) == 0)
		made = fake_real()->mmap(NULL, sizeof *made, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	if (fd >= 0)
		close(fd);
	if (made == MAP_FAILED)
		return NULL;
	made->pid = (uint32_t)getpid();
	made->costs = EMU_COSTS;
	for (int i = 0; i < EMU_COSTS; i++)
		strcpy(made->spent[i].name, names[i]);
	made->magic = EMU_PROCESS_MAGIC;
	if (rename(path, wanted) == 0)
		return made;
	munmap(made, sizeof *made);
	return NULL;
}

EXPORT struct emu_process *emu_process_page(void)
{
	static pthread_mutex_t making = PTHREAD_MUTEX_INITIALIZER;

	if (!fake_dir())
		return NULL;
	if (__atomic_load_n(&page_of, __ATOMIC_ACQUIRE) == getpid())
		return page;
	LOCKED(&making);
	if (page_of != getpid()) {
		page = make_page();
		__atomic_store_n(&page_of, getpid(), __ATOMIC_RELEASE);
	}
	return page;
}

EXPORT void emu_meter_begin(enum emu_cost cost)
{
	if (call.depth++)
		return;
	if (!call.thread)
		call.thread = (uint32_t)syscall(SYS_gettid);
	call.cost = cost;
	call.model_ns = 0;
	call.begin_ns = now_ns();
	call.begin_cpu_ns = own_cpu_ns();
}

EXPORT void emu_meter_add(uint64_t model_ns)
{
	call.model_ns += model_ns;
}

EXPORT void emu_meter_end(void)
{
	struct emu_process *p;
	struct emu_spent *spent;
	struct emu_interval *interval;
	uint64_t end_ns, cpu_ns;

	if (--call.depth)
		return;
	cpu_ns = own_cpu_ns() - call.begin_cpu_ns;
	p = emu_process_page();
	if (!p)
		return;
	end_ns = now_ns();
	spent = &p->spent[call.cost];
	__atomic_add_fetch(&spent->count, 1, __ATOMIC_RELAXED);
	__atomic_add_fetch(&spent->model_ns, call.model_ns, __ATOMIC_RELAXED);
	__atomic_add_fetch(&spent->wall_ns, end_ns - call.begin_ns, __ATOMIC_RELAXED);
	__atomic_add_fetch(&spent->cpu_ns, cpu_ns, __ATOMIC_RELAXED);
	interval = &p->interval[__atomic_fetch_add(&p->intervals, 1, __ATOMIC_RELAXED) % EMU_INTERVALS];
	__atomic_store_n(&interval->end_ns, 0, __ATOMIC_RELEASE);
	interval->begin_ns = call.begin_ns;
	interval->cost = (uint32_t)call.cost;
	interval->thread = call.thread;
	__atomic_store_n(&interval->end_ns, end_ns, __ATOMIC_RELEASE);
}
