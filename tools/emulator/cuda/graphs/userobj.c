/*
 * userobj.c - user objects: something of the caller's that lives as long as the graphs that hold it. The destructor runs
 * when the last reference goes, on the thread that drops it and without the lock.
 */
#include "capture.h"

#include <stdlib.h>

struct user_object {
	uint32_t magic;
	unsigned refs;
	void *value;
	CUhostFn destroy;
};

static HANDLE(object_from, void *, struct user_object, MAGIC_USER)

        void user_object_hold_locked(struct user_object *object, unsigned count)
{
	object->refs += count;
}

/* The lock is given up while the destructor runs: it may call us. */
void user_object_drop_locked(struct user_object *object, unsigned count)
{
	object->refs -= count < object->refs ? count : object->refs;
	if (object->refs)
		return;
	object->magic = 0;
	pthread_mutex_unlock(&emu.lock);
	object->destroy(object->value);
	free(object);
	pthread_mutex_lock(&emu.lock);
}

CUAPI(11030, cuUserObjectCreate, void **out, void *value, CUhostFn destroy, unsigned refs, unsigned flags)
{
	if (!out || !destroy || !refs || flags != 1) /* 1: no destructor sync, the only kind there is */
		return CUDA_ERROR_INVALID_VALUE;
	struct user_object *object = calloc(1, sizeof(*object));
	REFUSE_IF(!object, CUDA_ERROR_OUT_OF_MEMORY);
	*object = (struct user_object){MAGIC_USER, refs, value, destroy};
	*out = object;
	return CUDA_SUCCESS;
}

static CUresult change(void *handle, unsigned count, bool hold)
{
	struct user_object *object = object_from(handle);

	REFUSE_IF(!object || !count, CUDA_ERROR_INVALID_VALUE);
	LOCKED(&emu.lock);
	if (hold)
		user_object_hold_locked(object, count);
	else
		user_object_drop_locked(object, count);
	return CUDA_SUCCESS;
}

CUAPI(11030, cuUserObjectRetain, void *object, unsigned count)
{
	return change(object, count, true);
}

CUAPI(11030, cuUserObjectRelease, void *object, unsigned count)
{
	return change(object, count, false);
}

CUAPI(11030, cuGraphRetainUserObject, CUgraph graph_handle, void *handle, unsigned count, unsigned flags)
{
	struct graph *graph = graph_from(graph_handle);
	struct user_object *object = object_from(handle);

	REFUSE_IF(!graph || !object || !count || flags > 1, CUDA_ERROR_INVALID_VALUE);
	LOCKED(&emu.lock);
	if (!(flags & 1)) /* 1: the caller's references move to the graph */
		user_object_hold_locked(object, count);
	held_add(&graph->held, object, count);
	return CUDA_SUCCESS;
}

CUAPI(11030, cuGraphReleaseUserObject, CUgraph graph_handle, void *handle, unsigned count)
{
	struct graph *graph = graph_from(graph_handle);
	struct user_object *object = object_from(handle);

	REFUSE_IF(!graph || !object, CUDA_ERROR_INVALID_VALUE);
	LOCKED(&emu.lock);
	bool held = held_remove(&graph->held, object, count);
	if (held)
		user_object_drop_locked(object, count);
	return held ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

void held_add(struct held *held, struct user_object *object, unsigned count)
{
	struct held_object *at = realloc(held->at, (held->count + 1u) * sizeof(*at));

	if (!at)
		abort();
	held->at = at;
	at[held->count++] = (struct held_object){object, count};
}

bool held_remove(struct held *held, struct user_object *object, unsigned count)
{
	for (unsigned i = 0; i < held->count; i++) {
		if (held->at[i].object != object || held->at[i].refs < count)
			continue;
		held->at[i].refs -= count;
		return true;
	}
	return false;
}

void held_copy(struct held *into, const struct held *from)
{
	for (unsigned i = 0; i < from->count; i++) {
		user_object_hold_locked(from->at[i].object, from->at[i].refs);
		held_add(into, from->at[i].object, from->at[i].refs);
	}
}

void held_drop(struct held *held)
{
	while (held->count) {
		struct held_object last = held->at[--held->count];
		if (last.refs)
			user_object_drop_locked(last.object, last.refs);
	}
	free(held->at);
	held->at = NULL;
}
