/*
 * server.h - valve-emu-server inside: the state of a Resource Manager (RM) and of UVM, and which
 * thread may touch it when.
 *
 * Two kinds of locks, never to be mixed up:
 *  - Modelled locks are the driver's own: the API lock, one write lock per client, one lock per
 * GPU. They are held while model latencies are slept, because that is what serialises callers on a
 * real node. locks.c.
 *  - `state` is ours: one mutex around every table and list below. Nothing sleeps or waits under
 * it. Order: API lock, client lock, GPU locks by index, state.
 *
 * Life of one call: connection thread (wire.c) -> ioctls.c -> alloc/control/free/dup/uvm ->
 * runlist.c for what a channel may do. Objects found under the API lock stay until it is released,
 * because whatever frees takes it to write.
 */
#ifndef VALVE_EMU_SERVER_H
#define VALVE_EMU_SERVER_H

#include "../emu.h"
#include "../guards.h"
#include "../layouts.h"
#include "../wire.h"
#include "knobs.h"
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <sys/queue.h>
#include <sys/types.h>

struct client;
struct object;
struct file;

/* Physical memory: shared by the object that allocated it, its dups, exports and UVM mappings. */
struct memory {
	uint32_t refs;
	struct gpu *gpu; /* NULL: system memory */
	uint64_t size;
	int memfd; /* -1 until a process maps the bytes */
	uint32_t serial;
};

struct channel {
	TAILQ_ENTRY(channel) link; /* in its TSG */
	struct tsg *tsg;
	struct object *object;
	struct emu_channel *slot; /* its words on the board */
	uint32_t cid, engine;
	pid_t pid;
	bool scheduled, disabled;
	bool reset;          /* torn down by a failed preemption: never runs again */
	bool uvm_registered; /* then closing its files stops it first (STOP_CHANNEL) */
};

struct tsg {
	TAILQ_ENTRY(tsg) link;     /* in its GPU */
	TAILQ_ENTRY(tsg) in_ready; /* in the queue of those that may have work */
	bool is_ready;
	TAILQ_HEAD(channels, channel) channels;
	struct gpu *gpu;
	uint32_t id, engine, refs;
	uint64_t slice_us;
	bool once_off;          /* PREEMPT: give up the rest of this slice */
	uint64_t hold_until_ns; /* the fault "late": keeps running till then although it was
	                           disabled */
};

struct gpu {
	uint32_t index;
	struct emu_gpu *board;
	pthread_mutex_t lock; /* modelled */
	pthread_t thread;
	TAILQ_HEAD(tsgs, tsg) tsgs;
	TAILQ_HEAD(ready, tsg) ready;
	struct tsg *running; /* holder of the graphics engine */
	struct tsg *leaving; /* taken off it, perhaps not stopped yet */
	uint64_t slice_start_ns;
	uint64_t slice_end_ns;      /* 0: no other TSG wants to run */
	struct tsg *last;           /* whose registers and caches the engine has */
	uint64_t cold_until_ns;     /* the one that came on is not let to work before; 0: it is */
	uint64_t stopping_since_ns; /* a switch waits for the old TSG to stop; 0: none does */
};

struct share {
	uint32_t type, target;
};

struct object {
	TAILQ_ENTRY(object) in_client; /* in order of creation */
	LIST_ENTRY(object) in_bucket;
	struct client *client;
	uint32_t handle, cls;
	struct object *parent, *depends[3];
	uint32_t users; /* children and dependants */
	struct gpu *gpu;
	struct tsg *tsg;
	struct channel *channel;
	struct memory *memory;
	struct share shares[4];
	bool doomed; /* marked by a free that is under way */
};

struct client {
	TAILQ_ENTRY(client) link;
	TAILQ_HEAD(objects, object) objects; /* the root object first */
	pthread_mutex_t lock;                /* modelled */
	struct file *file;
	uint32_t handle, next_handle;
	pid_t pid;
	uid_t uid;
};

struct mapping { /* a piece of a UVM external range that is backed or sparse */
	TAILQ_ENTRY(mapping) link;
	uint64_t base, length, offset;
	struct memory *memory; /* NULL: sparse */
};

struct range {
	TAILQ_ENTRY(range) link;
	uint64_t base, length;
	TAILQ_HEAD(mappings, mapping) mappings; /* by address */
};

struct vaspace { /* behind a uvm file */
	bool initialised;
	pid_t owner;
	uint32_t gpus, gpu_vaspaces; /* bit masks */
	TAILQ_HEAD(ranges, range) ranges;
	pthread_mutex_t lock; /* modelled: UVM's own va_space lock */
	int process;          /* pidfd of who opened it: becomes readable when that ends */
	int pages; /* connection that changes the owner's mappings, -1 when none; guarded by lock */
	uint32_t page_seq;
};

