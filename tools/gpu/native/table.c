/* table.c - learns the channels of this process from its driver calls, as the product's shim does, written anew: two
 * readings of the same facts that must agree. */
#include "trace.h"

#include <string.h>

enum { OBJECTS = 2048 };
struct object { /* devices and TSGs: what leads to a channel */
	bool live;
	uint32_t client, handle, parent, cls, engine;
};
static struct object objects[OBJECTS];
static uint32_t object_count;
static atomic_flag lock = ATOMIC_FLAG_INIT;

static struct object *find_object(uint32_t client, uint32_t handle)
{
	for (uint32_t i = object_count; i-- > 0;)
		if (objects[i].live && objects[i].client == client && objects[i].handle == handle)
			return &objects[i];
	return NULL;
}

static struct table_channel *find_channel(uint32_t client, uint32_t channel)
{
	for (uint32_t i = tracer.table->channels; i-- > 0;) {
		struct table_channel *c = &tracer.table->channel[i];
		if (c->live == LIVE && c->client == client && c->channel == channel)
			return c;
	}
	return NULL;
}

static struct table_client *find_client(uint32_t client)
{
	for (uint32_t i = 0; i < tracer.table->clients; i++)
		if (tracer.table->client[i].live == LIVE && tracer.table->client[i].client == client)
			return &tracer.table->client[i];
	return NULL;
}

static void add_object(struct object object)
{
	uint32_t i = 0;

	while (i < object_count && objects[i].live)
		i++;
	if (i == OBJECTS) {
		tracer.table->incomplete = 1;
		return;
	}
	objects[i] = object;
	if (i == object_count)
		object_count++;
}

static void add_root(uint32_t client, int fd)
{
	struct table *t = tracer.table;
	uint32_t i = 0;

	while (i < t->clients && t->client[i].live == LIVE)
		i++;
	if (i == TABLE_CLIENTS) {
		t->incomplete = 1;
		return;
	}
	t->client[i] = (struct table_client){.client = client, .fd = fd};
	atomic_store(&t->client[i].live, LIVE);
	if (i == t->clients)
		atomic_store(&t->clients, i + 1);
}

static void add_channel(uint32_t client, uint32_t parent, uint32_t handle, uint32_t cls,
                        const struct nv_channel_alloc *p)
{
	const struct object *tsg = find_object(client, parent);
	bool in_tsg = tsg && tsg->cls == KEPLER_CHANNEL_GROUP_A;
	struct table *t = tracer.table;
	uint32_t i = 0;

	while (i < t->channels && t->channel[i].live == LIVE)
		i++;
	if (i == TABLE_CHANNELS) {
		t->incomplete = 1;
		return;
	}
	struct table_channel *c = &t->channel[i];
	*c = (struct table_channel){
	        .client = client, .channel = handle, .tsg = in_tsg ? parent : 0, .cls = cls};
	c->engine = in_tsg && tsg->engine ? tsg->engine
	                                  : p->engineType; /* inside a TSG the channel's is often 0 */
	c->cid = p->cid;
	atomic_store(&c->live, LIVE);
	if (i == t->channels)
		atomic_store(&t->channels, i + 1);
}

static void saw_alloc(int fd, const uint32_t *word, const void *params)
{
	uint32_t client = word[0], parent = word[1], handle = word[2], cls = word[3];
	struct table_client *root = find_client(client);
	struct table_channel *channel;

	if (cls == NV01_ROOT_CLIENT || cls <= NV01_ROOT_NON_PRIV) {
		add_root(handle, fd);
	} else if (cls == NV01_DEVICE_0) {
		uint32_t instance = params ? ((const struct nv0080_alloc *)params)->deviceId : 0;
		if (root && !root->device) {
			root->device = handle;
			root->instance = instance;
		}
		add_object((struct object){true, client, handle, parent, cls, 0});
	} else if (cls == NV20_SUBDEVICE_0) {
		if (root && (!root->subdevice || parent == root->device))
			root->subdevice = handle;
	} else if (cls == KEPLER_CHANNEL_GROUP_A) {
		uint32_t engine = params ? ((const struct nv_channel_group_alloc *)params)->engineType : 0;
		add_object((struct object){true, client, handle, parent, cls, engine});
	} else if (NV_CLASS_IS_GPFIFO(cls)) {
		if (params)
			add_channel(client, parent, handle, cls, params);
		else
			tracer.table->incomplete = 1;
	} else if ((channel = find_channel(client, parent))) {
		if (NV_CLASS_IS_COMPUTE(cls))
			channel->compute = cls;
		if (NV_CLASS_IS_COPY(cls))
			channel->copy = cls;
	}
}

