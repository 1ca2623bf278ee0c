/* capture.c - see capture.h */
#include "capture.h"

#include <stdlib.h>

enum { MODE_GLOBAL = 0, MODE_THREAD_LOCAL = 1, MODE_RELAXED = 2 };
static _Thread_local int thread_mode = MODE_GLOBAL;

static void tips_add(struct node_set *set, unsigned node)
{
	for (unsigned i = 0; i < set->count; i++)
		if (set->at[i] == node)
			return;
	if (set->count == set->room) {
		set->room = set->room ? 2 * set->room : 4;
		set->at = realloc(set->at, set->room * sizeof(*set->at));
		if (!set->at)
			abort();
	}
	set->at[set->count++] = node;
}

static void tips_copy(struct node_set *into, const struct node_set *from)
{
	for (unsigned i = 0; i < from->count; i++)
		tips_add(into, from->at[i]);
}

struct graph *graph_new(void)
{
	struct graph *graph = zeroed(sizeof(*graph));

	graph->magic = MAGIC_GRAPH;
	return graph;
}

void graph_free(struct graph *graph)
{
	for (unsigned i = 0; i < graph->count; i++) {
		if (graph->nodes[i]->work)
			work_free(graph->nodes[i]->work);
		free(graph->nodes[i]->after.at);
		free(graph->nodes[i]);
	}
	free(graph->nodes);
	held_drop(&graph->held);
	graph->magic = 0;
	free(graph);
}

unsigned graph_append(struct graph *graph, struct work *work, int type, const struct node_set *after)
{
	struct node *node = zeroed(sizeof(*node));

	if (graph->count == graph->room) {
		graph->room = graph->room ? 2 * graph->room : 16;
		graph->nodes = realloc(graph->nodes, graph->room * sizeof(struct node *));
	}
	if (!graph->nodes)
		abort();
	node->work = work;
	node->type = type;
	if (after)
		tips_copy(&node->after, after);
	graph->nodes[graph->count] = node;
	return graph->count++;
}

static void invalidate(struct capture *capture)
{
	capture->status = CAPTURE_INVALIDATED;
}

bool capture_is_open(const struct context *ctx)
{
	for (const struct capture *c = emu.captures; c; c = c->next)
		if (c->origin->ctx == ctx)
			return true;
	return false;
}

void capture_unref_locked(struct capture *capture)
{
	if (--capture->refs)
		return;
	if (capture->graph)
		graph_free(capture->graph);
	free(capture);
}

/* The legacy stream would wait for every blocking stream: not while one of them is only pretending to work. */
CUresult capture_check_implicit_locked(const struct stream *stream)
{
	CUresult result = CUDA_SUCCESS;

	if (stream != stream->ctx->legacy)
		return result;
	for (struct stream *s = stream->ctx->streams; s; s = s->next) {
		if (!s->capture || (s->flags & 1u))
			continue;
		invalidate(s->capture);
		result = CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
	}
	return result;
}

