/*
 * uvm.c - the unified memory driver: GPUs, VA spaces and channels that a process registered, and
 * the external ranges into which it maps RM memory (kernel-open/nvidia-uvm). Unknown requests are
 * answered by ENOTTY-like EINVAL and counted. UVM's calls into RM ask for the API lock to read but
 * get it to write, with every GPU lock: mapping memory stalls the whole node, which is why reclaim
 * must never run between the gates of two GPUs.
 */
#include "server.h"
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static struct gpu *gpu_of(const uint8_t *uuid)
{
	for (uint32_t i = 0; i < S.gpus; i++)
		if (memcmp(S.gpu[i].board->uuid, uuid, 16) == 0)
			return &S.gpu[i];
	return NULL;
}

bool uvm_knows_gpu(const struct vaspace *v, const uint8_t *uuid, bool with_vaspace)
{
	const struct gpu *g = gpu_of(uuid);

	return g && (with_vaspace ? v->gpu_vaspaces : v->gpus) & (1u << g->index);
}

static uint32_t initialize(struct call *c)
{
	struct uvm_initialize *p = (struct uvm_initialize *)c->arg;

	state_lock();
	c->file->uvm->initialised = true;
	c->file->uvm->owner = c->pid;
	state_unlock();
	p->rmStatus = NV_OK;
	return NV_OK;
}

static uint32_t register_gpu(struct call *c)
{
	struct uvm_register_gpu *p = (struct uvm_register_gpu *)c->arg;
	struct gpu *g = gpu_of(p->gpuUuid);

	if (g) {
		state_lock();
		c->file->uvm->gpus |= 1u << g->index;
		state_unlock();
		p->numaEnabled = 0;
		p->numaNodeId = -1;
	}
	return g ? NV_OK : NV_ERR_INVALID_DEVICE;
}

static uint32_t forget(const struct call *c, uint32_t *gpus)
{
	const struct uvm_unregister_gpu *p = (const struct uvm_unregister_gpu *)c->arg;
	struct gpu *g = gpu_of(p->gpuUuid);

	REFUSE_IF(!g, NV_ERR_INVALID_DEVICE);
	LOCKED(&S.state);
	*gpus &= ~(1u << g->index);
	return NV_OK;
}

static uint32_t unregister_gpu(struct call *c)
{
	return forget(c, &c->file->uvm->gpus);
}

static uint32_t register_vaspace(struct call *c)
{
	struct uvm_register_gpu_vaspace *p = (struct uvm_register_gpu_vaspace *)c->arg;
	struct gpu *g = gpu_of(p->gpuUuid);

	LOCKED(&S.state);
	struct object *o = find_object(p->hClient, p->hVaSpace);
	REFUSE_IF(!g || !(c->file->uvm->gpus & (1u << g->index)), NV_ERR_INVALID_DEVICE);
	REFUSE_IF(!o || o->cls != FERMI_VASPACE_A || !c->other || !file_may_use(c->other, o->client),
	          NV_ERR_OBJECT_NOT_FOUND);
	c->file->uvm->gpu_vaspaces |= 1u << g->index;
	return NV_OK;
}

static uint32_t unregister_vaspace(struct call *c)
{
	return forget(c, &c->file->uvm->gpu_vaspaces);
}

/* rmCtrlFd must be the file that owns hClient, as for any RM call. */
static uint32_t register_channel(struct call *c)
{
	struct uvm_register_channel *p = (struct uvm_register_channel *)c->arg;
	struct gpu *g = gpu_of(p->gpuUuid);
	SCOPED struct scope scope = api_enter(API_WRITE);

	gpus_enter(&scope, all_gpus());
	LOCKED(&S.state);
	struct object *o = find_object(p->hClient, p->hChannel);
	REFUSE_IF(!g || !(c->file->uvm->gpu_vaspaces & (1u << g->index)), NV_ERR_INVALID_DEVICE);
	REFUSE_IF(!o || !o->channel || o->gpu != g, NV_ERR_INVALID_CHANNEL);
	REFUSE_IF(!c->other || !file_may_use(c->other, o->client), NV_ERR_INVALID_CLIENT);
	o->channel->uvm_registered = true;
	return NV_OK;
}

static uint32_t unregister_channel(struct call *c)
{
	uint32_t at = uvm_unregister_at(load(&S.board->driver[0]));
	struct uvm_unregister_channel_590 *p = (struct uvm_unregister_channel_590 *)(void *)(c->arg + at);
	SCOPED struct scope scope = api_enter(API_WRITE);

	LOCKED(&S.state);
	struct object *o = find_object(p->hClient, p->hChannel);
	REFUSE_IF(!o || !o->channel || !o->channel->uvm_registered, NV_ERR_INVALID_CHANNEL);
	o->channel->uvm_registered = false;
	return NV_OK;
}

/* ---- closing ---- */

static bool is_registered(struct channel *c)
{
	return c->uvm_registered;
}

static bool must_wait(struct channel *c)
{
	return c->uvm_registered && c->disabled && load(&c->slot->pending) &&
	       knob(K_stop_disabled) == STOP_WAIT;
}

/* Channels that are stopped for good: those of a file that closes, or of a process whose memory goes. */
struct ending {
	const struct file *file;
	pid_t pid;
};

static uint32_t count_channels(struct ending end, bool (*counts)(struct channel *))
{
	struct client *c;
	struct object *o;
	uint32_t n = 0;

	LOCKED(&S.state);
	TAILQ_FOREACH(c, &S.clients, link)
		TAILQ_FOREACH(o, &c->objects, in_client)
			if (o->channel && (end.file ? c->file == end.file : o->channel->pid == end.pid))
				n += counts(o->channel);
	return n;
}

