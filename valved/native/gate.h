/*
 * gate.h - what Python may ask of the native gate. Also the text that cffi reads (build.py drops the lines that
 * start with #), so it holds declarations only.
 *
 * Every function here is called from valved's one Python thread, and but for the pure ones and valve_client_view by no
 * native thread. Functions that return int give 0, a positive RM status (proto/abi/nvrm.h), or -errno.
 */
#ifndef VALVE_NATIVE_GATE_H
#define VALVE_NATIVE_GATE_H

#include <stdint.h>

/* The machine, as a table: tests put a fake driver here. NULL entries mean the real call. */
struct valve_os {
	int (*open)(const char *path, int flags);
	int (*ioctl)(int fd, unsigned long request, void *argument);
	void (*between)(int point); /* called at valve_point, so that a test can act exactly there */
};

enum valve_point {
	VALVE_POINT_WAKE_OPENED = 1, /* wake: words are open, counters not yet re-read */
	VALVE_POINT_WAKE_PROVEN = 2, /* wake: all clients were idle, the hold not yet dropped */
	VALVE_POINT_ENABLING = 3,    /* issuer: about to enable, the driver not yet called */
	VALVE_POINT_MAIL = 4,        /* issuer: about to carry out a mail, and through with it */
	VALVE_POINT_HOLDING = 5,     /* hold: the words are closed, half of its cause is written */
	VALVE_POINT_COUNTING = 6,    /* hold: a GPU's holders were read, and are not changed */
};

struct valve_config {
	uint64_t lease_ns; /* control.lease_ns; the heartbeat is written every fifth of it */
	uint64_t hang_ns;  /* a disable that takes longer is reported and the next rung used */
	uint64_t order_ns; /* how long an in-process order may take */
	uint64_t loop_ns;  /* the caller silent for longer (valve_gate_alive): every GPU is held. 0: never */
	uint64_t spin_ns;  /* listener and issuers spin this long after their last work; 0: sleep mode */
	uint32_t quiet_us; /* control.quiet_us */
	uint32_t fifo_priority; /* SCHED_FIFO where permitted; 0: niceness */
};

struct valve_gpu_info {
	uint32_t minor, gpu_id, device_instance;
	uint32_t domain, bus, slot;
	uint8_t uuid[16];
	int32_t status; /* 0: own RM client is open. Else why not: this GPU cannot be reached from here */
};

enum valve_stamp_kind {
	VALVE_STAMP_GATE = 1,
	VALVE_STAMP_HOLD = 2,
	VALVE_STAMP_WAKE = 3,
	VALVE_STAMP_WAKE_REFUSED = 4,
	VALVE_STAMP_GATE_FAILED = 5,
	VALVE_STAMP_LEARN = 6, /* there are gaps to learn from before this service may be woken */
};

struct valve_stamp {
	uint64_t service, client;
	uint64_t launch_ns, seen_ns, ioctl_ns, done_ns;
	uint32_t kind, gpu, epoch;
	uint32_t channels; /* WAKE: open requests that were not believed */
	int32_t status;    /* WAKE: valve_wake_reason */
	uint32_t cause;    /* GATE and HOLD: valve_cause */
	/* GATE, HOLD and WAKE: what the service's one client that tells of requests had counted then. teller 0: there
	 * is none, or more than one. */
	uint64_t teller, requests_started, requests_ended;
};

/* Why a hold was taken. */
enum valve_cause {
	VALVE_CAUSE_ASKED = 0,        /* by the caller */
	VALVE_CAUSE_RING = 1,         /* a launch */
	VALVE_CAUSE_GRANT_END = 2,    /* a grant ended as it was to */
	VALVE_CAUSE_GRANT_BROKEN = 3, /* a launch fell into a grant */
};

/* What a service has granted so far. */
struct valve_grants {
	uint64_t grants, broken, granted_ns;
	uint64_t until_ns;    /* of the one that is open; 0: none */
	uint64_t answers[11]; /* by valve_grant_answer of region.h */
};

struct valve_gap_view {
	uint64_t end_ns, gap_ns;
};

