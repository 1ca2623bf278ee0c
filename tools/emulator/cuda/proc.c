/*
 * proc.c - how callers find entry points. Real programs take almost all of them from cuGetProcAddress by (base name,
 * version, flags); the choice here follows the documentation in cuda.h: a symbol newer than the asked version is
 * "version not sufficient", an unknown one "not found", both with success and a NULL pointer.
 */
#include "table.h"

#define HIGHEST_VERSION 13000
enum { QUERY_FOUND = 0, QUERY_NOT_FOUND = 1, QUERY_VERSION = 2 };

static const struct entry *find(const char *name, int version, bool per_thread, int *status)
{
	const struct entry *best = NULL;

	*status = QUERY_NOT_FOUND;
	for (unsigned i = 0; i < entry_count; i++) {
		const struct entry *entry = &entries[i];
		if (strcmp(entry->base, name) || (entry->per_thread && !per_thread))
			continue;
		if (!best)
			*status = QUERY_VERSION;
		if (entry->version > version)
			continue;
		/* The newest that the caller knows; among equals, or when asked for at all, the per-thread one. */
		if (!best || entry->per_thread > best->per_thread ||
		    (entry->per_thread == best->per_thread && entry->version > best->version))
			best = entry;
		*status = QUERY_FOUND;
	}
	return best;
}

CUAPI(cuGetProcAddress_v2, const char *name, void **out, int version, uint64_t flags, int *status)
{
	int found;

	if (!name || !out || flags > 3 || version > HIGHEST_VERSION)
		return CUDA_ERROR_INVALID_VALUE;
	const struct entry *entry =
	        find(name, version, (flags & CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM) != 0, &found);
	*out = NULL;
	if (entry)
		memcpy(out, &entry->function, sizeof(*out));
	if (status)
		*status = found;
	return CUDA_SUCCESS;
}

/* The first form has no status word, so what is missing is an error. */
CUAPI(cuGetProcAddress, const char *name, void **out, int version, uint64_t flags)
{
	CUresult result = cuGetProcAddress_v2(name, out, version, flags, NULL);

	return result || *out ? result : CUDA_ERROR_NOT_FOUND;
}

/* Private tables of the CUDA runtime: not imitated, so a real libcudart stops here with a clear error. */
CUAPI(cuGetExportTable, const void **table, const CUuuid *id)
{
	if (!table || !id)
		return CUDA_ERROR_INVALID_VALUE;
	*table = NULL;
	return CUDA_ERROR_NOT_FOUND;
}
