/*
 * region.h - the shared memory between one client process (shim or engine hook) and valved.
 *
 * Two memfds per client, both created by valved and handed over with the WELCOME message:
 *   control page   written by valved alone; sealed so that the client can only read it (F_SEAL_FUTURE_WRITE)
 *   client region  written by the client alone; valved reads it and trusts nothing in it
 * Every word has one writer, named below. Words that different threads write sit on different cache lines.
 * Fixed widths, natural alignment, little endian. A reader uses the offsets and sizes that the header states, so
 * that a valved of today serves a shim of last year: fields are only ever appended, and a new meaning is a
 * feature bit.
 *
 * Orders that matter (each is repeated where it is used):
 *   launch   client: submitted++ ; full fence ; read gate_epoch       (shim/src/activity/activity.c, trampolines)
 *   wake     valved: gate_epoch odd ; full fence ; re-read submitted  (valved/native/hold.c)
 *   One of the two must see the other: either valved sees the count and refuses to wake, or the client sees
 *   the open gate and rings. Wakes are rare and launches are not, so valved pays for both: where both sides announce
 *   VALVE_FEATURE_PLAIN_COUNT its fence is membarrier(GLOBAL_EXPEDITED), which makes every running thread of a
 *   registered process pass a full fence, and the launch needs none of its own.
 */
#ifndef VALVE_ABI_REGION_H
#define VALVE_ABI_REGION_H

#include <stddef.h>
#include <stdint.h>

#define VALVE_REGION_ABI    1u
#define VALVE_CONTROL_MAGIC 0x314c5443564c4156ull /* "VALVCTL1" */
#define VALVE_REGION_MAGIC  0x314e4752564c4156ull /* "VALVRGN1" */
#define VALVE_PAGE          4096u
#define VALVE_SLOTS         256u /* launching threads counted one by one; later ones share the last slot */
#define VALVE_GAPS          64u  /* ring of recent busy gaps */
#define VALVE_CONTROL_BYTES VALVE_PAGE
#define VALVE_REGION_BYTES  (VALVE_PAGE + VALVE_SLOTS * 64u + VALVE_PAGE)

enum valve_role { VALVE_ROLE_NONE = 0, VALVE_ROLE_ONLINE = 1, VALVE_ROLE_OFFLINE = 2, VALVE_ROLE_HOOK = 3 };

/* Feature bits, in both headers: a side uses what both announce. */
enum valve_feature {
	VALVE_FEATURE_GAPS = 1u << 0,          /* client fills the gap ring */
	VALVE_FEATURE_HINT = 1u << 1,          /* client publishes open request counts (engine hook) */
	VALVE_FEATURE_SELF_GATE = 1u << 2,     /* client can disable its own channels (path C) */
	VALVE_FEATURE_HOLD = 1u << 3,          /* client can hold its launches (launch-gate rung) */
	VALVE_FEATURE_SCHEDULE_DONE = 1u << 4, /* daemon wants SCHEDULE_DONE */
	VALVE_FEATURE_PLAIN_COUNT = 1u << 5,   /* counts without a fence: valved fences for the client */
	VALVE_FEATURE_MEMORY = 1u << 6,        /* speaks the KV_ messages of link.h */
	VALVE_FEATURE_SPARSE =
	        1u << 7, /* and those by which valved makes memory sparse itself. The daemon announces
	                                 * it only where it may: it asks for a descriptor of /dev/nvidia-uvm */
	VALVE_FEATURE_KV_FREE = 1u << 9, /* the daemon fills kv_free[] of the control page */
	VALVE_FEATURE_KEEP_STOP =
	        1u
	        << 12, /* daemon: SCHEDULE_WAIT and _DONE with h_client 0 are about the whole process. A client
	                   * that has stopped itself, or whose launches wait, stays so over a new link and asks so first */
	VALVE_FEATURE_KV_STEP = 1u << 8,  /* KV_STEP is said before the first engine step over a hole */
	VALVE_FEATURE_KV_RUNS = 1u << 13, /* KV_RUNS: one order for all ranges of a process on a GPU */
	VALVE_FEATURE_GRANT = 1u << 10,   /* granted time: an offline client stops itself at run_until_ns */
	VALVE_FEATURE_FETCH = 1u << 15,   /* daemon: fetches descriptors that are lent by number (link.h) */
	VALVE_FEATURE_ENDING = 1u << 16,  /* daemon: an offline client says ENDING before a signal ends it */
	VALVE_FEATURE_KEEP = 1u << 14,    /* an offline client allocates nothing that keep_bytes needs */
	VALVE_FEATURE_KV_MAKE = 1u << 17, /* daemon: a hook brings the memory of its table (KV_MAKE) */
};

