/*
 * errands.h - threads for what may take as long as a client likes: ringing, giving up and closing the files that it holds, too.
 * The kernel walks everything that waits for an eventfd that is rung, and a client can let a million epolls wait for it. It
 * takes all of those down in the thread that closes the file last. So no thread does either that anything waits for.
 */
#ifndef VALVE_NATIVE_ERRANDS_H
#define VALVE_NATIVE_ERRANDS_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

struct valve_gate;
struct valve_client;

enum {
	ERRAND_RING = 1,
	ERRAND_GIVE_UP = 2, /* its passed files */
	ERRAND_END = 4,     /* the last: there is no client afterwards */
	ERRAND_TAKEN = 8,   /* it is in a queue, or a thread is at it */
	ERRAND_THREADS = 3,
};

/* What rings order eventfds without ever blocking (bell.c). */
struct ringer {
	unsigned long context; /* 0: this kernel has no such thing, and orders are not rung */
	int nothing;           /* always there: what a passed number names once its file is given up */
};

/* What there is to do for a client. */
struct errand {
	struct errands *runners;
	struct valve_client *next; /* in a queue, behind this one */
	uint32_t due;              /* ERRAND_*; any thread */
	uint32_t dear_rings; /* to come until one that has cost much is forgotten; of whoever has taken it */
	uint32_t at_once;    /* rung by whoever has an order for it; caller sets, before any order */
};

struct errand_queue {
	struct valve_client *first, *last;
};

struct errands {
	struct ringer ringer;
	struct valve_client *fresh; /* any thread pushes; the newest first */
	uint32_t kick, quit;        /* futex; caller sets */
	pthread_mutex_t lock;       /* between the threads; none holds it while it is at work */
	struct errand_queue prompt, slow;
	bool has_slow; /* a thread is at a slow one: the others stay free for the prompt ones */
	pthread_t thread[ERRAND_THREADS];
};

/* errands.c */
int errands_start(struct valve_gate *gate);
bool errands_end(struct valve_gate *gate);
void errand_do(struct valve_client *client, uint32_t what);

/* client.c */
void client_give_up_passed(struct valve_client *client);
void client_end(struct valve_client *client);

/* bell.c */
int bell_open(struct ringer *ringer);
void bell_close(struct ringer *ringer);
void bell_ring(const struct ringer *ringer, int eventfd);

#endif
