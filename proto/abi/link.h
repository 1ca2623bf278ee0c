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
 *   RM_CLIENT + nvidiactl fd  ->    before its first channel: no channel counts before the file that owns h_client
 *                                   was shown, by the process itself or by a child that inherited it
 *                             <-    ACK
 *   CHANNEL_ADD               ->    offline: sent before the channel's SCHEDULE ioctl proceeds
 *                             <-    ACK   (offline with the gate closed: the channel is already off when it comes)
 *   CHANNEL_DEL               ->    no answer
 *   end of file               ->    the client is gone
 *   SCHEDULE_WAIT             ->    before an app's SCHEDULE/enable ioctl; ACK comes once it may proceed
 *                                   Without h_client: a process that has stopped its own channels wants to end that. The
 *                                   answer may be VALVE_LINK_HANDED: valved runs those that it has taken once it hears
 *                                   SCHEDULE_DONE, and the process enables none of them. An enable of its own would come
 *                                   late, beside a service, if its thread stood still after the answer. Others take it for 0
 *   SCHEDULE_DONE             ->    that ioctl came back: it may have enabled channels after a gate that fell in
 *                                   between, so valved gates them again. No answer. Only sent to a daemon that
 *                                   announces VALVE_FEATURE_SCHEDULE_DONE
 *   ENDING                    ->    offline, to a daemon that announces VALVE_FEATURE_ENDING: a signal has come that ends
 *                                   this process, and one thread of it waits. ACK lets it: no channel is off, or it
 *                                   stands until all are on, and the link ends. An end without an ACK: that valved has
 *                                   died, or is an older one, and the process switches its channels on itself
 *
 * KV memory (kv.h), between peers that both announce VALVE_FEATURE_MEMORY
 *   KV_RANGE                  ->    shim: an address range was reserved. ACK comes when it is backed: in whole, or,
 *                                   if ELASTIC, as far as the pool goes now. Orders for it come before the ACK
 *                             <-    KV_ORDER [+ an fd per entry of BACK without CREATE]
 *   KV_DONE [+ an fd per CREATE that was done]  ->   the order's end: how many entries, and why not more. No answer
 *   KV_HELD [+ an fd per entry]  -> shim, to a new valved, after KV_RANGE with held > 0: what is mapped where. ACK.
 *                                   (It waits for each of these, not for the ACK of that KV_RANGE)
 *   KV_STEP                   ->    offline shim, where valved announces VALVE_FEATURE_KV_STEP: an engine step is about
 *                                   to begin. Said before the first step after an elastic range came, and again until
 *                                   ACK 0: every range is whole, or a hook reads the table. EAGAIN: neither is so, and
 *                                   this process launches nothing until it is
 *   KV_PIN                    ->    shim: this span may never be taken (registered with a NIC, exported). No answer
 *   KV_RANGE_DEL              ->    shim: the range is unmapped and gone; its handles are the pool's. No answer
 *   KV_LAYOUT                 ->    hook of a rank (same pid as a shim with ranges): where blocks lie. Packets until
 *                                   `total` tensors are there, each answered with an ACK; EINVAL refuses it all
 *   KV_MAKE                   ->    hook, where valved announces VALVE_FEATURE_KV_MAKE: make the table of the KV_ATTACH
 *                                   that this hook says next. The body is the same
 *                             <-    KV_TABLE + 1 fd: a table without a page. The hook maps it and reads from each page:
 *                                   that makes the page, and who makes it pays for it. Or ACK with an errno value
 *   KV_ATTACH                 ->    hook of the scheduler: I read the table
 *                             <-    KV_TABLE + 2 fds (table, book), once all ranks have told their layout, or ACK with
 *                                   an errno value. EAGAIN: they have not within four seconds, or too many attach: ask
 *                                   again. An engine whose memory is none of these ranges gets a table that calls every
 *                                   block backed
 *   KV_NEED                   ->    hook: look at the book now (wanted_blocks rose, blocks were offered). No answer
 *
 * Where both announce VALVE_FEATURE_KV_RUNS, an order has this form instead, unless it has no slots
 *                             <-    KV_RUNS [+ an fd per slot of BACK without CREATE]: one order for slots of several
 *                                   ranges. Its runs are carried out in turn, and none behind the first slot that
 *                                   was not; one KV_DONE tells of all. Of BACK no slot twice, and no more than
 *                                   VALVE_KV_ENTRIES
 *
 * Offline shims, where valved announces VALVE_FEATURE_SPARSE
 *   KV_SCRATCH + the uvm fd   ->    here is memory to try it on, in each context with ranges. Before their KV_RANGE.
 *                                   No answer
 *                             <-    KV_ORDER TRY, once valved has made it sparse: look. KV_DONE tells
 *                             <-    KV_ORDER QUARANTINE, OUTSIDE: valved is about to make these slots sparse. Said
 *                                   before it is done, so that a valved that dies in between leaves a process that
 *                                   thinks its memory gone and never one that believes what reads as zero. So it
 *                                   is carried out even after the link broke: the shim reads to the end of the file
 *   KV_PIN                    ->    is answered there: nothing leaves the process before ACK. EBUSY: it is gone
 *
 * Descriptors by number, where valved announces VALVE_FEATURE_FETCH: the kernel passes none while other processes of the
 * user have too many under way (ETOOMANYREFS). Then a client says their numbers in its own table, behind the packet: an
 * int32 each, a mark (u32) and their count (u32); `length` is that of all, and the type has VALVE_LINK_LENT in it. valved
 * fetches them from the process that made the connection. With a mark each must have it as its signal (F_GETSIG): it is
 * the client's own file then, and no other that came under its number. If one could not be had, ACK says
 * VALVE_LINK_UNFETCHED and the packet counts as never said. A KV_DONE in this form has an ACK: its files stay open until then.
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

