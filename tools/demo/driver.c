/* driver.c - see driver.h */
#include "driver.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define MAX_ARGS 8

struct cuda cu;

typedef CUresult get_proc_address(const char *name, void **out, int version, uint64_t flags, int *status);

void cuda_check(CUresult code, const char *what)
{
	const char *name = "?";

	if (!code)
		return;
	if (cu.cuGetErrorName)
		cu.cuGetErrorName(code, &name);
	fprintf(stderr, "%.*s: %s (%d)\n", (int)strcspn(what, "("), what, name, code);
	exit(1);
}

static void find(get_proc_address *get, const char *name, int version, void *out)
{
	void *at = NULL;

	if (get(name, &at, version, 0, NULL) || !at) {
		fprintf(stderr,
		        "this libcuda.so.1 has no %s of CUDA %d.%d; a driver of CUDA 12 or later does\n",
		        name, version / 1000, version % 1000 / 10);
		exit(1);
	}
	memcpy(out, &at, sizeof(at));
}

void cuda_open(int device)
{
	void *library = dlopen("libcuda.so.1", RTLD_NOW);
	get_proc_address *get = NULL;
	CUcontext ctx;
	CUdevice dev;

	if (library)
		*(void **)&get = dlsym(library, "cuGetProcAddress_v2");
	if (!get) {
		fprintf(stderr, "no usable libcuda.so.1 (%s); without a GPU start me by tools/emulator/run\n",
		        library ? "too old" : dlerror());
		exit(1);
	}
#define X(name, version, parameters) find(get, #name, version, &cu.name);
	DEMO_CALLS(X)
#undef X
	CHECK(cu.cuInit(0));
	CHECK(cu.cuDeviceGet(&dev, device));
	CHECK(cu.cuDevicePrimaryCtxRetain(&ctx, dev));
	CHECK(cu.cuCtxSetCurrent(ctx));
}

CUfunction cuda_kernel(const char *name)
{
	static CUmodule module;
	CUfunction f;

	if (!module)
		CHECK(cu.cuModuleLoadData(&module, "// valve-emu\n"));
	CHECK(cu.cuModuleGetFunction(&f, module, name));
	return f;
}

void cuda_launch(CUfunction f, CUstream stream, uint64_t *args, unsigned count)
{
	void *params[MAX_ARGS];

	for (unsigned i = 0; i < count && i < MAX_ARGS; i++)
		params[i] = &args[i];
	CHECK(cu.cuLaunchKernel(f, 1, 1, 1, 1, 1, 1, 0, stream, params, NULL));
}

double now_s(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

void sleep_s(double seconds)
{
	if (seconds <= 0)
		return;
	struct timespec t = {(time_t)seconds, (long)((seconds - (double)(time_t)seconds) * 1e9)};
	nanosleep(&t, NULL);
}
