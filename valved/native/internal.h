/*
 * internal.h - the state of the gate, and which thread may touch what.
 *
 * Threads
 *   listener   one at a time: doorbells in, holds taken, words closed, issuers kicked; and the way back (waking.c).
 *   issuer     one per GPU: the worker at its seat, and no other, switches that GPU's channels.
 *              Both are workers (worker.c): a listener borrows the seat of an issuer that sleeps.
 *   watchdog     one: heartbeat of all control pages; notices calls of issuers that do not come back.
 *   caller     valved's Python thread: everything in gate.h.
 *
 * Nothing between the doorbell and the ioctl allocates, locks, logs or formats. What the caller changes reaches
 *   the listener  through slots and client lists that are swapped whole; the caller waits until the listener has
 *                 left the batch of events it was in before it frees the old one (listener_quiesce);
 *   an issuer     as mail: a list of plans that the issuer takes over between two edges and hands back used.
 * The one mutex (roster_lock) is between caller and watchdog; neither hot thread takes it.
 */
#ifndef VALVE_NATIVE_INTERNAL_H
#define VALVE_NATIVE_INTERNAL_H

#include "errands/errands.h"
#include "gate.h"
#include "nvrm.h"
#include "region.h"
#include "words.h"

#include <pthread.h>

enum {
	MAX_GPUS = 31,
	LISTENERS = 2,     /* threads beyond one for each GPU */
	ORDER_NO_GPU = 31, /* its bits in the order words are for orders on no GPU's account */
	MAX_SERVICES = 1024,
	MAX_CLIENTS = 4096,
	MAX_PASSED = 16, /* nvidiactl fds that one client may hand over */
	STAMPS = 4096,
	CHUNK = NV2080_DISABLE_CHANNELS_MAX,
	GONE = 128,
};

/* One RM client of our own: root, device and subdevice behind one nvidiactl fd. */
struct rm_client {
	int ctl, node;
	uint32_t h_client, h_device, h_subdevice;
};

struct gpu;
struct plan_step;

/* A way to stop and run the channels of one step. begin starts it. What a stop left open is done in two more rounds over all
 * steps, so no client delays another one: go_on (or NULL), in a call for each client, and finish. 0, an RM status or -errno. */
struct reach_ops {
	const char *name;
	int (*begin)(struct gpu *gpu, struct plan_step *step, bool stop);
	void (*go_on)(struct gpu *gpu, struct plan_step *step);
	int (*finish)(struct gpu *gpu, struct plan_step *step);
};

/* Up to 64 channels that one call (or one order) reaches, with both argument blocks built ahead of the edge. */
struct plan_step {
	const struct reach_ops *ops;
	int fd; /* and in whose name, on which subdevice the call is made; our own client's are looked up then */
	uint32_t h_client, h_subdevice;
	uint32_t order_seq, plan;          /* orders: what order_done must reach; the number of its plan */
	uint64_t order_ns;                 /* when the order was given */
	uint64_t refused;                  /* issuer's: pairs of `off` that the stop under way was refused */
	bool keep_off;                     /* `on` stays empty: the application switched these off itself */
	struct valve_client *owner[CHUNK]; /* of each channel */
	struct nv2080_fifo_disable_channels off, on;
};

/* What an edge walks. Built by the caller, owned by the issuer from the mail on, freed by the caller. The issuer
 * only ever drops stale channels from it: enable walks the very list that was disabled.
 * `next` is the issuer's: the step at which an enable goes on that was cut. */
struct plan {
	uint32_t steps, next, clients;
	struct valve_client **client; /* kept alive; one for each run of neighbours, also of dropped ones */
	struct plan_step step[];
};

enum mail_kind {
	MAIL_PLAN,   /* here is your new plan */
	MAIL_OFF,    /* self-test: switch stop_now off, whatever the state ... */
	MAIL_ON,     /* ... and on again */
	MAIL_CID,    /* ask the driver for a channel's number */
	MAIL_ENABLE, /* enable a channel that is in no plan */
	MAIL_ENABLE_UNLESS_HELD,
	MAIL_SLICE, /* set the time slice of a channel group */
};

/* What the caller asks of an issuer. No other thread talks to the driver about channels, so that a call that hangs
 * there never takes the caller's thread with it. */
