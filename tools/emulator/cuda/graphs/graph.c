/*
 * graph.c - graphs: made by capture (capture.c), instantiated, launched as one piece of work whose nodes run in the order
 * of capture. Node payloads are shared between graph, executable and launches in flight; the last user frees them.
 */
#include "capture.h"
#include "turn.h"

#include <stdlib.h>

/* What an executable runs. Launches in flight keep theirs when it is updated or destroyed. */
struct works {
	unsigned refs, count;
	struct held held;
	struct work *at[];
};

struct exec {
	uint32_t magic;
	struct works *works;
	uint64_t flags;
};

struct graph_work {
	struct work work;
	struct works *works;
};

HANDLE(graph_from, CUgraph, struct graph, MAGIC_GRAPH)
static HANDLE(exec_from, CUgraphExec, struct exec, MAGIC_EXEC)

        static struct works *works_of(const struct graph *graph)
{
	struct works *works = zeroed(sizeof(*works) + graph->count * sizeof(struct work *));

	works->refs = 1;
	for (unsigned i = 0; i < graph->count; i++)
		if (graph->nodes[i]->work)
			works->at[works->count++] = work_ref(graph->nodes[i]->work);
	held_copy(&works->held, &graph->held);
	return works;
}

static void works_unref(struct works *works)
{
	if (--works->refs)
		return;
	for (unsigned i = 0; i < works->count; i++)
		work_free(works->at[i]);
	held_drop(&works->held);
	free(works);
}

static CUresult run_graph(struct work *work, struct channel *channel)
{
	const struct works *works = ((struct graph_work *)work)->works;

	for (unsigned i = 0; i < works->count; i++) {
		if (!turn_begin(channel))
			return CUDA_SUCCESS;
		if (works->at[i]->is_launch)
			__atomic_fetch_add(&channel->slot->launches, 1, __ATOMIC_RELAXED);
		TRY(works->at[i]->run(works->at[i], channel));
	}
	return CUDA_SUCCESS;
}

static void drop_works(struct work *work)
{
	works_unref(((struct graph_work *)work)->works);
}

static CUresult instantiate(CUgraph handle, uint64_t flags, CUgraphExec *out)
{
	const struct graph *graph = graph_from(handle);

	REFUSE_IF(!out || !graph, CUDA_ERROR_INVALID_VALUE);
	struct exec *exec = calloc(1, sizeof(*exec));
	REFUSE_IF(!exec, CUDA_ERROR_OUT_OF_MEMORY);
	pthread_mutex_lock(&emu.lock);
	exec->magic = MAGIC_EXEC;
	exec->flags = flags;
	exec->works = works_of(graph);
	pthread_mutex_unlock(&emu.lock);
	*out = (CUgraphExec)exec;
	return CUDA_SUCCESS;
}

CUAPI(10000, cuGraphCreate, CUgraph *out, unsigned flags)
{
	REFUSE_IF(!out || flags, CUDA_ERROR_INVALID_VALUE);
	*out = (CUgraph)graph_new();
	return CUDA_SUCCESS;
}

CUAPI(10000, cuGraphDestroy, CUgraph handle)
{
	struct graph *graph = graph_from(handle);

	REFUSE_IF(!graph, CUDA_ERROR_INVALID_VALUE);
	LOCKED(&emu.lock);
	graph_free(graph);
	return CUDA_SUCCESS;
}

CUAPI(10000, cuGraphGetNodes, CUgraph handle, CUgraphNode *out, size_t *count)
{
	const struct graph *graph = graph_from(handle);

	REFUSE_IF(!graph || !count, CUDA_ERROR_INVALID_VALUE);
	for (size_t i = 0; out && i < *count; i++)
		out[i] = i < graph->count ? (CUgraphNode)graph->nodes[i] : NULL;
	if (!out || *count > graph->count)
		*count = graph->count;
	return CUDA_SUCCESS;
}

CUAPI(10000, cuGraphNodeGetType, CUgraphNode handle, int *out)
{
	REFUSE_IF(!handle || !out, CUDA_ERROR_INVALID_VALUE);
	*out = ((const struct node *)handle)->type;
	return CUDA_SUCCESS;
}

