/* probe.h - what probe.c lends to cycles.c. */
#ifndef VALVE_GPU_PROBE_H
#define VALVE_GPU_PROBE_H

#include "rm.h"

#include <signal.h>

enum { PATH_BYTES = 108, GUARD_MS = 15000 };
#define SLOW_NS 10000000000ull /* a call that takes longer ends the session */

struct probe {
	int guard, work, passed; /* sockets of the guard and of the workload's tracer; the passed nvidiactl */
	uint32_t their_client, their_subdevice;
	struct rm_client own;
	struct table *table;
	struct beat *beat;
	char path, table_path[PATH_BYTES];
	bool is_slow, left_off;
	bool is_patient; /* few cores: look now and then instead of all the time, and be less exact */
};
extern struct probe probe;
extern volatile sig_atomic_t stop_now;

enum { PATIENCE_US = 20 };
static inline void look_again(void)
{
	if (probe.is_patient)
		sleep_us(PATIENCE_US);
}

bool guard_ask(const char *verb, unsigned ms); /* for the attached workload; true: acknowledged */
enum rm_select select_of(const char *word);
struct rm_result switch_channels(enum rm_select select, bool off);
struct rm_result switch_list(rm_list *list, bool off);
void print_result(const char *prefix, struct rm_result r);
void cycles(const char *rest);

#endif
