/*
 * control.c - RM_CONTROL: one table row per command says where it may be issued, how large its
 * parameters are, and which locks the driver holds while it runs (the flags word of
 * G/g_subdevice_nvoc.c and its sisters, decoded by K/rmapi/control.c). A command that is not here
 * answers NOT_SUPPORTED and is counted by number.
 */
#include "server.h"
#include <string.h>

static uint32_t build_version(struct control *k)
{
	struct nv0000_build_version_v2 *p = k->params;

	REFUSE_IF(k->size != sizeof *p && k->size != sizeof *p - sizeof p->driverBranch,
	          NV_ERR_INVALID_ARGUMENT);
	memset(k->params, 0, k->size);
	LOCKED(&S.state);
	memcpy(p->driverVersionBuffer, S.driver, sizeof S.driver);
	return NV_OK;
}

static uint32_t id_info(struct control *k)
{
	struct nv0000_gpu_id_info *p = k->params;

	for (uint32_t i = 0; i < S.gpus; i++) {
		if (S.gpu[i].board->gpu_id != p->gpuId)
			continue;
		*p = (struct nv0000_gpu_id_info){.gpuId = p->gpuId,
		                                 .deviceInstance = S.gpu[i].board->device_instance,
		                                 .boardId = p->gpuId,
		                                 .gpuInstance = i,
		                                 .numaId = -1};
		return NV_OK;
	}
	return NV_ERR_INVALID_ARGUMENT;
}

/* NV0000_CTRL_GPU_INVALID_ID ends the list */
static uint32_t probed_ids(struct control *k)
{
	uint32_t *ids = k->params;

	memset(ids, 0, k->size);
	for (uint32_t i = 0; i < 32; i++)
		ids[i] = i < S.gpus ? S.gpu[i].board->gpu_id : ~0u;
	return NV_OK;
}

static uint32_t gid_info(struct control *k)
{
	struct nv2080_gpu_gid_info *p = k->params;

	if (p->flags != 2) /* only the binary SHA-1 form */
		return NV_ERR_NOT_SUPPORTED;
	memset(p->data, 0, sizeof p->data);
	memcpy(p->data, k->object->gpu->board->uuid, 16);
	p->length = 16;
	return NV_OK;
}

static uint32_t fb_info(struct control *k)
{
	struct nv2080_fb_get_info *p = k->params;
	const struct emu_gpu *board = k->object->gpu->board;

	REFUSE_IF(4 + p->count * sizeof(p->entry[0]) > k->size, NV_ERR_INVALID_ARGUMENT);
	for (uint32_t i = 0; i < p->count; i++) {
		REFUSE_IF(p->entry[i].index != NV2080_FB_INFO_INDEX_HEAP_FREE, NV_ERR_NOT_SUPPORTED);
		p->entry[i].data = (uint32_t)((board->total_bytes - load(&board->used_bytes)) >> 10);
	}
	return NV_OK;
}

static uint32_t get_ctxsw_modes(struct control *k)
{
	struct nv2080_ctxsw_modes *p = k->params;

	*p = (struct nv2080_ctxsw_modes){.hChannel = p->hChannel, .cilpPreempt = 2};
	return NV_OK;
}

static uint32_t accept(struct control *k)
{
	(void)k;
	return NV_OK;
}