struct mail {
	struct mail *next;
	enum mail_kind kind;
	struct plan *plan, *stop_now, *run_now; /* MAIL_PLAN: deltas for a stopped GPU; MAIL_ENABLE: one */
	uint32_t h_client, h_channel;           /* MAIL_CID; MAIL_SLICE: of the group */
	uint32_t slice_us;                      /* MAIL_SLICE */
	int fd;                                 /* MAIL_SLICE: passed by ... */
	struct valve_client *client; /* ... that this mail keeps; NULL: it uses nothing of a client's */
	uint32_t cid;                /* out */
	struct plan *old;            /* out: the plan that this one replaced */
	uint32_t was_off, *was; /* out: whether something of that one may be off; where its sender hears it */
	int status;             /* out */
	uint32_t done;          /* futex: 1 once it was carried out; 2: its sender no longer waits for that */
};

/* A flight is whatever an issuer does in the driver, as the watchdog sees it: the word is (number << 2 | state). */
enum flight_state { FLIGHT_NONE = 0, FLIGHT_OUT = 1, FLIGHT_LOST = 2, FLIGHT_HELD = 3 };

/* gpu.seat: number of its owner << 2 | lent << 1 | asleep. A seat is lent, and changes hands, only while its owner sleeps. */
#define SEAT_ASLEEP 1u
#define SEAT_LENT   2u
#define SEAT_NEXT   4u
#define ABANDONED   2u /* mail.done */

struct gpu {
	struct valve_gate *gate;
	uint32_t index;
	struct valve_gpu_info info;
	struct rm_client own; /* the issuer's alone, from its start to its end */
	uint32_t closings;    /* issuer's alone: how many it has seen */
	uint32_t unproven;    /* mails that stop something and were not carried out yet */
	uint32_t owes_word;   /* issuer's alone: that all is off after all, once that is proven */
	bool owed;            /* issuer's alone: something is off that its plan, or the next one, is to run */
	uint32_t tried;       /* issuer's alone: the target that ... */
	uint32_t failures;    /* ... was missed so many times in a row, ... */
	uint64_t retry_ns;    /* ... and is not tried again before then */
	int told_status;      /* issuer's alone: what the last GATE_FAILED stamp said, of which closing */
	uint32_t told_closing;

	_Alignas(64) uint32_t kick; /* futex: anyone increments and wakes it when the issuer must look */

	/* The holders: closings << 32 | closer << 16 | count. Listener and caller, by compare-and-swap. The closer is
	 * the service that made the count leave 0; closings rises each time that happens. */
	_Alignas(64) uint64_t holders;

	uint64_t until_ns;      /* of the grant open here, 0: none; by its service's opener and closer */
	uint32_t sliced;        /* its one holder shares it in slices (slice.c): each holder clears it, too */
	uint64_t told_until_ns; /* issuer's alone: the end that its clients were told */
	bool was_sliced, delays; /* issuer's alone: why channels run; a launch waits for the stop tried now */

	_Alignas(64) uint32_t seat; /* issuer and listener */

	_Alignas(64) struct mail *mail; /* caller pushes, issuer takes all */

	_Alignas(64) uint32_t state; /* issuer writes, caller reads: valve_gpu_state */
	uint32_t handled;            /* the kick that the issuer went to sleep on */
	uint32_t flight, flier;      /* issuer and watchdog; flier: the thread that is in the driver */
	uint64_t flight_ns;
	uint32_t owes_release, owes_stop; /* holds to take back; a stop in doubt. Issuer clears */
	struct plan *plan;                /* issuer's; the watchdog's while a flight is lost */
	struct mail *spent;               /* issuer pushes, caller takes all */
	struct mail *late; /* issuer's alone: answered, but what it was to run now was refused */
	uint32_t late_failures;
	uint64_t late_ns;              /* and is not tried again before then */
	uint32_t gone_head, gone_tail; /* a ring: the issuer fills it, the caller empties it */
	struct valve_gone gone[GONE];
};

struct client_list {
	uint32_t count;
	struct valve_client *client[];
};

/* An online service: one gate word for all its clients. Slots are never freed, so any thread may look at any. */
struct service {
	uint64_t id;
	uint32_t live;
	uint32_t mask;               /* GPUs; the caller changes it only while the hold is settled */
	struct client_list *clients; /* caller swaps, listener walks */

	/* Caller writes, listener reads. While it is set the listener alone changes the epoch, and what stands under
	 * "looks" below is the listener's; else the caller opens, and both may close. */
	uint32_t permitted;

	/* Odd: open. Odd to even (the hold is taken) by the swap's winner; even to odd by the thread in `permitted`. */
	_Alignas(64) uint32_t epoch;
	uint32_t settled; /* last even epoch whose hold was counted on all GPUs */
	uint32_t stamped; /* last even epoch that a GATE or HOLD stamp reported */
	uint32_t caused;  /* last even epoch whose cause stands here */
	uint64_t cause_client, launch_ns,
	        seen_ns; /* of the present hold; written before the hold is counted */
	uint64_t held_since_ns;
	uint32_t told_open; /* 1 from the stamp of a wake to the next hold */

