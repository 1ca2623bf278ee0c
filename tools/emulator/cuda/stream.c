/* stream.c - streams: making, resolving (legacy, per-thread), waiting. Each is bound to one compute and one copy
 * channel of its context, round robin, so streams beyond the number of channels share one as on the card. */
#include "capture.h"
#include "core.h"

#include <stdlib.h>

#define NON_BLOCKING 1u

struct stream *stream_make(struct context *ctx, unsigned flags, int priority)
{
	struct stream *stream = zeroed(sizeof(*stream));

	stream->magic = MAGIC_STREAM;
	stream->ctx = ctx;
	stream->line = timeline_new();
	stream->flags = flags;
	stream->priority = priority;
	stream->id = ctx->next_stream++;
	stream->compute = &ctx->compute[stream->id % ctx->computes];
	stream->copy = &ctx->copy[stream->id % COPY_ENGINES];
	stream->next = ctx->streams;
	ctx->streams = stream;
	return stream;
}

void stream_free_locked(struct stream *stream)
{
	UNLINK(stream->ctx->streams, stream);
	capture_leave_locked(stream);
	deps_met(&stream->ctx->orphans);
	deps_add(&stream->ctx->orphans, stream->line, stream->line->submitted);
	deps_clear(&stream->waits);
	timeline_unref(stream->line);
	stream->magic = 0;
	free(stream);
}

static struct stream *per_thread(struct context *ctx)
{
	struct stream *stream = ctx->streams;

	while (stream && !(stream->is_per_thread && pthread_equal(stream->owner, pthread_self())))
		stream = stream->next;
	if (stream)
		return stream;
	stream = stream_make(ctx, 0, 0);
	stream->is_per_thread = true;
	stream->owner = pthread_self();
	return stream;
}

/* The handle's stream, after the checks every call makes; NULL and 1 are the legacy stream, 2 the thread's own. */
CUresult stream_resolve(CUstream handle, struct stream **out)
{
	struct context *ctx = NULL;
	bool is_default = (uintptr_t)handle <= 2;
	CUresult result = is_default ? context_current(&ctx) : driver_check();

	*out = NULL;
	if (result)
		return result;
	if (!handle || handle == CU_STREAM_LEGACY) {
		*out = ctx->legacy;
		return CUDA_SUCCESS;
	}
	if (handle == CU_STREAM_PER_THREAD) {
		pthread_mutex_lock(&emu.lock);
		*out = per_thread(ctx);
		pthread_mutex_unlock(&emu.lock);
		return CUDA_SUCCESS;
	}
	*out = (struct stream *)handle;
	REFUSE_IF((*out)->magic != MAGIC_STREAM, CUDA_ERROR_INVALID_HANDLE);
	return (*out)->ctx->sticky;
}

CUresult stream_wait_locked(struct stream *stream)
{
	struct context *ctx = stream->ctx;
	struct timeline *line = timeline_ref(stream->line);
	uint64_t seq = line->submitted;

	pthread_mutex_unlock(&emu.lock);
	timeline_wait(line, seq);
	pthread_mutex_lock(&emu.lock);
	timeline_unref(line);
	return ctx->sticky;
}

static CUresult stream_wait(struct stream *stream)
{
	struct context *ctx = stream->ctx;

	LOCKED(&emu.lock);
	TRY(ctx->sticky ? ctx->sticky : capture_forbids_sync_locked(stream));
	return stream_wait_locked(stream);
}

void context_work_locked(struct context *ctx, struct dependencies *out)
{
	for (struct stream *s = ctx->streams; s; s = s->next)
		deps_add(out, s->line, s->line->submitted);
	deps_copy(out, &ctx->orphans);
}

CUresult context_wait(struct context *ctx)
{
	struct dependencies all = {0};

	pthread_mutex_lock(&emu.lock);
	context_work_locked(ctx, &all);
	pthread_mutex_unlock(&emu.lock);
	deps_wait(&all);
	return ctx->sticky;
}

int priority_clamp(int priority)
{
	return priority < -5 ? -5 : priority > 0 ? 0 : priority;
}

CUAPI(5050, cuStreamCreateWithPriority, CUstream *out, unsigned flags, int priority)
{
	struct context *ctx;

	TRY(context_current(&ctx));
	REFUSE_IF(!out || flags > NON_BLOCKING, CUDA_ERROR_INVALID_VALUE);
	LOCKED(&emu.lock);
	*out = (CUstream)stream_make(ctx, flags, priority_clamp(priority));
	return CUDA_SUCCESS;
}

CUAPI(2000, cuStreamCreate, CUstream *out, unsigned flags)
{
	return cuStreamCreateWithPriority(out, flags, 0);
}

/* Returns at once; work already queued goes on. The timeline lives until that work is done. */
CUAPI(4000, cuStreamDestroy_v2, CUstream handle)
{
	struct stream *stream;

	REFUSE_IF((uintptr_t)handle <= 2, CUDA_ERROR_INVALID_HANDLE);
	TRY(stream_resolve(handle, &stream));
	LOCKED(&emu.lock);
	stream_free_locked(stream);
	return CUDA_SUCCESS;
}

CUAPI(2000, cuStreamSynchronize, CUstream handle)
{
	METERED(WAIT);
	struct stream *stream = NULL;
	CUresult result = stream_resolve(handle, &stream);

	return result ? result : stream_wait(stream);
}

CUAPI(2000, cuStreamQuery, CUstream handle)
{
	struct stream *stream = NULL;

	TRY(stream_resolve(handle, &stream));
	LOCKED(&emu.lock);
	CUresult result = capture_forbids_sync_locked(stream);
	return !result && stream->line->done < stream->line->submitted ? CUDA_ERROR_NOT_READY : result;
}

#define STREAM_GETTER(since, name, type, value)          \
	CUAPI(since, name, CUstream handle, type *out)   \
	{                                                \
		struct stream *stream;                   \
		TRY(stream_resolve(handle, &stream));    \
		if (!out)                                \
			return CUDA_ERROR_INVALID_VALUE; \
		*out = (type)(value);                    \
		return CUDA_SUCCESS;                     \
	}
STREAM_GETTER(5050, cuStreamGetFlags, unsigned, stream->flags)
STREAM_GETTER(5050, cuStreamGetPriority, int, stream->priority)
STREAM_GETTER(9020, cuStreamGetCtx, CUcontext, stream->ctx)
STREAM_GETTER(12080, cuStreamGetDevice, CUdevice, stream->ctx->dev->ordinal)
STREAM_GETTER(12000, cuStreamGetId, unsigned long long,
              ((unsigned long long)stream->ctx->id << 32) + stream->id)