enum level { ROOT, SUBDEVICE, TSG, CHANNEL };
enum gpu_locks { NONE, ONE, ALL, BY_KNOB };
struct row {
	uint32_t cmd;
	enum level level;
	uint32_t size, first_branch; /* size 0: the handler looks */
	enum api_mode api;
	enum gpu_locks gpus;
	bool firmware; /* a round trip, slept with the locks held */
	uint32_t (*run)(struct control *);
};
static const struct row rows[] = {
        {NV0000_CTRL_CMD_SYSTEM_GET_BUILD_VERSION_V2, ROOT, 0, 0, API_WRITE, NONE, false, build_version},
        {NV0000_CTRL_CMD_GPU_GET_ID_INFO_V2, ROOT, 32, 0, API_WRITE, NONE, false, id_info},
        {NV0000_CTRL_CMD_GPU_GET_PROBED_IDS, ROOT, 256, 0, API_WRITE, NONE, false, probed_ids},
        {NV0000_CTRL_CMD_GPU_GET_PROBED_IDS, ROOT, 384, 580, API_WRITE, NONE, false, probed_ids},
        {NV0000_CTRL_CMD_OS_UNIX_EXPORT_OBJECT_TO_FD, ROOT, 24, 0, API_WRITE, ALL, false, export_object},
        {NV0000_CTRL_CMD_OS_UNIX_IMPORT_OBJECT_FROM_FD, ROOT, 20, 0, API_WRITE, ALL, false, import_object},
        {NV0000_CTRL_CMD_OS_UNIX_EXPORT_OBJECTS_TO_FD, ROOT, 2128, 0, API_WRITE, ALL, false, export_objects},
        {NV0000_CTRL_CMD_OS_UNIX_IMPORT_OBJECTS_FROM_FD, ROOT, 652, 0, API_WRITE, ALL, false, import_objects},
        {NV0000_CTRL_CMD_OS_UNIX_GET_EXPORT_OBJECT_INFO, ROOT, 76, 0, API_WRITE, NONE, false, export_info},
        {NV2080_CTRL_CMD_GPU_GET_GID_INFO, SUBDEVICE, 268, 0, API_WRITE, NONE, false, gid_info},
        {NV2080_CTRL_CMD_FB_GET_INFO_V2, SUBDEVICE, 4 + 8 * 0x36, 0, API_READ, ONE, false, fb_info},
        {NV2080_CTRL_CMD_FB_GET_INFO_V2, SUBDEVICE, 4 + 8 * 0x37, 550, API_READ, ONE, false, fb_info},
        {NV2080_CTRL_CMD_FB_GET_INFO_V2, SUBDEVICE, 4 + 8 * 0x39, 570, API_READ, ONE, false, fb_info},
        {NV2080_CTRL_CMD_FB_GET_INFO_V2, SUBDEVICE, 4 + 8 * 0x80, 580, API_READ, ONE, false, fb_info},
        {NV2080_CTRL_CMD_FIFO_DISABLE_CHANNELS, SUBDEVICE, 536, 0, API_READ, BY_KNOB, true,
         fifo_disable_channels},
        {NV2080_CTRL_CMD_FIFO_QUERY_CHANNEL_UNIQUE_ID, SUBDEVICE, 1540, 570, API_WRITE, ALL, false,
         fifo_channel_ids},
        {NV2080_CTRL_CMD_FIFO_GET_CHANNEL_GROUP_UNIQUE_ID_INFO, SUBDEVICE, 1552, 570, API_WRITE, ALL, false,
         fifo_group_info},
        {NV2080_CTRL_CMD_GR_SET_CTXSW_PREEMPTION_MODE, SUBDEVICE, 32, 0, API_READ, ONE, true, accept},
        {NV2080_CTRL_CMD_GR_SET_CTXSW_PREEMPTION_MODE + 1, SUBDEVICE, 32, 0, API_READ, ONE, true, accept},
        {NV2080_CTRL_CMD_GR_GET_CTXSW_MODES, SUBDEVICE, 24, 0, API_READ, ONE, true, get_ctxsw_modes},
        {NVA06C_CTRL_CMD_GPFIFO_SCHEDULE, TSG, 2, 0, API_WRITE, ALL, true, tsg_schedule},
        {NVA06C_CTRL_CMD_GPFIFO_SCHEDULE, TSG, 3, 580, API_WRITE, ALL, true, tsg_schedule},
        {NVA06C_CTRL_CMD_BIND, TSG, 4, 0, API_WRITE, ALL, true, tsg_bind},
        {NVA06C_CTRL_CMD_SET_TIMESLICE, TSG, 8, 0, API_WRITE, ALL, true, tsg_set_timeslice},
        {NVA06C_CTRL_CMD_GET_TIMESLICE, TSG, 8, 0, API_WRITE, NONE, false, tsg_get_timeslice},
        {NVA06C_CTRL_CMD_PREEMPT, TSG, 8, 0, API_READ, ONE, true, tsg_preempt},
        {NVA06F_CTRL_CMD_GPFIFO_SCHEDULE, CHANNEL, 2, 0, API_WRITE, ALL, true, channel_schedule},
        {NVA06F_CTRL_CMD_GPFIFO_SCHEDULE, CHANNEL, 3, 580, API_WRITE, ALL, true, channel_schedule},
        {NVA06F_CTRL_CMD_BIND, CHANNEL, 4, 0, API_WRITE, ALL, true, accept},
        {NVA06F_CTRL_CMD_STOP_CHANNEL, CHANNEL, 1, 0, API_WRITE, ALL, true, channel_stop},
        {NVC36F_CTRL_CMD_GPFIFO_GET_WORK_SUBMIT_TOKEN, CHANNEL, 4, 0, API_WRITE, NONE, false,
         work_submit_token},
};

