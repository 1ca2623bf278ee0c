/*
 * guard.c - enables channels if no other process does.
 *
 * The driver keeps no record of which client disabled a channel and nothing re-enables it. So every disable of the lab
 * is announced here first, and issued only once this process has answered. It enables at the deadline of a hold, when
 * asked, when the lab dies, at a signal, and at its own time limit. The workloads stay connected: should this process
 * die, the tracer inside each of them enables its own channels.
 *
 *   register TABLE SOCK BEAT   hold TABLE MS   release TABLE   enable-all   watch   quit
 */
#include "rm.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

enum { WATCHED = 64, PEERS = 64, PATH = 108, LOOK_MS = 20, ASK_MS = 3000, SETTLE_US = 100000 };
#define PARTING_NS 12000000000ull /* a little over the ten seconds after which a call counts as stuck */
struct watched {
	struct table *table;
	struct beat *beat;
	char path[PATH], sock[PATH];
	uint64_t due_ns; /* 0: nothing is held */
};
static struct watched watched[WATCHED];
static unsigned count;
static struct rm_client own = {.ctl = -1, .node = -1};
static bool has_own;
static FILE *log_file;
static volatile sig_atomic_t signalled;

static void on_signal(int number)
{
	signalled = number;
}

/* kill(pid, 0) also succeeds on a zombie whose parent is slow to reap it, so the state is read too. */
static bool is_alive(uint32_t pid)
{
	char path[40], text[256] = "";

	if (!pid || (kill((pid_t)pid, 0) && errno != EPERM))
		return false;
	snprintf(path, sizeof(path), "/proc/%u/stat", pid);
	int fd = open(path, O_RDONLY | O_CLOEXEC);
	if (fd < 0)
		return true;
	ssize_t n = read(fd, text, sizeof(text) - 1);
	close(fd);
	const char *state = n > 0 ? strrchr(text, ')') : NULL;
	return !state || !state[1] || (state[2] != 'Z' && state[2] != 'X');
}

static void say(const char *what, const char *table, const char *how, struct rm_result r)
{
	const char *name = strrchr(table, '/');

	fprintf(log_file,
	        "{\"t_ns\": %llu, \"what\": \"%s\", \"table\": \"%s\", \"how\": \"%s\", \"errno\": %d, ",
	        (unsigned long long)now_ns(), what, name ? name + 1 : table, how, r.err);
	fprintf(log_file, "\"status\": %u, \"us\": %.1f}\n", r.status, (double)r.ns / 1e3);
	fflush(log_file);
}

static void open_own(void)
{
	struct rm_step step[RM_STEPS];

	if (has_own)
		return;
	has_own = rm_open(&own, true, step) == 0;
	if (!has_own)
		rm_close(&own);
}

/* By our own client first; then by the workload itself, because the firmware may refuse or ignore foreign clients. */
static void enable(struct watched *w, const char *why)
{
	rm_list list;
	char answer[LINE];

	w->due_ns = 0;
	if (!rm_pairs(w->table, SELECT_ALL, 0, &list))
		return;
	if (has_own)
		say(why, w->path, "own client", rm_switch(own.ctl, own.client, own.subdevice, &list, false));
	int s = is_alive(w->table->pid) && w->sock[0] ? sock_connect(w->sock, 200) : -1;
	if (s < 0)
		return;
	struct rm_result r = {.err = sock_ask(s, "on all", answer, NULL, ASK_MS) ? ETIMEDOUT : 0};
	say(why, w->path, "in process", r);
	close(s);
}

static void enable_all(const char *why)
{
	for (unsigned i = 0; i < count; i++)
		enable(&watched[i], why);
}

static struct watched *find(const char *path)
{
	for (unsigned i = 0; i < count; i++)
		if (!strcmp(watched[i].path, path))
			return &watched[i];
	return NULL;
}

static const char *enter(const char *path, const char *sock, const char *beat)
{
	struct table *table = map_table(path);
	struct watched *w = find(path);

	open_own();
	if (!table || (!w && count == WATCHED))
		return "no such table, or too many";
	if (!w)
		w = &watched[count++];
	*w = (struct watched){.table = table, .beat = map_beat(beat)};
	snprintf(w->path, sizeof(w->path), "%s", path);
	snprintf(w->sock, sizeof(w->sock), "%s", sock);
	return NULL;
}

/* A hold is granted only where a way back exists. */
static const char *hold(struct watched *w, unsigned ms)
{
	if (!w)
		return "not registered";
	if (!has_own) {
		int s = sock_connect(w->sock, 100);
		if (s < 0)
			return "no way to enable";
		close(s);
	}
	w->due_ns = now_ns() + ms * 1000000ull;
	return NULL;
}

