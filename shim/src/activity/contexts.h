/* contexts.h - what the observers keep for the watcher. All of it under probe_lock. */
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
	CUevent event; /* the watcher's, made when it first probes */
	int device;    /* of a primary context; -1 otherwise */
	enum valve_context_state state;
};

struct valve_contexts {
	uint32_t generation; /* rises with every change: a probe that saw another one proves nothing */
	uint32_t overflow, stream_overflow;
	struct valve_context context[VALVE_CONTEXTS];
	CUstream stream[VALVE_STREAMS];
};
extern struct valve_contexts valve_contexts VALVE_HIDDEN;

#endif
