/*
 * proc.c - how callers find entry points. Real programs take almost all of them from cuGetProcAddress by (base name,
 * version, flags); the choice here follows the documentation in cuda.h: a symbol newer than the asked version is
 * "version not sufficient", an unknown one "not found", both with success and a NULL pointer.
 */
#include "core.h"

#include <ctype.h>

#define HIGHEST_VERSION 13000
enum { QUERY_FOUND = 0, QUERY_NOT_FOUND = 1, QUERY_VERSION = 2 };

/* Begin and end of the section, as the linker names them. */
extern const struct entry __start_entries[] __attribute__((visibility("hidden")));
extern const struct entry __stop_entries[] __attribute__((visibility("hidden")));

/* For the test that looks at each. */
__attribute__((visibility("default"))) const struct entry *valve_emu_entries(size_t *count);
const struct entry *valve_emu_entries(size_t *count)
{
	*count = (size_t)(__stop_entries - __start_entries);
	return __start_entries;
}

static bool is_per_thread(const char *symbol)
{
	const char *suffix = strstr(symbol, "_pt");

	return suffix && (!strcmp(suffix, "_ptds") || !strcmp(suffix, "_ptsz"));
}

/* Callers ask for the name without the number of its form ("_v2") and without the suffix of the per-thread one. */
static bool has_base(const char *symbol, const char *base)
{
	size_t length = strlen(symbol) - (is_per_thread(symbol) ? sizeof("_ptsz") - 1 : 0);

	if (isdigit((unsigned char)symbol[length - 1]) && !strncmp(symbol + length - 3, "_v", 2))
		length -= 3;
	return strlen(base) == length && !strncmp(symbol, base, length);
}

static const struct entry *find(const char *name, int version, bool per_thread, int *status)
{
	const struct entry *best = NULL;

	*status = QUERY_NOT_FOUND;
	for (const struct entry *entry = __start_entries; entry < __stop_entries; entry++) {
		if (!has_base(entry->symbol, name) || (is_per_thread(entry->symbol) && !per_thread))
			continue;
		if (!best)
			*status = QUERY_VERSION;
		if (entry->since > version)
			continue;
		/* The newest that the caller knows; among equals, or when asked for at all, the per-thread one. */
		int preference = best ? is_per_thread(entry->symbol) - is_per_thread(best->symbol) : 1;
		if (preference > 0 || (!preference && entry->since > best->since))
			best = entry;
		*status = QUERY_FOUND;
	}
	return best;
}

CUAPI(12000, cuGetProcAddress_v2, const char *name, void **out, int version, uint64_t flags, int *status)
{
	int found;

	REFUSE_IF(!name || !out || flags > 3 || version > HIGHEST_VERSION, CUDA_ERROR_INVALID_VALUE);
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
CUAPI(11030, cuGetProcAddress, const char *name, void **out, int version, uint64_t flags)
{
	CUresult result = cuGetProcAddress_v2(name, out, version, flags, NULL);

	return result || *out ? result : CUDA_ERROR_NOT_FOUND;
}

/* Private tables of the CUDA runtime: not imitated, so a real libcudart stops here with a clear error. */
CUAPI(3000, cuGetExportTable, const void **table, const CUuuid *id)
{
	REFUSE_IF(!table || !id, CUDA_ERROR_INVALID_VALUE);
	*table = NULL;
	return CUDA_ERROR_NOT_FOUND;
}
