/*
 * rm.c - the object map: insert, find, cascade. Decoding is in rmcall.c and rmcontrol.c.
 *
 * A process has some hundred of the objects we keep (memory objects are not kept), so every look-up is a scan. Handles
 * repeat in every client: the key is (h_client, handle).
 */
#include "rm.h"

#include <string.h>

#include "rmmap.h"

void rm_reset(struct rm_map *map)
{
	memset(map->objects, 0, (size_t)map->used * sizeof(*map->objects));
	map->used = map->incomplete = map->branch = map->version = map->frees = 0;
}

static uint32_t number(const char **text)
{
	uint32_t value = 0;

	for (uint32_t digits = 0; **text >= '0' && **text <= '9' && digits < 5; digits++, (*text)++)
		value = value * 10 + (uint32_t)(**text - '0');
	if (**text == '.')
		(*text)++;
	return value;
}

void rm_set_version(struct rm_map *map, const char *version)
{
	uint32_t branch = number(&version), minor = number(&version), patch = number(&version);

	if (branch < 100 || branch > 4000 || minor > 999 || patch > 999)
		return; /* not a version */
	map->branch = branch;
	map->version = branch * 1000000u + minor * 1000u + patch;
}

bool rm_is_known_branch(const struct rm_map *map)
{
	return map->branch >= NV_BRANCH_FIRST && map->branch <= NV_BRANCH_LAST;
}

/* Where the handles stand in UVM_UNREGISTER_CHANNEL; older branches have a GPU UUID before them. */
uint32_t rm_unregister_at(const struct rm_map *map)
{
	static const struct nv_branch branches[] = {NV_BRANCH_TABLE};
	uint32_t at = branches[0].unregister_at;

	for (size_t i = 0; i < sizeof(branches) / sizeof(branches[0]); i++)
		if (map->branch >= branches[i].first)
			at = branches[i].unregister_at;
	return at;
}

struct rm_object *rm_find(struct rm_map *map, uint32_t h_client, uint32_t handle)
{
	struct rm_object *dying = NULL;

	for (uint32_t i = 0; i < map->used; i++) {
		struct rm_object *object = &map->objects[i];

		if (object->kind == RM_NONE || object->h_client != h_client || object->handle != handle)
			continue;
		if (!object->dying)
			return object;
		dying = object;
	}
	return dying;
}

/* A handle that is in use can only mean that we missed its end: the driver's word counts. */
struct rm_object *rm_insert(struct rm_map *map, enum rm_kind kind, uint32_t h_client, uint32_t parent,
                            uint32_t handle)
{
	struct rm_object *place = rm_find(map, h_client, handle);

	if (place && place->dying)
		place = NULL; /* the same handle again while its FREE has not come back */
	for (uint32_t i = 0; !place && i < map->used; i++)
		if (map->objects[i].kind == RM_NONE)
			place = &map->objects[i];
	if (!place && map->used < map->capacity)
		place = &map->objects[map->used++];
	if (!place) {
		map->incomplete = 1;
		return NULL;
	}
	*place = (struct rm_object){
	        .kind = (uint8_t)kind, .h_client = h_client, .parent = parent, .handle = handle, .fd = -1};
	return place;
}

/* ---- ends of life ---- */

static bool dies_with(struct rm_map *map, const struct rm_object *object, uint32_t free_number)
{
	const uint32_t links[] = {object->parent, object->space, object->share};

	for (size_t i = 0; i < sizeof(links) / sizeof(links[0]); i++) {
		const struct rm_object *other = links[i] ? rm_find(map, object->h_client, links[i]) : NULL;

		if (other && other != object && other->dying == free_number)
			return true;
	}
	return false;
}

/* Children and dependants (a channel depends on its VA space, its context share and its group) go, too. */
static void cascade(struct rm_map *map, uint32_t free_number)
{
	bool again = true;

	while (again) {
		again = false;
		for (uint32_t i = 0; i < map->used; i++) {
			struct rm_object *object = &map->objects[i];

			if (object->kind == RM_NONE || object->dying || !dies_with(map, object, free_number))
				continue;
			object->dying = free_number;
			again = true;
		}
	}
}

static void doom_client(struct rm_map *map, uint32_t h_client, uint32_t free_number)
{
	for (uint32_t i = 0; i < map->used; i++)
		if (map->objects[i].kind != RM_NONE && map->objects[i].h_client == h_client)
			map->objects[i].dying = free_number;
}

static uint32_t next_free(struct rm_map *map)
{
	return ++map->frees ? map->frees : ++map->frees;
}

uint32_t rm_doom(struct rm_map *map, uint32_t h_client, uint32_t handle)
{
	struct rm_object *object = rm_find(map, h_client, handle);
	uint32_t free_number = next_free(map);

	if (handle == h_client) {
		doom_client(map, h_client, free_number);
	} else if (object) {
		object->dying = free_number;
		cascade(map, free_number);
	}
	return free_number;
}

void rm_spare(struct rm_map *map, uint32_t free_number)
{
	for (uint32_t i = 0; i < map->used; i++)
		if (map->objects[i].dying == free_number) {
			map->objects[i].dying = 0;
			map->objects[i].reported = map->objects[i].taken =
			        0; /* valved was told that it ends */
		}
}

void rm_bury(struct rm_map *map, uint32_t free_number)
{
	for (uint32_t i = 0; i < map->used; i++)
		if (map->objects[i].dying == free_number)
			memset(&map->objects[i], 0, sizeof(map->objects[i]));
}

uint32_t rm_closing(struct rm_map *map, int fd)
{
	uint32_t free_number = next_free(map);

	for (uint32_t i = 0; i < map->used; i++)
		if (map->objects[i].kind == RM_CLIENT && map->objects[i].fd == fd)
			doom_client(map, map->objects[i].h_client, free_number);
	return free_number;
}

/* ---- questions ---- */

struct rm_object *rm_device_of(struct rm_map *map, const struct rm_object *object)
{
	/* channel -> group -> device is the deepest way; one step more than that is a cycle of forged handles */
	for (int steps = 0; object && steps < 4; steps++) {
		struct rm_object *up = rm_find(map, object->h_client, object->parent);

		if (up && up->kind == RM_DEVICE)
			return up;
		object = up;
	}
	return NULL;
}

struct rm_object *rm_subdevice_of(struct rm_map *map, const struct rm_object *device)
{
	for (uint32_t i = 0; i < map->used; i++) {
		struct rm_object *object = &map->objects[i];

		if (object->kind == RM_SUBDEVICE && object->h_client == device->h_client &&
		    object->parent == device->handle && !object->dying)
			return object;
	}
	return NULL;
}

static struct rm_object *group(struct rm_map *map, const struct rm_object *channel)
{
	struct rm_object *up = rm_find(map, channel->h_client, channel->parent);

	return up && up->kind == RM_GROUP ? up : NULL;
}

uint32_t rm_group_of(struct rm_map *map, const struct rm_object *channel)
{
	struct rm_object *up = group(map, channel);

	return up ? up->handle : 0;
}

/* In a group the group's engine counts: the channel's own is often 0. */
uint32_t rm_engine_of(struct rm_map *map, const struct rm_object *channel)
{
	struct rm_object *up = group(map, channel);

	return up && up->engine ? up->engine : channel->engine;
}

/* Unknown counts as compute: gating a copy channel costs little, missing a compute channel breaks the promise. */
bool rm_is_compute(struct rm_map *map, const struct rm_object *channel)
{
	uint32_t engine = rm_engine_of(map, channel);

	if (engine)
		return NV_ENGINE_IS_GR(engine);
	return channel->has_compute || !channel->has_copy;
}