#include "kv.h"

#define VALVE_LINK_MAGIC     0x4b4e4c56u /* "VLNK" */
#define VALVE_LINK_ABI       1u
#define VALVE_LINK_MAX       2048u   /* no packet is longer */
#define VALVE_LINK_FDS       64u     /* nor carries more descriptors */
#define VALVE_LINK_LENT      0x8000u /* in a header's type: its descriptors are numbers behind the packet */
#define VALVE_LINK_UNFETCHED 49u     /* status of an ACK (EUNATCH): lend nothing on this link again */
#define VALVE_LINK_HANDED    42u     /* status of an ACK (ENOMSG): see SCHEDULE_WAIT */

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
	VALVE_LINK_ENDING = 11,
	VALVE_LINK_KV_RANGE = 16,
	VALVE_LINK_KV_RANGE_DEL = 17,
	VALVE_LINK_KV_HELD = 18,
	VALVE_LINK_KV_PIN = 19,
	VALVE_LINK_KV_ORDER = 20,
	VALVE_LINK_KV_DONE = 21,
	VALVE_LINK_KV_LAYOUT = 22,
	VALVE_LINK_KV_ATTACH = 23,
	VALVE_LINK_KV_TABLE = 24,
	VALVE_LINK_KV_NEED = 25,
	VALVE_LINK_KV_SCRATCH = 26,
	VALVE_LINK_KV_STEP = 27,
	VALVE_LINK_KV_RUNS = 28,
	VALVE_LINK_KV_MAKE = 29, /* valve_link_kv_attach */
};

/* Only VERSION is for good: of DRAINING a client asks again at once, of the others after 5 to 30 seconds. */
enum valve_refusal {
	VALVE_REFUSED_VERSION = 1,   /* no common ABI; both versions are in the body */
	VALVE_REFUSED_ROLE = 2,      /* this process may not have the role it asked for */
	VALVE_REFUSED_QUOTA = 3,     /* too many clients of this user */
	VALVE_REFUSED_DRAINING = 4,  /* valved is leaving */
	VALVE_REFUSED_MODE = 5,      /* harvesting is off here: said by 0.1 only */
	VALVE_REFUSED_MALFORMED = 6, /* the message makes no sense */
};

enum valve_note {
	VALVE_NOTE_INCOMPLETE_MAP = 1, /* an ioctl could not be decoded: the channel map may have holes */
	VALVE_NOTE_APP_DISABLED = 2,   /* the application disabled a channel itself: never enable it */
	VALVE_NOTE_APP_ENABLED = 3,
	VALVE_NOTE_UNKNOWN_DRIVER = 4, /* capture is off: the driver version has no known layout */
	VALVE_NOTE_UNKNOWN_SUBMIT = 5, /* a submit-class name that the table does not know */
	VALVE_NOTE_MPS = 6,            /* MPS client: not supported */
	VALVE_NOTE_NOT_ENABLED = 7,    /* the driver refused to enable channels: they are tried again */
	VALVE_NOTE_NO_MEMORY = 8,      /* of an online process: the card had not enough for an allocation */
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
	        want_fd; /* 1: valved wants the nvidiactl fd of this RM client (a proof, path B): send RM_CLIENT again with it */
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
	uint32_t h_client; /* 0: all of the process (VALVE_FEATURE_KEEP_STOP) */
	uint32_t h_object; /* TSG or channel that the application schedules */
};

struct valve_link_ending {
	struct valve_link_header header;
	uint32_t signal; /* for people */
	uint32_t pad0;
};

struct valve_link_note {
	struct valve_link_header header;
	uint32_t code; /* valve_note */
	uint32_t h_client, h_channel;
	uint32_t pad0;
	char text[96];
};

/* An address range of the shim, `slots` handles long. A pair (client, range) names it; the client numbers its ranges. */
struct valve_link_kv_range {
	struct valve_link_header header;
	uint8_t gpu_uuid[16]; /* all zero when only device_instance is known */
	uint32_t device_instance;
	uint32_t range;
	uint64_t base;
	uint64_t handle_bytes;
	uint32_t slots;
	uint32_t flags; /* VALVE_KV_ELASTIC, VALVE_KV_HEEDED */
	uint32_t held;  /* slots already backed, told with KV_HELD next: a new valved gives nothing before */
	uint32_t pad0;
};