struct valve_view {
	uint64_t submitted, idle_submitted, idle_ns, launch_ns, rings, watcher_ns;
	uint64_t hint_ns, requests_started, requests_ended, useful_tokens, self_stops;
	uint32_t busy, open_requests, order_done, order_status, features;
	uint32_t filled;    /* its client has written there: the rest means something */
	uint32_t gap_count; /* of the entries below: new ones since the last look */
	struct valve_gap_view gaps[64];
};

enum valve_reach {
	VALVE_REACH_OWN = 0,  /* valved's own RM client names the workload's channels */
	VALVE_REACH_FD = 1,   /* the same call on the workload's passed nvidiactl fd */
	VALVE_REACH_SELF = 2, /* order STOP: the shim switches its own channels */
	VALVE_REACH_HOLD = 3, /* order HOLD: the shim holds launches */
};

/* One channel to arm. Entries of one plan come sorted by (reach, apart, keep_off, client, h_target). */
struct valve_entry {
	struct valve_client *client;
	uint32_t reach;
	uint32_t h_client, h_channel;
	int32_t fd;                     /* VALVE_REACH_FD: the passed fd; else -1 */
	uint32_t h_target, h_subdevice; /* VALVE_REACH_FD: whose name the call is made in; else 0 */
	uint32_t keep_off;              /* 1: a stop includes it, a run does not (rungs OWN and FD) */
	uint32_t apart;                 /* 1: no list has it together with channels of another client */
};

/* A channel that has ended, by the driver's word; whose it was, and the plan that named it. */
struct valve_gone {
	uint64_t client;
	uint32_t h_client, h_channel, plan;
};

enum valve_gpu_state {
	VALVE_GPU_RUNNING = 0,
	VALVE_GPU_WATCHED = 1, /* held, but valve_gate_let keeps the channels on */
	VALVE_GPU_STOPPED = 2,
	VALVE_GPU_STOPPING = 3, /* the issuer is walking */
	VALVE_GPU_ENABLING = 4, /* the issuer walks back, or could not and will again: anything may run */
	VALVE_GPU_FAILED = 5,   /* should be stopped and is not, or not for sure: tried again and again */
};

/* What left a plan (valve_arm): none of it was off, some may be, or that is told later. */
enum valve_was {
	VALVE_WAS_ON = 0,
	VALVE_WAS_OFF = 1,
	VALVE_WAS_UNKNOWN = 2,
};

/* What the ordinary wake decision rests on: valved/policy/wake.py, WakeSettings, and what Python knows of the service. */
struct valve_wake_rule {
	uint64_t cooldown_ns;
	uint64_t learn_ns;         /* a longer gap inside a hold must be learned from first */
	uint64_t watch_since_ns;   /* its watchers were asked to watch */
	uint64_t looking_since_ns; /* not looked at before then: earlier gaps prove nothing */
	uint64_t watcher_lease_ns, dead_look_ns, hint_lease_ns, refused_backoff_ns, leak_ns, leak_cooldowns;
	uint64_t look_share, look_least_ns, look_most_ns;
};

enum valve_wake_action { VALVE_WAKE_HOLD = 0, VALVE_WAKE_WAIT = 1, VALVE_WAKE_NOW = 2 };

enum valve_wake_reason {
	VALVE_WAKE_NONE = 0, /* not looked at yet */
	VALVE_WAKE_NO_OPEN_REQUESTS = 1,
	VALVE_WAKE_COOLDOWN_OVER = 2,
	VALVE_WAKE_COOLING = 3,
	VALVE_WAKE_REFUSED_LATELY = 4,
	VALVE_WAKE_BUSY = 5,
	VALVE_WAKE_OPEN_REQUESTS = 6,
	VALVE_WAKE_WATCHER_DEAD = 7,
};

struct valve_wake_state {
	uint64_t blocked_until_ns, leaked;
	uint32_t refusals, pad0;
};

/* One look at a service that holds its GPUs, summed up. */
struct valve_wake_seen {
	uint64_t held_since_ns, quiet_since_ns, open;
	uint32_t busy, silent; /* launchers without a proof, and without a watcher */
	uint32_t fresh, stale; /* reports of open requests */
};

struct valve_wake_decision {
	uint64_t look_again_ns, quiet_ns, leaked;
	uint32_t action, reason, hinted, stale_hints;
};

