/*
 * link.h - messages on the link socket (/run/valve/link.sock, SOCK_SEQPACKET): shim and engine hook to valved.
 *
 * One message per packet: a 24-byte header, then a fixed body whose size the type fixes. File descriptors ride on
 * the packet by SCM_RIGHTS. Who a peer is comes from SO_PEERCRED, never from a field here. A packet that is too
 * short, too long, of an unknown type or magic is counted and refused, and the connection is closed.
 * Requests carry a seq; the answer repeats it. The socket is blocking on the client side with a deadline.
 *
 * The conversation
 *   client                          valved
 *   HELLO                     ->
 *                             <-    WELCOME + 4 fds (control, region, doorbell, order)   or REFUSED
 *   RM_CLIENT [+ nvidiactl fd] ->        (offline: numbers needed for paths B and C)
 *                             <-    ACK
 *   CHANNEL_ADD               ->    offline: sent before the channel's SCHEDULE ioctl proceeds
 *                             <-    ACK   (offline with the gate closed: the channel is already off when it comes)
 *   CHANNEL_DEL               ->    no answer
 *   end of file               ->    the client is gone
 *   SCHEDULE_WAIT             ->    before an app's SCHEDULE/enable ioctl; ACK comes once it may proceed
 *   SCHEDULE_DONE             ->    that ioctl came back: it may have enabled channels after a gate that fell in
 *                                   between, so valved gates them again. No answer. Only sent to a daemon that
 *                                   announces VALVE_FEATURE_SCHEDULE_DONE
 *
 * CHANNEL_ADD and RM_CLIENT for a pair that is already known replace what is known (an engine learned later, a GPU
 * UUID learned later, a new daemon). A client whose channels stopped on its own account (lease) enables them before
 * it sends CHANNEL_ADD to a new daemon: a channel is on when it is added, and what it is after the ACK is valved's.
 * The client reads all the time, also answers it no longer waits for: valved never waits to send one.
 */
#ifndef VALVE_ABI_LINK_H
#define VALVE_ABI_LINK_H

#include <stddef.h>
#include <stdint.h>

#define VALVE_LINK_MAGIC 0x4b4e4c56u /* "VLNK" */
#define VALVE_LINK_ABI   1u
#define VALVE_LINK_MAX   512u /* no packet is longer */

enum valve_link_type {
	VALVE_LINK_HELLO = 1,
	VALVE_LINK_WELCOME = 2,
	VALVE_LINK_REFUSED = 3,
	VALVE_LINK_ACK = 4,
	VALVE_LINK_RM_CLIENT = 5,
	VALVE_LINK_CHANNEL_ADD = 6,
	VALVE_LINK_CHANNEL_DEL = 7,
	VALVE_LINK_SCHEDULE_WAIT = 8,
	VALVE_LINK_NOTE = 9, /* one-way: something the operator should know (enum valve_note) */
	VALVE_LINK_SCHEDULE_DONE = 10,
};

enum valve_refusal {
	VALVE_REFUSED_VERSION = 1,   /* no common ABI; both versions are in the body */
	VALVE_REFUSED_ROLE = 2,      /* this process may not have the role it asked for */
	VALVE_REFUSED_QUOTA = 3,     /* too many clients of this user */
	VALVE_REFUSED_DRAINING = 4,  /* valved is leaving */
	VALVE_REFUSED_MODE = 5,      /* harvesting is off here */
	VALVE_REFUSED_MALFORMED = 6, /* the message makes no sense */
};

enum valve_note {
	VALVE_NOTE_INCOMPLETE_MAP = 1, /* an ioctl could not be decoded: the channel map may have holes */
	VALVE_NOTE_APP_DISABLED = 2,   /* the application disabled a channel itself: never enable it */
	VALVE_NOTE_APP_ENABLED = 3,
	VALVE_NOTE_UNKNOWN_DRIVER = 4, /* capture is off: the driver version has no known layout */
	VALVE_NOTE_UNKNOWN_SUBMIT = 5, /* a submit-class name that the table does not know */
	VALVE_NOTE_MPS = 6,            /* MPS client: not supported */
};

struct valve_link_header {
	uint32_t magic;
	uint16_t abi;
	uint16_t type;   /* valve_link_type */
	uint32_t length; /* of the whole packet */
	uint32_t seq;
	uint64_t sent_ns; /* CLOCK_MONOTONIC */
};

struct valve_link_hello {
	struct valve_link_header header;
	uint16_t abi_min, abi_max; /* region and link ABI that this client speaks */
	uint32_t features;
	uint32_t wanted_role; /* valve_role; a wish, never proof */
	uint32_t driver;      /* branch * 1000000 + minor * 1000 + patch, e.g. 580159004; 0 unknown */
	char build[32];       /* version of the shim, for people */
	char comm[16];
};

struct valve_link_welcome {
	struct valve_link_header header;
	uint16_t abi; /* the one both will use */
	uint16_t role;
	uint32_t features;
	uint64_t service;
	uint64_t client; /* valved's id of this client */
	uint32_t control_bytes, region_bytes;
};

struct valve_link_refused {
	struct valve_link_header header;
	uint32_t code; /* valve_refusal */
	uint16_t daemon_abi_min, daemon_abi_max;
	char text[96];
};

struct valve_link_ack {
	struct valve_link_header header;
	uint32_t status; /* 0, or an errno value */
	uint32_t
	        want_fd; /* 1: valved wants the nvidiactl fd of this RM client (path B): send RM_CLIENT again with it */
};

/* One RM client (root object) of the process, with what is needed to issue controls in its name. */
struct valve_link_rm_client {
	struct valve_link_header header;
	uint8_t gpu_uuid[16]; /* all zero when only device_instance is known */
	uint32_t device_instance;
	uint32_t h_client;
	uint32_t h_device;
	uint32_t h_subdevice;
	uint32_t has_fd; /* 1: the nvidiactl fd that owns h_client rides on this packet */
	uint32_t pad0;
};

struct valve_link_channel {
	struct valve_link_header header;
	uint8_t gpu_uuid[16]; /* all zero: not known yet, device_instance counts */
	uint32_t device_instance;
	uint32_t h_client;
	uint32_t h_channel;
	uint32_t cid; /* unique per driver session: detects handle reuse */
	uint32_t h_tsg;
	uint32_t engine;  /* NV2080_ENGINE_TYPE_*: 1..8 compute, 9.. copy */
	uint32_t compute; /* 1: belongs to a compute (GR) group */
	uint32_t pad0;
};

/* SCHEDULE_WAIT and SCHEDULE_DONE */
struct valve_link_schedule {
	struct valve_link_header header;
	uint32_t h_client;
	uint32_t h_object; /* TSG or channel that the application schedules */
};

struct valve_link_note {
	struct valve_link_header header;
	uint32_t code; /* valve_note */
	uint32_t h_client, h_channel;
	uint32_t pad0;
	char text[96];
};

#define VALVE_SIZE(type, n) _Static_assert(sizeof(struct type) == (n), #type)
VALVE_SIZE(valve_link_header, 24);
VALVE_SIZE(valve_link_hello, 88);
VALVE_SIZE(valve_link_welcome, 56);
VALVE_SIZE(valve_link_refused, 128);
VALVE_SIZE(valve_link_ack, 32);
VALVE_SIZE(valve_link_rm_client, 64);
VALVE_SIZE(valve_link_channel, 72);
VALVE_SIZE(valve_link_schedule, 32);
VALVE_SIZE(valve_link_note, 136);
#undef VALVE_SIZE

#endif