	/* of the last edge, for its stamps: the client that tells of requests, if there is just one */
	uint32_t tellers;
	uint64_t teller, started, ended;

	/* looks */
	struct valve_wake_rule rule;
	struct valve_wake_state wake;
	uint64_t due_ns;
	uint32_t said_reason; /* the last decision, for the caller: hinted << 16 | action << 8 | reason */
	uint64_t said_quiet_ns, said_leaked;

	/* granted time (grant.c). The caller writes most and rest; the others are of the thread that opens and closes */
	uint64_t grant_most_ns, grant_rest_ns; /* longest, 0: no consent; from one's beginning to the next */
	uint64_t granted_since_ns, granted_until_ns; /* of the grant that is open; until 0: none is */
	uint64_t grant_next_ns;
	uint32_t slicing;       /* the grant that is open goes by slices, ... */
	uint64_t granted_asker; /* ... and this hook moves its end on: generation << 32 | slot */
	uint64_t wish_ns, wish_asker, wish_look_ns,
	        wish_end_ns; /* listener's: a request that waits for a proof */
	uint32_t wish_seq;
	uint32_t cause; /* of the present hold: valve_cause */
	uint64_t grants, broken, granted_ns, answers[VALVE_GRANT_ANSWERS];
};

struct valve_client {
	uint64_t id;
	struct errand errand;
	uint32_t role, slot, generation;
	int32_t service; /* index, -1 for none; listener reads it */
	struct valve_control *control;
	struct valve_region *region;
	int doorbell, order;
	uint64_t orders; /* GPUs that want it held << 32 | GPUs that want it stopped */

	uint32_t muted;      /* listener sets it for a doorbell that rings for nothing; watchdog clears it */
	uint32_t idle_rings; /* listener's alone: rings that changed nothing since window_ns */
	uint64_t window_ns;

	uint32_t hints;       /* caller writes: an engine hook that tells of open requests */
	uint64_t gaps_judged; /* listener's alone */
	uint32_t grant_seen;  /* listener's alone: the last request that was heard */
	uint32_t leaves;      /* caller writes: it has left, and its process goes on */
	uint64_t met_claim, met_ns, late_claim; /* issuers': a claim waited for, since when; one in vain */
	uint64_t until_told;                    /* issuers': the end of a grant that it was told last */
	uint64_t until_before; /* issuers': and the one before; 0: none, or waited for in vain */

	uint32_t refs;          /* caller's alone: plan entries and mails that name this client */
	uint32_t dropped;       /* caller writes, before its passed files go; issuers read */
	int passed[MAX_PASSED]; /* caller's alone until it drops the client */
	uint64_t gaps_seen;
};

struct stamp_cell {
	uint64_t turn;
	struct valve_stamp stamp;
};

struct stamp_ring {
	_Alignas(64) uint64_t head; /* producers */
	_Alignas(64) uint64_t tail; /* caller writes, producers read it for a guess */
	uint32_t prompt, lost;      /* caller writes: every stamp rings; producers: so many found no room */
	int fd;
	struct stamp_cell cell[STAMPS];
};

/* A thread that is the listener or sits at a GPU; which of them changes. */
struct worker {
	struct valve_gate *gate;
	struct gpu *gpu; /* where it starts; NULL: as the listener */
	pthread_t thread;
	bool started;
};

struct valve_gate {
	struct valve_config config;
	struct valve_os os;
	struct errands errands;
	int rings; /* 0, or why not */
	char version[64];
	char refusal[96]; /* why nothing may be issued; empty when something may */
	const struct nv_branch *branch;
	uint64_t alive_ns;  /* when the caller last said that it turns, 0 never; the watchdog reads */
	uint32_t guarding;  /* watchdog's: it holds every GPU because the caller is silent */
	uint32_t let;       /* GPUs: the caller writes, issuers read */
	uint32_t grantable; /* GPUs whose offline work stops itself: the caller writes, the listener reads */
	uint32_t sliceable, by_slices; /* the same: with short slices; and whether grants go by them */
	uint32_t quit;                 /* futex */
	uint32_t gpu_count;
	struct gpu gpu[MAX_GPUS];

