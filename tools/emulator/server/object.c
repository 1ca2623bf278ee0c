/*
 * object.c - clients and the trees of objects below them (R/rs_client.c, R/rs_server.c). An object
 * is named by (hClient, handle); handles repeat in every process, client handles do not. Freeing an
 * object frees what lies below it and what depends on it: a channel also depends on its VA space,
 * its context share and its TSG.
 */
#include "server.h"
#include <stdlib.h>
#include <unistd.h>

enum {
	CLIENT_BASE = 0xC1D00000,
	CLIENT_MASK = 0xFFFFF, /* handles come again only after 1,048,576 allocations */
	HANDLE_BASE = 0xCAF00000,
	RESERVED_BASE = 0xC9F00000,
	RESERVED_SIZE = 0x80000,
	BUCKETS = 1 << 14,
};
static LIST_HEAD(bucket, object) table[BUCKETS];

static struct bucket *bucket_of(uint32_t h_client, uint32_t handle)
{
	uint32_t mixed = (h_client * 2654435761u) ^ (handle * 2246822519u);

	return &table[(mixed ^ (mixed >> 15)) % BUCKETS];
}

struct object *find_object(uint32_t h_client, uint32_t handle)
{
	struct object *o;

	LIST_FOREACH(o, bucket_of(h_client, handle), in_bucket)
		if (o->handle == handle && o->client->handle == h_client)
			return o;
	return NULL;
}

struct client *find_client(uint32_t h_client)
{
	struct object *root = find_object(h_client, h_client);

	return root ? root->client : NULL;
}

/* All checks are by struct file, never by process: a fd that was passed carries its authority
 * (K/rmapi/client.c, rmclientValidate). A second file REGISTER_FD'ed to the first stands for it. */
bool file_may_use(const struct file *f, const struct client *c)
{
	return c->file == (f->ctl ? f->ctl : f);
}

static struct object *insert(struct client *c, uint32_t handle, uint32_t cls)
{
	struct object *o = calloc(1, sizeof *o);

	if (!o)
		return NULL;
	o->client = c;
	o->handle = handle;
	o->cls = cls;
	TAILQ_INSERT_TAIL(&c->objects, o, in_client);
	LIST_INSERT_HEAD(bucket_of(c->handle, handle), o, in_bucket);
	return o;
}

static uint32_t next_client_handle(void)
{
	uint32_t handle;

	do
		handle = CLIENT_BASE | (++S.next_client & CLIENT_MASK);
	while (find_object(handle, handle));
	return handle;
}

uint32_t client_new(const struct call *call, uint32_t wanted, struct client **out)
{
	struct client *c;

	REFUSE_IF(wanted && find_object(wanted, wanted), NV_ERR_INVALID_CLIENT);
	c = calloc(1, sizeof *c);
	REFUSE_IF(!c, NV_ERR_NO_MEMORY);
	TAILQ_INIT(&c->objects);
	pthread_mutex_init(&c->lock, NULL);
	c->handle = wanted ? wanted : next_client_handle();
	c->next_handle = HANDLE_BASE;
	c->file = call->file->ctl ? call->file->ctl : call->file;
	c->pid = call->pid;
	c->uid = call->uid;
	TAILQ_INSERT_TAIL(&S.clients, c, link);
	insert(c, c->handle, NV01_ROOT_CLIENT);
	*out = c;
	return NV_OK;
}

uint32_t object_new(struct client *c, uint32_t *handle, uint32_t cls, struct object *parent,
                    struct object **out)
{
	struct object *o;

	if (!*handle) {
		do
			*handle = c->next_handle++;
		while (find_object(c->handle, *handle));
	} else if (*handle == c->handle || *handle - RESERVED_BASE < RESERVED_SIZE)
		return NV_ERR_INVALID_OBJECT_HANDLE;
	else if (find_object(c->handle, *handle))
		return NV_ERR_INSERT_DUPLICATE_NAME;
	o = insert(c, *handle, cls);
	REFUSE_IF(!o, NV_ERR_NO_MEMORY);
	o->parent = parent;
	o->gpu = parent->gpu;
	parent->users++;
	*out = o;
	return NV_OK;
}

void object_depends(struct object *o, struct object *on)
{
	for (size_t i = 0; on && i < sizeof o->depends / sizeof o->depends[0]; i++) {
		if (o->depends[i])
			continue;
		o->depends[i] = on;
		on->users++;
		return;
	}
}

static void drop(struct object *o)
{
	if (o->channel)
		channel_gone(o->channel);
	if (o->tsg)
		tsg_put(o->tsg);
	if (o->memory)
		memory_put(o->memory);
	if (o->parent)
		o->parent->users--;
	for (size_t i = 0; i < sizeof o->depends / sizeof o->depends[0]; i++)
		if (o->depends[i])
			o->depends[i]->users--;
	TAILQ_REMOVE(&o->client->objects, o, in_client);
	LIST_REMOVE(o, in_bucket);
	free(o);
}

static bool rests_on_doomed(const struct object *o)
{
	if (o->parent && o->parent->doomed)
		return true;
	for (size_t i = 0; i < sizeof o->depends / sizeof o->depends[0]; i++)
		if (o->depends[i] && o->depends[i]->doomed)
			return true;
	return false;
}

static void client_drop(struct client *c)
{
	TAILQ_REMOVE(&S.clients, c, link);
	pthread_mutex_destroy(&c->lock);
	free(c);
}

/* Whatever rests on an object was created after it: one walk forward marks, one walk back frees. */
void object_free(struct object *o)
{
	struct client *c = o->client;
	bool is_root = o->handle == c->handle;
	struct object *at, *before;

	if (!o->users && !is_root) {
		drop(o);
		return;
	}
	o->doomed = true;
	for (at = TAILQ_NEXT(o, in_client); at; at = TAILQ_NEXT(at, in_client))
		at->doomed = is_root || rests_on_doomed(at);
	for (at = TAILQ_LAST(&c->objects, objects); at; at = before) {
		before = TAILQ_PREV(at, objects, in_client);
		if (at->doomed)
			drop(at);
	}
	if (is_root)
		client_drop(c);
}