static const char *obey(const char *text)
{
	char verb[16] = "", a[PATH] = "", b[PATH] = "", c[PATH] = "";

	sscanf(text, "%15s %107s %107s %107s", verb, a, b, c);
	if (!strcmp(verb, "register"))
		return enter(a, b, c);
	if (!strcmp(verb, "hold"))
		return hold(find(a), (unsigned)atoi(b));
	if (!strcmp(verb, "release")) {
		struct watched *w = find(a);
		if (w)
			w->due_ns = 0;
		return NULL;
	}
	if (!strcmp(verb, "enable-all"))
		enable_all("request");
	else if (!strcmp(verb, "quit"))
		signalled = SIGTERM;
	else if (strcmp(verb, "watch")) /* a workload that wants to know when we are gone */
		return "unknown verb";
	return NULL;
}

/* What is over or dead. A stale handle is an error to the driver, not harm. */
static void look(void)
{
	for (unsigned i = 0; i < count;) {
		struct watched *w = &watched[i];
		bool dead = !is_alive(w->table->pid);

		if (w->due_ns && (dead || now_ns() > w->due_ns))
			enable(w, dead ? "owner died" : "deadline");
		if (dead)
			*w = watched[--count];
		else
			i++;
	}
}

static struct pollfd peer[PEERS + 1];
static bool is_workload[PEERS + 1]; /* says nothing but `watch`, and never disables */
static nfds_t peers = 1;

static void drop(nfds_t i)
{
	close(peer[i].fd);
	peer[i] = peer[--peers];
	is_workload[i] = is_workload[peers];
}

static void serve(int ready, bool is_ending)
{
	char text[LINE];

	for (nfds_t i = peers; ready > 0 && i-- > 1;) {
		if (!peer[i].revents)
			continue;
		if (sock_receive(peer[i].fd, text, NULL, 0)) {
			drop(i);
			continue;
		}
		is_workload[i] = !strcmp(text, "watch");
		const char *refused = is_ending ? "the guard ends" : obey(text);
		sock_send(peer[i].fd, refused ? refused : "ok", -1);
	}
	if (ready > 0 && peer[0].revents && peers <= PEERS) {
		int s = accept4(peer[0].fd, NULL, NULL, SOCK_CLOEXEC);
		if (s >= 0)
			peer[peers++] = (struct pollfd){s, POLLIN, 0};
	}
}

static const char *watch_over(pid_t parent, uint64_t end_ns)
{
	for (;;) {
		int ready = poll(peer, peers, LOOK_MS);

		if (signalled)
			return "asked to end";
		if (parent && (getppid() != parent || !is_alive((uint32_t)parent)))
			return "the lab died";
		if (now_ns() > end_ns)
			return "time limit";
		serve(ready, false);
		look();
	}
}

/*
 * A disable of a probe that was killed may still be on its way into the driver when we enable. So: enable, refuse every
 * new hold, wait until the probes are gone, give a call in flight time to end, and enable once more.
 */
static void last_enable(const char *why)
{
	uint64_t until = now_ns() + PARTING_NS;
	bool has_probe = true;

	enable_all(why);
	while (has_probe && now_ns() < until) {
		has_probe = false;
		for (nfds_t i = 1; i < peers; i++)
			has_probe = has_probe || !is_workload[i];
		if (has_probe)
			serve(poll(peer, peers, LOOK_MS), true);
	}
	sleep_us(SETTLE_US);
	enable_all("parting");
}

int main(int argc, char **argv)
{
	struct sigaction action = {.sa_handler = on_signal};

	if (argc != 5) {
		fprintf(stderr, "usage: guard SOCK LOG PARENT-PID SECONDS\n");
		return 2;
	}
	setsid(); /* must outlive whatever kills the group of the lab */
	sigaction(SIGTERM, &action, NULL);
	sigaction(SIGINT, &action, NULL);
	sigaction(SIGHUP, &action, NULL);
	signal(SIGPIPE, SIG_IGN);
	log_file = fopen(argv[2], "a");
	int listener = log_file ? sock_listen(argv[1]) : -1;
	if (listener < 0) {
		fprintf(stderr, "guard: cannot open %s or %s\n", argv[1], argv[2]);
		return 1;
	}
	peer[0] = (struct pollfd){listener, POLLIN, 0};
	const char *why = watch_over((pid_t)atoi(argv[3]), now_ns() + (uint64_t)atoi(argv[4]) * 1000000000u);
	last_enable(why);
	for (unsigned i = 0; i < count; i++)
		if (watched[i].beat)
			atomic_store(&watched[i].beat->stop, 1); /* let workloads end by themselves */
	say("end", "", why, (struct rm_result){0});
	unlink(argv[1]);
	rm_close(&own);
	return 0;
}