	struct worker worker[MAX_GPUS + LISTENERS];
	pthread_t watchdog;
	uint32_t listeners, listening; /* so many; 1 while one of them handles events */
	int epoll, wake, timer; /* wake: makes a listener look at quit and kicked; timer: a look is due */
	uint32_t kicked;        /* caller: look at every service */
	uint64_t look_ns, armed_ns, turn_ns[MAX_SERVICES + 1]; /* listener's: next look, timer, of each */
	_Alignas(64) uint64_t listener_turn;                   /* listener's: odd while it handles events */
	struct valve_client *client[MAX_CLIENTS];
	uint32_t generation;
	pthread_mutex_t roster_lock; /* watchdog against caller: client[] and their control pages */
	uint32_t places, mutes;      /* client[] ever used; listener mutes, watchdog clears */

	uint32_t services;                        /* slots ever used: no loop needs to look beyond */
	struct service service[MAX_SERVICES + 1]; /* the last: the watchdog's guard, which has no clients */
	struct stamp_ring stamps;
};

/* rm.c: RM sequences */
int rm_read_version(const struct valve_os *os, char version[64]);
const struct nv_branch *rm_branch(const char *version);
int rm_list_cards(const struct valve_os *os, struct valve_gpu_info *out, uint32_t max, uint32_t *count);
int rm_open(const struct valve_os *os, struct valve_gpu_info *info, struct rm_client *out);
void rm_close(const struct valve_os *os, struct rm_client *client);
int rm_control(const struct valve_os *os, const struct rm_client *client, uint32_t h_object, uint32_t cmd,
               void *params, uint32_t bytes);
int rm_switch(const struct valve_os *os, int fd, uint32_t h_client, uint32_t h_subdevice,
              struct nv2080_fifo_disable_channels *lists);
int rm_slice(const struct valve_os *os, int fd, uint32_t h_client, uint32_t h_tsg, uint32_t us);
int rm_unique_id(const struct valve_os *os, const struct rm_client *client, uint32_t h_client,
                 uint32_t h_channel, uint32_t *cid);
bool rm_is_stale(int status);
bool rm_speaks(const struct valve_os *os, int fd, uint32_t h_client, uint32_t h_subdevice);

/* own.c */
bool own_revived(struct gpu *gpu);
uint64_t own_confirms(struct gpu *gpu, const struct plan_step *step, uint64_t stale);
int own_unique_id(struct gpu *gpu, uint32_t h_client, uint32_t h_channel, uint32_t *cid);

/* late.c: issuer's alone */
void late_run(struct gpu *gpu, struct plan *owed, const uint32_t *seen);
void late_forget(struct plan *owed);
bool late_join(struct gpu *gpu);
bool late_keep(struct gpu *gpu, struct mail *mail);
uint64_t late_turn(struct gpu *gpu, uint32_t seen);

/* walk.c, reach_rm.c, reach_order.c */
int walk_stop(struct gpu *gpu, struct plan *plan);
int walk_run(struct gpu *gpu, struct plan *plan);
extern const struct reach_ops reach_own, reach_fd, reach_self, reach_hold;
int step_issue(struct gpu *gpu, const struct plan_step *step, struct nv2080_fifo_disable_channels *params);
uint32_t order_set(struct valve_client *client, uint32_t gpu, enum valve_order order, bool on, bool again);
int order_wait(const struct valve_client *client, uint32_t seq, uint64_t until_ns);
void order_release(struct gpu *gpu, struct plan *plan);
void order_move(struct gpu *gpu, const struct plan *old, const struct plan *fresh);
void order_leave(struct gpu *gpu, const struct plan *leaving);
void order_hold_all(struct gpu *gpu, struct plan_step *step);
void order_hold_plan(struct gpu *gpu, const struct plan *plan);

/* plan.c */
struct plan *plan_new(struct gpu *gpu, const struct valve_entry *entries, uint32_t count);
void plan_free(struct plan *plan);
bool plan_names(const struct plan *plan, const struct valve_client *client, uint32_t *from);
bool plan_has(const struct plan *plan, uint32_t h_client, uint32_t h_channel);
void plan_drop(struct plan_step *step, uint32_t at);
void plan_lose(struct gpu *gpu, struct plan_step *step, uint32_t at);
uint32_t plan_channels(const struct plan *plan);

/* issuer.c */
bool issuer_borrow(struct gpu *gpu);
void issuer_keep(struct gpu *gpu);
void issuer_serve(struct gpu *gpu);
void issuer_kick(struct gpu *gpu);
void issuer_run(struct gpu *gpu, struct plan *owed, const uint32_t *seen);
uint64_t issuer_backoff_ns(uint32_t failures);

