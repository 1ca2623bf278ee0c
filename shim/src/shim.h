/*
 * shim.h - what the parts of the shim share. One process, one `struct valve_shim`, three kinds of memory:
 *
 *   valve_pages   the page that launches read, client region, control page. Zero bytes of our own until valved answered,
 *                 then its two memfds mapped over the same addresses. So the hot path reads a constant address, and a
 *                 daemon that comes, goes or is replaced never moves a word under a launching thread. Launches read the
 *                 control page, or one of our own (link/pages.c).
 *   valve_tls     this thread's counter slot and re-entry guard (initial-exec: one instruction away)
 *   valve_shim    everything else
 *
 * Threads: the application's own; `session` (link/link.c, link/session.c) once the process opened nvidiactl; `watcher` (watcher.c)
 * once an online process has a CUDA context. Lock order: capture (rm map) before link before nothing; probe (contexts)
 * alone. Nothing here allocates from the application's heap.
 */
#ifndef VALVE_SHIM_H
#define VALVE_SHIM_H

/* The hooks define open() and ioctl() by name: no large-file renaming, no fortified twins (they need a new glibc). */
#if !defined(_GNU_SOURCE) || defined(_FILE_OFFSET_BITS) || _FORTIFY_SOURCE > 0
#error "compile with the flags of shim/meson.build"
#endif

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "atomics.h"
#include "cuda.h"
#include "hooks.h"
#include "link.h"
#include "ownfd.h"
#include "packet.h"
#include "region.h"

#define VALVE_EXPORT           __attribute__((visibility("default")))
#define VALVE_HIDDEN           __attribute__((visibility("hidden")))
#define VALVE_TRAMPOLINE_BYTES 64u /* of the pool in trampoline.S */
#pragma GCC visibility push(hidden)

/* ---- per thread ---- */
struct valve_tls {
	/* First two: the trampolines read them. One is set once the thread has counted, never both. */
	struct valve_slot *slot;   /* counted with a plain add: valved fences for us */
	struct valve_slot *fenced; /* counted with the lock prefix */
	uint32_t inside;           /* > 0: a hook of ours runs on this thread, nested ones pass through */
	uint32_t kv_depth;         /* > 0: between valve_kv_begin and valve_kv_end */
	uint32_t kv_flags;         /* of the ranges made there */
	uint32_t kv_asked;         /* allocations there, of any size */
	uint32_t pool_depth;       /* > 0: what this thread allocates valved has decided on */
};
_Static_assert(offsetof(struct valve_tls, fenced) == 8, "trampoline.S");
extern _Thread_local struct valve_tls valve_tls __attribute__((tls_model("initial-exec")));

/* ---- the shared pages ---- */
#define VALVE_PAGES_BYTES (2 * VALVE_CONTROL_BYTES + VALVE_REGION_BYTES)
extern unsigned char valve_pages[VALVE_PAGES_BYTES];
#define VALVE_REGION       ((struct valve_region *)(void *)(valve_pages + VALVE_CONTROL_BYTES))
#define VALVE_CONTROL_PAGE (valve_pages + VALVE_CONTROL_BYTES + VALVE_REGION_BYTES)
#define VALVE_LAUNCH       ((const volatile struct valve_control *)(const void *)valve_pages)
#define VALVE_CONTROL      ((const volatile struct valve_control *)(const void *)VALVE_CONTROL_PAGE)

/* ---- entries of interposed names: trampoline.S lays them out, so its offsets are checked below ---- */
struct valve_entry {
	void *real;       /* where the trampoline jumps; valve_slow until the first call */
	const char *name; /* exported name; NULL in the pools */
	void *handler;    /* observers only: runs instead of the real call and calls it itself */
	void *target;     /* the real call, also while `real` is a detour (valve_ptds_detour) */
};
_Static_assert(sizeof(struct valve_entry) == 32, "trampoline.S");
typedef CUresult (*valve_call)(uintptr_t, uintptr_t, uintptr_t, uintptr_t, uintptr_t, uintptr_t);
typedef CUresult (*valve_handler)(uintptr_t, uintptr_t, uintptr_t, uintptr_t, uintptr_t, uintptr_t,
                                  struct valve_entry *);