static bool detach(struct channel *c)
{
	if (!c->uvm_registered)
		return false;
	c->uvm_registered = false;
	c->reset = true;
	store(&c->slot->reset, 1);
	store(&c->slot->pending, 0);
	store(&c->slot->active, 0);
	channel_take(c);
	runlist_poke(c->tsg->gpu);
	return true;
}

/*
 * Closing stops every registered channel with bImmediate = 0: "wait for idle up to the RM timeout,
 * then force", one after another, under the API lock in write mode and all GPU locks
 * (nv_gpu_ops.c). A disabled channel with queued work never becomes idle, so a process that is
 * killed while gated stalls the whole node: enable first, then kill.
 */
static void stop_channels(struct ending end, pid_t pid)
{
	if (!count_channels(end, is_registered))
		return;
	SCOPED struct scope scope = api_enter(API_WRITE);
	gpus_enter(&scope, all_gpus());
	uint32_t waits = count_channels(end, must_wait);
	if (waits)
		kernel_log("stopping %u disabled channels of pid %d", waits, pid);
	scope_sleep(&scope, waits * (uint64_t)knob(K_stop_wait_ms));
	count_channels(end, detach);
}

void stop_channels_of_file(const struct file *f)
{
	stop_channels((struct ending){.file = f}, f->pid);
}

/* UVM hears when the memory of a process goes (uvm_va_space_mm.c: "process exit, mm teardown, file open") and takes its
 * channels out of the VA space for good, whoever keeps its files. */
void stop_channels_of_process(pid_t pid)
{
	stop_channels((struct ending){.pid = pid}, pid);
}

void uvm_release(struct file *f)
{
	pthread_mutex_lock(&f->uvm->lock);
	ranges_drop(f->uvm);
	pthread_mutex_unlock(&f->uvm->lock);
	if (f->uvm->pages >= 0)
		close(f->uvm->pages);
}

static uint32_t nothing(struct call *c)
{
	(void)c;
	return NV_OK;
}

static const struct request {
	uint32_t number, status_at; /* 0: behind the attributes, see layouts.h */
	uint32_t (*run)(struct call *);
	const char *event; /* name for fault scripts */
} requests[] = {
        {UVM_INITIALIZE, offsetof(struct uvm_initialize, rmStatus), initialize, NULL},
        {UVM_MM_INITIALIZE, offsetof(struct uvm_mm_initialize, rmStatus), nothing, NULL},
        {UVM_REGISTER_GPU, offsetof(struct uvm_register_gpu, rmStatus), register_gpu, NULL},
        {UVM_UNREGISTER_GPU, offsetof(struct uvm_unregister_gpu, rmStatus), unregister_gpu, NULL},
        {UVM_REGISTER_GPU_VASPACE, offsetof(struct uvm_register_gpu_vaspace, rmStatus), register_vaspace,
         NULL},
        {UVM_UNREGISTER_GPU_VASPACE, offsetof(struct uvm_unregister_gpu, rmStatus), unregister_vaspace, NULL},
        {UVM_REGISTER_CHANNEL, offsetof(struct uvm_register_channel, rmStatus), register_channel, NULL},
        {UVM_UNREGISTER_CHANNEL, 0, unregister_channel, NULL},
        {UVM_CREATE_EXTERNAL_RANGE, offsetof(struct uvm_range, rmStatus), range_create, NULL},
        {UVM_FREE, offsetof(struct uvm_range, rmStatus), range_free, "unmap"},
        {UVM_MAP_EXTERNAL_ALLOCATION, 0, range_map, "map"}, /* 0: where it stands differs between branches */
        {UVM_UNMAP_EXTERNAL, offsetof(struct uvm_unmap_external, rmStatus), range_unmap, "unmap"},
        {UVM_MAP_EXTERNAL_SPARSE, offsetof(struct uvm_map_external_sparse, rmStatus), range_sparse, "sparse"},
};

static const struct request *find_request(uint32_t number)
{
	for (size_t i = 0; i < sizeof requests / sizeof requests[0]; i++)
		if (requests[i].number == number)
			return &requests[i];
	tally_unknown(TALLY_UVM, number);
	return NULL;
}

static uint32_t moving_status_at(uint32_t number, uint32_t branch)
{
	if (number == UVM_UNREGISTER_CHANNEL)
		return uvm_unregister_at(branch) +
		       (uint32_t)offsetof(struct uvm_unregister_channel_590, rmStatus);
	return uvm_map_tail_at(branch) + (uint32_t)offsetof(struct uvm_map_external_tail, rmStatus);
}

int uvm_ioctl(struct call *c)
{
	uint32_t branch = load(&S.board->driver[0]), status, status_at;
	const struct request *r;
	struct fault_hit fault = {0};

	if (c->head.request == UVM_DEINITIALIZE)
		return 0;
	r = find_request(c->head.request);
	if (!r || c->head.arg_size != uvm_arg_size(c->head.request, branch))
		return EINVAL;
	status_at = r->status_at ? r->status_at : moving_status_at(r->number, branch);
	if (r->event)
		fault = fault_at(r->event, c, NULL);
	pthread_mutex_lock(&c->file->uvm->lock);
	if (fault.has_status)
		status = fault.status;
	else if (fault.silent)
		status = NV_OK;
	else if (!c->file->uvm->initialised && r->run != initialize && r->run != nothing)
		status = NV_ERR_ILLEGAL_ACTION;
	else
		status = r->run(c);
	pthread_mutex_unlock(&c->file->uvm->lock);
	memcpy(c->arg + status_at, &status, sizeof status);
	return 0;
}
