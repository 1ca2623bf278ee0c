/* gpu.h - the CUDA driver API as the workload uses it: by dlopen, with the few types of proto/abi/cuda.h. No toolkit. */
#ifndef VALVE_GPU_GPU_H
#define VALVE_GPU_GPU_H

#include "cuda.h"
#include "lab.h"

struct prop { /* CUmemAllocationProp */
	int type, handle_types, location, device;
	void *win32;
	unsigned char flags[8];
};
struct access { /* CUmemAccessDesc */
	int location, device, flags;
};
_Static_assert(sizeof(struct prop) == 32 && sizeof(struct access) == 12, "cuda.h of CUDA 13.0");

typedef void host_function(void *);
/* clang-format off */
#define GPU_CALLS(X) \
	X(cuInit, (unsigned)) \
	X(cuDriverGetVersion, (int *)) \
	X(cuDeviceGet, (CUdevice *, int)) \
	X(cuDeviceGetAttribute, (int *, int, CUdevice)) \
	X(cuDeviceGetUuid_v2, (CUuuid *, CUdevice)) \
	X(cuDevicePrimaryCtxRetain, (CUcontext *, CUdevice)) \
	X(cuDevicePrimaryCtxRelease_v2, (CUdevice)) \
	X(cuCtxCreate_v2, (CUcontext *, unsigned, CUdevice)) \
	X(cuCtxDestroy_v2, (CUcontext)) \
	X(cuCtxSetCurrent, (CUcontext)) \
	X(cuCtxGetStreamPriorityRange, (int *, int *)) \
	X(cuCtxSynchronize, (void)) \
	X(cuModuleLoadData, (CUmodule *, const void *)) \
	X(cuModuleUnload, (CUmodule)) \
	X(cuModuleGetFunction, (CUfunction *, CUmodule, const char *)) \
	X(cuOccupancyMaxActiveBlocksPerMultiprocessor, (int *, CUfunction, int, size_t)) \
	X(cuStreamCreateWithPriority, (CUstream *, unsigned, int)) \
	X(cuStreamDestroy_v2, (CUstream)) \
	X(cuStreamSynchronize, (CUstream)) \
	X(cuStreamQuery, (CUstream)) \
	X(cuStreamWriteValue32_v2, (CUstream, CUdeviceptr, uint32_t, unsigned)) \
	X(cuStreamBeginCapture_v2, (CUstream, int)) \
	X(cuStreamEndCapture, (CUstream, CUgraph *)) \
	X(cuGraphInstantiateWithFlags, (CUgraphExec *, CUgraph, unsigned long long)) \
	X(cuGraphLaunch, (CUgraphExec, CUstream)) \
	X(cuEventCreate, (CUevent *, unsigned)) \
	X(cuEventRecord, (CUevent, CUstream)) \
	X(cuEventQuery, (CUevent)) \
	X(cuLaunchKernel, (CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, CUstream, \
	                   void **, void **)) \
	X(cuLaunchHostFunc, (CUstream, host_function *, void *)) \
	X(cuMemAlloc_v2, (CUdeviceptr *, size_t)) \
	X(cuMemFree_v2, (CUdeviceptr)) \
	X(cuMemHostAlloc, (void **, size_t, unsigned)) \
	X(cuMemHostRegister_v2, (void *, size_t, unsigned)) \
	X(cuMemHostGetDevicePointer_v2, (CUdeviceptr *, void *, unsigned)) \
	X(cuMemsetD32_v2, (CUdeviceptr, unsigned, size_t)) \
	X(cuMemsetD32Async, (CUdeviceptr, unsigned, size_t, CUstream)) \
	X(cuMemcpyHtoD_v2, (CUdeviceptr, const void *, size_t)) \
	X(cuMemcpyDtoH_v2, (void *, CUdeviceptr, size_t)) \
	X(cuMemcpyDtoDAsync_v2, (CUdeviceptr, CUdeviceptr, size_t, CUstream)) \
	X(cuMemcpyDtoHAsync_v2, (void *, CUdeviceptr, size_t, CUstream)) \
	X(cuMemAddressReserve, (CUdeviceptr *, size_t, size_t, CUdeviceptr, unsigned long long)) \
	X(cuMemAddressFree, (CUdeviceptr, size_t)) \
	X(cuMemCreate, (CUmemGenericAllocationHandle *, size_t, const struct prop *, unsigned long long)) \
	X(cuMemRelease, (CUmemGenericAllocationHandle)) \
	X(cuMemMap, (CUdeviceptr, size_t, size_t, CUmemGenericAllocationHandle, unsigned long long)) \
	X(cuMemUnmap, (CUdeviceptr, size_t)) \
	X(cuMemSetAccess, (CUdeviceptr, size_t, const struct access *, size_t)) \
	X(cuMemExportToShareableHandle, (void *, CUmemGenericAllocationHandle, int, unsigned long long)) \
	X(cuMemImportFromShareableHandle, (CUmemGenericAllocationHandle *, void *, int)) \
	X(cuMemGetAddressRange_v2, (CUdeviceptr *, size_t *, CUdeviceptr)) \
	X(cuPointerGetAttribute, (void *, int, CUdeviceptr)) \
	X(cuIpcGetMemHandle, (void *, CUdeviceptr)) \
	X(cuGetErrorName, (CUresult, const char **))
