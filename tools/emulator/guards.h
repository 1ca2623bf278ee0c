/* guards.h - a mutex that is held to the end of a block, and a check that ends a function. */
#ifndef VALVE_EMU_GUARDS_H
#define VALVE_EMU_GUARDS_H

#include <pthread.h>

/* Ends the function with this error where the condition holds. */
#define REFUSE_IF(condition, error)   \
	do {                          \
		if (condition)        \
			return error; \
	} while (0)

#define LOCKED(mutex) \
	__attribute__((cleanup(mutex_unlock), unused)) pthread_mutex_t *const locked = mutex_lock(mutex)
static inline pthread_mutex_t *mutex_lock(pthread_mutex_t *mutex)
{
	pthread_mutex_lock(mutex);
	return mutex;
}
static inline void mutex_unlock(pthread_mutex_t *const *mutex)
{
	pthread_mutex_unlock(*mutex);
}

#endif
