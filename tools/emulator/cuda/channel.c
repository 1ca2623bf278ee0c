/*
 * channel.c - the object tree of a CUDA context, in the order of the real library: VA space, compute
 * group on GR0 with its context share and CUDA_DEVICE_MAX_CONNECTIONS channels, then one group per copy engine. Every
 * channel is registered with UVM before its group is scheduled, so a reader of ioctls knows it before it can run.
 */
#include "rm.h"

#include <limits.h>
#include <linux/futex.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

#define GPFIFO_ENTRIES 1024u
#define USERD_BYTES    4096u
#define CONTROL_BASE \
	0x200400000ull /* where UVM is told that a channel's buffers lie; nothing is mapped there */
#define CONTROL_BYTES 0x200000ull

static unsigned compute_channels(void)
{
	const char *text = getenv("CUDA_DEVICE_MAX_CONNECTIONS");
	long count = text ? strtol(text, NULL, 10) : 8;

	return count < 1 || count > MAX_COMPUTE ? 8 : (unsigned)count;
}

static uint32_t alloc_group(struct context *ctx, uint32_t engine, enum rm_form form, uint32_t *h_group)
{
	struct nv_channel_group_alloc p = {.hVASpace = ctx->h_vaspace, .engineType = engine};

	*h_group = rm_new_handle();
	return rm_alloc(form, ctx->dev->h_device, *h_group, KEPLER_CHANNEL_GROUP_A, &p, sizeof(p));
}

static uint32_t schedule(uint32_t h_group)
{
	struct nva06c_gpfifo_schedule p = {.bEnable = 1};

	return rm_control(h_group, NVA06C_CTRL_CMD_GPFIFO_SCHEDULE, &p, emu.board->driver[0] >= 580 ? 3 : 2);
}

static void link_channel(struct channel *channel, struct context *ctx, uint32_t cid)
{
	channel->ctx = ctx;
	channel->cid = cid;
	channel->slot = &emu.board->channel[cid % EMU_CHANNELS];
	channel->gpu = ctx->dev->board;
	channel->tail = &channel->head;
	pthread_cond_init(&channel->has_work, NULL);
	pthread_cond_init(&channel->has_space, NULL);
	LOCKED(&emu.lock);
	channel->next = emu.channels;
	emu.channels = channel;
}

/* Compute channels come by NVOS64 and name a context share; copy channels by NVOS21 with the VA space alone. */
static uint32_t alloc_channel(struct context *ctx, struct channel *channel, uint32_t h_group, bool is_copy)
{
	struct nv_channel_alloc p = {
	        .gpFifoOffset = CONTROL_BASE,
	        .gpFifoEntries = GPFIFO_ENTRIES,
	        .hContextShare = is_copy ? 0 : ctx->h_share,
	        .hVASpace = is_copy ? ctx->h_vaspace : 0,
	        .userdOffset = {ctx->next_handle++ * USERD_BYTES},
	};
	enum rm_form form = is_copy ? RM_NVOS21 : RM_NVOS64;
	uint32_t token = 0;

	channel->h_channel = rm_new_handle();
	uint32_t status = rm_alloc(form, h_group, channel->h_channel, HOPPER_CHANNEL_GPFIFO_A, &p,
	                           emu.board->driver[0] >= 570 ? 368 : 360);
	if (status)
		return status;
	link_channel(channel, ctx, p.cid);
	status = rm_alloc(form, channel->h_channel, rm_new_handle(),
	                  is_copy ? HOPPER_DMA_COPY_A : HOPPER_COMPUTE_A, NULL, 0);
	if (status)
		return status;
	rm_control(channel->h_channel, NVC36F_CTRL_CMD_GPFIFO_GET_WORK_SUBMIT_TOKEN, &token, sizeof(token));
	return uvm_register_channel(ctx->dev, channel->h_channel, CONTROL_BASE, CONTROL_BYTES);
}

static uint32_t create_compute(struct context *ctx)
{
	struct nv_ctxshare_alloc share = {.hVASpace = ctx->h_vaspace};
	struct nva06c_preempt preempt = {.bWait = 1};
	uint32_t status = alloc_group(ctx, NV_ENGINE_GR0, RM_NVOS64, &ctx->h_group);

	if (status)
		return status;
	ctx->h_share = rm_new_handle();
	status =
	        rm_alloc(RM_NVOS64, ctx->h_group, ctx->h_share, FERMI_CONTEXT_SHARE_A, &share, sizeof(share));
	unsigned wanted = compute_channels();
	while (!status && ctx->computes < wanted) {
		status = alloc_channel(ctx, &ctx->compute[ctx->computes], ctx->h_group, false);
		ctx->computes += !status;
	}
	if (!status)
		status = schedule(ctx->h_group);
	if (!status)
		rm_control(ctx->h_group, NVA06C_CTRL_CMD_PREEMPT, &preempt, sizeof(preempt));
	return status;
}

static uint32_t create_copy(struct context *ctx, unsigned index)
{
	uint32_t status = alloc_group(ctx, NV_ENGINE_COPY0 + index, RM_NVOS21, &ctx->h_copy_group[index]);

	if (!status)
		status = alloc_channel(ctx, &ctx->copy[index], ctx->h_copy_group[index], true);
	return status ? status : schedule(ctx->h_copy_group[index]);
}

CUresult channels_create(struct context *ctx)
{
	uint32_t status;

	ctx->h_vaspace = rm_new_handle();
	status = rm_alloc(RM_NVOS21, ctx->dev->h_device, ctx->h_vaspace, FERMI_VASPACE_A, NULL, 0);
	if (!status)
		uvm_register_gpu(
		        ctx->dev); /* a second context of the process is told that it is there already */
	if (!status)
		status = uvm_register_vaspace(ctx->dev, ctx->h_vaspace);
	if (!status)
		status = create_compute(ctx);
	for (unsigned i = 0; i < COPY_ENGINES && !status; i++)
		status = create_copy(ctx, i);
	if (!status)
		return CUDA_SUCCESS;
	channels_destroy(ctx);
	return status == NV_ERR_INSUFFICIENT_PERMISSIONS ? CUDA_ERROR_NOT_PERMITTED
	                                                 : CUDA_ERROR_OUT_OF_MEMORY;
}

static void stop_channel(struct channel *channel)
{
	if (!channel->slot)
		return;
	pthread_mutex_lock(&emu.lock);
	__atomic_store_n(&channel->stop, true, __ATOMIC_RELEASE);
	pthread_cond_broadcast(&channel->has_work);
	pthread_cond_broadcast(&channel->has_space);
	UNLINK(emu.channels, channel);
	pthread_mutex_unlock(&emu.lock);
	syscall(SYS_futex, &channel->slot->grant, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
	if (channel->started)
		pthread_join(channel->thread, NULL);
	uvm_unregister_channel(channel->ctx->dev, channel->h_channel);
	pthread_cond_destroy(&channel->has_work);
	pthread_cond_destroy(&channel->has_space);
}

void channels_destroy(struct context *ctx)
{
	for (unsigned i = 0; i < MAX_COMPUTE; i++)
		stop_channel(&ctx->compute[i]);
	for (unsigned i = 0; i < COPY_ENGINES; i++) {
		stop_channel(&ctx->copy[i]);
		if (ctx->h_copy_group[i])
			rm_free(ctx->dev->h_device, ctx->h_copy_group[i]);
	}
	if (ctx->h_group)
		rm_free(ctx->dev->h_device, ctx->h_group);
	uvm_unregister_vaspace(ctx->dev);
	rm_free(ctx->dev->h_device, ctx->h_vaspace);
}