struct valve_look {
	uint64_t quiet_ns, leaked;
	uint32_t holds, action, reason, hinted;
};

enum valve_wake_outcome { VALVE_WOKEN = 0, VALVE_WAKE_REFUSED = 1, VALVE_NOT_HOLDING = 2 };

struct valve_gate *valve_gate_open(const struct valve_config *config, const struct valve_os *os);
int valve_gate_close(struct valve_gate *gate);
const char *valve_gate_version(struct valve_gate *gate);
const char *valve_gate_refusal(struct valve_gate *gate);
int valve_gate_orders(struct valve_gate *gate);
uint32_t valve_gate_gpus(struct valve_gate *gate, struct valve_gpu_info *out, uint32_t max);
void valve_gate_alive(struct valve_gate *gate); /* the caller's loop turns; arms the watch over it */
void valve_gate_let(struct valve_gate *gate, uint32_t mask); /* GPUs that are on though they are held */
uint32_t valve_gate_settle(struct valve_gate *gate, uint64_t timeout_ns);
int valve_stamps_fd(struct valve_gate *gate);
uint32_t valve_stamps_lost(struct valve_gate *gate); /* so far, because the ring was full */
uint32_t valve_stamps_take(struct valve_gate *gate, struct valve_stamp *out, uint32_t max);

int32_t valve_service_new(struct valve_gate *gate, uint64_t id);
void valve_service_free(struct valve_gate *gate, int32_t service);
void valve_service_gpus(struct valve_gate *gate, int32_t service, uint32_t mask);
int valve_hold(struct valve_gate *gate, int32_t service);
int valve_wake(struct valve_gate *gate, int32_t service);
void valve_service_permit(struct valve_gate *gate, int32_t service, const struct valve_wake_rule *rule);
void valve_service_look(struct valve_gate *gate, int32_t service, struct valve_look *out);
void valve_service_consent(struct valve_gate *gate, int32_t service, uint64_t most_ns, uint64_t rest_ns);
void valve_service_grants(struct valve_gate *gate, int32_t service, struct valve_grants *out);
void valve_gate_grantable(struct valve_gate *gate, uint32_t mask);
void valve_gate_sliceable(struct valve_gate *gate, uint32_t on, uint32_t mask);
/* The slice of a channel group (h_tsg) in the name of its own RM client, on its passed file; 0: it is so now, by the driver's word. */
int valve_gpu_slice(struct valve_gate *gate, uint32_t gpu, struct valve_client *client, int fd,
                    uint32_t h_client, uint32_t h_tsg, uint32_t us);
void valve_gate_prompt(struct valve_gate *gate, uint32_t prompt);
/* Pure: any thread may ask. */
void valve_wake_begin(struct valve_wake_seen *seen, uint64_t held_since_ns);
void valve_wake_launcher(struct valve_wake_seen *seen, const struct valve_wake_rule *rule, uint64_t now,
                         uint32_t is_idle, uint64_t idle_ns, uint64_t heard_ns);
void valve_wake_hint(struct valve_wake_seen *seen, const struct valve_wake_rule *rule, uint64_t now,
                     uint64_t open, uint64_t hint_ns);
void valve_wake_decide(struct valve_wake_state *state, const struct valve_wake_seen *seen,
                       const struct valve_wake_rule *rule, uint64_t now, struct valve_wake_decision *out);
void valve_wake_refused(struct valve_wake_state *state, const struct valve_wake_rule *rule, uint64_t now);

struct valve_client *valve_client_new(struct valve_gate *gate, uint64_t id, uint32_t role, int32_t service,
                                      uint64_t service_id, int control, int region, int doorbell, int order);
/* It is no client any more. Its passed files stay until it is freed. Precondition: it is offline. */
void valve_client_part(struct valve_gate *gate, struct valve_client *client);
void valve_client_free(struct valve_gate *gate, struct valve_client *client);
int valve_client_take_fd(struct valve_client *client, int fd);
int valve_client_view(struct valve_client *client, struct valve_view *out, uint32_t with_gaps);
void valve_client_leaves(struct valve_client *client, uint32_t lives_on); /* its ends stand then */
void valve_client_hints(struct valve_client *client, uint32_t on);
void valve_client_offer(struct valve_client *client, uint32_t consented, uint64_t tpot_ns, uint64_t gap_ns,
                        uint32_t by_slices);
