/* capture_query.c - is this stream being captured, and into what. */
#include "capture.h"

static CUresult capture_info(CUstream handle, int *status, uint64_t *id, CUgraph *graph)
{
	struct stream *stream;
	CUresult result = stream_resolve(handle, &stream);

	if (result)
		return result;
	REFUSE_IF(!status, CUDA_ERROR_INVALID_VALUE);
	LOCKED(&emu.lock);
	struct capture *capture = stream->capture;
	if (!capture)
		result = capture_check_implicit_locked(stream);
	*status = capture ? capture->status : CAPTURE_NONE;
	if (capture && id)
		*id = capture->id;
	if (capture && graph)
		*graph = (CUgraph)capture->graph;
	return result;
}

CUAPI(10000, cuStreamIsCapturing, CUstream handle, int *status)
{
	return capture_info(handle, status, NULL, NULL);
}

CUAPI(10010, cuStreamGetCaptureInfo, CUstream handle, int *status, uint64_t *id)
{
	return capture_info(handle, status, id, NULL);
}

CUAPI(11030, cuStreamGetCaptureInfo_v2, CUstream handle, int *status, uint64_t *id, CUgraph *graph,
      void *deps, size_t *count)
{
	(void)deps; /* the nodes' order is the order of capture; their handles are not handed out */
	if (count)
		*count = 0;
	return capture_info(handle, status, id, graph);
}

CUAPI(12030, cuStreamGetCaptureInfo_v3, CUstream handle, int *status, uint64_t *id, CUgraph *graph,
      void *deps, void *edges, size_t *count)
{
	if (edges)
		*(void **)edges = NULL;
	return cuStreamGetCaptureInfo_v2(handle, status, id, graph, deps, count);
}