/* KV_RANGE_DEL (offset and bytes 0) and KV_PIN */
struct valve_link_kv_span {
	struct valve_link_header header;
	uint32_t range;
	uint32_t pad0;
	uint64_t offset; /* from the base of the range */
	uint64_t bytes;
};

/* KV_ORDER and KV_HELD (order 0). Always sent whole; `count` entries are meant. */
struct valve_link_kv_entries {
	struct valve_link_header header;
	/* valved's number of it. Orders of one client are carried out in the order they were sent; but zeroing goes on
	 * beside later orders for other slots (it needs channels that are on), so its KV_DONE may come after theirs */
	uint64_t order;
	uint32_t range;
	uint16_t op;  /* valve_kv_op */
	uint16_t how; /* valve_kv_how */
	uint32_t count;
	uint32_t pad0;
	struct valve_kv_entry entry[VALVE_KV_ENTRIES];
};

/* KV_RUNS. Always sent whole; `count` runs are meant. */
struct valve_link_kv_runs {
	struct valve_link_header header;
	uint64_t order;
	uint16_t op;  /* valve_kv_op, but not TRY */
	uint16_t how; /* valve_kv_how */
	uint32_t count;
	struct valve_kv_run run[VALVE_KV_RUNS];
};

struct valve_link_kv_done {
	struct valve_link_header header;
	uint64_t order;
	uint32_t done; /* entries, or slots of runs, carried out, from the first one on */
	/* 0, or an errno value: why the next one was not. ENOMEM; ESTALE: the range is gone; EIO: the driver refused;
	 * EBUSY: pinned; EEXIST: backed already; EINVAL: no such slot; EAGAIN: more than 1,024 orders wait; EMFILE: no
	 * room for the descriptors, send fewer at a time. Of TRY: ENODATA: it did not read zero; EBADMSG: its bytes
	 * did not come back */
	uint32_t status;
	uint32_t cu_result; /* the driver's own word with EIO */
	uint32_t pad0;
};

struct valve_link_kv_layout {
	struct valve_link_header header;
	uint32_t blocks, block_tokens;
	uint32_t total; /* tensors in all packets */
	uint32_t first; /* index of tensor[0] */
	uint32_t count;
	uint32_t pinned_count;
	uint32_t pinned[8]; /* blocks that are never taken: null and padding blocks */
	struct valve_kv_tensor tensor[VALVE_KV_TENSORS];
};

struct valve_link_kv_attach {
	struct valve_link_header header;
	uint16_t abi_min, abi_max; /* VALVE_KV_ABI that the hook speaks */
	uint32_t mode;             /* valve_kv_mode; may sink later, in the book */
	uint32_t blocks, block_tokens;
	uint32_t rows, row_blocks; /* of the book */
	uint32_t ranks;            /* processes that will register a layout */
	uint32_t pad0;
	char engine[48]; /* "vllm 0.32.0", for people */
};

struct valve_link_kv_table {
	struct valve_link_header header;
	uint16_t abi; /* the one both will use */
	uint16_t pad0;
	uint32_t table_bytes, book_bytes;
	uint32_t pad1;
};

/* KV_NEED */
struct valve_link_kv_need {
	struct valve_link_header header;
	uint32_t wanted_blocks; /* as in the book, for the record */
	uint32_t pad0;
};

/* KV_STEP */
struct valve_link_kv_step {
	struct valve_link_header header;
	uint32_t range; /* the newest one */
	uint32_t pad0;
};

/* One handle's worth of the shim's own memory, never an application's. Comes with a descriptor of the file on which the
 * process registered its channels with UVM. */
struct valve_link_kv_scratch {
	struct valve_link_header header;
	uint8_t gpu_uuid[16];
	uint32_t device_instance; /* where the UUID is all zero */
	uint32_t place;           /* the shim's number of it: `range` of the order TRY */
	uint64_t base, bytes;
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
VALVE_SIZE(valve_link_ending, 32);
VALVE_SIZE(valve_link_note, 136);
VALVE_SIZE(valve_link_kv_range, 80);
VALVE_SIZE(valve_link_kv_span, 48);
VALVE_SIZE(valve_link_kv_entries, 1072);
VALVE_SIZE(valve_link_kv_runs, 1960);
VALVE_SIZE(valve_link_kv_done, 48);
VALVE_SIZE(valve_link_kv_layout, 1232);
VALVE_SIZE(valve_link_kv_attach, 104);
VALVE_SIZE(valve_link_kv_table, 40);
VALVE_SIZE(valve_link_kv_need, 32);
VALVE_SIZE(valve_link_kv_step, 32);
VALVE_SIZE(valve_link_kv_scratch, 64);
#undef VALVE_SIZE

#endif
