/* event.c - events: a point on a stream's timeline, with the time at which the GPU came past it. */
#include "capture.h"
#include "core.h"

#include <stdlib.h>

struct event_work {
	struct work work;
	struct mark *mark;
};

static void mark_unref(struct mark *mark)
{
	if (!mark || --mark->refs)
		return;
	deps_clear(&mark->after);
	free(mark);
}

static CUresult stamp(struct work *work, struct channel *channel)
{
	(void)channel;
	((struct event_work *)work)->mark->time_ns = now_ns();
	return CUDA_SUCCESS;
}

static void drop_mark(struct work *work)
{
	mark_unref(((struct event_work *)work)->mark);
}

static HANDLE(event_from, CUevent, struct event, MAGIC_EVENT)

        static void forget_capture_locked(struct event *event)
{
	if (event->capture)
		capture_unref_locked(event->capture);
	event->capture = NULL;
	event->tips.count = 0;
}

static void set_mark_locked(struct event *event, struct mark *mark)
{
	mark->refs++;
	mark_unref(event->mark);
	event->mark = mark;
	forget_capture_locked(event);
}

/* Queues the stamp at the end of the stream. The lock is kept until the event points at it. */
static void record(struct stream *stream, struct event *event)
{
	struct event_work *stamping = work_new(sizeof(*stamping), stamp);

	stamping->work.drop = drop_mark;
	stamping->mark = zeroed(sizeof(struct mark));
	stamping->mark->refs = 1;
	LOCKED(&emu.lock);
	uint64_t seq = work_enqueue_locked(stream, LANE_COMPUTE, &stamping->work);
	deps_add(&stamping->mark->after, stream->line, seq);
	set_mark_locked(event, stamping->mark);
}

CUAPI(2000, cuEventCreate, CUevent *out, unsigned flags)
{
	struct context *ctx;

	TRY(context_current(&ctx));
	REFUSE_IF(!out || flags > 7, CUDA_ERROR_INVALID_VALUE);
	struct event *event = calloc(1, sizeof(*event));
	REFUSE_IF(!event, CUDA_ERROR_OUT_OF_MEMORY);
	event->magic = MAGIC_EVENT;
	event->ctx = ctx;
	event->flags = flags;
	*out = (CUevent)event;
	return CUDA_SUCCESS;
}

CUAPI(4000, cuEventDestroy_v2, CUevent handle)
{
	struct event *event = event_from(handle);

	REFUSE_IF(!event, CUDA_ERROR_INVALID_HANDLE);
	pthread_mutex_lock(&emu.lock);
	mark_unref(event->mark);
	forget_capture_locked(event);
	free(event->tips.at);
	pthread_mutex_unlock(&emu.lock);
	event->magic = 0;
	free(event);
	return CUDA_SUCCESS;
}

CUAPI(2000, cuEventRecord, CUevent handle, CUstream stream_handle)
{
	METERED(RECORD);
	struct stream *stream;
	struct event *event = event_from(handle);
	CUresult result = stream_resolve(stream_handle, &stream);

	if (result)
		return result;
	REFUSE_IF(!event || event->ctx != stream->ctx, CUDA_ERROR_INVALID_HANDLE);
	pthread_mutex_lock(&emu.lock);
	bool captured = capture_event_locked(stream, event, &result);
	pthread_mutex_unlock(&emu.lock);
	if (!captured && !result)
		record(stream, event);
	return result;
}

CUAPI(11010, cuEventRecordWithFlags, CUevent handle, CUstream stream, unsigned flags)
{
	return flags > 1 ? CUDA_ERROR_INVALID_VALUE : cuEventRecord(handle, stream);
}

/* Done, pending or captured. */
static CUresult state_locked(struct event *event)
{
	if (event->capture)
		return capture_misuse_event_locked(event);
	if (event->ctx->sticky)
		return event->ctx->sticky;
	return event->mark && !deps_met(&event->mark->after) ? CUDA_ERROR_NOT_READY : CUDA_SUCCESS;
}

/* With `wait` set it blocks until the event has happened. */
static CUresult look(CUevent handle, bool wait)
{
	struct event *event = event_from(handle);

	TRY(driver_check());
	REFUSE_IF(!event, CUDA_ERROR_INVALID_HANDLE);
	pthread_mutex_lock(&emu.lock);
	struct context *ctx = event->ctx;
	CUresult result = state_locked(event);
	if (!wait || result != CUDA_ERROR_NOT_READY) {
		pthread_mutex_unlock(&emu.lock);
		return result;
	}
	struct dependencies left = {0};
	deps_copy(&left, &event->mark->after);
	pthread_mutex_unlock(&emu.lock);
	deps_wait(&left);
	return ctx->sticky;
}

