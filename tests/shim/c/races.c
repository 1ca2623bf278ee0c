/*
 * races.c - the shim's threads in one process under the thread sanitizer: launchers with C counters, the watcher, and a
 * "valved" that opens the gate, asks for proof and tries to wake. The assembly stays outside; its steps are repeated
 * here with a fenced count.
 *
 * What is checked: no launch is lost; a gate that was open while somebody launched has rung; and "idle" is never
 * published while work that was counted before is still running (the fake GPU runs each launch for a moment).
 */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "contexts.h"

#define LAUNCHERS 4

struct valve_shim valve_shim;
static uint64_t started, finished; /* the fake GPU's books */
static uint64_t recorded;          /* what had started when the event was recorded */
static uint32_t ended, recording, capturing, spoilt;
static struct valve_entry entry;

/* ---- what interpose.c and getproc.c would provide ---- */

static CUresult fine(void)
{
	return CUDA_SUCCESS;
}

static CUresult create_event(CUevent *event, unsigned flags)
{
	(void)flags;
	*event = (CUevent)(uintptr_t)1;
	return CUDA_SUCCESS;
}

static CUresult record(CUcontext context, CUevent event)
{
	(void)context, (void)event;
	add_full(&recording, 1);
	if (load_acquire(&capturing))
		store_release(&spoilt, 1);
	store_release(&recorded, load_acquire(&started));
	add_full(&recording, (uint32_t)-1);
	return CUDA_SUCCESS;
}

static CUresult query(CUevent event)
{
	(void)event;
	return load_acquire(&finished) >= load_acquire(&recorded) ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

void *valve_real_symbol(const char *name)
{
	if (!strcmp(name, "cuEventCreate"))
		return (void *)(uintptr_t)create_event;
	if (!strcmp(name, "cuCtxRecordEvent"))
		return (void *)(uintptr_t)record;
	if (!strcmp(name, "cuEventQuery"))
		return (void *)(uintptr_t)query;
	return (void *)(uintptr_t)fine;
}

void *valve_bind(struct valve_entry *bound, void *real, bool ptds)
{
	(void)ptds;
	store_release(&bound->target, real);
	store_release(&bound->real, real);
	return real;
}

bool valve_has_ptds_suffix(const char *name)
{
	(void)name;
	return false;
}

void valve_slow(void)
{
}

void valve_heed_child(void)
{
}

void valve_memory_forget(CUcontext context, int device, bool is_gone)
{
	(void)context, (void)device, (void)is_gone;
}

int valve_spawn(void *(*run)(void *), size_t most)
{
	pthread_t thread;

	(void)most;
	return -pthread_create(&thread, NULL, run, NULL) ?: -pthread_detach(thread);
}

/* ---- the actors ---- */

/* A launch by the steps of trampoline.S, fenced form. The GPU has it from "started" to "finished". */
static void launch(void)
{
	if (valve_tls.fenced)
		add_full(&valve_tls.fenced->submitted, 1);
	if (!valve_tls.fenced || (load_acquire(&VALVE_LAUNCH->gate_epoch) & 1))
		valve_launch_slow(&entry);
	add_full(&started, 1);
	for (volatile int i = 0; i < 200; i++)
		;
	add_full(&finished, 1);
}

static void *launcher(void *count)
{
	for (long i = 0; i < (long)(intptr_t)count; i++) {
		launch();
		if (i % 10 == 9)
			sleep_ns(3000000); /* a gap in which idleness can be proven */
	}
	add_full(&ended, 1);
	return NULL;
}

/* Opens and closes the gate; at each opening after which somebody launched, the bell must have been rung. */
static void *gatekeeper(void *unused)
{
	struct valve_control *control = (struct valve_control *)(void *)valve_pages;
	long missed = 0;

	(void)unused;
	while (load_acquire(&ended) < LAUNCHERS) {
		uint32_t epoch = control->gate_epoch + 1;
		uint64_t before;

		exchange_full(&control->gate_epoch, epoch);
		before = valve_submitted();
		sleep_ns(2000000);
		/* Two launches each: those in flight when the gate opened had passed the test already. */
		if (valve_submitted() > before + LAUNCHERS &&
		    load_acquire(&VALVE_REGION->rung_epoch) != epoch)
			missed++;
		exchange_full(&control->gate_epoch, epoch + 1);
		sleep_ns(1000000);
	}
	return (void *)(intptr_t)missed;
}

static CUresult begin_capture(void)
{
	add_full(&capturing, 1);
	if (load_acquire(&recording))
		store_release(&spoilt, 1);
	return CUDA_SUCCESS;
}

static CUresult end_capture(void)
{
	add_full(&capturing, (uint32_t)-1);
	return CUDA_SUCCESS;
}

/* Captures, as often as it can, and never beside a record. */
static void *capturer(void *unused)
{
	struct valve_entry begin = {.target = (void *)(uintptr_t)begin_capture};
	struct valve_entry end = {.target = (void *)(uintptr_t)end_capture};

	while (load_acquire(&ended) < LAUNCHERS) {
		valve_on_cuStreamBeginCapture(3, 0, 0, 0, 0, 0, &begin);
		valve_on_cuStreamEndCapture(3, 0, 0, 0, 0, 0, &end);
		sleep_ns(100000);
	}
	return unused;
}

static void add_context(void)
{
	valve_contexts.context[0] =
	        (struct valve_context){.context = (CUcontext)(uintptr_t)2, .state = CONTEXT_LIVE};
	valve_contexts.generation = 1;
}

int main(int argc, char **argv)
{
	struct valve_control *control = (struct valve_control *)(void *)VALVE_CONTROL_PAGE;
	intptr_t count = argc > 1 ? atoi(argv[1]) : 100;
	pthread_t team[LAUNCHERS], session, captures;
	void *missed;

	entry.real = (void *)(uintptr_t)valve_slow;
	entry.name = "cuLaunchKernel";
	control->watch = 1;
	valve_shim.role = VALVE_ROLE_ONLINE;
	valve_shim.must_fence = 1;
	add_context();
	valve_watcher_start();
	pthread_create(&session, NULL, gatekeeper, NULL);
	pthread_create(&captures, NULL, capturer, NULL);
	for (int i = 0; i < LAUNCHERS; i++)
		pthread_create(&team[i], NULL, launcher, (void *)count);
	for (int i = 0; i < LAUNCHERS; i++)
		pthread_join(team[i], NULL);
	pthread_join(session, &missed);
	pthread_join(captures, NULL);
	while (load_acquire(&VALVE_REGION->idle_submitted) != (uint64_t)(LAUNCHERS * count))
		sleep_ns(1000000);
	if (valve_submitted() != (uint64_t)(LAUNCHERS * count) || missed || spoilt ||
	    load_acquire(&finished) != load_acquire(&started))
		return 1;
	puts("every launch was counted, every open gate heard, idleness was never claimed too early");
	return 0;
}
