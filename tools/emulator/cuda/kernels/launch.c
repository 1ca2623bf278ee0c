/* launch.c - kernel launches in their three forms, host functions, and what runs when a kernel's turn has come. */
#include "kernel.h"
#include "turn.h"

#include <stdlib.h>

#define MAX_THREADS        1024u
#define EXTRA_END          ((void *)0)
#define EXTRA_BUFFER       ((void *)1)
#define EXTRA_BUFFER_BYTES ((void *)2)

/* For tests and the curious: launches of kernels that this libcuda cannot run. */
__attribute__((visibility("default"))) uint64_t valve_emu_unknown_kernels;

static CUresult run_native(struct channel *channel, const struct emu_native *native, const void *args)
{
	for (uint64_t step = 0; turn_check(channel); step++)
		if (!native->step(args, step))
			break;
	return CUDA_SUCCESS;
}

static CUresult run_launch(struct work *work, struct channel *channel)
{
	struct launch *launch = (struct launch *)work;
	const struct function *function = launch->function;

	if (function->builtin)
		return function->builtin->run(channel, launch->args);
	if (function->native)
		return run_native(channel, function->native, launch->args);
	__atomic_fetch_add(&valve_emu_unknown_kernels, 1, __ATOMIC_RELAXED);
	turn_run(channel, real_ns(setting(SETTING_kernel_us) * 1000u));
	return CUDA_SUCCESS;
}

static unsigned arg_size(const struct function *function, unsigned index)
{
	if (function->builtin)
		return index < function->builtin->args ? 8 : 0;
	if (function->native)
		return index < function->native->arg_count ? function->native->arg_bytes[index] : 0;
	return 0; /* the parameters of an unknown kernel are never looked at */
}

static size_t args_bytes(const struct function *function)
{
	size_t at = 0;

	for (unsigned i = 0, size; i < MAX_ARGS && (size = arg_size(function, i)); i++)
		at = (at + size - 1) / size * size + size;
	return at;
}

static void pack_args(struct launch *launch, void **params)
{
	size_t at = 0;

	for (unsigned i = 0, size; i < MAX_ARGS && (size = arg_size(launch->function, i)); i++) {
		at = (at + size - 1) / size * size;
		memcpy(launch->args + at, params[i], size);
		at += size;
	}
}

static void pack_extra(struct launch *launch, void **extra)
{
	const void *buffer = NULL;
	size_t bytes = 0;

	for (; *extra != EXTRA_END; extra += 2) {
		if (*extra == EXTRA_BUFFER)
			buffer = extra[1];
		else if (*extra == EXTRA_BUFFER_BYTES)
			bytes = *(size_t *)extra[1];
	}
	if (buffer)
		memcpy(launch->args, buffer, bytes < launch->arg_bytes ? bytes : launch->arg_bytes);
}

static CUresult launch_on(CUstream handle, CUfunction f, const unsigned *grid, const unsigned *block,
                          void **params, void **extra)
{
	struct stream *stream;
	struct function *function = function_from(f);

	TRY(stream_resolve(handle, &stream));
	REFUSE_IF(!function, CUDA_ERROR_INVALID_HANDLE);
	uint64_t threads = (uint64_t)block[0] * block[1] * block[2];
	REFUSE_IF(!threads || threads > MAX_THREADS || !grid[0] || !grid[1] || !grid[2] || (params && extra),
	          CUDA_ERROR_INVALID_VALUE);
	size_t bytes = args_bytes(function);
	REFUSE_IF(bytes && !params && !extra, CUDA_ERROR_INVALID_VALUE);
	struct launch *launch = work_new(sizeof(*launch) + bytes, run_launch);
	launch->work.is_launch = true;
	launch->work.node_type = NODE_KERNEL;
	launch->function = function;
	launch->arg_bytes = bytes;
	if (bytes && params)
		pack_args(launch, params);
	else if (bytes)
		pack_extra(launch, extra);
	return work_submit(stream, LANE_COMPUTE, &launch->work);
}

CUAPI(4000, cuLaunchKernel, CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
      unsigned bz, unsigned shared, CUstream stream, void **params, void **extra)
{
	(void)shared;
	return launch_on(stream, f, (unsigned[]){gx, gy, gz}, (unsigned[]){bx, by, bz}, params, extra);
}

CUAPI(11060, cuLaunchKernelEx, const CUlaunchConfig *config, CUfunction f, void **params, void **extra)
{
	REFUSE_IF(!config, CUDA_ERROR_INVALID_VALUE);
	return launch_on(config->stream, f, config->grid, config->block, params, extra);
}

CUAPI(9000, cuLaunchCooperativeKernel, CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx,
      unsigned by, unsigned bz, unsigned shared, CUstream stream, void **params)
{
	(void)shared;
	return launch_on(stream, f, (unsigned[]){gx, gy, gz}, (unsigned[]){bx, by, bz}, params, NULL);
}

struct host_work {
	struct work work;
	CUhostFn function;
	CUstreamCallback callback;
	CUstream stream;
	void *user;
};

/* The GPU has come to it; the host runs it with the channel off the GPU, as the driver's callback thread would. */
static CUresult run_host(struct work *work, struct channel *channel)
{
	struct host_work *host = (struct host_work *)work;

	turn_end(channel);
	if (host->function)
		host->function(host->user);
	else
		host->callback(host->stream, channel->ctx->sticky, host->user);
	return CUDA_SUCCESS;
}

CUAPI(10000, cuLaunchHostFunc, CUstream handle, CUhostFn function, void *user)
{
	struct stream *stream;

	TRY(stream_resolve(handle, &stream));
	REFUSE_IF(!function, CUDA_ERROR_INVALID_VALUE);
	struct host_work *host = work_new(sizeof(*host), run_host);
	host->work.node_type = NODE_HOST;
	host->function = function;
	host->user = user;
	return work_submit(stream, LANE_COMPUTE, &host->work);
}

CUAPI(5000, cuStreamAddCallback, CUstream handle, CUstreamCallback callback, void *user, unsigned flags)
{
	struct stream *stream;

	TRY(stream_resolve(handle, &stream));
	REFUSE_IF(!callback || flags, CUDA_ERROR_INVALID_VALUE);
	struct host_work *host = work_new(sizeof(*host), run_host);
	host->work.node_type = -1; /* not permitted in a capture */
	host->callback = callback;
	host->stream = handle;
	host->user = user;
	return work_submit(stream, LANE_COMPUTE, &host->work);
}
