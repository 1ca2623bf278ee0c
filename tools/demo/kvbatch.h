/* kvbatch.h - offline batch inference with content-checked KV. */
#ifndef VALVE_DEMO_KVBATCH_H
#define VALVE_DEMO_KVBATCH_H

#include <signal.h>

struct kvbatch_plan {
	double blocks, block_kib, planes; /* of the cache */
	double requests;                  /* to answer; 0: until told to stop */
	double duration, report;          /* seconds; 0: none */
	double batch, in_tokens, out_tokens, step_us, prefill_us;
	double seed;
};

/* Returns the exit status: 0 when the answers are those of an undisturbed run. */
int kvbatch_run(const struct kvbatch_plan *plan, const volatile sig_atomic_t *stop);

#endif
