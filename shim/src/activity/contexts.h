/*
 * contexts.h - what the observers keep for the watcher. All of it under probe_lock, which no thread holds across a driver call:
 * the watcher says which context it is asking about. Only a thread that wants to destroy that one, or to capture in it, waits.
 */
#ifndef VALVE_CONTEXTS_H
#define VALVE_CONTEXTS_H

#include "shim.h"

#define VALVE_CONTEXTS 64
#define VALVE_STREAMS  1024
#define VALVE_STREAM_GOING \
	((CUstream)(uintptr_t)1) /* being destroyed; 1 is the legacy stream's own constant */

enum valve_context_state { CONTEXT_FREE, CONTEXT_LIVE, CONTEXT_GOING };

struct valve_context {
	CUcontext context;
	CUevent event;     /* the watcher's, made when it first probes */
	int device;        /* of a primary context; -1 otherwise */
	uint32_t attached; /* cuCtxAttach: so many Detach do not end it */
	enum valve_context_state state;
};

struct valve_contexts {
	uint32_t generation; /* rises with every change: a probe that saw another one proves nothing */
	uint32_t overflow, stream_overflow;
	uint32_t asking;       /* odd: a driver call of the watcher is under way. Futex word */
	uint32_t asks_streams; /* it goes through all streams, whichever context it names */
	CUcontext asked;       /* what that call is about */
	struct valve_context context[VALVE_CONTEXTS];
	CUstream stream[VALVE_STREAMS];
};
extern struct valve_contexts valve_contexts VALVE_HIDDEN;

/* Returns when no driver call of the watcher about this context is under way that began before. NULL: about any. */
void valve_contexts_await(CUcontext context) VALVE_HIDDEN;

#endif
