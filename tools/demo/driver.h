/*
 * driver.h - the CUDA driver API as the demo workloads use it: libcuda by dlopen, every call by cuGetProcAddress, the way
 * NVIDIA's own runtime does it. So the same binaries run on a real card and on the emulated one.
 */
#ifndef VALVE_DEMO_DRIVER_H
#define VALVE_DEMO_DRIVER_H

#include <stdbool.h>

#include "cuda.h"

typedef void (*CUhostFn)(void *user);

/* X(name, CUDA version asked for, parameters) */
#define DEMO_CALLS(X)                                                                                       \
	X(cuInit, 2000, (unsigned flags))                                                                   \
	X(cuGetErrorName, 6000, (CUresult code, const char **out))                                          \
	X(cuDeviceGet, 2000, (CUdevice * out, int ordinal))                                                 \
	X(cuDevicePrimaryCtxRetain, 7000, (CUcontext * out, CUdevice dev))                                  \
	X(cuCtxSetCurrent, 4000, (CUcontext ctx))                                                           \
	X(cuModuleLoadData, 2000, (CUmodule * out, const void *image))                                      \
	X(cuModuleGetFunction, 2000, (CUfunction * out, CUmodule module, const char *name))                 \
	X(cuStreamCreate, 2000, (CUstream * out, unsigned flags))                                           \
	X(cuStreamBeginCapture, 10010, (CUstream stream, int mode))                                         \
	X(cuStreamEndCapture, 10000, (CUstream stream, CUgraph * out))                                      \
	X(cuGraphInstantiateWithFlags, 11040, (CUgraphExec * out, CUgraph graph, unsigned long long flags)) \
	X(cuGraphLaunch, 10000, (CUgraphExec exec, CUstream stream))                                        \
	X(cuGraphDestroy, 10000, (CUgraph graph))                                                           \
	X(cuEventCreate, 2000, (CUevent * out, unsigned flags))                                             \
	X(cuEventRecord, 2000, (CUevent event, CUstream stream))                                            \
	X(cuEventSynchronize, 2000, (CUevent event))                                                        \
	X(cuMemAlloc, 3020, (CUdeviceptr * out, size_t bytes))                                              \
	X(cuMemHostRegister, 6050, (void *at, size_t bytes, unsigned flags))                                \
	X(cuMemcpyHtoD, 3020, (CUdeviceptr to, const void *from, size_t bytes))                             \
	X(cuMemcpyDtoH, 3020, (void *to, CUdeviceptr from, size_t bytes))                                   \
	X(cuLaunchKernel, 4000,                                                                             \
	  (CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,      \
	   unsigned shared, CUstream stream, void **params, void **extra))

struct cuda {
#define X(name, version, parameters) CUresult(*name) parameters;
	DEMO_CALLS(X)
#undef X
};
extern struct cuda cu;

void cuda_open(int device); /* ends the program with a sentence when there is no driver */
CUfunction cuda_kernel(const char *name);
void cuda_check(CUresult code, const char *what);
#define CHECK(call) cuda_check(call, #call)

/* One block of one thread with 64-bit parameters: all that the emulator's kernels take. */
void cuda_launch(CUfunction f, CUstream stream, uint64_t *args, unsigned count);

double now_s(void);
void sleep_s(double seconds);

#endif