/* Freeing a device, a TSG or the root frees what is under it. */
static void saw_free(uint32_t client, uint32_t handle)
{
	struct object *o = find_object(client, handle);
	bool whole = handle == client || (o && o->cls == NV01_DEVICE_0);
	struct table *t = tracer.table;

	for (uint32_t i = 0; i < t->channels; i++) {
		struct table_channel *c = &t->channel[i];
		if (c->live == LIVE && c->client == client &&
		    (whole || c->channel == handle || c->tsg == handle))
			atomic_store(&c->live, FREED);
	}
	for (uint32_t i = 0; i < object_count; i++)
		if (objects[i].live && objects[i].client == client && (whole || objects[i].handle == handle))
			objects[i].live = false;
	struct table_client *root = find_client(client);
	if (root && handle == client)
		atomic_store(&root->live, FREED);
	if (root && handle == root->device)
		root->device = root->subdevice = 0;
	if (root && handle == root->subdevice)
		root->subdevice = 0;
}

/* A TSG or channel allocated without an engine gets it later. */
static void saw_bind(uint32_t client, uint32_t handle, uint32_t engine)
{
	struct object *o = find_object(client, handle);

	if (o && o->cls == KEPLER_CHANNEL_GROUP_A && !o->engine)
		o->engine = engine;
	for (uint32_t i = 0; i < tracer.table->channels; i++) {
		struct table_channel *c = &tracer.table->channel[i];
		if (c->live == LIVE && c->client == client && !c->engine &&
		    (c->channel == handle || c->tsg == handle))
			c->engine = engine;
	}
}

static void saw_control(const struct nvos54_control *c)
{
	const void *params = (const void *)(uintptr_t)c->params;

	if (c->cmd == NV2080_CTRL_CMD_FIFO_DISABLE_CHANNELS)
		atomic_fetch_add(&tracer.table->app_disables, 1);
	if (c->cmd == NVA06C_CTRL_CMD_GPFIFO_SCHEDULE || c->cmd == NVA06F_CTRL_CMD_GPFIFO_SCHEDULE)
		atomic_fetch_add(&tracer.table->app_schedules, 1);
	if (c->cmd == NVA06C_CTRL_CMD_PREEMPT)
		atomic_fetch_add(&tracer.table->app_preempts, 1);
	bool is_bind = c->cmd == NVA06C_CTRL_CMD_BIND || c->cmd == NVA06F_CTRL_CMD_BIND;
	if (is_bind && c->status == NV_OK && params && c->paramsSize == sizeof(uint32_t))
		saw_bind(c->hClient, c->hObject, *(const uint32_t *)params);
}

static void saw_escape(int fd, uint32_t nr, uint32_t size, const void *arg)
{
	const struct nvos21_alloc *short_form = arg;
	const struct nvos64_alloc *long_form = arg;
	const struct nvos00_free *freed = arg;
	const struct nv_ioctl_xfer *xfer = arg;
	uint64_t params;

	if (nr == NV_ESC_IOCTL_XFER_CMD && size == sizeof(*xfer) && xfer->cmd != nr) {
		saw_escape(fd, xfer->cmd, xfer->size, (const void *)(uintptr_t)xfer->ptr);
	} else if (nr == NV_ESC_RM_ALLOC && size == sizeof(*short_form) && short_form->status == NV_OK) {
		saw_alloc(fd, arg, (const void *)(uintptr_t)short_form->pAllocParms);
	} else if (nr == NV_ESC_RM_ALLOC && size == sizeof(*long_form) && long_form->status == NV_OK) {
		params = long_form->flags & NVOS64_FLAGS_FINN_SERIALIZED ? 0 : long_form->pAllocParms;
		saw_alloc(fd, arg, (const void *)(uintptr_t)params);
	} else if (nr == NV_ESC_RM_CONTROL && size == sizeof(struct nvos54_control)) {
		saw_control(arg);
	} else if (nr == NV_ESC_RM_FREE && size == sizeof(*freed) && freed->status == NV_OK) {
		saw_free(freed->hRoot, freed->hObjectOld);
	}
}

void table_saw(const struct call *call)
{
	if (!tracer.table || tracer.owner != tracer.pid)
		return;
	atomic_fetch_add(&tracer.table->calls, 1);
	if (call->code || !call->arg)
		return;
	while (atomic_flag_test_and_set_explicit(&lock, memory_order_acquire)) {
	}
	if (call->kind == UVM && call->request == UVM_REGISTER_CHANNEL) {
		const struct uvm_register_channel *r = call->arg;
		struct table_channel *c = find_channel(r->hClient, r->hChannel);
		if (c && r->rmStatus == NV_OK)
			c->is_uvm = 1;
		else if (r->rmStatus == NV_OK)
			tracer.table->incomplete = 1;
	} else if (call->kind != UVM) {
		saw_escape(call->fd, NV_IOC_NR(call->request), NV_IOC_SIZE(call->request), call->arg);
	}
	atomic_flag_clear_explicit(&lock, memory_order_release);
}

/* The last close of a file frees its clients. */
void table_closed(int fd)
{
	if (!tracer.table || tracer.owner != tracer.pid)
		return;
	while (atomic_flag_test_and_set_explicit(&lock, memory_order_acquire)) {
	}
	for (uint32_t i = 0; i < tracer.table->clients; i++)
		if (tracer.table->client[i].live == LIVE && tracer.table->client[i].fd == fd)
			saw_free(tracer.table->client[i].client, tracer.table->client[i].client);
	atomic_flag_clear_explicit(&lock, memory_order_release);
}