/* listener.c */
int listener_open(struct valve_gate *gate);
struct gpu *listener_serve(struct valve_gate *gate);
void listener_quiesce(struct valve_gate *gate);
int listener_add(struct valve_gate *gate, struct valve_client *client);
void listener_mute(struct valve_gate *gate, struct valve_client *client, bool mute);

/* worker.c */
void hurry(const struct valve_config *config, uint32_t thread, bool may_be_real_time);
bool thread_join(pthread_t thread);
int thread_start(pthread_t *thread, void *(*body)(void *), void *argument);
int worker_start(struct valve_gate *gate, struct worker *worker, struct gpu *gpu);

/* watchdog.c */
int watchdog_start(struct valve_gate *gate);

/* hold.c */
bool service_hold(struct valve_gate *gate, uint32_t index, const struct valve_client *cause,
                  uint64_t launch_ns, uint64_t seen_ns, struct gpu **taken);
void service_owe(struct gpu *gpu);
void guard_hold(struct valve_gate *gate, bool on);
struct valve_stamp service_stamp(struct gpu *gpu, uint64_t holders);
void service_tell(struct gpu *gpu, uint64_t holders, const struct valve_stamp *stamp);
int service_wake(struct valve_gate *gate, uint32_t index, struct gpu **freed);
uint32_t service_settle(const struct service *service);
uint32_t holders_count(uint64_t holders);
uint32_t holders_closer(uint64_t holders);
bool word_raise(uint32_t *word, uint32_t epoch);

/* grant.c */
bool grant_heard(struct valve_gate *gate, struct valve_client *client, uint64_t seen_ns, struct gpu **taken);
uint64_t grant_turn(struct valve_gate *gate, uint32_t index, uint64_t now);
void grant_clear(struct valve_gate *gate, const struct service *service, uint32_t mask);
void grant_reset(struct service *service);
enum valve_cause grant_close(struct service *service, bool by_launch, uint64_t seen_ns);
void grant_recall_all(struct valve_gate *gate);

/* slice.c */
enum valve_grant_answer slice_refuses(struct valve_gate *gate, uint32_t gpu);
bool slice_is_sole(const struct service *service);
enum valve_grant_answer slice_open(struct valve_gate *gate, struct service *service, uint64_t now);
uint64_t slice_turn(struct valve_gate *gate, struct service *service, uint64_t now, bool may_go_on);
void slice_close(struct valve_gate *gate, struct service *service, uint64_t now, bool is_broken);
void slice_break(struct gpu *gpu);

/* until.c */
bool until_is_claimed(const struct plan *plan, uint64_t until_ns);
void until_tell(struct gpu *gpu, const struct plan *plan, uint64_t until_ns);
void until_move(struct gpu *gpu, const struct plan *old, const struct plan *fresh);
bool until_wait(const struct gpu *gpu, const struct plan *plan);

/* client.c */
struct valve_grant *client_grant(const struct valve_client *client);
void client_reap(struct valve_client *client);
bool client_has_passed(const struct valve_client *client, int fd);
bool client_is_idle(const struct valve_client *client);
bool client_may_launch(const struct valve_client *client);
void service_enlist(struct valve_gate *gate, struct valve_client *client, bool in);

/* stamps.c */
int stamps_open(struct stamp_ring *ring);
void stamps_close(struct stamp_ring *ring);
void stamp_push(struct stamp_ring *ring, const struct valve_stamp *stamp, bool loud);

/* waking.c */
bool service_is_idle(const struct service *service);
void waking_turn(struct valve_gate *gate, uint64_t now, struct gpu **freed);
void waking_arm(struct valve_gate *gate);
void waking_rouse(const struct valve_client *client);
void waking_held(struct valve_gate *gate, struct service *service, uint64_t now);
void waking_withdraw(struct valve_gate *gate, struct service *service);
void waking_note_requests(struct service *service);
void waking_fill_requests(const struct service *service, struct valve_stamp *stamp);
void waking_kick(struct valve_gate *gate);
bool waking_is_ordinary(const struct service *service);
bool waking_has_requests(const struct service *service);

/* arm.c; mail.c: issuer's alone */
int mail_carry_out(struct gpu *gpu, struct mail *mail);
bool is_stuck(const struct gpu *gpu);
void mail_spend(struct gpu *gpu, struct mail *mail);
void mail_reap(struct gpu *gpu);
void mail_discard(struct gpu *gpu);

/* gate.c */
void at_point(struct valve_gate *gate, enum valve_point point); /* tests look in here */
enum valve_gpu_state gpu_target(const struct gpu *gpu, uint64_t holders);
bool gpu_is_awaited(const struct gpu *gpu);

#endif
