/* Counter-based draws: no state, so a policy that skips a draw does not shift those of the others. */
#include <math.h>

#include "core.h"

static uint64_t mix(uint64_t x)
{
	/* splitmix64's finaliser (public domain, Vigna). */
	x += 0x9e3779b97f4a7c15ULL;
	x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
	x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
	return x ^ (x >> 31);
}

double draw_unit(uint64_t seed, enum stream stream, uint64_t a, uint64_t b)
{
	uint64_t x = mix(seed ^ mix((uint64_t)stream ^ mix(a ^ mix(b))));

	return ((double)(x >> 11) + 0.5) * 0x1.0p-53;
}

double draw_normal(uint64_t seed, enum stream stream, uint64_t a, uint64_t b)
{
	double u = draw_unit(seed, stream, a, b);
	double v = draw_unit(seed ^ 0x5851f42d4c957f2dULL, stream, a, b);

	return sqrt(-2.0 * log(u)) * cos(6.283185307179586 * v);
}

int64_t draw_lognormal(uint64_t seed, enum stream stream, uint64_t a, uint64_t b, double median, double sigma,
                       double max)
{
	double x;

	if (median <= 0)
		return 0;
	x = sigma > 0 ? median * exp(sigma * draw_normal(seed, stream, a, b)) : median;
	return (int64_t)(x < max ? x : max);
}