/* ---- locks: a word each, so that a forked child can reset them ---- */
struct valve_lock {
	uint32_t word; /* 0 free, 1 held, 2 held and waited for. Futex word */
};
void valve_lock(struct valve_lock *lock);
void valve_unlock(struct valve_lock *lock);
void valve_lock_reset(struct valve_lock *lock); /* in a forked child: the thread that held it is not there */

/* ---- the shim's state ---- */
enum valve_state {
	VALVE_STATE_NEW,      /* nvidiactl never opened: nothing exists */
	VALVE_STATE_UNLINKED, /* no daemon: everything passes through, the session tries again */
	VALVE_STATE_LINKED,   /* registered */
	VALVE_STATE_OFF,      /* another version, or something failed for good: pass through for ever */
};

struct valve_reply {
	uint32_t seq;  /* 0: free */
	uint32_t done; /* 1: answered, 2: the link broke. Futex word */
	uint32_t status;
};

#define VALVE_REPLIES 32 /* threads that may wait for an answer at once */

struct valve_shim {
	/* First, because trampoline.S sets it: work may be in streams that cannot be queried. */
	uint32_t ptds;
	uint32_t unknown_capture; /* set there, too: a capture may be open of which we never learn the end */
	uint32_t state;           /* valve_state */
	uint32_t role;            /* valve_role that valved gave */
	uint32_t daemon_features; /* valve_feature bits */
	uint32_t driver;          /* as in valve_link_hello */
	uint32_t pid;     /* the process that registered: a vfork child shares this memory and is not it */
	uint32_t session; /* its thread, 0: none. Our descriptors are in its table */
	uint32_t leaving; /* it is to end for a while (alone.c). Futex word */
	struct valve_own_fd own[VALVE_OWNS];
	uint32_t link_generation; /* rises with every valved that took us */
	uint32_t next_seq;
	uint32_t next_slot;
	uint32_t must_fence; /* this daemon or this kernel knows no VALVE_FEATURE_PLAIN_COUNT */
	uint32_t can_membarrier;
	uint32_t watcher_runs;
	uint32_t telling; /* threads that do: what one has chosen counts as told, and may not be sent yet */
	uint32_t untold;  /* valved's socket was full: the session tells the rest */
	uint32_t self_stopped; /* path C holds our channels off, also those still to come */
	uint32_t stopping;     /* the process exits: the watcher leaves the driver alone */
	uint64_t clock_ns;     /* what our clock lacks to valved's (link.c); 0: they are one */
	struct valve_reply reply[VALVE_REPLIES];
	struct valve_lock link_lock;    /* own, replies, sending */
	struct valve_lock capture_lock; /* the rm map */
	struct valve_lock probe_lock;   /* contexts, streams, capture depth */
	struct valve_lock entry_lock;   /* pools of trampolines */
	struct valve_lock note_lock;    /* notes */
	struct valve_lock gate_lock;    /* path C's buffer; taken before capture_lock */
};
extern struct valve_shim valve_shim;
_Static_assert(offsetof(struct valve_shim, unknown_capture) == 4, "trampoline.S");

/* CLOCK_MONOTONIC, as valved reads it. */
static inline uint64_t now_ns(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec +
	       load_relaxed(&valve_shim.clock_ns);
}

static inline bool valve_is_linked(void)
{
	return load_acquire(&valve_shim.state) == VALVE_STATE_LINKED;
}

static inline bool valve_is_offline(void)
{
	return load_relaxed(&valve_shim.role) == VALVE_ROLE_OFFLINE;
}

/* trampoline.S */
void valve_slow(void);
void valve_ptds_detour(void);
void valve_capture_detour(void);
extern unsigned char valve_trampolines_begin[], valve_trampolines_end[];
extern struct valve_entry valve_pool_entries[];
extern unsigned char valve_pool_submit[], valve_pool_observe[];

/* interpose.c */
void *valve_real_symbol(const char *name); /* in the real libcuda, whatever the scope; NULL when absent */
void *valve_next(const char *name);        /* RTLD_NEXT */

