/*
 * types.h - driver API types beyond proto/abi/cuda.h, as laid out by the public header of CUDA 13.0. Only what the
 * stand-in's entry points take; sizes are asserted because real callers were compiled against the real header.
 */
#ifndef EMU_CUDA_TYPES_H
#define EMU_CUDA_TYPES_H

#include "cuda.h"

typedef struct CUmemPoolHandle_st *CUmemoryPool;
typedef struct CUarray_st *CUarray;
typedef struct CUlinkState_st *CUlinkState;
typedef void (*CUhostFn)(void *user);
typedef void (*CUstreamCallback)(CUstream stream, CUresult status, void *user);

typedef struct {
	unsigned grid[3], block[3], shared;
	CUstream stream;
	void *attrs;
	unsigned attr_count;
} CUlaunchConfig;

typedef struct {
	int alloc_type, handle_types;
	CUmemLocation location;
	void *win32_attributes;
	size_t max_size;
	uint16_t usage;
	uint8_t reserved[54];
} CUmemPoolProps;

enum { CU_MEMORYTYPE_HOST = 1, CU_MEMORYTYPE_DEVICE = 2, CU_MEMORYTYPE_ARRAY = 3, CU_MEMORYTYPE_UNIFIED = 4 };
struct copy2d_side {
	size_t x, y;
	int type;
	const void *host;
	CUdeviceptr device;
	CUarray array;
	size_t pitch;
};
typedef struct {
	struct copy2d_side src, dst;
	size_t width, height;
} CUDA_MEMCPY2D;

struct copy3d_side {
	size_t x, y, z, lod;
	int type;
	const void *host;
	CUdeviceptr device;
	CUarray array;
	void *context; /* reserved in the plain form, the context in the peer form */
	size_t pitch, height;
};
typedef struct {
	struct copy3d_side src, dst;
	size_t width, height, depth;
} CUDA_MEMCPY3D;

enum {
	CU_MEM_OP_WAIT_32 = 1,
	CU_MEM_OP_WRITE_32 = 2,
	CU_MEM_OP_FLUSH = 3,
	CU_MEM_OP_WAIT_64 = 4,
	CU_MEM_OP_WRITE_64 = 5,
	CU_MEM_OP_BARRIER = 6,
};
enum { CU_WAIT_GEQ = 0, CU_WAIT_EQ = 1, CU_WAIT_AND = 2, CU_WAIT_NOR = 3 };
typedef struct {
	int operation;
	CUdeviceptr address;
	uint64_t value; /* 32-bit forms use the low half */
	unsigned flags;
	CUdeviceptr alias;
	uint64_t pad;
} CUstreamBatchMemOpParams;

typedef struct {
	CUfunction function;
	unsigned grid[3], block[3], shared;
	void **params;
	void **extra;
	CUkernel kernel;
	CUcontext context;
} CUDA_KERNEL_NODE_PARAMS;

typedef struct {
	uint64_t flags;
	CUstream upload_stream;
	CUgraphNode error_node;
	int result;
} CUDA_GRAPH_INSTANTIATE_PARAMS;

enum {
	NODE_KERNEL = 0,
	NODE_MEMCPY = 1,
	NODE_MEMSET = 2,
	NODE_HOST = 3,
	NODE_GRAPH = 4,
	NODE_EMPTY = 5,
	NODE_EVENT_RECORD = 7,
	NODE_MEM_ALLOC = 10,
	NODE_MEM_FREE = 11,
	NODE_MEM_OP = 12,
};
enum { CAPTURE_NONE = 0, CAPTURE_ACTIVE = 1, CAPTURE_INVALIDATED = 2 };
#define CU_STREAM_LEGACY     ((CUstream)(uintptr_t)1)
#define CU_STREAM_PER_THREAD ((CUstream)(uintptr_t)2)

enum {
	CUDA_ERROR_ALREADY_MAPPED = 208,
	CUDA_ERROR_NOT_MAPPED = 211,
	CUDA_ERROR_UNSUPPORTED_LIMIT = 215,
	CUDA_ERROR_PEER_ACCESS_UNSUPPORTED = 217,
	CUDA_ERROR_FILE_NOT_FOUND = 301,
	CUDA_ERROR_SHARED_OBJECT_INIT_FAILED = 303,
	CUDA_ERROR_OPERATING_SYSTEM = 304,
	CUDA_ERROR_ILLEGAL_STATE = 401,
	CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED = 704,
	CUDA_ERROR_PEER_ACCESS_NOT_ENABLED = 705,
	CUDA_ERROR_PRIMARY_CONTEXT_ACTIVE = 708,
	CUDA_ERROR_CONTEXT_IS_DESTROYED = 709,
	CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED = 712,
	CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED = 713,
	CUDA_ERROR_CAPTURED_EVENT = 907,
	CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD = 908,
	CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE = 910,
	CUDA_ERROR_INVALID_RESOURCE_TYPE = 914,
	CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION = 915,
};

_Static_assert(sizeof(CUlaunchConfig) == 56, "CUlaunchConfig");
_Static_assert(sizeof(CUmemPoolProps) == 88, "CUmemPoolProps");
_Static_assert(sizeof(CUDA_MEMCPY2D) == 128, "CUDA_MEMCPY2D");
_Static_assert(sizeof(CUDA_MEMCPY3D) == 200, "CUDA_MEMCPY3D");
_Static_assert(sizeof(CUstreamBatchMemOpParams) == 48, "CUstreamBatchMemOpParams");
_Static_assert(sizeof(CUDA_KERNEL_NODE_PARAMS) == 72, "CUDA_KERNEL_NODE_PARAMS");

#endif
