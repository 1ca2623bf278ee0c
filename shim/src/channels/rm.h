/*
 * rm.h - the driver's objects of this process, as the shim learns them from the process's ioctls. A pure state machine:
 * no system calls but `readable`, no locks (capture.c holds one), no allocation. tests/fuzz runs it alone.
 */
#ifndef VALVE_RM_H
#define VALVE_RM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "nvrm.h"

#define RM_GID_BINARY 2u /* the form in which a GPU UUID is 16 bytes */

enum rm_kind { RM_NONE, RM_CLIENT, RM_DEVICE, RM_SUBDEVICE, RM_SPACE, RM_SHARE, RM_GROUP, RM_CHANNEL };

struct rm_object {
	uint32_t h_client, handle, parent;
	uint32_t space, share; /* a channel or group dies with these, too (dependants) */
	uint32_t engine;       /* group, channel: NV2080_ENGINE_TYPE_*, 0 unknown */
	uint32_t instance;     /* device: RM device instance */
	uint32_t cid;          /* channel: unique per driver session */
	int32_t fd;            /* client: the nvidiactl file it belongs to */
	uint32_t dying;        /* number of the FREE that destroys it, 0 none */
	uint32_t told;         /* channel: number of the last message about it to valved */
	uint8_t kind;
	uint8_t scheduled;    /* group, channel: an application enabled it */
	uint8_t due;          /* channel: report it to valved now */
	uint8_t reported;     /* device, channel: valved has its present state */
	uint8_t taken;        /* channel: valved has confirmed that it stops and wakes it */
	uint8_t wants_fd;     /* device: valved asked for the client's fd */
	uint8_t has_uuid;     /* device */
	uint8_t has_compute;  /* channel: a compute object lives on it */
	uint8_t has_copy;     /* channel: a copy object lives on it */
	uint8_t app_disabled; /* channel: the application itself turned it off: never turn it on */
	uint8_t note_due;     /* channel: app_disabled changed and valved was not told */
	uint8_t unregistered; /* channel: UVM has stopped it for good, its FREE follows */
	uint8_t held;         /* channel: our own thread disabled it (path C) */
	uint8_t uuid[16];     /* device */
};

struct rm_map {
	struct rm_object *objects;
	uint32_t capacity;
	uint32_t used;       /* objects behind this index were never used */
	uint32_t is_mps;     /* an MPS object was made */
	uint32_t incomplete; /* something could not be decoded: the map may have holes */
	uint32_t branch;     /* driver branch, 0 until known */
	uint32_t version;    /* as in valve_link_hello.driver */
	uint32_t frees;      /* FREEs and closes so far: each has a number, several may run at once */
	bool (*readable)(const void *pointer, size_t bytes);
};

/* One ioctl, decoded (and taken out of its XFER wrapper) before it runs. */
struct rm_call {
	uint32_t nr, size;
	const void *argument;
	uint32_t h_client, h_object; /* FREE, CONTROL */
	uint32_t free_number;        /* FREE */
	uint32_t is_enable;          /* may enable channels: SCHEDULE(1), or the application's own enable */
};

void rm_reset(struct rm_map *map);
void rm_set_version(struct rm_map *map, const char *version); /* "580.159.04" */
bool rm_is_known_branch(const struct rm_map *map);
uint32_t rm_unregister_at(const struct rm_map *map);

/* Before the ioctl: decodes it, marks what a FREE will destroy and the channels that a SCHEDULE will start. */
void rm_before(struct rm_map *map, uint32_t request, const void *argument, struct rm_call *call);
/* After it. `ok`: ioctl() returned 0. */
void rm_after(struct rm_map *map, int fd, const struct rm_call *call, bool ok);
void rm_after_uvm(struct rm_map *map, uint32_t request, const void *argument);
/* A file is closed: marks all of its clients as dying, under the number that it returns. */
uint32_t rm_closing(struct rm_map *map, int fd);
void rm_bury(struct rm_map *map, uint32_t free_number); /* forgets the objects that it destroyed */

/* An allocation of memory on a card, before it runs. */
struct rm_wish {
	uint64_t bytes;
	uint64_t status_at, handle_at; /* where the caller reads the driver's answer */
	uint32_t h_client, h_parent, h_subdevice;
	uint8_t uuid[16];
	bool has_uuid;
};
bool rm_wants_memory(struct rm_map *map, const struct rm_call *call, struct rm_wish *out);

struct rm_object *rm_find(struct rm_map *map, uint32_t h_client, uint32_t handle);
struct rm_object *rm_device_of(struct rm_map *map, const struct rm_object *object);
struct rm_object *rm_subdevice_of(struct rm_map *map, const struct rm_object *device);
uint32_t rm_group_of(struct rm_map *map, const struct rm_object *channel); /* handle, 0 without */
uint32_t rm_engine_of(struct rm_map *map, const struct rm_object *channel);
bool rm_is_compute(struct rm_map *map, const struct rm_object *channel);

#endif