void valve_client_step(const struct valve_client *client, uint64_t *begin_ns, uint64_t *end_ns);
void valve_client_watch(struct valve_client *client, uint32_t on);
void valve_client_online(struct valve_client *client, uint32_t on);
void valve_client_memory(struct valve_client *client, uint64_t handle_bytes, uint64_t budget_bytes,
                         uint64_t size_rule);
void valve_client_kv_free(struct valve_client *client, uint32_t index, const uint8_t *gpu_uuid,
                          uint64_t bytes, uint64_t keep_bytes);
void valve_client_hold(struct valve_client *client, uint32_t on);
/* Whoever gives it an order rings. Before its first channel. */
void valve_client_at_once(struct valve_client *client, uint32_t on);

uint32_t valve_gpu_state(struct valve_gate *gate, uint32_t gpu);
uint32_t valve_gpu_gated(struct valve_gate *gate, uint32_t gpu);
uint32_t valve_gate_turning(struct valve_gate *gate);
void valve_gpu_run_again(struct valve_gate *gate, uint32_t gpu);
void valve_gpu_stop_again(struct valve_gate *gate, uint32_t gpu);
int valve_gpu_cid(struct valve_gate *gate, uint32_t gpu, uint32_t h_client, uint32_t h_channel,
                  uint32_t *cid);
int valve_gpu_try(struct valve_gate *gate, uint32_t gpu, const struct valve_entry *entry);
/* `unless_held`: -EBUSY, and nothing is done, while a service holds the GPU. The issuer looks, so no stop comes
 * between. */
int valve_gpu_enable(struct valve_gate *gate, uint32_t gpu, const struct valve_entry *entry,
                     uint32_t unless_held);
/*
 * Knows no gate. A way into the memory of the process behind `fd`, with a thread of its own that waits in the driver. The
 * thread owns the descriptor and closes it as its last act; `bell`, an eventfd that is readable when answers wait, is the
 * door's, too. NULL: there is no thread for it, and both are still the caller's.
 */
struct valve_door *valve_door_open(int fd, int bell, const uint8_t *uuid);
/* Have `count` runs (pairs of address and bytes) made sparse, behind what was asked before. 0 or -ENOMEM. */
int valve_door_ask(struct valve_door *door, const uint64_t *runs, uint32_t count);
/* The next answer, in their order: 1, and *status is 0, an RM status or -errno; *done: runs made. 0: none waits. */
int valve_door_answer(struct valve_door *door, int *status, uint32_t *done, uint64_t *took_ns);
void valve_door_close(struct valve_door *door); /* once what was asked is done; no answer is waited for */
/* Knows no gate. Connections that wait at a non-blocking listener: of each its descriptor, the pid and the uid of who made it.
 * How many, or -errno where there are some and no descriptor for the first. */
int valve_knocks_take(int listener, int32_t *found, int most);
void valve_knocks_close(const int32_t *fds, int count);
/* Called on threads that may wait in the driver. */
/* What a descriptor of a stranger is: 0 and its numbers for a character device, else -errno. Never waits for the file. */
int valve_fd_device(int fd, uint32_t *major, uint32_t *minor);
/* 0: the file is nvidiactl, and this RM client of it has this subdevice on the card with this UUID. Else why not. */
int valve_rm_owns(int fd, uint32_t h_client, uint32_t h_subdevice, uint32_t gpu_id, const uint8_t *uuid);
uint32_t valve_gate_plans(struct valve_gate *gate); /* the number of the newest plan: they are counted */
/* Each is handed out once. Where too many came meanwhile some are not: the next stop that names them finds them again. */
uint32_t valve_gpu_gone(struct valve_gate *gate, uint32_t gpu, struct valve_gone *out, uint32_t max);
int valve_arm(struct valve_gate *gate, uint32_t gpu, const struct valve_entry *all, uint32_t count,
              const struct valve_entry *stop_now, uint32_t stop_count, const struct valve_entry *run_now,
              uint32_t run_count, uint32_t *was_off);

#endif