CUresult capture_work_locked(struct stream *stream, struct work **work)
{
	struct capture *capture = stream->capture;

	if (!capture)
		return capture_check_implicit_locked(stream);
	REFUSE_IF(capture->status == CAPTURE_INVALIDATED, CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
	if ((*work)->node_type < 0) {
		invalidate(capture);
		return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
	}
	unsigned node = graph_append(capture->graph, *work, (*work)->node_type, &stream->tips);
	stream->tips.count = 0;
	tips_add(&stream->tips, node);
	*work = NULL;
	return CUDA_SUCCESS;
}

CUresult capture_forbids_sync_locked(struct stream *stream)
{
	if (!stream->capture)
		return capture_check_implicit_locked(stream);
	invalidate(stream->capture);
	return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
}

CUresult capture_forbids_context_locked(struct context *ctx)
{
	CUresult result = CUDA_SUCCESS;

	for (struct capture *c = emu.captures; c; c = c->next) {
		if (c->origin->ctx != ctx)
			continue;
		invalidate(c);
		result = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
	}
	return result;
}

CUresult capture_forbids_unsafe(void)
{
	CUresult result = CUDA_SUCCESS;

	if (thread_mode == MODE_RELAXED || !__atomic_load_n(&emu.captures, __ATOMIC_RELAXED))
		return result;
	LOCKED(&emu.lock);
	for (struct capture *c = emu.captures; c; c = c->next) {
		bool mine = pthread_equal(c->thread, pthread_self()) && c->mode != MODE_RELAXED;
		if (!mine && (thread_mode == MODE_THREAD_LOCAL || c->mode != MODE_GLOBAL))
			continue;
		invalidate(c);
		result = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
	}
	return result;
}

bool capture_event_locked(struct stream *stream, struct event *event, CUresult *result)
{
	struct capture *capture = stream->capture;

	if (!capture) {
		*result = capture_check_implicit_locked(stream);
		return false;
	}
	*result =
	        capture->status == CAPTURE_INVALIDATED ? CUDA_ERROR_STREAM_CAPTURE_INVALIDATED : CUDA_SUCCESS;
	if (*result)
		return true;
	capture->refs++;
	if (event->capture)
		capture_unref_locked(event->capture);
	event->capture = capture;
	event->tips.count = 0;
	tips_copy(&event->tips, &stream->tips);
	return true;
}

static void join(struct stream *stream, struct capture *capture)
{
	if (!stream->capture) {
		stream->capture = capture;
		stream->tips.count = 0;
		capture->refs++;
	}
}

bool capture_wait_locked(struct stream *stream, struct event *event, CUresult *result)
{
	struct capture *capture = event->capture;

	*result = CUDA_SUCCESS;
	if (!capture && !stream->capture) {
		*result = capture_check_implicit_locked(stream);
		return false;
	}
	if (!capture) { /* a captured stream may not wait for work outside the capture */
		invalidate(stream->capture);
		*result = CUDA_ERROR_STREAM_CAPTURE_ISOLATION;
	} else if (stream->capture && stream->capture != capture) {
		invalidate(stream->capture);
		invalidate(capture);
		*result = CUDA_ERROR_STREAM_CAPTURE_MERGE;
	} else if (capture->status == CAPTURE_INVALIDATED || !capture->origin) {
		*result = CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
	} else {
		join(stream, capture);
		tips_copy(&stream->tips, &event->tips);
	}
	return true;
}

CUresult capture_misuse_event_locked(struct event *event)
{
	invalidate(event->capture);
	return CUDA_ERROR_CAPTURED_EVENT;
}

static void unlink_locked(struct capture *capture)
{
	for (struct capture **at = &emu.captures; *at; at = &(*at)->next) {
		if (*at == capture) {
			/* capture_forbids_unsafe looks at the head without the lock */
			__atomic_store_n(at, capture->next, __ATOMIC_RELAXED);
			break;
		}
	}
	capture->origin = NULL;
}

void capture_leave_locked(struct stream *stream)
{
	struct capture *capture = stream->capture;

	free(stream->tips.at);
	stream->tips = (struct node_set){0};
	stream->capture = NULL;
	if (!capture)
		return;
	if (capture->origin == stream) { /* destroyed while it captured */
		invalidate(capture);
		unlink_locked(capture);
	}
	capture_unref_locked(capture);
}

static CUresult begin(CUstream handle, int mode, struct graph *graph)
{
	struct stream *stream;

	TRY(stream_resolve(handle, &stream));
	REFUSE_IF(mode < MODE_GLOBAL || mode > MODE_RELAXED, CUDA_ERROR_INVALID_VALUE);
	REFUSE_IF(stream == stream->ctx->legacy, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
	struct capture *capture = calloc(1, sizeof(*capture));
	REFUSE_IF(!capture, CUDA_ERROR_OUT_OF_MEMORY);
	pthread_mutex_lock(&emu.lock);
	if (stream->capture) {
		pthread_mutex_unlock(&emu.lock);
		free(capture);
		return CUDA_ERROR_ILLEGAL_STATE;
	}
	capture->graph = graph ? graph : graph_new();
	capture->origin = stream;
	capture->thread = pthread_self();
	capture->mode = mode;
	capture->status = CAPTURE_ACTIVE;
	capture->id = ++emu.next_id;
	capture->refs = 1;
	capture->next = emu.captures;
	__atomic_store_n(&emu.captures, capture, __ATOMIC_RELAXED);
	stream->capture = capture;
	stream->tips.count = 0;
	pthread_mutex_unlock(&emu.lock);
	return CUDA_SUCCESS;
}

CUAPI(10010, cuStreamBeginCapture_v2, CUstream handle, int mode)
{
	return begin(handle, mode, NULL);
}

CUAPI(10000, cuStreamBeginCapture, CUstream handle)
{
	return begin(handle, MODE_GLOBAL, NULL);
}

/* Every node must lead to the origin's tips, or a forked stream was never joined. Nodes are in topological order. */
static bool is_joined(const struct graph *graph, const struct node_set *tips)
{
	bool *reached = calloc(graph->count + 1u, sizeof(bool));
	bool all = reached != NULL;

	for (unsigned i = 0; all && i < tips->count; i++)
		reached[tips->at[i]] = true;
	for (unsigned i = graph->count; all && i-- > 0;) {
		all = reached[i];
		for (unsigned k = 0; k < graph->nodes[i]->after.count; k++)
			reached[graph->nodes[i]->after.at[k]] = true;
	}
	free(reached);
	return all;
}

static CUresult end_locked(struct stream *stream, struct graph **graph)
{
	struct capture *capture = stream->capture;
	CUresult result = CUDA_SUCCESS;

	REFUSE_IF(!capture, CUDA_ERROR_ILLEGAL_STATE);
	REFUSE_IF(capture->origin != stream, CUDA_ERROR_STREAM_CAPTURE_UNMATCHED);
	REFUSE_IF(capture->mode != MODE_RELAXED && !pthread_equal(capture->thread, pthread_self()),
	          CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD);
	if (capture->status == CAPTURE_INVALIDATED)
		result = CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
	else if (!is_joined(capture->graph, &stream->tips))
		result = CUDA_ERROR_STREAM_CAPTURE_UNJOINED;
	unlink_locked(capture);
	if (!result) {
		*graph = capture->graph;
		capture->graph = NULL;
	}
	invalidate(capture); /* events that still point at it */
	for (struct stream *s = stream->ctx->streams; s; s = s->next)
		if (s->capture == capture && s != stream)
			capture_leave_locked(s);
	capture_leave_locked(stream);
	return result;
}

CUAPI(10000, cuStreamEndCapture, CUstream handle, CUgraph *out)
{
	struct stream *stream;
	struct graph *graph = NULL;

	TRY(stream_resolve(handle, &stream));
	REFUSE_IF(!out, CUDA_ERROR_INVALID_VALUE);
	pthread_mutex_lock(&emu.lock);
	CUresult result = end_locked(stream, &graph);
	pthread_mutex_unlock(&emu.lock);
	*out = (CUgraph)graph;
	return result;
}

CUAPI(10010, cuThreadExchangeStreamCaptureMode, int *mode)
{
	REFUSE_IF(!mode || *mode < MODE_GLOBAL || *mode > MODE_RELAXED, CUDA_ERROR_INVALID_VALUE);
	int before = thread_mode;
	thread_mode = *mode;
	*mode = before;
	return CUDA_SUCCESS;
}
