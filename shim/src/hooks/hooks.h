/*
 * hooks.h - the one table of interposed driver names. Everything expands from it: the exported trampolines and their
 * entries (trampoline.S), the base names that cuGetProcAddress answers are
 * checked against (interpose.c), and libvalve.map's check in tests/shim. Read by C and by the assembler: no types here.
 *
 * VALVE_SUBMIT(X): everything that can put work on a GPU queue. Only counted, never looked into,
 * so no prototype. A new call of a new driver is one line here.
 * VALVE_OBSERVE(X): calls whose result we must know: where contexts and streams come from, captures, GetProcAddress, KV memory.
 * At most six register arguments, all integers or pointers.
 *
 * The letter says which twins libcuda exports: 2/3/4 = _v2.., Z = _ptsz (stream calls), D = _ptds (synchronous calls)
 * under the per-thread default stream. A caller of cuGetProcAddress passes the base name; the driver chooses the twin.
 */
#define VALVE_TWIN_1(X, n)   X(n, 0)
#define VALVE_TWIN_V(X, n)   X(n##_v2, 0) /* the plain name is of the days of 32-bit addresses */
#define VALVE_TWIN_2(X, n)   X(n, 0) X(n##_v2, 0)
#define VALVE_TWIN_234(X, n) X(n, 0) X(n##_v2, 0) X(n##_v3, 0) X(n##_v4, 0)
#define VALVE_TWIN_Z(X, n)   X(n, 0) X(n##_ptsz, 1)
#define VALVE_TWIN_D(X, n)   X(n, 0) X(n##_ptds, 1)
#define VALVE_TWIN_2Z(X, n)  X(n, 0) X(n##_v2, 0) X(n##_v2_ptsz, 1)
#define VALVE_TWIN_2D(X, n)  X(n, 0) X(n##_v2, 0) X(n##_v2_ptds, 1)
#define VALVE_TWIN_Z2Z(X, n) X(n, 0) X(n##_ptsz, 1) X(n##_v2, 0) X(n##_v2_ptsz, 1)

/* clang-format off */
#define VALVE_SUBMIT_BASES(T) \
	/* launches, and host work ordered in a stream */ \
	T(Z, cuLaunchKernel) T(Z, cuLaunchKernelEx) T(Z, cuLaunchCooperativeKernel) \
	T(1, cuLaunch) T(1, cuLaunchGrid) T(1, cuLaunchGridAsync) T(1, cuLaunchCooperativeKernelMultiDevice) \
	T(Z, cuGraphLaunch) T(Z, cuGraphUpload) T(Z, cuLaunchHostFunc) T(Z, cuStreamAddCallback) \
	/* copies */ \
	T(D, cuMemcpy) T(Z, cuMemcpyAsync) T(D, cuMemcpyPeer) T(Z, cuMemcpyPeerAsync) \
	T(2D, cuMemcpyHtoD) T(2D, cuMemcpyDtoH) T(2D, cuMemcpyDtoD) T(2D, cuMemcpyDtoA) T(2D, cuMemcpyAtoD) \
	T(2D, cuMemcpyHtoA) T(2D, cuMemcpyAtoH) T(2D, cuMemcpyAtoA) \
	T(2Z, cuMemcpyHtoAAsync) T(2Z, cuMemcpyAtoHAsync) \
	T(2Z, cuMemcpyHtoDAsync) T(2Z, cuMemcpyDtoHAsync) T(2Z, cuMemcpyDtoDAsync) \
	T(2D, cuMemcpy2D) T(2D, cuMemcpy2DUnaligned) T(2D, cuMemcpy3D) T(D, cuMemcpy3DPeer) \
	T(2Z, cuMemcpy2DAsync) T(2Z, cuMemcpy3DAsync) T(Z, cuMemcpy3DPeerAsync) \
	T(Z2Z, cuMemcpyBatchAsync) T(Z2Z, cuMemcpy3DBatchAsync) \
	/* fills */ \
	T(2D, cuMemsetD8) T(2D, cuMemsetD16) T(2D, cuMemsetD32) \
	T(2D, cuMemsetD2D8) T(2D, cuMemsetD2D16) T(2D, cuMemsetD2D32) \
	T(Z, cuMemsetD8Async) T(Z, cuMemsetD16Async) T(Z, cuMemsetD32Async) \
	T(Z, cuMemsetD2D8Async) T(Z, cuMemsetD2D16Async) T(Z, cuMemsetD2D32Async) \
	/* memory operations of a stream, semaphores */ \
	T(Z2Z, cuStreamWriteValue32) T(Z2Z, cuStreamWriteValue64) T(Z2Z, cuStreamWaitValue32) \
	T(Z2Z, cuStreamWaitValue64) T(Z2Z, cuStreamBatchMemOp) \
	T(Z, cuSignalExternalSemaphoresAsync) T(Z, cuWaitExternalSemaphoresAsync) \
	/* pools and managed memory */ \
	T(Z, cuMemAllocAsync) T(Z, cuMemFreeAsync) T(Z, cuMemAllocFromPoolAsync) \
	T(Z2Z, cuMemPrefetchAsync) T(Z, cuMemPrefetchBatchAsync) T(Z, cuMemDiscardBatchAsync) \
	T(Z, cuMemDiscardAndPrefetchBatchAsync) T(Z, cuMemMapArrayAsync) T(Z, cuMemBatchDecompressAsync) \
	T(Z, cuStreamAttachMemAsync) T(Z, cuGraphicsMapResources) T(Z, cuGraphicsUnmapResources)

#define VALVE_OBSERVE_BASES(T) \
	T(2, cuGetProcAddress) \
	T(234, cuCtxCreate) T(2, cuCtxDestroy) T(1, cuCtxAttach) T(1, cuCtxDetach) \
	T(1, cuDevicePrimaryCtxRetain) T(2, cuDevicePrimaryCtxRelease) T(2, cuDevicePrimaryCtxReset) \
	T(1, cuStreamCreate) T(1, cuStreamCreateWithPriority) T(2, cuStreamDestroy) \
	T(Z2Z, cuStreamBeginCapture) T(Z, cuStreamBeginCaptureToGraph) T(Z, cuStreamEndCapture) \
	VALVE_MEMORY_BASES(T)

/* Calls about device memory, in the form that CUDA 3.2 gave them (VALVE_MEMORY_SINCE): a caller that asks
 * cuGetProcAddress for an older version gets the driver's own. */
#define VALVE_MEMORY_BASES(T) \
	T(V, cuMemAlloc) T(V, cuMemFree) T(V, cuMemGetInfo) T(V, cuMemGetAddressRange) \
	T(1, cuPointerGetAttribute) T(1, cuPointerGetAttributes) T(1, cuPointerSetAttribute) \
	T(1, cuIpcGetMemHandle) T(1, cuMemGetHandleForAddressRange) T(1, cuMemRetainAllocationHandle)
#define VALVE_MEMORY_SINCE 3020
/* clang-format on */

/* How many distinct driver pointers cuGetProcAddress can be answered for. libcuda 13 has about 150 of the first. */
#define VALVE_POOL_SUBMIT  384
#define VALVE_POOL_OBSERVE 64