/* The newest row of a command that this branch has; sizes differ between branches. */
static const struct row *find_row(uint32_t cmd)
{
	const struct row *found = NULL;
	uint32_t branch = load(&S.board->driver[0]);

	for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++)
		if (rows[i].cmd == cmd && branch >= rows[i].first_branch)
			found = &rows[i];
	if (!found)
		tally_unknown(TALLY_CONTROL, cmd);
	return found;
}

static bool at_level(const struct object *o, enum level level)
{
	switch (level) {
	case ROOT:
		return o->cls == NV01_ROOT_CLIENT;
	case SUBDEVICE:
		return o->cls == NV20_SUBDEVICE_0;
	case TSG:
		return o->cls == KEPLER_CHANNEL_GROUP_A;
	default:
		return o->channel != NULL;
	}
}

static uint32_t lock_mask(const struct row *row, const struct object *o)
{
	bool one = row->gpus == ONE || (row->gpus == BY_KNOB && knob(K_lock) != LOCK_STOCK);

	if (row->gpus == NONE)
		return 0;
	return one ? 1u << o->gpu->index : all_gpus();
}

static uint32_t run(struct call *c, struct control *k, const struct nvos54_control *a, const struct row *row,
                    struct scope *scope)
{
	state_lock();
	k->client = find_client(a->hClient);
	state_unlock();
	REFUSE_IF(!k->client || !file_may_use(c->file, k->client), NV_ERR_INVALID_CLIENT);
	client_enter(scope, k->client);
	state_lock();
	k->object = find_object(a->hClient, a->hObject);
	state_unlock();
	REFUSE_IF(!k->object, NV_ERR_INVALID_OBJECT_HANDLE);
	REFUSE_IF(!row || !at_level(k->object, row->level), NV_ERR_NOT_SUPPORTED);
	REFUSE_IF(a->paramsSize != c->head.params_size || (row->size && row->size != a->paramsSize),
	          NV_ERR_INVALID_ARGUMENT);
	REFUSE_IF(k->object->gpu && load(&k->object->gpu->board->lost), NV_ERR_GPU_IS_LOST);
	gpus_enter(scope, lock_mask(row, k->object));
	k->locked_ns = now_ns();
	k->model_ns = scope->debt_ns + (row->firmware ? (uint64_t)knob(K_rpc_us) : 0);
	if (row->firmware)
		scope_sleep(scope, (uint64_t)knob(K_rpc_us));
	return row->run(k);
}

uint32_t rm_control(struct call *c, struct nvos54_control *a)
{
	const struct row *row;
	struct control k = {.call = c, .params = c->params, .size = c->head.params_size};
	struct fault_hit fault;

	if (a->flags & NVOS54_FLAGS_FINN_SERIALIZED) {
		tally_unknown(TALLY_CONTROL, a->cmd);
		return NV_ERR_NOT_SUPPORTED;
	}
	fault = fault_at("control", c, NULL);
	if (fault.has_status)
		return fault.status;
	row = find_row(a->cmd);
	c->params_out = c->head.params_size;
	SCOPED struct scope scope = api_enter(row ? row->api : API_WRITE);
	return run(c, &k, a, row, &scope);
}