/* Orders to an offline client, in control.order: what its session thread must do now. */
enum valve_order {
	VALVE_ORDER_RUN =
	        0, /* no STOP and no HOLD (any more): ends no stop that the process asks about (link.h) */
	VALVE_ORDER_STOP = 1, /* disable own channels (path C) */
	VALVE_ORDER_HOLD = 2, /* hold launches (launch gate) */
};

/* What the watcher is doing, in region.watcher_state: everything but IDLE leaves the client busy. */
enum valve_watcher {
	VALVE_WATCHER_ASLEEP = 0,     /* valved does not ask (control.watch is 0), or it does not run yet */
	VALVE_WATCHER_WATCHING = 1,   /* waiting for quiet, or for the probe to complete */
	VALVE_WATCHER_IDLE = 2,       /* proven idle */
	VALVE_WATCHER_CAPTURE = 3,    /* a stream capture is open: probing would invalidate it */
	VALVE_WATCHER_NO_CONTEXT = 4, /* work was submitted but no context is known */
	VALVE_WATCHER_ERROR = 5,      /* the probe failed: stays busy */
};

/* The control page. Writer of every word: valved. */
struct valve_control {
	uint64_t magic;
	uint32_t abi;
	uint32_t bytes;    /* of this page */
	uint32_t features; /* valve_feature bits of the daemon */
	uint32_t role;     /* valve_role this client was given */
	uint64_t service;  /* service (gate domain) id */
	uint8_t pad0[24];

	/* 64: the word that the hot path reads. Odd: open, offline may be running, ring when you launch.
	 * Even: closed, no process needs your ring. Rises by one at every change.
	 * An offline client never rings: its word is odd only while order is HOLD, which sends its launches into
	 * the slow path, where they wait on the order word. Waiters re-check at least every 100 ms, so a futex wake
	 * on order, watch and (from the client) busy makes things prompt but nothing depends on it. */
	_Alignas(64) uint32_t gate_epoch;
	uint8_t pad1[60];

	/* 128: slow words */
	_Alignas(64) uint64_t
	        heartbeat_ns;       /* CLOCK_MONOTONIC, written every lease_ns / 5 by the native thread */
	uint64_t lease_ns;          /* heartbeat older than this: valved is gone */
	uint32_t online_registered; /* 1: an online client shares a GPU with this client */
	uint32_t watch;             /* 1: the watcher must prove idleness; 0: it may sleep. Futex word */
	uint32_t order;             /* valve_order, for the session thread; the order eventfd is rung after */
	uint32_t order_seq;         /* rises with every order */
	uint32_t draining;          /* 1: enable all, pass through; reserved: no valved writes it */
	uint32_t quiet_us;          /* quiet time before the watcher probes */
	uint8_t pad2[24];

	/* 192: memory */
	_Alignas(64) uint64_t kv_handle_bytes; /* size of a pool handle; 0: KV memory is not managed here */
	uint64_t kv_budget_bytes; /* KV memory on each GPU that this client may hope for now, with what it
	                           * holds; 0: no limit is told */
	uint64_t
	        kv_size_rule; /* device allocations from this size on are KV memory; 0: only bracketed ones */
	uint8_t pad3[40];
};

/*
 * Behind the control words, at VALVE_KV_FREE_OFFSET: for each GPU of the node the bytes of free handles that the pool holds.
 * The driver counts them as used, and a process that may get them counts them as free. Entries without a uuid end it.
 * To an offline client also what it must leave free there.
 */
#define VALVE_KV_FREE_OFFSET 256u
#define VALVE_KV_FREE_GPUS   32u
struct valve_kv_free {
	uint8_t gpu_uuid[16]; /* written once, before bytes */
	uint64_t bytes;
	uint64_t keep_bytes; /* an allocation of the client's own that would leave less is refused */
};

