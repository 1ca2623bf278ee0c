/* function.c - what functions and kernels say about themselves, occupancy, and the driver's linker. */
#include "kernel.h"

#include <stdlib.h>

#define MAX_THREADS_PER_SM 2048
#define SHARED_PER_SM      233472u
#define SMS                132
#define MAX_DYNAMIC_SHARED 8
#define BINARY_IMAGE       "// valve-emu-linked\n.version 8.0\n"

static CUresult get_attribute(int *out, int attribute, const struct function *function)
{
	REFUSE_IF(!function, CUDA_ERROR_INVALID_HANDLE);
	REFUSE_IF(!out || attribute < 0 || attribute >= FUNCTION_ATTRIBUTES, CUDA_ERROR_INVALID_VALUE);
	*out = __atomic_load_n(&function->attributes[attribute], __ATOMIC_RELAXED);
	return CUDA_SUCCESS;
}

static CUresult set_attribute(struct function *function, int attribute, int value)
{
	REFUSE_IF(!function, CUDA_ERROR_INVALID_HANDLE);
	REFUSE_IF(attribute < MAX_DYNAMIC_SHARED || attribute >= FUNCTION_ATTRIBUTES,
	          CUDA_ERROR_INVALID_VALUE);
	__atomic_store_n(&function->attributes[attribute], value, __ATOMIC_RELAXED);
	return CUDA_SUCCESS;
}

CUAPI(2020, cuFuncGetAttribute, int *out, int attribute, CUfunction f)
{
	return get_attribute(out, attribute, function_from(f));
}

CUAPI(9000, cuFuncSetAttribute, CUfunction f, int attribute, int value)
{
	return set_attribute(function_from(f), attribute, value);
}

CUAPI(12000, cuKernelGetAttribute, int *out, int attribute, CUkernel kernel, CUdevice dev)
{
	return device_at(dev) ? get_attribute(out, attribute, function_from(kernel))
	                      : CUDA_ERROR_INVALID_DEVICE;
}

CUAPI(12000, cuKernelSetAttribute, int attribute, int value, CUkernel kernel, CUdevice dev)
{
	return device_at(dev) ? set_attribute(function_from(kernel), attribute, value)
	                      : CUDA_ERROR_INVALID_DEVICE;
}

