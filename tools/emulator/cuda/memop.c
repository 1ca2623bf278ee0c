/*
 * memop.c - stream memory operations: write a word when the stream comes by, or hold the stream until a word has a value.
 * A waiting channel is off the GPU and looks again every now and then, as the host scheduler does with a semaphore.
 */
#include "copy.h"
#include "turn.h"

#include <stdlib.h>

#define LOOK_AGAIN_NS 50000u
#define MOST_OPS      256u

struct memop_work {
	struct work work;
	unsigned count;
	CUstreamBatchMemOpParams ops[];
};

static bool is_satisfied(const CUstreamBatchMemOpParams *op)
{
	bool wide = op->operation == CU_MEM_OP_WAIT_64;
	uint64_t word = wide ? __atomic_load_n((uint64_t *)(uintptr_t)op->address, __ATOMIC_ACQUIRE)
	                     : __atomic_load_n((uint32_t *)(uintptr_t)op->address, __ATOMIC_ACQUIRE);
	uint64_t value = wide ? op->value : (uint32_t)op->value;

	switch (op->flags & 3u) {
	case CU_WAIT_EQ:
		return word == value;
	case CU_WAIT_AND:
		return (word & value) != 0;
	case CU_WAIT_NOR:
		return wide ? ~(word | value) != 0 : (uint32_t) ~(word | value) != 0;
	default: /* greater or equal, cyclic */
		return wide ? (int64_t)(word - value) >= 0 : (int32_t)(uint32_t)(word - value) >= 0;
	}
}

static bool run_op(const CUstreamBatchMemOpParams *op, struct channel *channel)
{
	switch (op->operation) {
	case CU_MEM_OP_WRITE_32:
		__atomic_store_n((uint32_t *)(uintptr_t)op->address, (uint32_t)op->value, __ATOMIC_RELEASE);
		return true;
	case CU_MEM_OP_WRITE_64:
		__atomic_store_n((uint64_t *)(uintptr_t)op->address, op->value, __ATOMIC_RELEASE);
		return true;
	case CU_MEM_OP_WAIT_32:
	case CU_MEM_OP_WAIT_64:
		while (!is_satisfied(op))
			if (!turn_pause(channel, LOOK_AGAIN_NS))
				return false;
		return true;
	default: /* barriers and flushes: everything is ordered here */
		return true;
	}
}

static CUresult run_memops(struct work *work, struct channel *channel)
{
	const struct memop_work *memop = (const struct memop_work *)work;

	for (unsigned i = 0; i < memop->count; i++)
		if (!run_op(&memop->ops[i], channel))
			break;
	return CUDA_SUCCESS;
}

static bool is_valid(const CUstreamBatchMemOpParams *op)
{
	bool wide = op->operation == CU_MEM_OP_WAIT_64 || op->operation == CU_MEM_OP_WRITE_64;

	if (op->operation < CU_MEM_OP_WAIT_32 || op->operation > CU_MEM_OP_BARRIER)
		return false;
	if (op->operation == CU_MEM_OP_FLUSH || op->operation == CU_MEM_OP_BARRIER)
		return true;
	return op->address && op->address % (wide ? 8 : 4) == 0;
}

static CUresult submit(CUstream handle, unsigned count, const CUstreamBatchMemOpParams *ops)
{
	struct stream *stream;

	TRY(stream_resolve(handle, &stream));
	REFUSE_IF(!count || count > MOST_OPS || !ops, CUDA_ERROR_INVALID_VALUE);
	for (unsigned i = 0; i < count; i++)
		if (!is_valid(&ops[i]))
			return CUDA_ERROR_INVALID_VALUE;
	struct memop_work *memop = work_new(sizeof(*memop) + count * sizeof(*ops), run_memops);
	memop->work.node_type = NODE_MEM_OP;
	memop->count = count;
	memcpy(memop->ops, ops, count * sizeof(*ops));
	return work_submit(stream, LANE_COMPUTE, &memop->work);
}

CUAPI(11070, cuStreamBatchMemOp_v2, CUstream stream, unsigned count, CUstreamBatchMemOpParams *ops,
      unsigned flags)
{
	return flags ? CUDA_ERROR_INVALID_VALUE : submit(stream, count, ops);
}

CUAPI(11070, cuStreamBatchMemOp_v2_ptsz, CUstream stream, unsigned count, CUstreamBatchMemOpParams *ops,
      unsigned flags)
{
	return cuStreamBatchMemOp_v2(PER_THREAD(stream), count, ops, flags);
}

#define MEM_OP(since, name, type, op)                                                               \
	CUAPI(since, name, CUstream stream, CUdeviceptr address, type value, unsigned flags)        \
	{                                                                                           \
		CUstreamBatchMemOpParams one = {                                                    \
		        .operation = op, .address = address, .value = value, .flags = flags};       \
		return submit(stream, 1, &one);                                                     \
	}                                                                                           \
	CUAPI(since, name##_ptsz, CUstream stream, CUdeviceptr address, type value, unsigned flags) \
	{                                                                                           \
		return name(PER_THREAD(stream), address, value, flags);                             \
	}
MEM_OP(11070, cuStreamWaitValue32_v2, uint32_t, CU_MEM_OP_WAIT_32)
MEM_OP(11070, cuStreamWaitValue64_v2, uint64_t, CU_MEM_OP_WAIT_64)
MEM_OP(11070, cuStreamWriteValue32_v2, uint32_t, CU_MEM_OP_WRITE_32)
MEM_OP(11070, cuStreamWriteValue64_v2, uint64_t, CU_MEM_OP_WRITE_64)