/*
 * Granted time, behind the free handles. A grant is a wake with an end: an engine's hook asks for a pause between two of its
 * steps, and the GPU is closed again at its end by valved; should valved be gone by then, by each offline process itself.
 */
#define VALVE_GRANT_OFFSET       1280u
#define VALVE_GRANT_GPUS         32u
#define VALVE_RUN_UNTIL_GRACE_NS 5000000u /* valved has so long to close before a client stops itself */
struct valve_grant {
	/* to an engine's hook. consented 0: it asks for nothing and rings no doorbell */
	uint32_t consented;
	uint32_t answer;     /* valve_grant_answer, to the request ... */
	uint32_t answer_seq; /* ... of this number; written last */
	uint32_t
	        by_slices; /* 1: no call is made per pause; while it steps it moves grant_until_ns on, without a ring,
	                      * and rings for what is no step: a new request, an abort, its end */
	uint64_t tpot_ns, gap_ns; /* what the owner stated */
	uint64_t
	        shared_until_ns; /* rung timeslice: until when offline work may run beside the steps. While it lies ahead
	                          * a pause needs no call; 0: it has ended, or has not begun */
	uint8_t pad1[24];

	/* 64: to an offline client. By GPU of the node, written by its issuer: until when channels there may run. 0: until
	 * valved stops them. Set before they are enabled, cleared after they were stopped; the order eventfd is rung after
	 * it is set. */
	_Alignas(64) uint64_t run_until_ns[VALVE_GRANT_GPUS];
};

enum valve_grant_answer {
	VALVE_GRANT_NONE = 0,
	VALVE_GRANT_GIVEN = 1,
	VALVE_GRANT_NO_CONSENT = 2,
	VALVE_GRANT_NOT_HELD = 3,    /* the service is idle, or has no GPU: nothing is there to grant */
	VALVE_GRANT_OTHERS = 4,      /* another service holds one of its GPUs, or has granted it */
	VALVE_GRANT_NOT_STOPPED = 5, /* a stop there failed, or is under way */
	VALVE_GRANT_SHIM = 6,        /* offline work there would not stop itself */
	VALVE_GRANT_LENGTH = 7,
	VALVE_GRANT_RATE = 8,
	VALVE_GRANT_BUSY = 9,   /* GPU work was not proven done */
	VALVE_GRANT_SLICE = 10, /* rung timeslice: offline work there has no short slice */
	VALVE_GRANT_ANSWERS = 11,
};

/* One launching thread's counter. Writer: that thread alone (the last slot is shared and counted atomically). */
struct valve_slot {
	_Alignas(64) uint64_t submitted; /* submit-class calls entered */
	uint32_t tid;                    /* owner, 0 when free */
	uint32_t pad0;
	uint8_t pad1[48];
};

struct valve_gap {
	uint64_t end_ns; /* CLOCK_MONOTONIC */
	uint64_t gap_ns; /* from proven idle to the next submit seen */
};

/* Head page of the client region. Writers are threads of the client, as named. */
struct valve_region {
	uint64_t magic;
	uint32_t abi;
	uint32_t bytes;
	uint32_t features;
	uint32_t slot_count; /* that any thread counts in, as given out: rises, each before its first count */
	uint32_t slot_offset;
	uint32_t gap_offset;
	uint32_t gap_count;
	uint32_t pid;
	uint8_t pad0[24];

	/* 64: slow path, first launch of a gate epoch (any launching thread, under the rung_epoch exchange) */
	_Alignas(64) uint32_t busy; /* 1 from the ring until the watcher proves idle. Futex word */
	uint32_t rung_epoch;        /* last gate epoch that was rung */
	uint64_t launch_ns;         /* CLOCK_MONOTONIC at the ringing launch */
	uint64_t rings;             /* doorbells rung in all */
	uint8_t pad1[40];

	/* 128: the watcher thread. Everything submitted up to idle_submitted was proven done at idle_ns. */
	_Alignas(64) uint64_t idle_submitted;
	uint64_t idle_ns;
	uint64_t watcher_ns;    /* the watcher's heartbeat */
	uint32_t idle_seq;      /* even: stable; odd: the three words above are being written (seqlock) */
	uint32_t watcher_state; /* valve_watcher */
	uint64_t gaps;          /* gaps written in all; ring index = (gaps - 1) % gap_count */
	uint64_t probes;        /* idle probes issued */
	uint8_t pad2[16];