struct file { /* the driver's struct file: lives until its last fd is closed and its last call has
	         returned */
	TAILQ_ENTRY(file) link;
	LIST_ENTRY(file) in_bucket;
	uint64_t id;
	enum emu_kind kind;
	uint32_t minor, refs;
	pid_t pid;
	uid_t uid;
	int sock;
	struct file *ctl;        /* REGISTER_FD */
	struct memory **exports; /* EXPORT_OBJECT(S)_TO_FD put them here; NULL: a fresh file */
	uint32_t max_exports;
	uint8_t metadata[64];
	struct vaspace *uvm;
};

/* One ioctl on its way. Handlers fill out arg and params in place. */
struct call {
	struct emu_call head;
	struct file *file, *other;
	pid_t pid;
	uid_t uid;
	char *arg, *params;
	uint32_t params_out; /* bytes of params that go back */
	uint64_t entry_ns;
	struct emu_page_op page;
	int memfd; /* passed with the answer when page.kind is set; -1 none */
};

enum { FILE_BUCKETS = 4096 }; /* a pool of memory holds tens of thousands of files */
struct server {
	pthread_mutex_t state;
	char dir[4096];
	struct emu_board *board;
	int board_fd;
	uint32_t nonce, gpus;
	char driver[64]; /* version as the card reports it */
	uint64_t seed;
	struct gpu gpu[EMU_GPUS];
	TAILQ_HEAD(clients, client) clients;
	TAILQ_HEAD(files, file) files;
	LIST_HEAD(file_bucket, file) file_buckets[FILE_BUCKETS];
	uint64_t next_file;
	uint32_t next_client, next_cid, next_tsg, next_memory;
	uint64_t mmu_faults; /* accesses to holes */
};
extern struct server S;

/* clock.c */
void model_sleep_ns(uint64_t ns); /* model time: divided by time_scale; charged to the call */
void charge_ns(uint64_t real_ns); /* to the call that this thread serves */
uint64_t take_charges(void);      /* since the last time, real nanoseconds */
void sleep_until(uint64_t ns);    /* real time */
uint64_t model_to_real_ns(uint64_t ns);

/* futex.c: words shared with other processes */
void futex_wake(uint32_t *word);
/* Returns when *word != seen, on a wake, or at the deadline (0: none). May return early. */
void futex_wait(uint32_t *word, uint32_t seen, uint64_t deadline_ns);
#define load(p)     __atomic_load_n((p), __ATOMIC_SEQ_CST)
#define store(p, v) __atomic_store_n((p), (v), __ATOMIC_SEQ_CST)
#define bump(p)     (void)__atomic_add_fetch((p), 1, __ATOMIC_SEQ_CST)

/* locks.c */
enum api_mode { API_READ, API_WRITE };
struct scope {
	struct client *client;
	uint32_t gpus;    /* bit mask of GPU locks held */
	uint64_t debt_ns; /* model time that taking them cost and that was not slept yet */
};
void locks_init(void);
void locks_write(FILE *out); /* the API lock, as JSON */
struct scope api_enter(enum api_mode mode);
void client_enter(struct scope *s, struct client *c);
void gpus_enter(struct scope *s, uint32_t mask);
void scope_sleep(struct scope *s, uint64_t ns); /* model time, with what the locks cost */
void scope_leave(struct scope *s);
#define SCOPED __attribute__((cleanup(scope_leave))) /* left when the block ends */
uint32_t all_gpus(void);
void state_lock(void);
void state_unlock(void);

/* object.c */
struct object *find_object(uint32_t h_client, uint32_t handle);
struct client *find_client(uint32_t h_client);
uint32_t client_new(const struct call *c, uint32_t wanted, struct client **out);
uint32_t object_new(struct client *c, uint32_t *handle, uint32_t cls, struct object *parent,
                    struct object **out);
void object_depends(struct object *o, struct object *on);
void object_free(struct object *o); /* with descendants and dependants; state held */
bool file_may_use(const struct file *f, const struct client *c);

/* memory.c */
struct memory *memory_new(struct gpu *gpu, uint64_t size);
void memory_put(struct memory *m);
int memory_fd(struct memory *m); /* a dup for the caller to close, or -1 */

/* files.c */
/* The caller has a reference of its own to put. */
struct file *file_new(enum emu_kind kind, uint32_t minor, int sock, pid_t pid, uid_t uid);
struct file *file_get(uint64_t id); /* takes a reference; NULL when unknown */
void file_put(struct file *f);
void files_watch(void); /* never returns: notices hang-ups */
int files_init(void);

/* ioctls.c */
int driver_ioctl(struct call *c); /* 0 or errno */

/* alloc.c, free.c, dup.c, control.c, uvm.c: each one entry point per escape */
uint32_t rm_alloc(struct call *c, struct nvos64_alloc *a);
uint32_t rm_free(struct call *c, struct nvos00_free *a);
uint32_t rm_dup(struct call *c, struct nvos55_dup *a);
uint32_t rm_share(struct call *c, struct nvos57_share *a);
uint32_t rm_control(struct call *c, struct nvos54_control *a);
int uvm_ioctl(struct call *c);
void uvm_release(struct file *f);
bool uvm_knows_gpu(const struct vaspace *v, const uint8_t *uuid, bool with_vaspace); /* registered */
/* uvm_range.c: the mapping ioctls */
uint32_t range_create(struct call *c);
uint32_t range_free(struct call *c);
uint32_t range_map(struct call *c);
uint32_t range_unmap(struct call *c);
uint32_t range_sparse(struct call *c);
void ranges_drop(struct vaspace *v);
bool may_dup(const struct object *o, const struct client *to);