/* clang-format on */

struct gpu {
#define X(name, parameters) CUresult(*name) parameters;
	GPU_CALLS(X)
#undef X
	CUresult (*cuCtxRecordEvent)(CUcontext, CUevent); /* from CUDA 12.5 on: may be NULL */
	void *library;
	CUcontext context;
	CUmodule module;
	CUfunction burn, fill, sum;
	unsigned multiprocessors, blocks;
	char *image; /* the kernels: PTX, or the emulator's stand-ins */
};
extern struct gpu gpu;

/* The first error of this process, and where: later calls are not made, and the result line says it. */
struct failure {
	CUresult code;
	const char *where;
};
extern struct failure failure;

#define STRING2(x) #x
#define STRING(x)  STRING2(x)
#define CK(call)                                                           \
	do {                                                               \
		if (gpu_check((call), __FILE_NAME__ ":" STRING(__LINE__))) \
			return;                                            \
	} while (0)
#ifndef __FILE_NAME__
#define __FILE_NAME__ __FILE__
#endif

/* Ends the function with the error of a call that fails. */
#define TRY(call)                        \
	do {                             \
		CUresult error = (call); \
		if (error)               \
			return error;    \
	} while (0)

CUresult gpu_check(CUresult code, const char *where);
void gpu_open(const char *image_path);
enum { THREADS = 256 };

/* beatpage.c */
struct beat_page {
	CUdeviceptr at, slot;
	volatile uint64_t *mark; /* where a copy may write a beat */
};
CUresult beat_share(struct beat *beat, struct beat_page *page);

/* vmm.c: a range of handles of which one after the other is remapped, and the calls that do it */
enum vmm_call {
	VMM_UNMAP,
	VMM_MAP,
	VMM_ACCESS,
	VMM_ALLOC,
	VMM_FREE,
	VMM_RESERVE,
	VMM_CREATE,
	VMM_RELEASE,
	VMM_CALLS
};
extern const char *const vmm_names[VMM_CALLS];
struct piece {
	CUdeviceptr at;
	CUmemGenericAllocationHandle handle;
	size_t bytes;
};
enum { VMM_SLOTS = 8, VMM_SLOT_BYTES = 4 << 20, VMM_PIECES = 512 };
CUresult vmm_do(enum vmm_call call, struct piece *piece, uint64_t *ns);
unsigned vmm_pattern(unsigned slot);
struct vmm_pool {
	struct piece slot[VMM_SLOTS +
	                  1]; /* the last is the quarantine handle, always mapped at its own place too */
	CUdeviceptr scratch;
};
extern struct vmm_pool vmm_pool;
CUresult vmm_pool_make(void);
int vmm_cost(unsigned mib, unsigned total_mib, char *answer, size_t room);

/* helper.c: a thread inside the workload that does what it is told (see the list there) */
int helper_start(const char *sock);

#endif
