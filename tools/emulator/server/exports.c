/*
 * exports.c - memory that leaves its client through a file, singly (cuMemExportToShareableHandle) or up to thousands of
 * pieces in one file (the array forms, which no CUDA call uses). The file keeps what it carries; possession of it is the
 * authority to import: no process or user is compared (U/rmobjexportimport.c).
 */
#include "server.h"
#include <stdlib.h>
#include <string.h>

enum { ONE = 1, TYPE_RM = 1, IMPORTED_NONE = 0, IMPORTED_VIDMEM = 1, IMPORTED_SYSMEM = 2 };

void exports_drop(struct file *f)
{
	for (uint32_t i = 0; i < f->max_exports; i++)
		if (f->exports[i])
			memory_put(f->exports[i]);
	free(f->exports);
	f->exports = NULL;
	f->max_exports = 0;
}

/* A control file without a client. */
static bool is_fresh(const struct file *f)
{
	struct client *c;

	if (!f || f->kind != EMU_CTL || f->exports)
		return false;
	TAILQ_FOREACH(c, &S.clients, link)
		if (c->file == f)
			return false;
	return true;
}

static uint32_t make_room(struct file *f, uint32_t objects, const uint8_t *metadata)
{
	REFUSE_IF(!is_fresh(f) || !objects, NV_ERR_INVALID_ARGUMENT);
	f->exports = calloc(objects, sizeof *f->exports);
	REFUSE_IF(!f->exports, NV_ERR_NO_MEMORY);
	f->max_exports = objects;
	if (metadata)
		memcpy(f->metadata, metadata, sizeof f->metadata);
	return NV_OK;
}

static struct memory *memory_of(const struct client *c, uint32_t handle)
{
	struct object *o = find_object(c->handle, handle);

	return o ? o->memory : NULL;
}

static void put_export(struct file *f, uint32_t at, struct memory *m)
{
	if (m)
		m->refs++;
	if (f->exports[at])
		memory_put(f->exports[at]);
	f->exports[at] = m;
}

uint32_t export_object(struct control *k)
{
	struct nv0000_export_object_to_fd *p = k->params;
	struct file *target = k->call->other;

	REFUSE_IF(p->type != TYPE_RM || !target, NV_ERR_INVALID_ARGUMENT);
	LOCKED(&S.state);
	struct memory *m = memory_of(k->client, p->hObject);
	uint32_t status = m ? make_room(target, ONE, NULL) : NV_ERR_INVALID_OBJECT_HANDLE;
	if (status == NV_OK)
		put_export(target, 0, m);
	return status;
}

/* Objects [index, index + n) of the file become those named; 0 takes one out. */
uint32_t export_objects(struct control *k)
{
	struct nv0000_export_objects_to_fd *p = k->params;
	struct file *target = k->call->other;

	REFUSE_IF(!target || p->numObjects > NV0000_EXPORT_OBJECTS_MAX, NV_ERR_INVALID_ARGUMENT);
	LOCKED(&S.state);
	for (uint32_t i = 0; i < p->numObjects; i++)
		REFUSE_IF(p->objects[i] && !memory_of(k->client, p->objects[i]),
		          NV_ERR_INVALID_OBJECT_HANDLE);
	uint32_t status = target->exports ? NV_OK : make_room(target, p->maxObjects, p->metadata);
	REFUSE_IF(status, status);
	REFUSE_IF((uint32_t)p->index + p->numObjects > target->max_exports, NV_ERR_OUT_OF_RANGE);
	for (uint32_t i = 0; i < p->numObjects; i++)
		put_export(target, p->index + i, p->objects[i] ? memory_of(k->client, p->objects[i]) : NULL);
	return NV_OK;
}

static uint32_t import_one(struct client *c, struct object *parent, struct memory *m, uint32_t *handle)
{
	uint32_t cls = m->gpu ? NV01_MEMORY_LOCAL_USER : NV01_MEMORY_SYSTEM, status;
	struct object *o;

	REFUSE_IF(!parent || (parent->cls != NV01_DEVICE_0 && parent->cls != NV20_SUBDEVICE_0),
	          NV_ERR_INVALID_OBJECT_PARENT);
	REFUSE_IF(m->gpu && m->gpu != parent->gpu, NV_ERR_INVALID_DEVICE);
	status = object_new(c, handle, cls, parent, &o);
	if (status == NV_OK) {
		o->memory = m;
		m->refs++;
	}
	return status;
}

static struct memory *exported(const struct file *f, uint32_t at)
{
	return f && at < f->max_exports ? f->exports[at] : NULL;
}

uint32_t import_object(struct control *k)
{
	struct nv0000_import_object_from_fd *p = k->params;

	LOCKED(&S.state);
	struct memory *m = exported(k->call->other, 0);
	REFUSE_IF(!m, NV_ERR_OBJECT_NOT_FOUND);
	return import_one(k->client, find_object(k->client->handle, p->hParent), m, &p->hObject);
}

/* A refusal takes back what this call had imported. */
static void undo_imports(struct client *c, struct nv0000_import_objects_from_fd *p, uint32_t count)
{
	for (uint32_t i = 0; i < count; i++)
		if (p->objectTypes[i] != IMPORTED_NONE)
			object_free(find_object(c->handle, p->objects[i]));
}

uint32_t import_objects(struct control *k)
{
	struct nv0000_import_objects_from_fd *p = k->params;
	const struct file *from = k->call->other;
	uint32_t status = NV_OK, i;

	REFUSE_IF(!from || !from->exports, NV_ERR_OBJECT_NOT_FOUND);
	REFUSE_IF(p->numObjects > NV0000_IMPORT_OBJECTS_MAX, NV_ERR_INVALID_ARGUMENT);
	REFUSE_IF((uint32_t)p->index + p->numObjects > from->max_exports, NV_ERR_OUT_OF_RANGE);
	LOCKED(&S.state);
	for (i = 0; i < p->numObjects && status == NV_OK; i++) {
		struct memory *m = exported(from, p->index + i);

		p->objectTypes[i] = IMPORTED_NONE;
		if (!m)
			continue;
		status = import_one(k->client, find_object(k->client->handle, p->hParent), m, &p->objects[i]);
		if (status == NV_OK)
			p->objectTypes[i] = m->gpu ? IMPORTED_VIDMEM : IMPORTED_SYSMEM;
	}
	if (status)
		undo_imports(k->client, p, i);
	return status;
}

uint32_t export_info(struct control *k)
{
	struct nv0000_export_object_info *p = k->params;
	const struct file *f = k->call->other;

	LOCKED(&S.state);
	REFUSE_IF(!f || !f->exports, NV_ERR_OBJECT_NOT_FOUND);
	const struct memory *m = exported(f, 0);
	p->deviceInstance = m && m->gpu ? m->gpu->board->device_instance : 0;
	p->maxObjects = (uint16_t)f->max_exports;
	memcpy(p->metadata, f->metadata, sizeof p->metadata);
	return NV_OK;
}