CUAPI(3000, cuFuncSetCacheConfig, CUfunction f, int config)
{
	(void)config;
	return function_from(f) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

CUAPI(12000, cuKernelSetCacheConfig, CUkernel kernel, int config, CUdevice dev)
{
	(void)config, (void)dev;
	return function_from(kernel) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

CUAPI(12030, cuFuncGetName, const char **out, CUfunction f)
{
	const struct function *function = function_from(f);

	REFUSE_IF(!out || !function, CUDA_ERROR_INVALID_HANDLE);
	*out = function->name;
	return CUDA_SUCCESS;
}

CUAPI(12030, cuKernelGetName, const char **out, CUkernel kernel)
{
	return cuFuncGetName(out, (CUfunction)(void *)kernel);
}

CUAPI(11000, cuFuncGetModule, CUmodule *out, CUfunction f)
{
	const struct function *function = function_from(f);

	REFUSE_IF(!out || !function, CUDA_ERROR_INVALID_HANDLE);
	*out = (CUmodule)function->module;
	return CUDA_SUCCESS;
}

CUAPI(12050, cuKernelGetLibrary, CUlibrary *out, CUkernel kernel)
{
	return cuFuncGetModule((CUmodule *)out, (CUfunction)(void *)kernel);
}

/* Known kernels have 64-bit parameters one after the other; of others nothing is known. */
CUAPI(12040, cuFuncGetParamInfo, CUfunction f, size_t index, size_t *offset, size_t *bytes)
{
	const struct function *function = function_from(f);

	REFUSE_IF(!function, CUDA_ERROR_INVALID_HANDLE);
	REFUSE_IF(!function->builtin || index >= function->builtin->args, CUDA_ERROR_INVALID_VALUE);
	if (offset)
		*offset = 8 * index;
	if (bytes)
		*bytes = 8;
	return CUDA_SUCCESS;
}

CUAPI(12040, cuKernelGetParamInfo, CUkernel kernel, size_t index, size_t *offset, size_t *bytes)
{
	return cuFuncGetParamInfo((CUfunction)(void *)kernel, index, offset, bytes);
}

CUAPI(12040, cuFuncIsLoaded, int *out, CUfunction f)
{
	REFUSE_IF(!out || !function_from(f), CUDA_ERROR_INVALID_HANDLE);
	*out = 1;
	return CUDA_SUCCESS;
}

CUAPI(12040, cuFuncLoad, CUfunction f)
{
	return function_from(f) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

CUAPI(11070, cuModuleGetLoadingMode, int *out)
{
	REFUSE_IF(!out, CUDA_ERROR_INVALID_VALUE);
	*out = 2; /* lazy */
	return CUDA_SUCCESS;
}

CUAPI(12040, cuModuleGetFunctionCount, unsigned *out, CUmodule handle)
{
	const struct module *module = module_from(handle);

	REFUSE_IF(!out || !module, CUDA_ERROR_INVALID_HANDLE);
	*out = 0;
	LOCKED(&emu.lock);
	for (const struct function *f = module->functions; f; f = f->next)
		++*out;
	return CUDA_SUCCESS;
}

CUAPI(12040, cuLibraryGetKernelCount, unsigned *out, CUlibrary handle)
{
	return cuModuleGetFunctionCount(out, (CUmodule)(void *)handle);
}

CUAPI(3020, cuModuleGetGlobal_v2, CUdeviceptr *out, size_t *bytes, CUmodule handle, const char *name)
{
	(void)out, (void)bytes, (void)name;
	return module_from(handle) ? CUDA_ERROR_NOT_FOUND
	                           : CUDA_ERROR_INVALID_HANDLE; /* no image has variables */
}

CUAPI(12000, cuLibraryGetGlobal, CUdeviceptr *out, size_t *bytes, CUlibrary handle, const char *name)
{
	return cuModuleGetGlobal_v2(out, bytes, (CUmodule)(void *)handle, name);
}

CUAPI(6050, cuOccupancyMaxActiveBlocksPerMultiprocessor, int *out, CUfunction f, int block, size_t shared)
{
	REFUSE_IF(!function_from(f), CUDA_ERROR_INVALID_HANDLE);
	REFUSE_IF(!out || block <= 0 || block > 1024, CUDA_ERROR_INVALID_VALUE);
	int by_threads = MAX_THREADS_PER_SM / block;
	int by_shared = shared ? (int)(SHARED_PER_SM / shared) : 32;
	*out = by_threads < by_shared ? by_threads : by_shared;
	*out = *out > 32 ? 32 : *out;
	return CUDA_SUCCESS;
}

CUAPI(7000, cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags, int *out, CUfunction f, int block,
      size_t shared, unsigned flags)
{
	(void)flags;
	return cuOccupancyMaxActiveBlocksPerMultiprocessor(out, f, block, shared);
}

CUAPI(6050, cuOccupancyMaxPotentialBlockSize, int *grid, int *block, CUfunction f, void *shared_of,
      size_t shared, int limit)
{
	(void)shared_of, (void)shared;
	REFUSE_IF(!function_from(f), CUDA_ERROR_INVALID_HANDLE);
	REFUSE_IF(!grid || !block, CUDA_ERROR_INVALID_VALUE);
	*block = limit > 0 && limit < 1024 ? limit : 1024;
	*grid = SMS * (MAX_THREADS_PER_SM / *block);
	return CUDA_SUCCESS;
}

CUAPI(7000, cuOccupancyMaxPotentialBlockSizeWithFlags, int *grid, int *block, CUfunction f, void *shared_of,
      size_t shared, int limit, unsigned flags)
{
	(void)flags;
	return cuOccupancyMaxPotentialBlockSize(grid, block, f, shared_of, shared, limit);
}

CUAPI(10020, cuOccupancyAvailableDynamicSMemPerBlock, size_t *out, CUfunction f, int blocks, int block)
{
	(void)block;
	REFUSE_IF(!function_from(f), CUDA_ERROR_INVALID_HANDLE);
	REFUSE_IF(!out || blocks <= 0, CUDA_ERROR_INVALID_VALUE);
	*out = SHARED_PER_SM / (unsigned)blocks - 1024u;
	return CUDA_SUCCESS;
}

/* The linker: its output holds all its text inputs, so that every entry of theirs is found in it. */
struct link {
	char *text;
	size_t bytes;
};

static CUresult link_add(struct link *link, const void *data, size_t bytes)
{
	char *text = realloc(link->text, link->bytes + bytes + 1);

	REFUSE_IF(!text, CUDA_ERROR_OUT_OF_MEMORY);
	memcpy(text + link->bytes, data, bytes);
	link->text = text;
	link->bytes += bytes;
	text[link->bytes] = 0;
	return CUDA_SUCCESS;
}

CUAPI(6050, cuLinkCreate_v2, unsigned count, void *options, void **values, CUlinkState *out)
{
	(void)count, (void)options, (void)values;
	struct link *link = calloc(1, sizeof(*link));

	REFUSE_IF(!link || !out || link_add(link, BINARY_IMAGE, sizeof(BINARY_IMAGE) - 1),
	          CUDA_ERROR_OUT_OF_MEMORY);
	*out = (CUlinkState)link;
	return CUDA_SUCCESS;
}

CUAPI(6050, cuLinkAddData_v2, CUlinkState state, int type, void *data, size_t bytes, const char *name,
      unsigned count, void *options, void **values)
{
	(void)name, (void)count, (void)options, (void)values;
	REFUSE_IF(!state || !data, CUDA_ERROR_INVALID_VALUE);
	if (type != 1) /* PTX; device code in binary form cannot be joined here */
		return CUDA_ERROR_NOT_SUPPORTED;
	return link_add((struct link *)state, data, strnlen(data, bytes));
}

CUAPI(5050, cuLinkComplete, CUlinkState state, void **out, size_t *bytes)
{
	const struct link *link = (const struct link *)state;

	REFUSE_IF(!state || !out || !bytes, CUDA_ERROR_INVALID_VALUE);
	*out = link->text;
	*bytes = link->bytes + 1;
	return CUDA_SUCCESS;
}

CUAPI(5050, cuLinkDestroy, CUlinkState state)
{
	struct link *link = (struct link *)state;

	REFUSE_IF(!link, CUDA_ERROR_INVALID_VALUE);
	free(link->text);
	free(link);
	return CUDA_SUCCESS;
}