/* A detached thread; no signal sent to the process wakes it. */
#define VALVE_STACK_LEAST (1u << 20)
#define VALVE_STACK_MOST  (8u << 20)
int valve_spawn(void *(*run)(void *), size_t most);

void *valve_bind(struct valve_entry *entry, void *real,
                 bool ptds); /* returns where the trampoline jumps now */
bool valve_has_ptds_suffix(const char *name);
bool valve_is_secure(void);

/* hooks/child.c */
void valve_after_fork(void); /* in the child */
void valve_heed_child(void); /* the same, where no handler of ours ran */
bool valve_is_child(void);   /* also of vfork(). Asks nothing that a signal handler may not */
bool valve_begin_process(
        void); /* before the driver's file is watched; false: a vfork child, whose memory is not its own */

/* activity.c */
void *valve_launch_slow(struct valve_entry *entry); /* from the trampolines: returns where to jump */
void valve_ring(void);
void valve_speak_for_the_past(void);
uint64_t valve_submitted(void);
void valve_wake_watcher(void);

/* getproc.c and contexts.c: observers, one per base name of VALVE_OBSERVE_BASES */
CUresult valve_observe(uintptr_t, uintptr_t, uintptr_t, uintptr_t, uintptr_t, uintptr_t,
                       struct valve_entry *);
#define VALVE_DECLARE_OBSERVER(twin, base)                                                         \
	CUresult valve_on_##base(uintptr_t, uintptr_t, uintptr_t, uintptr_t, uintptr_t, uintptr_t, \
	                         struct valve_entry *);
VALVE_OBSERVE_BASES(VALVE_DECLARE_OBSERVER)
#undef VALVE_DECLARE_OBSERVER
void valve_contexts_reset(void);

/* alloc.c: KV memory; the rest of it is in memory.h */
void valve_memory_forget(CUcontext context, int device, bool is_gone);
void valve_memory_reset(void);
void valve_orders_wake(void);
bool valve_orders_left_no_hole(void);
bool valve_announce_is_waiting(void);
bool valve_announce_is_behind(void);
valve_link_handler valve_orders_take;      /* KV_ORDER */
valve_link_handler valve_orders_take_runs; /* KV_RUNS */

/* link/until.c: the session's thread alone */
bool valve_until_stands(void);
void valve_until_forget(void);
uint64_t valve_until_rest_ns(uint64_t most_ns);
void valve_until_check(bool released, bool *stopped);

/* link/ending.c */
void valve_ending_watch(void);          /* the session's thread, again and again */
void valve_ending_answer(uint32_t seq); /* valved has answered that request */
void valve_ending_reset(void);          /* in a forked child */

/* link/orphan.c */
void valve_orphan_check(uint64_t lost_ns);

/* link/pages.c */
int valve_map_pages(int control_fd, int region_fd, uint32_t role);
void valve_map_private(uint32_t gate, uint32_t order); /* the daemon's control page gives way to our own */
void valve_map_fresh(void);                            /* all pages, zero: a forked child */
uint64_t valve_kept_bytes(const uint8_t *gpu_uuid);    /* what must stay free there for online work */
const volatile struct valve_kv_free *valve_kv_free_of(const uint8_t *gpu_uuid); /* NULL: not told */
bool valve_launches_wait(void);   /* by the page that they read */
bool valve_launches_kept(void);   /* a hold that a valved before this one had ordered */
void valve_launches_hold(void);   /* until a valved has spoken */
void valve_launches_follow(void); /* this valved has spoken */

/* link.c: the socket. All but valve_link_request never block */
enum valve_link_refusal {
	VALVE_LINK_NOT_NOW = 1, /* refused as things are: a mode, a quota, a claim may change */
	VALVE_LINK_NO_ROOM,     /* it would be taken, if valved had room for it */
	VALVE_LINK_NEVER,       /* this valved speaks another version */
};
/* HELLO, WELCOME, map the pages. 0, valve_link_refusal, or -errno: no valved to be had now */
int valve_link_connect(uint32_t wanted_role, int timeout_ms);
bool valve_link_would_take(int err);
int valve_link_send(void *message, uint32_t bytes, uint16_t type, int fd);
int valve_link_send_fds(void *message, uint32_t bytes, uint16_t type, const int *fds, uint32_t count,
                        uint32_t generation);