CUAPI(2000, cuEventQuery, CUevent handle)
{
	return look(handle, false);
}

CUAPI(2000, cuEventSynchronize, CUevent handle)
{
	METERED(WAIT);
	return look(handle, true);
}

CUAPI(12080, cuEventElapsedTime_v2, float *out, CUevent start, CUevent end)
{
	struct event *first = event_from(start), *last = event_from(end);

	REFUSE_IF(!out, CUDA_ERROR_INVALID_VALUE);
	REFUSE_IF(!first || !last || ((first->flags | last->flags) & CU_EVENT_DISABLE_TIMING),
	          CUDA_ERROR_INVALID_HANDLE);
	pthread_mutex_lock(&emu.lock); /* another thread may record them anew meanwhile */
	CUresult result = first->mark && last->mark ? state_locked(first) : CUDA_ERROR_INVALID_HANDLE;
	if (!result)
		result = state_locked(last);
	double real = result ? 0 : (double)last->mark->time_ns - (double)first->mark->time_ns;
	pthread_mutex_unlock(&emu.lock);
	if (!result)
		*out = (float)(real * emu.board->time_scale / 1e6);
	return result;
}

CUAPI(2000, cuEventElapsedTime, float *out, CUevent start, CUevent end)
{
	return cuEventElapsedTime_v2(out, start, end);
}

static CUresult wait_for_event(struct stream *stream, struct event *event)
{
	CUresult result = CUDA_SUCCESS;

	LOCKED(&emu.lock);
	if (!capture_wait_locked(stream, event, &result) && !result && event->mark)
		deps_copy(&stream->waits, &event->mark->after);
	return result;
}

CUAPI(3020, cuStreamWaitEvent, CUstream stream_handle, CUevent handle, unsigned flags)
{
	struct stream *stream;
	struct event *event = event_from(handle);

	TRY(stream_resolve(stream_handle, &stream));
	REFUSE_IF(!event, CUDA_ERROR_INVALID_HANDLE);
	return flags > 1 ? CUDA_ERROR_INVALID_VALUE : wait_for_event(stream, event);
}

/*
 * One event over everything the context was given so far. It queues nothing, so it cannot stand in the way of a stream
 * that shares a channel. A capture in the context dies of it, as documented.
 */
CUAPI(12050, cuCtxRecordEvent, CUcontext ctx_handle, CUevent handle)
{
	struct event *event = event_from(handle);

	TRY(driver_check());
	REFUSE_IF(!context_valid(ctx_handle) || !event, CUDA_ERROR_INVALID_HANDLE);
	struct context *ctx = (struct context *)ctx_handle;
	struct mark *mark = zeroed(sizeof(struct mark));
	LOCKED(&emu.lock);
	CUresult result = ctx->sticky ? ctx->sticky : capture_forbids_context_locked(ctx);
	mark->time_ns = now_ns();
	mark->refs = 1;
	if (!result) {
		context_work_locked(ctx, &mark->after);
		set_mark_locked(event, mark);
	}
	mark_unref(mark);
	return result;
}

CUAPI(12050, cuCtxWaitEvent, CUcontext ctx_handle, CUevent handle)
{
	struct event *event = event_from(handle);

	TRY(driver_check());
	REFUSE_IF(!context_valid(ctx_handle) || !event, CUDA_ERROR_INVALID_HANDLE);
	struct context *ctx = (struct context *)ctx_handle;
	LOCKED(&emu.lock);
	CUresult result = ctx->sticky ? ctx->sticky : capture_forbids_context_locked(ctx);
	for (struct stream *s = ctx->streams; s && !result && event->mark; s = s->next)
		deps_copy(&s->waits, &event->mark->after);
	return result;
}

CUAPI(2000, cuCtxSynchronize, void)
{
	METERED(WAIT);
	struct context *ctx;

	TRY(context_current(&ctx));
	pthread_mutex_lock(&emu.lock);
	CUresult result = capture_forbids_context_locked(ctx);
	pthread_mutex_unlock(&emu.lock);
	return result ? result : context_wait(ctx);
}

CUAPI(13000, cuCtxSynchronize_v2, CUcontext handle)
{
	METERED(WAIT);

	TRY(driver_check());
	return context_valid(handle) ? context_wait((struct context *)handle) : CUDA_ERROR_INVALID_CONTEXT;
}
