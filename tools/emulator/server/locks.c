/*
 * locks.c - the driver's locks, with the scopes that decide how GPUs hold each other up (facts:
 * K/core/locks.c, R/rs_server.c). A scope collects what a call has taken and gives it back in one
 * step.
 */
#include "server.h"

/* Like Linux' rwsem first come, first served: glibc's read-write lock lets either the readers or the writers starve,
 * and then a loop of mappings would hold a gate up for ever. */
static struct {
	pthread_mutex_t mutex;
	pthread_cond_t changed;
	uint64_t next_ticket, turn; /* whose turn it is to enter */
	uint32_t readers;
	bool writer;
} api = {.mutex = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER};

static void api_lock(enum api_mode mode)
{
	uint64_t ticket;

	LOCKED(&api.mutex);
	ticket = api.next_ticket++;
	while (ticket != api.turn || api.writer || (mode == API_WRITE && api.readers))
		pthread_cond_wait(&api.changed, &api.mutex);
	if (mode == API_WRITE)
		api.writer = true;
	else
		api.readers++;
	api.turn++;
	pthread_cond_broadcast(&api.changed);
}

static void api_unlock(void)
{
	LOCKED(&api.mutex);
	if (api.writer)
		api.writer = false;
	else
		api.readers--;
	pthread_cond_broadcast(&api.changed);
}

void locks_write(FILE *out)
{
	LOCKED(&api.mutex);
	fprintf(out, "{\"readers\":%u,\"writer\":%s,\"waiting\":%llu}", api.readers,
	        api.writer ? "true" : "false", (unsigned long long)(api.next_ticket - api.turn));
}

void locks_init(void)
{
	uint32_t i;

	pthread_mutex_init(&S.state, NULL);
	for (i = 0; i < EMU_GPUS; i++)
		pthread_mutex_init(&S.gpu[i].lock, NULL);
}

void state_lock(void)
{
	pthread_mutex_lock(&S.state);
}

void state_unlock(void)
{
	pthread_mutex_unlock(&S.state);
}

uint32_t all_gpus(void)
{
	return (1u << S.gpus) - 1u;
}

struct scope api_enter(enum api_mode mode)
{
	api_lock(mode);
	return (struct scope){0};
}

void client_enter(struct scope *s, struct client *c)
{
	pthread_mutex_lock(&c->lock);
	s->client = c;
}

/* Interrupts are masked on each GPU that is locked: the price grows with their number even without
 * contention. */
void gpus_enter(struct scope *s, uint32_t mask)
{
	uint32_t i;

	for (i = 0; i < S.gpus; i++) {
		if (!(mask & (1u << i)))
			continue;
		pthread_mutex_lock(&S.gpu[i].lock);
		s->debt_ns += (uint64_t)knob(K_masking_us);
	}
	s->gpus = mask;
}

/* One sleep instead of several short ones: each costs a wake-up that no card has. */
void scope_sleep(struct scope *s, uint64_t ns)
{
	model_sleep_ns(s->debt_ns + ns);
	s->debt_ns = 0;
}

void scope_leave(struct scope *s)
{
	uint32_t i;

	model_sleep_ns(s->debt_ns);
	for (i = S.gpus; i-- > 0;)
		if (s->gpus & (1u << i))
			pthread_mutex_unlock(&S.gpu[i].lock);
	if (s->client)
		pthread_mutex_unlock(&s->client->lock);
	api_unlock();
}
