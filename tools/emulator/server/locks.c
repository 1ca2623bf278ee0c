/*
 * locks.c - the driver's locks, with the scopes that decide how GPUs hold each other up (facts:
 * K/core/locks.c, R/rs_server.c). A scope collects what a call has taken and gives it back in one
 * step.
 */
#include "server.h"

static pthread_rwlock_t api;

void locks_init(void)
{
	pthread_rwlockattr_t attributes;
	uint32_t i;

	/* Linux' rwsem does not let readers overtake a waiting writer for ever; glibc's default
	 * does. */
	pthread_rwlockattr_init(&attributes);
	pthread_rwlockattr_setkind_np(&attributes, PTHREAD_RWLOCK_PREFER_WRITER_NONRECURSIVE_NP);
	pthread_rwlock_init(&api, &attributes);
	pthread_rwlockattr_destroy(&attributes);
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

void api_enter(struct scope *s, enum api_mode mode)
{
	*s = (struct scope){0};
	if (mode == API_WRITE)
		pthread_rwlock_wrlock(&api);
	else
		pthread_rwlock_rdlock(&api);
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
	pthread_rwlock_unlock(&api);
	*s = (struct scope){0};
}
