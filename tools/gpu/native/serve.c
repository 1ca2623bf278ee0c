/*
 * serve.c - the tracer's thread: switches the channels of this process from inside (path C), hands its control
 * descriptor over (path B), and, should the guard die, enables everything.
 *
 *   off SEL | on SEL -> "errno status ns channels"       fd -> "client subdevice", with the descriptor
 *   uvm -> with the uvm descriptor
 */
#include "trace.h"

#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

enum { PEERS = 16, FIRST = 2 }; /* slot 0: the listener, slot 1: the guard */

static int raw_ioctl(int fd, unsigned long request, void *arg)
{
	return tracer.ioctl(fd, request, arg);
}

static void switch_own(const char *word, bool off, char answer[LINE])
{
	enum rm_select select = !strcmp(word, "all")   ? SELECT_ALL
	                        : !strcmp(word, "one") ? SELECT_ONE
	                                               : SELECT_GR;
	struct rm_result sum = {0};
	unsigned channels = 0;
	rm_list list;

	for (uint32_t i = 0; i < tracer.table->clients; i++) {
		const struct table_client *c = &tracer.table->client[i];
		if (c->live != LIVE || !rm_pairs(tracer.table, select, c->client, &list))
			continue;
		struct rm_result r = rm_switch(c->fd, c->client, c->subdevice, &list, off);
		channels += list.numChannels;
		sum.ns += r.ns;
		sum.err = r.err ? r.err : sum.err;
		sum.status = r.status ? r.status : sum.status;
	}
	snprintf(answer, LINE, "%d %u %llu %u", sum.err, sum.status, (unsigned long long)sum.ns, channels);
}

static int pass_fd(char answer[LINE])
{
	rm_list list;

	for (uint32_t i = 0; i < tracer.table->clients; i++) {
		const struct table_client *c = &tracer.table->client[i];
		if (c->live != LIVE || !rm_pairs(tracer.table, SELECT_ALL, c->client, &list))
			continue;
		snprintf(answer, LINE, "%u %u", c->client, c->subdevice);
		return c->fd;
	}
	snprintf(answer, LINE, "none");
	return -1;
}

static void answer_one(int s, const char *text)
{
	char answer[LINE] = "what?";
	int fd = -1;

	if (!strncmp(text, "off ", 4))
		switch_own(text + 4, true, answer);
	else if (!strncmp(text, "on ", 3))
		switch_own(text + 3, false, answer);
	else if (!strcmp(text, "fd"))
		fd = pass_fd(answer);
	else if (!strcmp(text, "uvm"))
		fd = tracer_uvm();
	sock_send(s, answer, fd);
}

static void *serve(void *argument)
{
	struct pollfd *peer = argument;
	char text[LINE], unused[LINE];
	nfds_t n = FIRST;

	for (;;) {
		if (poll(peer, n, -1) < 0)
			continue;
		if (peer[1].revents && sock_receive(peer[1].fd, text, NULL, 0)) {
			switch_own("all", false, unused); /* no other process is left to do it */
			tracer.close(peer[1].fd);
			peer[1].fd = -1;
		}
		for (nfds_t i = n; i-- > FIRST;) {
			if (!peer[i].revents)
				continue;
			if (sock_receive(peer[i].fd, text, NULL, 0)) {
				tracer.close(peer[i].fd);
				peer[i] = peer[--n];
				continue;
			}
			answer_one(peer[i].fd, text);
		}
		if (peer[0].revents && n < PEERS) {
			int s = accept4(peer[0].fd, NULL, NULL, SOCK_CLOEXEC);
			if (s >= 0)
				peer[n++] = (struct pollfd){s, POLLIN, 0};
		}
	}
	return NULL;
}

void serve_start(const char *sock, const char *guard)
{
	static struct pollfd peer[PEERS];
	char answer[LINE];
	sigset_t all, old;
	pthread_t thread;

	rm_ioctl = raw_ioctl;
	peer[0] = (struct pollfd){sock_listen(sock), POLLIN, 0};
	peer[1] = (struct pollfd){guard ? sock_connect(guard, 1000) : -1, POLLIN, 0};
	if (peer[0].fd < 0)
		return;
	if (peer[1].fd >= 0)
		sock_ask(peer[1].fd, "watch", answer, NULL, 1000);
	sigfillset(&all); /* the program's signals are not ours to take */
	pthread_sigmask(SIG_SETMASK, &all, &old);
	if (!pthread_create(&thread, NULL, serve, peer))
		pthread_detach(thread);
	pthread_sigmask(SIG_SETMASK, &old, NULL);
}
