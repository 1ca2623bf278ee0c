/*
 * twins.c - the per-thread-default-stream forms of calls that take a stream: the same call, with stream 0 meaning the
 * thread's own stream. One line each; copies and memsets have theirs beside them.
 */
#include "copy.h"

#define TWIN(since, name, suffix, parameters, arguments)                         \
	CUresult name parameters;                                                \
	__attribute__((visibility("default"))) CUresult name##suffix parameters; \
	ENTRY(since, name##suffix)                                               \
	CUresult name##suffix parameters                                         \
	{                                                                        \
		return name arguments;                                           \
	}
#define S PER_THREAD(s)

TWIN(7000, cuStreamSynchronize, _ptsz, (CUstream s), (S))
TWIN(7000, cuStreamQuery, _ptsz, (CUstream s), (S))
TWIN(7000, cuStreamWaitEvent, _ptsz, (CUstream s, CUevent e, unsigned flags), (S, e, flags))
TWIN(7000, cuStreamGetFlags, _ptsz, (CUstream s, unsigned *out), (S, out))
TWIN(7000, cuStreamGetPriority, _ptsz, (CUstream s, int *out), (S, out))
TWIN(9020, cuStreamGetCtx, _ptsz, (CUstream s, CUcontext *out), (S, out))
TWIN(12050, cuStreamGetCtx_v2, _ptsz, (CUstream s, CUcontext *out, void **green), (S, out, green))
TWIN(12040, cuStreamGetGreenCtx, _ptsz, (CUstream s, void **out), (S, out))
TWIN(12080, cuStreamGetDevice, _ptsz, (CUstream s, CUdevice *out), (S, out))
TWIN(12000, cuStreamGetId, _ptsz, (CUstream s, unsigned long long *out), (S, out))
TWIN(7000, cuStreamAddCallback, _ptsz, (CUstream s, CUstreamCallback f, void *user, unsigned flags),
     (S, f, user, flags))
TWIN(10000, cuStreamBeginCapture, _ptsz, (CUstream s), (S))
TWIN(10010, cuStreamBeginCapture_v2, _ptsz, (CUstream s, int mode), (S, mode))
TWIN(10000, cuStreamEndCapture, _ptsz, (CUstream s, CUgraph *out), (S, out))
TWIN(10000, cuStreamIsCapturing, _ptsz, (CUstream s, int *out), (S, out))
TWIN(10010, cuStreamGetCaptureInfo, _ptsz, (CUstream s, int *status, uint64_t *id), (S, status, id))
TWIN(11030, cuStreamGetCaptureInfo_v2, _ptsz,
     (CUstream s, int *status, uint64_t *id, CUgraph *graph, void *deps, size_t *n),
     (S, status, id, graph, deps, n))
TWIN(12030, cuStreamGetCaptureInfo_v3, _ptsz,
     (CUstream s, int *status, uint64_t *id, CUgraph *graph, void *deps, void *edges, size_t *n),
     (S, status, id, graph, deps, edges, n))
TWIN(7000, cuEventRecord, _ptsz, (CUevent e, CUstream s), (e, S))
TWIN(11010, cuEventRecordWithFlags, _ptsz, (CUevent e, CUstream s, unsigned flags), (e, S, flags))
TWIN(10000, cuLaunchHostFunc, _ptsz, (CUstream s, CUhostFn f, void *user), (S, f, user))
TWIN(10000, cuGraphLaunch, _ptsz, (CUgraphExec x, CUstream s), (x, S))
TWIN(11010, cuGraphUpload, _ptsz, (CUgraphExec x, CUstream s), (x, S))
TWIN(7000, cuMemcpyPeer, _ptds, (CUdeviceptr to, CUcontext tc, CUdeviceptr from, CUcontext fc, size_t n),
     (to, tc, from, fc, n))
TWIN(7000, cuMemcpyPeerAsync, _ptsz,
     (CUdeviceptr to, CUcontext tc, CUdeviceptr from, CUcontext fc, size_t n, CUstream s),
     (to, tc, from, fc, n, S))
TWIN(7000, cuLaunchKernel, _ptsz,
     (CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
      unsigned shared, CUstream s, void **params, void **extra),
     (f, gx, gy, gz, bx, by, bz, shared, S, params, extra))
TWIN(9000, cuLaunchCooperativeKernel, _ptsz,
     (CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
      unsigned shared, CUstream s, void **params),
     (f, gx, gy, gz, bx, by, bz, shared, S, params))
TWIN(12000, cuGraphInstantiateWithParams, _ptsz,
     (CUgraphExec * out, CUgraph g, CUDA_GRAPH_INSTANTIATE_PARAMS *p), (out, g, p))

/* The stream stands inside the configuration here. */
CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction f, void **params, void **extra);
CUAPI(11060, cuLaunchKernelEx_ptsz, const CUlaunchConfig *config, CUfunction f, void **params, void **extra)
{
	REFUSE_IF(!config, CUDA_ERROR_INVALID_VALUE);
	CUlaunchConfig own = *config;
	own.stream = PER_THREAD(config->stream);
	return cuLaunchKernelEx(&own, f, params, extra);
}

TWIN(11020, cuMemAllocAsync, _ptsz, (CUdeviceptr * out, size_t n, CUstream s), (out, n, S))
TWIN(11020, cuMemAllocFromPoolAsync, _ptsz, (CUdeviceptr * out, size_t n, CUmemoryPool pool, CUstream s),
     (out, n, pool, S))
TWIN(11020, cuMemFreeAsync, _ptsz, (CUdeviceptr address, CUstream s), (address, S))
