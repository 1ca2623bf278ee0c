/*
 * twins.c - the per-thread-default-stream forms of calls that take a stream: the same call, with stream 0 meaning the
 * thread's own stream. One line each; copies and memsets have theirs beside them.
 */
#include "copy.h"

#define TWIN(name, suffix, parameters, arguments)                                \
	CUresult name parameters;                                                \
	__attribute__((visibility("default"))) CUresult name##suffix parameters; \
	CUresult name##suffix parameters                                         \
	{                                                                        \
		return name arguments;                                           \
	}
#define S PER_THREAD(s)

TWIN(cuStreamSynchronize, _ptsz, (CUstream s), (S))
TWIN(cuStreamQuery, _ptsz, (CUstream s), (S))
TWIN(cuStreamWaitEvent, _ptsz, (CUstream s, CUevent e, unsigned flags), (S, e, flags))
TWIN(cuStreamGetFlags, _ptsz, (CUstream s, unsigned *out), (S, out))
TWIN(cuStreamGetPriority, _ptsz, (CUstream s, int *out), (S, out))
TWIN(cuStreamGetCtx, _ptsz, (CUstream s, CUcontext *out), (S, out))
TWIN(cuStreamGetCtx_v2, _ptsz, (CUstream s, CUcontext *out, void **green), (S, out, green))
TWIN(cuStreamGetGreenCtx, _ptsz, (CUstream s, void **out), (S, out))
TWIN(cuStreamGetDevice, _ptsz, (CUstream s, CUdevice *out), (S, out))
TWIN(cuStreamGetId, _ptsz, (CUstream s, unsigned long long *out), (S, out))
TWIN(cuStreamAddCallback, _ptsz, (CUstream s, CUstreamCallback f, void *user, unsigned flags),
     (S, f, user, flags))
TWIN(cuStreamBeginCapture, _ptsz, (CUstream s), (S))
TWIN(cuStreamBeginCapture_v2, _ptsz, (CUstream s, int mode), (S, mode))
TWIN(cuStreamEndCapture, _ptsz, (CUstream s, CUgraph *out), (S, out))
TWIN(cuStreamIsCapturing, _ptsz, (CUstream s, int *out), (S, out))
TWIN(cuStreamGetCaptureInfo, _ptsz, (CUstream s, int *status, uint64_t *id), (S, status, id))
TWIN(cuStreamGetCaptureInfo_v2, _ptsz,
     (CUstream s, int *status, uint64_t *id, CUgraph *graph, void *deps, size_t *n),
     (S, status, id, graph, deps, n))
TWIN(cuStreamGetCaptureInfo_v3, _ptsz,
     (CUstream s, int *status, uint64_t *id, CUgraph *graph, void *deps, void *edges, size_t *n),
     (S, status, id, graph, deps, edges, n))
TWIN(cuEventRecord, _ptsz, (CUevent e, CUstream s), (e, S))
TWIN(cuEventRecordWithFlags, _ptsz, (CUevent e, CUstream s, unsigned flags), (e, S, flags))
TWIN(cuLaunchHostFunc, _ptsz, (CUstream s, CUhostFn f, void *user), (S, f, user))
TWIN(cuGraphLaunch, _ptsz, (CUgraphExec x, CUstream s), (x, S))
TWIN(cuGraphUpload, _ptsz, (CUgraphExec x, CUstream s), (x, S))
TWIN(cuMemcpyPeer, _ptds, (CUdeviceptr to, CUcontext tc, CUdeviceptr from, CUcontext fc, size_t n),
     (to, tc, from, fc, n))
TWIN(cuMemcpyPeerAsync, _ptsz,
     (CUdeviceptr to, CUcontext tc, CUdeviceptr from, CUcontext fc, size_t n, CUstream s),
     (to, tc, from, fc, n, S))
TWIN(cuLaunchKernel, _ptsz,
     (CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
      unsigned shared, CUstream s, void **params, void **extra),
     (f, gx, gy, gz, bx, by, bz, shared, S, params, extra))
TWIN(cuLaunchCooperativeKernel, _ptsz,
     (CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
      unsigned shared, CUstream s, void **params),
     (f, gx, gy, gz, bx, by, bz, shared, S, params))
TWIN(cuGraphInstantiateWithParams, _ptsz, (CUgraphExec * out, CUgraph g, CUDA_GRAPH_INSTANTIATE_PARAMS *p),
     (out, g, p))

/* The stream stands inside the configuration here. */
CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction f, void **params, void **extra);
CUAPI(cuLaunchKernelEx_ptsz, const CUlaunchConfig *config, CUfunction f, void **params, void **extra)
{
	if (!config)
		return CUDA_ERROR_INVALID_VALUE;
	CUlaunchConfig own = *config;
	own.stream = PER_THREAD(config->stream);
	return cuLaunchKernelEx(&own, f, params, extra);
}

TWIN(cuMemAllocAsync, _ptsz, (CUdeviceptr * out, size_t n, CUstream s), (out, n, S))
TWIN(cuMemAllocFromPoolAsync, _ptsz, (CUdeviceptr * out, size_t n, CUmemoryPool pool, CUstream s),
     (out, n, pool, S))
TWIN(cuMemFreeAsync, _ptsz, (CUdeviceptr address, CUstream s), (address, S))
