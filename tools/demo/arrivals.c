/* arrivals.c - see arrivals.h */
#include "arrivals.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define TOKEN_SIGMA 0.8

static uint64_t next_random(uint64_t *state)
{
	uint64_t z = (*state += 0x9e3779b97f4a7c15ull);

	z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
	z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
	return z ^ (z >> 31);
}

double random_uniform(uint64_t *state)
{
	return ((double)(next_random(state) >> 11) + 0.5) / 9007199254740992.0;
}

static double random_normal(uint64_t *state)
{
	double u = random_uniform(state), v = random_uniform(state);

	return sqrt(-2 * log(u)) * cos(2 * M_PI * v);
}

double random_lognormal(uint64_t *state, double median, double sigma)
{
	return median * exp(sigma * random_normal(state));
}

/* A hyperexponential gap: with probability p from a fast phase, else from a slow one, balanced means. */
static double random_gap(uint64_t *state, double mean, double burst)
{
	double p = burst > 1 ? 0.5 * (1 + sqrt((burst - 1) / (burst + 1))) : 1;
	double phase = random_uniform(state) < p ? p : 1 - p;

	return -log(random_uniform(state)) * mean / (burst > 1 ? 2 * phase : 1);
}

static struct request *append(struct request *list, unsigned count, double at, double in, double out)
{
	if ((count & (count - 1)) == 0)
		list = realloc(list, (count ? 2 * count : 1) * sizeof(*list));
	if (!list) {
		perror("requests");
		exit(1);
	}
	list[count] = (struct request){
	        .arrival_s = at,
	        .id = count,
	        .in_tokens = in < 1 ? 1 : (unsigned)in,
	        .out_tokens = out < 1 ? 1 : (unsigned)out,
	};
	return list;
}

struct request *arrivals_draw(const struct shape *shape, unsigned *count)
{
	uint64_t state = shape->seed;
	struct request *list = NULL;
	double at = random_gap(&state, 1 / shape->rate_per_s, shape->burst);

	for (*count = 0; at < shape->duration_s; ++*count) {
		double in = random_lognormal(&state, shape->in_tokens, TOKEN_SIGMA);
		double out = random_lognormal(&state, shape->out_tokens, TOKEN_SIGMA);
		list = append(list, *count, at, in, out);
		at += random_gap(&state, 1 / shape->rate_per_s, shape->burst);
	}
	return list;
}

struct request *arrivals_read(const char *path, double speed, double limit_s, unsigned *count)
{
	FILE *file = fopen(path, "r");
	struct request *list = NULL;
	char line[256];
	double at, in, out;

	*count = 0;
	if (!file) {
		perror(path);
		exit(1);
	}
	while (fgets(line, sizeof(line), file)) {
		if (sscanf(line, "%lf,%lf,%lf", &at, &in, &out) != 3)
			continue; /* the header */
		if (limit_s > 0 && at / speed >= limit_s)
			break;
		list = append(list, (*count)++, at / speed, in, out);
	}
	fclose(file);
	return list;
}
