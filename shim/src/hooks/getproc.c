/*
 * getproc.c - cuGetProcAddress. The driver answers first; if it gave a pointer for a name in our table, the caller
 * gets a trampoline bound to that very pointer. The driver has already chosen by version and flags, so no suffix,
 * version or per-thread rule of ours can be wrong. Whether these pointers equal the exported ones is unknown and
 * does not matter.
 */
#include "hooks.h"
#include "shim.h"

#include <string.h>

#define PER_THREAD 2u /* CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM */

/* Base names, as callers ask for them; a full name (cuMemcpyHtoD_v2) is accepted too. */
struct base_name {
	const char *name;
	valve_handler handler; /* NULL: submit class */
	int since;             /* CUDA version whose form the handler knows */
};

#define SUBMIT_BASE(twin, base)  {#base, NULL, 0},
#define MEMORY_BASE(twin, base)  {#base, valve_on_##base, VALVE_MEMORY_SINCE},
#define OBSERVE_BASE(twin, base) {#base, valve_on_##base, 0},
/* The first that matches counts. */
static const struct base_name bases[] = {VALVE_SUBMIT_BASES(SUBMIT_BASE) VALVE_MEMORY_BASES(MEMORY_BASE)
                                                 VALVE_OBSERVE_BASES(OBSERVE_BASE)};

static const struct base_name *base_of(const char *name)
{
	for (size_t i = 0; i < sizeof(bases) / sizeof(bases[0]); i++) {
		size_t length = strlen(bases[i].name);
		const char *rest;

		if (strncmp(name, bases[i].name, length) != 0)
			continue;
		rest = name + length;
		if (rest[0] == '_' && rest[1] == 'v' && rest[2] >= '2' && rest[2] <= '9')
			rest += 3;
		if (!*rest || !strcmp(rest, "_ptsz") || !strcmp(rest, "_ptds"))
			return &bases[i];
	}
	return NULL;
}

/* A name that looks like work for a GPU but is not in the table: a driver newer than we are. */
static bool looks_like_submit(const char *name)
{
	static const char *const prefixes[] = {"cuLaunch",      "cuGraphLaunch", "cuMemcpy",
	                                       "cuMemset",      "cuStreamWrite", "cuStreamWait",
	                                       "cuStreamBatch", "cuStreamBegin"};
	size_t length = strlen(name);

	if (!strcmp(name, "cuStreamWaitEvent"))
		return false; /* orders streams, starts nothing */
	if (length > 5 && !strcmp(name + length - 5, "Async"))
		return true;
	for (size_t i = 0; i < sizeof(prefixes) / sizeof(prefixes[0]); i++)
		if (!strncmp(name, prefixes[i], strlen(prefixes[i])))
			return true;
	return false;
}

/* Not in the table: else its observer sees it. */
static bool may_begin_capture(const char *name)
{
	return !strncmp(name, "cuStreamBegin", 13);
}

static bool is_ours(const void *pointer)
{
	return (const unsigned char *)pointer >= valve_trampolines_begin &&
	       (const unsigned char *)pointer < valve_trampolines_end;
}

/* The trampoline for this pointer; the pointer itself when the pool is used up, which is reported. */
static void *trampoline_for(void *real, valve_handler handler, bool ptds, const char *name)
{
	uint32_t first = handler ? VALVE_POOL_SUBMIT : 0;
	uint32_t count = handler ? VALVE_POOL_OBSERVE : VALVE_POOL_SUBMIT;
	unsigned char *code = handler ? valve_pool_observe : valve_pool_submit;
	void *answer = real;

	valve_lock(&valve_shim.entry_lock);
	for (uint32_t i = 0; i < count; i++) {
		struct valve_entry *entry = &valve_pool_entries[first + i];

		if (entry->target && entry->target != real)
			continue;
		if (!entry->target) {
			entry->handler = (void *)(uintptr_t)handler;
			valve_bind(entry, real, ptds);
			if (!handler && may_begin_capture(name))
				store_release(&entry->real, (void *)(uintptr_t)valve_capture_detour);
		}
		answer = code + (size_t)i * VALVE_TRAMPOLINE_BYTES;
		break;
	}
	valve_unlock(&valve_shim.entry_lock);
	if (answer == real)
		valve_note(VALVE_NOTE_UNKNOWN_SUBMIT, 0, 0, name);
	return answer;
}

/* v1: (symbol, pfn, version, flags); v2 adds a status pointer, which v1 ignores in its register. */
CUresult valve_on_cuGetProcAddress(uintptr_t symbol, uintptr_t pfn, uintptr_t version, uintptr_t flags,
                                   uintptr_t status, uintptr_t unused, struct valve_entry *entry)
{
	CUresult result = ((valve_call)entry->target)(symbol, pfn, version, flags, status, unused);
	const char *name = (const char *)symbol;
	void **answer = (void **)pfn;
	const struct base_name *base;

	/* NULL with success is a legitimate "not available": nothing to replace. */
	if (result != CUDA_SUCCESS || !name || !answer || !*answer || is_ours(*answer))
		return result;
	base = base_of(name);
	if (base && (int)version >= base->since)
		*answer = trampoline_for(*answer, base->handler, flags & PER_THREAD, name);
	else if (!base && looks_like_submit(name))
		valve_note(VALVE_NOTE_UNKNOWN_SUBMIT, 0, 0, name);
	if (!base && may_begin_capture(name))
		*answer = trampoline_for(*answer, NULL, false, name);
	return result;
}

/* An observed name called by export: its handler and its real call are found by name. */
static bool resolve(struct valve_entry *entry)
{
	const struct base_name *base = base_of(entry->name);
	void *real = valve_real_symbol(entry->name);

	if (!base || !base->handler || !real)
		return false;
	store_release(&entry->target, real);
	store_release(&entry->handler, (void *)(uintptr_t)base->handler);
	return true;
}

CUresult valve_observe(uintptr_t a0, uintptr_t a1, uintptr_t a2, uintptr_t a3, uintptr_t a4, uintptr_t a5,
                       struct valve_entry *entry)
{
	if (!load_acquire(&entry->handler) && !resolve(entry))
		return CUDA_ERROR_NOT_FOUND;
	return ((valve_handler)entry->handler)(a0, a1, a2, a3, a4, a5, entry);
}
