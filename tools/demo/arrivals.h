/* arrivals.h - the requests an online service gets: from a trace, or drawn by a seeded generator. */
#ifndef VALVE_DEMO_ARRIVALS_H
#define VALVE_DEMO_ARRIVALS_H

#include <stdint.h>

struct request {
	double arrival_s, first_s, done_s; /* since the start; 0: not yet */
	unsigned id, in_tokens, out_tokens, made;
};
struct shape {
	double rate_per_s, duration_s,
	        burst;                /* burst: squared coefficient of variation of the gaps, 1 = Poisson */
	double in_tokens, out_tokens; /* medians; both are lognormal */
	uint64_t seed;
};

double random_uniform(uint64_t *state); /* (0, 1) */
double random_lognormal(uint64_t *state, double median, double sigma);

struct request *arrivals_draw(const struct shape *shape, unsigned *count);
/* Lines "t_s,in_tokens,out_tokens" after a header; arrivals beyond limit_s (if not 0) are left out. */
struct request *arrivals_read(const char *path, double speed, double limit_s, unsigned *count);

#endif