int valve_link_request(void *message, uint32_t bytes, uint16_t type, int fd, int timeout_ms);
int valve_link_request_fds(void *message, uint32_t bytes, uint16_t type, const int *fds, uint32_t count,
                           int timeout_ms, const uint32_t *progress);
/* By number alone (link.h): the caller may close them when this returns */
int valve_link_lend(void *message, uint32_t bytes, uint16_t type, const int *fds, uint32_t count,
                    uint32_t generation);
int valve_link_post(int link, void *message, uint32_t bytes, const int *fds, uint32_t count, bool is_kept);
void valve_link_head(struct valve_link_header *header, uint32_t bytes, uint16_t type);
void valve_link_answer(uint32_t seq, uint32_t done, uint32_t status);
int valve_milliseconds_left(uint64_t deadline_ns);
int valve_link_receive(void); /* session: everything that has come; -errno when the link is no more */
void valve_link_drop(void);
void valve_link_handle(uint16_t type, valve_link_handler *handler);

/* note.c */
void valve_note(uint32_t code, uint32_t h_client, uint32_t h_channel, const char *text);
void valve_note_flush(void);
void valve_note_reset(void);

/* link/session.c */
void valve_register(void);       /* the process opened nvidiactl */
void *valve_keep(void *unused);  /* the session's thread */
bool valve_session_leaves(void); /* alone.c: the session's thread asks */
int valve_alone_spawn(void);     /* alone.c: makes the session's thread, which has begun when this returns */
void valve_alone_begin(void);    /* alone.c: the session's thread is here */
void valve_alone_give_up(void);  /* alone.c: it could not begin */
void valve_alone_find(void);

/* capture.c: exported hooks that no header declares without large-file renaming, and the ioctl below them */
VALVE_EXPORT int open64(const char *path, int flags, ...);
VALVE_EXPORT int openat64(int folder, const char *path, int flags, ...);
VALVE_EXPORT int __open_2(const char *path, int flags);
VALVE_EXPORT int __open64_2(const char *path, int flags);
VALVE_EXPORT int ioctl(int fd, unsigned long request, ...);

bool valve_capture_find(void); /* the real calls behind the hooks; closing.c likewise */
bool valve_closing_find(void);
int valve_capture_uvm_fd(void); /* the file on which channels were registered; -1: none */

/* report.c */
void valve_capture_report(bool wait); /* tells valved what it does not know yet */
bool valve_capture_is_told(void);     /* valved was sent all of it */
void valve_capture_forget_reports(void);
int valve_capture_tell_ran(void);     /* of each RM client: its channels may have run after a gate */
valve_link_handler valve_capture_ack; /* ACK: valved may ask for the fds of our RM clients (path B) */
void valve_capture_reset(void);
bool valve_capture_has_channels(void);

/* selfgate.c: path C. Returns the RM status of the worst call, 0 when all is well */
enum valve_gate_set { VALVE_GATE_HELD, VALVE_GATE_ALL };
uint32_t valve_self_gate(bool disable, enum valve_gate_set set);
void valve_self_gate_join(void);
void valve_self_gate_hand_over(void);
uint32_t valve_self_gate_owes(void);   /* so many passes in a row missed something; 0: nothing is owed */
uint64_t valve_self_gate_due_ns(void); /* when it is worth another one; UINT64_MAX: nothing is owed */
void valve_self_gate_reset(void);

/* watcher.c */
void valve_watcher_start(void);

/* hint.c */
void valve_hint_renew(uint64_t now);
void valve_hint_reset_child(void);

/* say.c */
void valve_say(const char *text); /* one line on stderr, once per text */
void valve_say_start(void);
void valve_say_follow(void); /* the program has made another file stderr */
void valve_say_reset_child(void);

#pragma GCC visibility pop
#endif