	/* 192: capture lock-out, under the capture lock */
	_Alignas(64) uint32_t capture_depth;
	uint8_t pad3[60];

	/* 256: session thread (offline) */
	_Alignas(64) uint32_t order_done; /* order_seq that was carried out */
	uint32_t order_status;            /* RM status of the last self-gate, 0 when fine */
	uint64_t order_ns;                /* when it was done */
	uint64_t self_stops;              /* times the lease made the client stop itself */
	uint8_t pad4[40];

	/* 320: engine hook: lifecycle hint (VALVE_FEATURE_HINT) */
	_Alignas(64) uint32_t open_requests;
	uint32_t pad5;
	uint64_t hint_ns; /* last write; a stale hint (older than the lease) is not believed */
	uint64_t requests_started;
	uint64_t requests_ended;
	uint64_t useful_tokens; /* progress for the throughput SLA: each token counted once */
	uint8_t pad6[24];

	/* 384: engine hook: granted time. grant_seq rises after the rest was written; then the doorbell is rung. Only where
	 * the control page says that the owner consents. */
	_Alignas(64) uint64_t grant_until_ns; /* offline work may run until then; past: no longer */
	uint64_t step_begin_ns,
	        step_end_ns; /* of the engine's last step, with and without consent; the end is written last. Slices end `gap`
	                      * after it, whatever grant_until_ns says */
	uint32_t grant_seq;
	uint32_t pad7;

	/* 416: session thread (offline): it stops itself for the run_until_ns in until_claim, and has for until_done. A claim
	 * is written before run_until_ns is read once more: either the client finds it cleared, or valved finds the claim. */
	uint64_t until_claim, until_done;
	uint8_t pad8[16];
};

#define VALVE_SLOT_OFFSET VALVE_PAGE
#define VALVE_GAP_OFFSET  (VALVE_PAGE + VALVE_SLOTS * 64u)

#define VALVE_AT(type, field, at) _Static_assert(offsetof(struct type, field) == (at), #type "." #field)
_Static_assert(sizeof(struct valve_control) == VALVE_KV_FREE_OFFSET, "control");
_Static_assert(sizeof(struct valve_kv_free) == 32, "free handles of a GPU");
_Static_assert(VALVE_KV_FREE_OFFSET + VALVE_KV_FREE_GPUS * 32u <= VALVE_GRANT_OFFSET, "free handles end");
_Static_assert(VALVE_GRANT_OFFSET + sizeof(struct valve_grant) <= VALVE_CONTROL_BYTES, "control page");
_Static_assert(sizeof(struct valve_grant) == 64 + VALVE_GRANT_GPUS * 8u, "granted time");
_Static_assert(sizeof(struct valve_slot) == 64, "slot");
_Static_assert(sizeof(struct valve_gap) == 16, "gap");
_Static_assert(sizeof(struct valve_region) == 448, "region head");
_Static_assert(sizeof(struct valve_region) <= VALVE_PAGE, "the head fits its page");
_Static_assert(VALVE_GAPS * sizeof(struct valve_gap) <= VALVE_PAGE, "the gap ring fits its page");
VALVE_AT(valve_control, gate_epoch, 64);
VALVE_AT(valve_control, heartbeat_ns, 128);
VALVE_AT(valve_control, watch, 148);
VALVE_AT(valve_control, order, 152);
VALVE_AT(valve_control, kv_handle_bytes, 192);
VALVE_AT(valve_region, busy, 64);
VALVE_AT(valve_region, launch_ns, 72);
VALVE_AT(valve_region, idle_submitted, 128);
VALVE_AT(valve_region, gaps, 160);
VALVE_AT(valve_region, capture_depth, 192);
VALVE_AT(valve_region, order_done, 256);
VALVE_AT(valve_region, open_requests, 320);
VALVE_AT(valve_region, grant_until_ns, 384);
VALVE_AT(valve_region, until_claim, 416);
#undef VALVE_AT

#endif
