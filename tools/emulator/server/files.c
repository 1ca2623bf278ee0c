/*
 * files.c - struct files. The driver acts on the last close of a file, whichever process holds it: fork, dup
 * and SCM_RIGHTS all count. Here the last copy of a socket closes and epoll says so. What the
 * release then does takes the API lock, so it runs on a thread of its own, as it would in the
 * context of the process that exits.
 */
#include "server.h"
#include <errno.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/syscall.h>
#include <unistd.h>

static int watch = -1;

int files_init(void)
{
	watch = epoll_create1(EPOLL_CLOEXEC);
	return watch < 0 ? -errno : 0;
}

/* In the place of a file's address, which is even: its file may be gone by the time that the end is told. */
static uint64_t process_mark(pid_t pid)
{
	return (uint64_t)(uint32_t)pid << 1 | 1;
}

struct file *file_new(enum emu_kind kind, uint32_t minor, int sock, pid_t pid, uid_t uid)
{
	struct epoll_event event = {.events = EPOLLRDHUP | EPOLLHUP},
	                   end = {.events = EPOLLIN | EPOLLONESHOT};
	struct file *f = calloc(1, sizeof *f);

	if (!f)
		return NULL;
	f->kind = kind;
	f->minor = minor;
	f->refs = 2; /* the fds that other processes hold, and the caller */
	f->pid = pid;
	f->uid = uid;
	f->sock = sock;
	if (kind == EMU_UVM) {
		f->uvm = calloc(1, sizeof *f->uvm);
		if (!f->uvm) {
			free(f);
			return NULL;
		}
		f->uvm->pages = -1;
		f->uvm->process = (int)syscall(SYS_pidfd_open, pid, 0);
		TAILQ_INIT(&f->uvm->ranges);
		pthread_mutex_init(&f->uvm->lock, NULL);
	}
	state_lock();
	f->id = ++S.next_file;
	TAILQ_INSERT_TAIL(&S.files, f, link);
	LIST_INSERT_HEAD(&S.file_buckets[f->id % FILE_BUCKETS], f, in_bucket);
	state_unlock();
	event.data.ptr = f;
	epoll_ctl(watch, EPOLL_CTL_ADD, sock, &event);
	end.data.u64 = process_mark(pid);
	if (f->uvm && f->uvm->process >= 0)
		epoll_ctl(watch, EPOLL_CTL_ADD, f->uvm->process, &end);
	return f;
}

struct file *file_get(uint64_t id)
{
	struct file *f;

	LOCKED(&S.state);
	LIST_FOREACH(f, &S.file_buckets[id % FILE_BUCKETS], in_bucket)
		if (f->id == id && f->refs)
			break; /* at 0 it is being released and cannot come back */
	if (f)
		f->refs++;
	return f;
}

/* U/osapi.c, rm_cleanup_file_private: every client of the file goes with it. */
static void free_clients_of(const struct file *f)
{
	struct client *c, *next;

	for (c = TAILQ_FIRST(&S.clients); c; c = next) {
		next = TAILQ_NEXT(c, link);
		if (c->file == f)
			object_free(TAILQ_FIRST(&c->objects));
	}
}

static void forget(struct file *f)
{
	SCOPED struct scope scope = api_enter(API_WRITE);

	LOCKED(&S.state);
	free_clients_of(f);
	exports_drop(f);
	TAILQ_REMOVE(&S.files, f, link);
	LIST_REMOVE(f, in_bucket);
}

static void *release(void *argument)
{
	struct file *f = argument;

	stop_channels_of_file(f);
	if (f->uvm)
		uvm_release(f);
	forget(f);
	if (f->ctl)
		file_put(f->ctl);
	if (f->uvm) {
		pthread_mutex_destroy(&f->uvm->lock);
		if (f->uvm->process >= 0)
			close(f->uvm->process);
		free(f->uvm);
	}
	close(f->sock);
	free(f);
	return NULL;
}

static void *process_ended(void *argument)
{
	stop_channels_of_process((pid_t)(uintptr_t)argument);
	return NULL;
}

/* What takes the driver's locks is done on a thread of its own. */
static void begin(void *(*run)(void *), void *argument)
{
	pthread_attr_t attributes;
	pthread_t thread;

	pthread_attr_init(&attributes);
	pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
	if (pthread_create(&thread, &attributes, run, argument))
		run(argument);
	pthread_attr_destroy(&attributes);
}

void file_put(struct file *f)
{
	uint32_t left;

	state_lock();
	left = --f->refs;
	state_unlock();
	if (!left)
		begin(release, f);
}

void files_watch(void)
{
	struct epoll_event events[64];
	int i, n;

	for (;;) {
		n = epoll_wait(watch, events, 64, -1);
		for (i = 0; i < n; i++) {
			struct file *f = events[i].data.ptr;

			if (events[i].data.u64 & 1) {
				begin(process_ended, (void *)(uintptr_t)(events[i].data.u64 >> 1));
				continue;
			}
			epoll_ctl(watch, EPOLL_CTL_DEL, f->sock, NULL);
			file_put(f);
		}
	}
}
