/*
 * online.c - an LLM-shaped online service: open-loop arrivals, a prefill for each new request, then batched decode
 * iterations with host gaps between them, like a continuous-batching engine. Latencies are measured where the user
 * stands: TTFT from arrival to the first token, TPOT over the tokens after it. One JSON line per request, one at the end.
 */
#include "arrivals.h"
#include "driver.h"
#include "options.h"

#include <dlfcn.h>
#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_BATCH = 512, MAX_LAYERS = 256, CAPTURE_THREAD_LOCAL = 1 };

static double rate = 2, duration = 30, burst = 4, in_tokens = 400, out_tokens = 40, seed = 1, speed = 1;
static double batch = 64, prefill_us = 40, decode_us = 10000, sequence_us = 50, layers = 4, gap_ms = 0.5,
              device;
static const char *trace;
static int graphs, quiet;

static const struct option options[] = {
        {"trace", "CSV of arrivals: t_s,in_tokens,out_tokens; else they are drawn", OPTION_TEXT, &trace},
        {"speed", "how many times faster than the trace says", OPTION_NUMBER, &speed},
        {"duration", "seconds of arrivals", OPTION_NUMBER, &duration},
        {"rate", "drawn requests per second", OPTION_NUMBER, &rate},
        {"burst", "squared coefficient of variation of the gaps between them, 1 = Poisson", OPTION_NUMBER,
         &burst},
        {"in-tokens", "median prompt", OPTION_NUMBER, &in_tokens},
        {"out-tokens", "median answer", OPTION_NUMBER, &out_tokens},
        {"seed", "of arrivals and gaps", OPTION_NUMBER, &seed},
        {"batch", "largest number of requests decoded together", OPTION_NUMBER, &batch},
        {"prefill-us", "GPU time per prompt token", OPTION_NUMBER, &prefill_us},
        {"decode-us", "GPU time of a decode iteration", OPTION_NUMBER, &decode_us},
        {"sequence-us", "and more per request in the batch", OPTION_NUMBER, &sequence_us},
        {"layers", "kernels that an iteration is launched as", OPTION_NUMBER, &layers},
        {"gap-ms", "median host gap between iterations (lognormal)", OPTION_NUMBER, &gap_ms},
        {"device", "GPU", OPTION_NUMBER, &device},
        {"graphs", "launch decode iterations as CUDA graphs", OPTION_FLAG, &graphs},
        {"quiet", "only the summary", OPTION_FLAG, &quiet},
        {0},
};

static volatile sig_atomic_t stop;

static void on_signal(int number)
{
	(void)number;
	stop = 1;
}

/* An engine tells how many requests it has open if the hook's library, which listens, is loaded. */
static void demo_hint(unsigned open)
{
	static void (*publish)(uint32_t);
	static unsigned last = ~0u;
	static int looked;

	if (!looked++)
		*(void **)&publish = dlsym(RTLD_DEFAULT, "valve_hint_open_requests");
	if (publish && open != last)
		publish(open);
	last = open;
}

struct service {
	struct request *all, *active[MAX_BATCH];
	unsigned count, arrived, batch, finished;
	CUfunction spin;
	CUstream stream;
	CUevent done;
	CUgraphExec graph[16]; /* per power of two of the batch */
	uint64_t random;
	double start_s;
};

static double elapsed_s(const struct service *s)
{
	return now_s() - s->start_s;
}

static void run_for(struct service *s, double us)
{
	unsigned kernels = (unsigned)layers;
	uint64_t each = (uint64_t)(us / kernels);

	for (unsigned i = 0; i < kernels; i++)
		cuda_launch(s->spin, s->stream, &each, 1);
}

static void wait_done(struct service *s)
{
	CHECK(cu.cuEventRecord(s->done, s->stream));
	CHECK(cu.cuEventSynchronize(s->done));
}

static void hint(const struct service *s)
{
	demo_hint(s->arrived - s->finished);
}

static void finish(struct service *s, unsigned slot)
{
	struct request *r = s->active[slot];

	r->done_s = elapsed_s(s);
	s->finished++;
	s->active[slot] = s->active[--s->batch];
	if (quiet)
		return;
	double tpot = r->out_tokens > 1 ? (r->done_s - r->first_s) * 1e3 / (r->out_tokens - 1) : 0;
	printf("{\"request\": %u, \"arrival_s\": %.6f, \"in\": %u, \"out\": %u, \"ttft_ms\": %.3f, "
	       "\"tpot_ms\": %.3f}\n",
	       r->id, r->arrival_s, r->in_tokens, r->out_tokens, (r->first_s - r->arrival_s) * 1e3, tpot);
	fflush(stdout);
}