/* A control command under way, as its handler sees it. All locks of its table row are held, `state`
 * is not. */
struct control {
	struct call *call;
	struct client *client;
	struct object *object;
	void *params;
	uint32_t size;
	uint64_t locked_ns; /* when the last lock was taken */
	uint64_t model_ns;  /* model time since then: when the firmware got to work */
};
uint32_t fifo_disable_channels(struct control *k);
uint32_t fifo_channel_ids(struct control *k);
uint32_t fifo_group_info(struct control *k);
uint32_t tsg_schedule(struct control *k);
uint32_t channel_schedule(struct control *k);
uint32_t tsg_bind(struct control *k);
uint32_t tsg_set_timeslice(struct control *k);
uint32_t tsg_get_timeslice(struct control *k);
uint32_t tsg_preempt(struct control *k);
uint32_t channel_stop(struct control *k);
uint32_t work_submit_token(struct control *k);
uint32_t export_object(struct control *k);
uint32_t import_object(struct control *k);
uint32_t export_objects(struct control *k);
uint32_t import_objects(struct control *k);
uint32_t export_info(struct control *k);
void exports_drop(struct file *f); /* state held */

/* runlist.c; state held unless said */
int runlists_start(void); /* state not held */
struct tsg *tsg_new(struct gpu *g, uint32_t engine);
void tsg_put(struct tsg *t);
void runlist_ready(struct tsg *t); /* one of its channels may have become able to run */

/* channel.c; state held unless said */
struct channel *channel_of_slot(uint32_t slot); /* NULL: free */
bool channel_may_run(const struct channel *c);
void channel_give(struct channel *c);
void channel_take(struct channel *c);
/* Whether it executes no more; waited_ns counts from the start of the caller's wait. */
bool channel_stopped(struct channel *c, uint64_t waited_ns);
struct channel *channel_new(struct tsg *t, struct object *o, uint32_t engine, pid_t pid);
void channel_gone(struct channel *c);
/* Followed by one runlist_poke() for all that were set. */
void channel_set(struct channel *c, bool scheduled, bool disabled, bool revoke);
void runlist_poke(struct gpu *g);
/* Waits, without state, until none of them executes; false: one did not stop in time and was reset.
 */
bool channels_wait_stopped(struct channel **list, uint32_t n);
void gpu_lose(struct gpu *g);

/* uvm.c: what closing a file does to channels that UVM knows (STOP_CHANNEL, bImmediate = 0) */
void stop_channels_of_file(const struct file *f);
void stop_channels_of_process(pid_t pid);

/* journal.c: counters, the disable/enable log, the kernel log */
enum tally { TALLY_CONTROL, TALLY_CLASS, TALLY_ESCAPE, TALLY_UVM, TALLY_KINDS };
void tally_unknown(enum tally kind, uint32_t number);
struct gate_entry {
	uint64_t entry_ns, locked_ns, stopped_ns, done_ns;
	uint32_t gpu, on, channels, status, client;
	pid_t pid;
};
void journal_gate(const struct gate_entry *e);
void journal_write(FILE *out);
void kernel_log(const char *format, ...) __attribute__((format(printf, 1, 2)));
void xid(const struct gpu *g, uint32_t number, pid_t pid, const char *text);

/* snapshot.c */
void snapshot_json(FILE *out);
void snapshot_procs(FILE *out);

/* faults.c */
struct fault_hit {
	bool silent;     /* answer OK, do nothing */
	bool has_status; /* answer status, do nothing */
	uint32_t status;
	uint64_t late_ns; /* answer this long before the effect */
};
struct fault_hit fault_at(const char *event, const struct call *c, struct gpu *g);
const char *fault_add(const char *line); /* NULL or what is wrong */
void faults_clear(void);
void faults_release(void);  /* calls that stand at a "hold" go on */
uint32_t faults_held(void); /* how many stand there */

/* admin.c, wire.c */
void admin_serve(int fd);
void calls_serve(int fd, pid_t pid, uid_t uid);
void *connection_thread(void *fd);
void driver_text(char out[64]); /* the version, as of now */
const char *setting(const char *name,
                    const char *value); /* a knob or the driver version; NULL or what is wrong */
void board_follow_knobs(void);
int proc_files_write(void);
bool process_gone(pid_t pid);
bool process_stands(pid_t pid);                                    /* stopped by a signal */
int send_with_fd(int sock, const void *data, size_t size, int fd); /* fd -1: none; 0 or -1 */

#endif
