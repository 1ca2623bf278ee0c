/*
 * capture.h - stream capture: what turns calls into graph nodes, and the rules by which a call is refused or kills a
 * capture. All with emu.lock held.
 */
#ifndef EMU_CUDA_CAPTURE_H
#define EMU_CUDA_CAPTURE_H

#include "core.h"

struct node {
	struct work *work; /* NULL: an empty node */
	int type;
	struct node_set after;
};
struct held_object {
	struct user_object *object;
	unsigned refs;
};
struct held {
	struct held_object *at;
	unsigned count;
};
struct graph {
	uint32_t magic;
	struct held held; /* user objects */
	struct node **nodes;
	unsigned count, room;
};

struct graph *graph_new(void);
struct graph *graph_from(CUgraph handle);
void graph_free(struct graph *graph);
unsigned graph_append(struct graph *graph, struct work *work, int type, const struct node_set *after);

/* userobj.c */
void user_object_hold_locked(struct user_object *object, unsigned count);
void user_object_drop_locked(struct user_object *object, unsigned count);
void held_add(struct held *held, struct user_object *object, unsigned count);
bool held_remove(struct held *held, struct user_object *object, unsigned count);
void held_copy(struct held *into, const struct held *from);
void held_drop(struct held *held);

bool capture_is_open(const struct context *ctx);
/* Takes *work into the stream's graph (and sets it NULL), or refuses; leaves it alone when nothing is captured. */
CUresult capture_work_locked(struct stream *stream, struct work **work);
CUresult capture_check_implicit_locked(const struct stream *stream);
CUresult capture_forbids_sync_locked(struct stream *stream);
CUresult capture_forbids_context_locked(struct context *ctx);
CUresult
capture_forbids_unsafe(void); /* takes the lock: calls like cuMemAlloc, by the thread's capture mode */
bool capture_event_locked(struct stream *stream, struct event *event, CUresult *result);
bool capture_wait_locked(struct stream *stream, struct event *event, CUresult *result);
CUresult capture_misuse_event_locked(struct event *event);
void capture_leave_locked(struct stream *stream);
void capture_unref_locked(struct capture *capture);

#endif