/* New requests enter the batch while there is room; each is prefilled at once, which makes its first token. */
static void admit(struct service *s)
{
	unsigned room = (unsigned)batch - s->batch;

	while (s->arrived < s->count && s->all[s->arrived].arrival_s <= elapsed_s(s) && room--) {
		struct request *r = &s->all[s->arrived];
		s->arrived++;
		hint(s);
		run_for(s, r->in_tokens * prefill_us);
		wait_done(s);
		r->first_s = elapsed_s(s);
		r->made = 1;
		s->active[s->batch++] = r;
		if (r->made >= r->out_tokens)
			finish(s, s->batch - 1);
	}
	hint(s);
}

static void launch_graph(struct service *s)
{
	unsigned bucket = 0;
	CUgraph graph;

	while ((1u << bucket) < s->batch)
		bucket++;
	if (!s->graph[bucket]) {
		CHECK(cu.cuStreamBeginCapture(s->stream, CAPTURE_THREAD_LOCAL));
		run_for(s, decode_us + sequence_us * (1u << bucket));
		CHECK(cu.cuStreamEndCapture(s->stream, &graph));
		CHECK(cu.cuGraphInstantiateWithFlags(&s->graph[bucket], graph, 0));
		CHECK(cu.cuGraphDestroy(graph));
	}
	CHECK(cu.cuGraphLaunch(s->graph[bucket], s->stream));
}

static void decode(struct service *s)
{
	if (graphs)
		launch_graph(s);
	else
		run_for(s, decode_us + sequence_us * s->batch);
	wait_done(s);
	for (unsigned i = s->batch; i-- > 0;)
		if (++s->active[i]->made >= s->active[i]->out_tokens)
			finish(s, i);
	hint(s);
	sleep_s(random_lognormal(&s->random, gap_ms, 0.5) / 1e3);
}

static void serve(struct service *s)
{
	s->start_s = now_s();
	while (!stop && s->finished < s->count) {
		admit(s);
		if (s->batch)
			decode(s);
		else if (s->arrived < s->count)
			sleep_s(s->all[s->arrived].arrival_s - elapsed_s(s));
	}
}

static int by_value(const void *a, const void *b)
{
	double x = *(const double *)a, y = *(const double *)b;

	return (x > y) - (x < y);
}

static void print_figure(const char *name, double *values, unsigned count)
{
	double sum = 0;

	qsort(values, count, sizeof(double), by_value);
	for (unsigned i = 0; i < count; i++)
		sum += values[i];
	printf(", \"%s\": {\"n\": %u, \"mean\": %.4f, \"p50\": %.4f, \"p99\": %.4f, \"max\": %.4f}", name,
	       count, count ? sum / count : 0, count ? values[count / 2] : 0,
	       count ? values[(unsigned)(0.99 * (count - 1))] : 0, count ? values[count - 1] : 0);
}

static void summarise(const struct service *s)
{
	double *ttft = calloc(s->count + 1u, sizeof(double)), *tpot = calloc(s->count + 1u, sizeof(double));
	unsigned firsts = 0, rests = 0;
	unsigned long tokens = 0;

	for (unsigned i = 0; ttft && tpot && i < s->arrived; i++) {
		const struct request *r = &s->all[i];
		tokens += r->made;
		if (r->done_s <= 0)
			continue;
		ttft[firsts++] = (r->first_s - r->arrival_s) * 1e3;
		if (r->out_tokens > 1)
			tpot[rests++] = (r->done_s - r->first_s) * 1e3 / (r->out_tokens - 1);
	}
	printf("{\"summary\": \"online\", \"requests\": %u, \"finished\": %u, \"tokens\": %lu, \"start_s\": "
	       "%.6f, \"wall_s\": %.3f",
	       s->count, s->finished, tokens, s->start_s, elapsed_s(s));
	print_figure("ttft_ms", ttft, firsts);
	print_figure("tpot_ms", tpot, rests);
	printf("}\n");
	free(ttft);
	free(tpot);
}

int main(int argc, char **argv)
{
	static struct service s;
	struct sigaction action = {.sa_handler = on_signal, .sa_flags = (int)SA_RESETHAND};

	options_parse(argc, argv, options, "An LLM-shaped online service on the CUDA driver API.");
	if (batch < 1 || batch > MAX_BATCH || layers < 1 || layers > MAX_LAYERS || rate <= 0 || speed <= 0) {
		fprintf(stderr, "%s: batch is 1 to %d, layers 1 to %d, rate and speed above 0\n", argv[0],
		        MAX_BATCH, MAX_LAYERS);
		return 2;
	}
	sigaction(SIGTERM, &action, NULL);
	sigaction(SIGINT, &action, NULL);
	s.random = (uint64_t)seed ^ 0x676170ull;
	struct shape shape = {rate, duration, burst, in_tokens, out_tokens, (uint64_t)seed};
	s.all = trace ? arrivals_read(trace, speed, duration, &s.count) : arrivals_draw(&shape, &s.count);
	cuda_open((int)device);
	s.spin = cuda_kernel("emu_spin");
	CHECK(cu.cuStreamCreate(&s.stream, 1));
	CHECK(cu.cuEventCreate(&s.done, CU_EVENT_DISABLE_TIMING));
	serve(&s);
	summarise(&s);
	free(s.all);
	return 0;
}