CUAPI(10000, cuGraphAddEmptyNode, CUgraphNode *out, CUgraph handle, const CUgraphNode *after, size_t count)
{
	struct graph *graph = graph_from(handle);

	REFUSE_IF(!graph || !out || (count && !after), CUDA_ERROR_INVALID_VALUE);
	LOCKED(&emu.lock);
	*out = (CUgraphNode)graph->nodes[graph_append(graph, NULL, NODE_EMPTY, NULL)];
	return CUDA_SUCCESS;
}

CUAPI(10000, cuGraphInstantiate, CUgraphExec *out, CUgraph graph, CUgraphNode *error_node, char *log,
      size_t log_bytes)
{
	(void)error_node;
	if (log && log_bytes)
		*log = 0;
	return instantiate(graph, 0, out);
}

CUAPI(11000, cuGraphInstantiate_v2, CUgraphExec *out, CUgraph graph, CUgraphNode *error_node, char *log,
      size_t log_bytes)
{
	return cuGraphInstantiate(out, graph, error_node, log, log_bytes);
}

CUAPI(11040, cuGraphInstantiateWithFlags, CUgraphExec *out, CUgraph graph, unsigned long long flags)
{
	return instantiate(graph, flags, out);
}

CUAPI(12000, cuGraphInstantiateWithParams, CUgraphExec *out, CUgraph graph,
      CUDA_GRAPH_INSTANTIATE_PARAMS *params)
{
	REFUSE_IF(!params, CUDA_ERROR_INVALID_VALUE);
	params->error_node = NULL;
	params->result = 0;
	return instantiate(graph, params->flags, out);
}

CUAPI(12000, cuGraphExecGetFlags, CUgraphExec handle, uint64_t *flags)
{
	const struct exec *exec = exec_from(handle);

	REFUSE_IF(!exec || !flags, CUDA_ERROR_INVALID_VALUE);
	*flags = exec->flags;
	return CUDA_SUCCESS;
}

CUAPI(10000, cuGraphExecDestroy, CUgraphExec handle)
{
	struct exec *exec = exec_from(handle);

	REFUSE_IF(!exec, CUDA_ERROR_INVALID_VALUE);
	pthread_mutex_lock(&emu.lock);
	exec->magic = 0;
	works_unref(exec->works);
	pthread_mutex_unlock(&emu.lock);
	free(exec);
	return CUDA_SUCCESS;
}

/* Succeeds when the new graph has the same kinds of nodes in the same order. */
CUAPI(12000, cuGraphExecUpdate_v2, CUgraphExec handle, CUgraph graph_handle, int *info)
{
	struct exec *exec = exec_from(handle);
	const struct graph *graph = graph_from(graph_handle);

	REFUSE_IF(!exec || !graph, CUDA_ERROR_INVALID_VALUE);
	pthread_mutex_lock(&emu.lock);
	struct works *fresh = works_of(graph), *old = exec->works;
	bool same = fresh->count == old->count;
	for (unsigned i = 0; same && i < fresh->count; i++)
		same = fresh->at[i]->node_type == old->at[i]->node_type;
	if (same)
		exec->works = fresh;
	works_unref(same ? old : fresh);
	pthread_mutex_unlock(&emu.lock);
	if (info)
		*info = !same;
	return same ? CUDA_SUCCESS : CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE;
}

CUAPI(10000, cuGraphLaunch, CUgraphExec handle, CUstream stream_handle)
{
	struct stream *stream;
	struct exec *exec = exec_from(handle);

	TRY(stream_resolve(stream_handle, &stream));
	REFUSE_IF(!exec, CUDA_ERROR_INVALID_VALUE);
	struct graph_work *launch = work_new(sizeof(*launch), run_graph);
	launch->work.node_type = NODE_GRAPH;
	launch->work.drop = drop_works;
	pthread_mutex_lock(&emu.lock);
	launch->works = exec->works;
	launch->works->refs++;
	pthread_mutex_unlock(&emu.lock);
	return work_submit(stream, LANE_COMPUTE, &launch->work);
}

/* The executable is where it is launched from already; what is left is that the stream has been there. */
CUAPI(11010, cuGraphUpload, CUgraphExec handle, CUstream stream_handle)
{
	struct stream *stream;

	TRY(stream_resolve(stream_handle, &stream));
	REFUSE_IF(!exec_from(handle), CUDA_ERROR_INVALID_VALUE);
	return stream->capture ? CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED : CUDA_SUCCESS;
}
