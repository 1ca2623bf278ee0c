/* costs.c - see helper.h. In batches of ten, because one call is shorter than what the clock itself costs. */
#include "helper.h"

#include <stdio.h>
#include <stdlib.h>

enum { BATCH = 10, SAMPLES = 400 };
static struct {
	CUstream stream;
	CUevent event;
	CUdeviceptr word;
	CUgraphExec graph;
} use;

static CUresult record(void)
{
	return gpu.cuEventRecord(use.event, use.stream);
}

static CUresult query_event(void)
{
	CUresult code = gpu.cuEventQuery(use.event);

	return code == CUDA_ERROR_NOT_READY ? CUDA_SUCCESS : code;
}

static CUresult query_stream(void)
{
	CUresult code = gpu.cuStreamQuery(use.stream);

	return code == CUDA_ERROR_NOT_READY ? CUDA_SUCCESS : code;
}

static CUresult record_context(void)
{
	return gpu.cuCtxRecordEvent ? gpu.cuCtxRecordEvent(gpu.context, use.event) : CUDA_SUCCESS;
}

static CUresult write_value(void)
{
	return gpu.cuStreamWriteValue32_v2(use.stream, use.word, 1, 0);
}

static void nothing(void *unused)
{
	(void)unused;
}

static CUresult host_func(void)
{
	return gpu.cuLaunchHostFunc(use.stream, nothing, NULL);
}

static CUresult launch(void)
{
	unsigned words = 1, seed = 1;
	void *args[] = {&use.word, &words, &seed};

	return gpu.cuLaunchKernel(gpu.fill, 1, 1, 1, 32, 1, 1, 0, use.stream, args, NULL);
}

static CUresult launch_graph(void)
{
	return gpu.cuGraphLaunch(use.graph, use.stream);
}

static CUresult prepare(void)
{
	CUgraph graph;

	TRY(gpu.cuEventCreate(&use.event, CU_EVENT_DISABLE_TIMING));
	TRY(gpu.cuStreamBeginCapture_v2(use.stream, CU_STREAM_CAPTURE_MODE_RELAXED));
	for (int i = 0; i < BATCH; i++)
		TRY(launch());
	TRY(gpu.cuStreamEndCapture(use.stream, &graph));
	return gpu.cuGraphInstantiateWithFlags(&use.graph, graph, 0);
}

int call_costs(unsigned n, CUstream stream, CUdeviceptr word, char *answer, size_t room)
{
	static const struct {
		const char *name;
		CUresult (*call)(void);
	} list[] = {{"launch", launch},
	            {"graph_launch", launch_graph},
	            {"event_record", record},
	            {"event_query", query_event},
	            {"stream_query", query_stream},
	            {"ctx_record_event", record_context},
	            {"stream_write_value", write_value},
	            {"launch_host_func", host_func}};
	unsigned samples = n / BATCH < SAMPLES ? n / BATCH : SAMPLES;

	use.stream = stream;
	use.word = word;
	CUresult code = use.graph ? CUDA_SUCCESS : prepare();
	int at = snprintf(answer, room, "{\"where\": \"prepare\"");
	for (size_t k = 0; k < sizeof(list) / sizeof(list[0]) && !code; k++) {
		at += snprintf(answer + at, room - (size_t)at, ", \"%s_us\": [", list[k].name);
		for (unsigned i = 0; i < samples && !code; i++) {
			uint64_t start = now_ns();
			for (int b = 0; b < BATCH && !code; b++)
				code = list[k].call();
			double us = (double)(now_ns() - start) / 1e3 / BATCH;
			at += snprintf(answer + at, room - (size_t)at, "%s%.3f", i ? "," : "", us);
			if (!code)
				code = gpu.cuStreamSynchronize(stream);
		}
		at += snprintf(answer + at, room - (size_t)at, "]");
	}
	return at + snprintf(answer + at, room - (size_t)at, ", \"error\": %d}", code);
}
