/*
 * sparse.c - memory of another process made sparse, on a descriptor of its uvm file: whatever is mapped there is unmapped,
 * reads give zero, writes are dropped, and nothing faults. The driver asks for an initialised file and a range of it,
 * not for the caller (uvm_map_external_sparse, kernel-open/nvidia-uvm/uvm_map_external.c); its page tables are
 * written on channels of its own, so the owner's may be off.
 *
 * A call may take milliseconds, or never come back, so each process has a thread (a door). It is native because
 * a reclaim would wait for Python's lock twice, before the calls and after them.
 */
#include "internal.h"

#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>

struct work {
	struct work *next;
	int status;
	uint32_t count, done;
	uint64_t took_ns;
	uint64_t runs[]; /* address and bytes of each */
};

struct queue {
	struct work *first, **last;
};

struct valve_door {
	pthread_mutex_t lock; /* over all that follows; never held in a call that waits */
	pthread_cond_t asked;
	struct queue todo, answers;
	bool is_closed;
	int owners; /* the caller, and the thread until it ends: the last to leave frees it */
	int fd, bell;
	uint8_t uuid[16];
};

static void put(struct queue *queue, struct work *work)
{
	work->next = NULL;
	*queue->last = work;
	queue->last = &work->next;
}

static struct work *take(struct queue *queue)
{
	struct work *work = queue->first;

	if (work && !(queue->first = work->next))
		queue->last = &queue->first;
	return work;
}

static int make_sparse(int fd, const uint8_t *uuid, struct work *work)
{
	for (; work->done < work->count; ++work->done) {
		struct uvm_map_external_sparse params = {.base = work->runs[2 * work->done],
		                                         .length = work->runs[2 * work->done + 1],
		                                         .rmStatus = ~0u};
		int rc;

		memcpy(params.gpuUuid, uuid, sizeof params.gpuUuid);
		do {
			rc = ioctl(fd, (unsigned long)UVM_MAP_EXTERNAL_SPARSE, &params);
		} while (rc < 0 && errno == EINTR);
		if (rc < 0)
			return -errno;
		if (params.rmStatus)
			return (int)params.rmStatus;
	}
	return 0;
}

static void door_free(struct valve_door *door)
{
	struct work *work;

	while ((work = take(&door->answers)))
		free(work);
	pthread_cond_destroy(&door->asked);
	pthread_mutex_destroy(&door->lock);
	free(door);
}

/* With the lock held, which it lets go of. */
static void leave(struct valve_door *door)
{
	bool is_last = --door->owners == 0;

	pthread_mutex_unlock(&door->lock);
	if (!is_last)
		return;
	close(door->bell);
	door_free(door);
}

static void *serve(void *argument)
{
	struct valve_door *door = argument;
	const uint64_t one = 1;

	hurry(&(const struct valve_config){0}, 0, false); /* a service waits for what it is asked for */
	pthread_mutex_lock(&door->lock);
	for (;;) {
		struct work *work = take(&door->todo);
		uint64_t began_ns;

		if (!work && door->is_closed)
			break;
		if (!work) {
			pthread_cond_wait(&door->asked, &door->lock);
			continue;
		}
		pthread_mutex_unlock(&door->lock);
		began_ns = now_ns();
		work->status = make_sparse(door->fd, door->uuid, work);
		work->took_ns = now_ns() - began_ns;
		pthread_mutex_lock(&door->lock);
		put(&door->answers, work);
		if (write(door->bell, &one, sizeof one) < 0)
			continue; /* the counter is full: then it is readable, which is all we want */
	}
	pthread_mutex_unlock(&door->lock);
	close(door->fd); /* the last close of a uvm file tears a whole address space down */
	pthread_mutex_lock(&door->lock);
	leave(door);
	return NULL;
}

struct valve_door *valve_door_open(int fd, int bell, const uint8_t *uuid)
{
	struct valve_door *door = calloc(1, sizeof *door);
	pthread_t thread;

	if (!door)
		return NULL;
	pthread_mutex_init(&door->lock, NULL);
	pthread_cond_init(&door->asked, NULL);
	door->todo.last = &door->todo.first;
	door->answers.last = &door->answers.first;
	memcpy(door->uuid, uuid, sizeof door->uuid);
	door->fd = fd;
	door->bell = bell;
	door->owners = 2;
	if (thread_start(&thread, serve, door) != 0) {
		door_free(door);
		return NULL;
	}
	pthread_detach(thread);
	return door;
}

int valve_door_ask(struct valve_door *door, const uint64_t *runs, uint32_t count)
{
	struct work *work = calloc(1, sizeof *work + 2 * count * sizeof *runs);

	if (!work)
		return -ENOMEM;
	work->count = count;
	memcpy(work->runs, runs, 2 * count * sizeof *runs);
	pthread_mutex_lock(&door->lock);
	put(&door->todo, work);
	pthread_cond_signal(&door->asked);
	pthread_mutex_unlock(&door->lock);
	return 0;
}

int valve_door_answer(struct valve_door *door, int *status, uint32_t *done, uint64_t *took_ns)
{
	struct work *work;
	uint64_t rung;

	if (read(door->bell, &rung, sizeof rung) < 0 && errno != EAGAIN)
		return 0;
	pthread_mutex_lock(&door->lock);
	work = take(&door->answers);
	pthread_mutex_unlock(&door->lock);
	if (!work)
		return 0;
	*status = work->status;
	*done = work->done;
	*took_ns = work->took_ns;
	free(work);
	return 1;
}

void valve_door_close(struct valve_door *door)
{
	pthread_mutex_lock(&door->lock);
	door->is_closed = true;
	pthread_cond_signal(&door->asked);
	leave(door);
}
