/*
 * ends.c - tells valved of channels that end. Where the socket is full such a word is kept, and said when there is room: in
 * the order in which they ended, and before any channel is reported, because handles come again.
 */
#include "report.h"

#include <string.h>

#define OWED 1024 /* further ones are left out: a longer stop finds them */

static struct {
	uint32_t count;
	struct valve_link_channel end[OWED];
} owed; /* under capture_lock */

static bool say(struct valve_link_channel *end)
{
	return !valve_link_send(end, sizeof(*end), VALVE_LINK_CHANNEL_DEL, -1);
}

/* Precondition: capture_lock is held. */
static bool say_owed(void)
{
	uint32_t said = 0;

	while (said < owed.count && say(&owed.end[said]))
		said++;
	if (!said)
		return !owed.count;
	owed.count -= said;
	memmove(owed.end, owed.end + said, owed.count * sizeof(*owed.end));
	return !owed.count;
}

static void tell_end(const struct rm_object *object)
{
	struct valve_link_channel end = {
	        .h_client = object->h_client, .h_channel = object->handle, .cid = object->cid};
	const struct rm_object *device = rm_device_of(&valve_rm, object);

	end.device_instance = device ? device->instance : 0;
	if (device)
		memcpy(end.gpu_uuid, device->uuid, sizeof(device->uuid));
	if (valve_is_linked() && !(say_owed() && say(&end)) && owed.count < OWED)
		owed.end[owed.count++] = end;
}

void valve_ends_tell(uint32_t free_number)
{
	for (uint32_t i = 0; free_number && i < valve_rm.used; i++) {
		struct rm_object *object = &valve_rm.objects[i];

		if (object->dying != free_number || object->kind != RM_CHANNEL || !object->reported)
			continue;
		object->reported = 0;
		tell_end(object);
	}
}

bool valve_ends_are_told(void)
{
	bool all;

	valve_lock(&valve_shim.capture_lock);
	all = !valve_is_linked() || say_owed();
	valve_unlock(&valve_shim.capture_lock);
	return all;
}

void valve_ends_forget(void)
{
	if (owed.count)
		owed.count = 0;
}
