/* work.c - queues of work, the executor thread of each channel, and what happens when work faults. */
#include "capture.h"
#include "core.h"
#include "fault.h"
#include "turn.h"

#include <signal.h>
#include <stdlib.h>
#include <sys/prctl.h>

#define GPFIFO_DEPTH 1024u /* until the knob is set */

void *zeroed(size_t bytes)
{
	void *at = calloc(1, bytes);

	if (!at)
		abort();
	return at;
}

void *work_new(size_t size, work_fn *run)
{
	struct work *work = zeroed(size);

	work->run = run;
	work->on_gpu = true;
	work->refs = 1;
	return work;
}

struct work *work_ref(struct work *work)
{
	work->refs++;
	return work;
}

void work_free(struct work *work)
{
	if (--work->refs)
		return;
	if (work->drop)
		work->drop(work);
	deps_clear(&work->deps);
	timeline_unref(work->line);
	free(work);
}

static bool is_head_ready(struct channel *channel)
{
	return channel->head && deps_met(&channel->head->deps);
}

/* The program's signals are for its own threads; only what a faulting kernel raises belongs here. */
static void start_executor(struct channel *channel)
{
	pthread_attr_t attr;
	sigset_t ours, before;

	if (channel->started)
		return;
	sigfillset(&ours);
	sigdelset(&ours, SIGSEGV);
	sigdelset(&ours, SIGBUS);
	pthread_sigmask(SIG_SETMASK, &ours, &before);
	pthread_attr_init(&attr);
	pthread_attr_setstacksize(&attr, 512 * 1024);
	channel->started = pthread_create(&channel->thread, &attr, executor_main, channel) == 0;
	pthread_attr_destroy(&attr);
	pthread_sigmask(SIG_SETMASK, &before, NULL);
}

/* The default-stream rules: work of the legacy stream follows all blocking streams, and they follow it. */
static void add_default_stream_order(struct stream *stream, struct work *work)
{
	struct context *ctx = stream->ctx;

	if (stream->flags & 1u)
		return;
	if (stream != ctx->legacy) {
		deps_add(&work->deps, ctx->legacy->line, ctx->legacy->line->submitted);
		return;
	}
	for (struct stream *s = ctx->streams; s; s = s->next)
		if (s != stream && !(s->flags & 1u))
			deps_add(&work->deps, s->line, s->line->submitted);
}

static uint32_t gpfifo_depth(void)
{
	uint32_t depth = __atomic_load_n(&emu.board->gpfifo_depth, __ATOMIC_RELAXED);

	return depth ? depth : GPFIFO_DEPTH;
}

uint64_t work_enqueue_locked(struct stream *stream, enum lane lane, struct work *work)
{
	struct channel *channel = lane == LANE_COPY ? stream->copy : stream->compute;

	while (channel->queued >= gpfifo_depth() && !channel->stop)
		pthread_cond_wait(&channel->has_space, &emu.lock);
	work->line = timeline_ref(stream->line);
	deps_copy(&work->deps, &stream->waits);
	deps_clear(&stream->waits);
	add_default_stream_order(stream, work);
	if (stream->last && stream->last != channel)
		deps_add(&work->deps, stream->line, stream->line->submitted);
	stream->last = channel;
	work->seq = ++stream->line->submitted;
	uint64_t seq = work->seq;
	*channel->tail = work;
	channel->tail = &work->next;
	channel->queued++;
	start_executor(channel);
	if (channel->head == work) {
		turn_publish_locked(channel, is_head_ready(channel));
		pthread_cond_signal(&channel->has_work);
	} else if (channel->slot->pending) {
		__atomic_store_n(&channel->slot->pending, channel->queued, __ATOMIC_SEQ_CST);
	}
	return seq;
}

CUresult work_submit(struct stream *stream, enum lane lane, struct work *work)
{
	API_LOCKED;
	CUresult result = CUDA_SUCCESS;

	LOCKED(&emu.lock);
	if (stream->ctx->sticky)
		result = stream->ctx->sticky;
	else if (stream->capture || capture_is_open(stream->ctx))
		result = capture_work_locked(stream, &work);
	if (result == CUDA_SUCCESS && work) {
		work_enqueue_locked(stream, lane, work);
		work = NULL;
	}
	if (work)
		work_free(work);
	return result;
}

CUresult work_submit_wait(struct stream *stream, enum lane lane, struct work *work)
{
	struct context *ctx = stream->ctx;

	LOCKED(&emu.lock);
	CUresult result = ctx->sticky ? ctx->sticky : capture_forbids_sync_locked(stream);
	if (result) {
		work_free(work);
		return result;
	}
	work_enqueue_locked(stream, lane, work);
	return stream_wait_locked(stream);
}

/* A timeline moved: channels whose head waited for it may go on. */
static void wake_blocked_locked(void)
{
	for (struct channel *c = emu.channels; c; c = c->next) {
		if (!c->head || c->slot->pending || !is_head_ready(c))
			continue;
		turn_publish_locked(c, true);
		pthread_cond_signal(&c->has_work);
	}
}

static void finish_locked(struct channel *channel, struct work *work)
{
	channel->head = work->next;
	if (!channel->head)
		channel->tail = &channel->head;
	channel->queued--;
	pthread_cond_signal(&channel->has_space);
	timeline_advance(work->line, work->seq);
	turn_publish_locked(channel, is_head_ready(channel));
	wake_blocked_locked();
	work_free(work);
}

/* A faulted context runs nothing more, but what was queued still completes, so that no thread waits for ever. */
static void context_fault(struct context *ctx, CUresult error)
{
	LOCKED(&emu.lock);
	if (!ctx->sticky)
		ctx->sticky = error;
}

static void run_one(struct channel *channel, struct work *work)
{
	if (channel->ctx->sticky || (work->on_gpu && !turn_begin(channel)))
		return;
	if (work->is_launch)
		__atomic_fetch_add(&channel->slot->launches, 1, __ATOMIC_RELAXED);
	CUresult result = fault_guard(work, channel);
	sparse_refresh();
	if (result)
		context_fault(channel->ctx, result);
}

void *executor_main(void *argument)
{
	struct channel *channel = argument;

	prctl(PR_SET_TIMERSLACK, 1UL); /* timed kernels end when they should, not 50 us later */
	prctl(PR_SET_NAME, "emu-channel");
	fault_thread_begin();
	pthread_mutex_lock(&emu.lock);
	while (!channel->stop) {
		if (!is_head_ready(channel)) {
			pthread_mutex_unlock(&emu.lock);
			turn_end(channel);
			pthread_mutex_lock(&emu.lock);
			if (!channel->stop && !is_head_ready(channel))
				pthread_cond_wait(&channel->has_work, &emu.lock);
			continue;
		}
		struct work *work = channel->head;
		pthread_mutex_unlock(&emu.lock);
		run_one(channel, work);
		pthread_mutex_lock(&emu.lock);
		finish_locked(channel, work);
	}
	pthread_mutex_unlock(&emu.lock);
	turn_end(channel);
	fault_thread_end();
	return NULL;
}
