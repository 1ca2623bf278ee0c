/* gpu.c - see gpu.h */
#include "gpu.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

struct gpu gpu;
struct failure failure;
enum { MULTIPROCESSORS = 16, NO_LIBRARY = -1, NO_SYMBOL = -2, NO_IMAGE = -3 };

CUresult gpu_check(CUresult code, const char *where)
{
	const char *name = NULL;

	if (!code || failure.code)
		return failure.code;
	if (gpu.cuGetErrorName)
		gpu.cuGetErrorName(code, &name);
	fprintf(stderr, "spin: %s: %s (%d)\n", where, name ? name : "?", code);
	failure = (struct failure){code, where};
	return code;
}

static bool find(void *out, const char *name)
{
	void *at = dlsym(gpu.library, name);

	*(void **)out = at;
	if (!at)
		gpu_check(NO_SYMBOL, name);
	return at != NULL;
}

static char *read_file(const char *path)
{
	int fd = open(path, O_RDONLY | O_CLOEXEC);
	struct stat info;

	if (fd < 0 || fstat(fd, &info))
		return NULL;
	char *text = calloc(1, (size_t)info.st_size + 1);
	if (text && read(fd, text, (size_t)info.st_size) != (ssize_t)info.st_size)
		text = NULL;
	close(fd);
	return text;
}

/* Where the driver has no PTX compiler, the build's cubin beside the PTX is taken. */
static CUresult load_module(const char *path)
{
	const char *cubin = getenv("VALVE_LAB_CUBIN");

	gpu.image = read_file(path);
	if (!gpu.image)
		return NO_IMAGE;
	CUresult code = gpu.cuModuleLoadData(&gpu.module, gpu.image);
	if (!code || !cubin)
		return code;
	char *binary = read_file(cubin);
	if (!binary)
		return code;
	gpu.image = binary;
	return gpu.cuModuleLoadData(&gpu.module, gpu.image);
}

void gpu_open(const char *image_path)
{
	CUdevice device;
	int count = 0, fit = 0;

	gpu.library = dlopen("libcuda.so.1", RTLD_NOW);
	if (!gpu.library) {
		gpu_check(NO_LIBRARY, "no libcuda.so.1");
		return;
	}
#define X(name, parameters)          \
	if (!find(&gpu.name, #name)) \
		return;
	GPU_CALLS(X)
#undef X
	*(void **)&gpu.cuCtxRecordEvent = dlsym(gpu.library, "cuCtxRecordEvent");
	CK(gpu.cuInit(0));
	CK(gpu.cuDeviceGet(&device, 0));
	CK(gpu.cuDevicePrimaryCtxRetain(&gpu.context, device));
	CK(gpu.cuCtxSetCurrent(gpu.context));
	CK(gpu.cuDeviceGetAttribute(&count, MULTIPROCESSORS, device));
	CK(load_module(image_path));
	CK(gpu.cuModuleGetFunction(&gpu.burn, gpu.module, "burn"));
	CK(gpu.cuModuleGetFunction(&gpu.fill, gpu.module, "fill"));
	CK(gpu.cuModuleGetFunction(&gpu.sum, gpu.module, "sum"));
	CK(gpu.cuOccupancyMaxActiveBlocksPerMultiprocessor(&fit, gpu.burn, THREADS, 0));
	gpu.multiprocessors = (unsigned)count;
	gpu.blocks = gpu.multiprocessors * (unsigned)(fit > 0 ? fit : 1);
}
