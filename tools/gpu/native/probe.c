/*
 * probe.c - the measuring side: a process with an RM client of its own (path A), with a workload's passed descriptor
 * (path B), or that asks the workload (path C). Reads one command a line, answers one line of JSON. It disables nothing
 * that the guard has not acknowledged, and at the end of its input it enables what it left off.
 *
 *   open [bare]                      attach TABLE BEAT SOCK       path a|b|c         uid N
 *   list                             watch MS
 *   off SEL MS     on SEL            SEL: gr, all, one; MS: the guard's deadline
 *   raw off|on FLAGS PAIRS MS        PAIRS: client:channel,...; FLAGS bit 0: only disable scheduling
 *   cycles N SEL PAUSE_US PAUSE_US GAP_US GAP_US LIMIT_S
 *   control own|theirs OBJECT CMD HEX     OBJECT `sub`: the subdevice. Never the disable call
 *   sparse BASE BYTES UUID           UVM's sparse mapping on the uvm descriptor that the workload passes
 *
 * Started as: probe [GUARD-SOCKET [patient]]
 */
#include "probe.h"

#include <errno.h>
#include <grp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

struct probe probe = {.guard = -1, .work = -1, .passed = -1, .own = {.ctl = -1, .node = -1}, .path = 'a'};
volatile sig_atomic_t stop_now;

static void on_signal(int number)
{
	stop_now = number;
}

bool guard_ask(const char *verb, unsigned ms)
{
	char text[LINE], answer[LINE];

	if (probe.guard < 0)
		return false;
	snprintf(text, sizeof(text), "%s %s %u", verb, probe.table_path, ms);
	return !sock_ask(probe.guard, text, answer, NULL, GUARD_MS) && !strcmp(answer, "ok");
}

struct rm_result switch_list(rm_list *list, bool off)
{
	struct rm_result r;

	if (probe.path == 'b')
		r = rm_switch(probe.passed, probe.their_client, probe.their_subdevice, list, off);
	else
		r = rm_switch(probe.own.ctl, probe.own.client, probe.own.subdevice, list, off);
	if (r.ns > SLOW_NS)
		probe.is_slow = true;
	return r;
}

static const char *const select_names[] = {"gr", "all", "one"};

/* Path C: the tracer inside the workload does it. ENOENT: it knew no channel to switch. */
static struct rm_result ask_workload(enum rm_select select, bool off)
{
	char text[32], answer[LINE];
	struct rm_result r = {.err = EIO};
	unsigned channels = 0;

	snprintf(text, sizeof(text), "%s %s", off ? "off" : "on", select_names[select]);
	if (sock_ask(probe.work, text, answer, NULL, GUARD_MS)) {
		probe.is_slow = true;
		return r;
	}
	if (sscanf(answer, "%d %u %lu %u", &r.err, &r.status, &r.ns, &channels) != 4)
		r.err = EPROTO;
	else if (!channels)
		r.err = ENOENT;
	return r;
}

struct rm_result switch_channels(enum rm_select select, bool off)
{
	rm_list list;

	if (off)
		probe.left_off = true;
	if (probe.path == 'c')
		return ask_workload(select, off);
	if (!rm_pairs(probe.table, select, probe.path == 'b' ? probe.their_client : 0, &list))
		return (struct rm_result){.err = ENOENT};
	return switch_list(&list, off);
}

enum rm_select select_of(const char *word)
{
	return !strcmp(word, "all") ? SELECT_ALL : !strcmp(word, "one") ? SELECT_ONE : SELECT_GR;
}

void print_result(const char *prefix, struct rm_result r)
{
	printf("\"%serrno\": %d, \"%sstatus\": %u, \"%sus\": %.1f", prefix, r.err, prefix, r.status, prefix,
	       (double)r.ns / 1e3);
}

static void answer(struct rm_result r)
{
	printf("{");
	print_result("", r);
	printf(", \"slow\": %s}\n", probe.is_slow ? "true" : "false");
}

static void fail(const char *why)
{
	printf("{\"error\": \"%s\"}\n", why);
}

/* ---- commands ---- */

static void do_open(char *rest)
{
	struct rm_step step[RM_STEPS];
	int bad = rm_open(&probe.own, !strstr(rest, "bare"), step);

	printf("{\"ok\": %s, \"uid\": %d, \"steps\": [", bad ? "false" : "true", (int)getuid());
	for (int i = 0; i < RM_STEPS; i++) {
		printf("%s{\"name\": \"%s\", ", i ? ", " : "", step[i].name);
		print_result("", step[i].result);
		printf("}");
	}
	printf("], \"client\": %u, \"subdevice\": %u, \"instance\": %u, \"minor\": %u}\n", probe.own.client,
	       probe.own.subdevice, probe.own.instance, probe.own.minor);
}

static void do_attach(char *rest)
{
	char table[PATH_BYTES] = "", beat[PATH_BYTES] = "", sock[PATH_BYTES] = "", text[LINE], answer[LINE];

	sscanf(rest, "%107s %107s %107s", table, beat, sock);
	probe.table = map_table(table);
	probe.beat = strcmp(beat, "-") ? map_beat(beat) : NULL;
	if (!probe.table || (strcmp(beat, "-") && !probe.beat))
		return fail("no such table or beat file");
	snprintf(probe.table_path, sizeof(probe.table_path), "%s", table);
	probe.work = sock_connect(sock, 1000);
	snprintf(text, sizeof(text), "register %s %s %s", table, sock, beat);
	if (probe.guard >= 0 && (sock_ask(probe.guard, text, answer, NULL, GUARD_MS) || strcmp(answer, "ok")))
		return fail("the guard did not register the workload");
	printf("{\"ok\": true, \"workload\": %s}\n", probe.work >= 0 ? "true" : "false");
}

static void do_path(char *rest)
{
	char answer[LINE];

	probe.path = *rest;
	if (*rest == 'b') {
		if (probe.work < 0 || sock_ask(probe.work, "fd", answer, &probe.passed, GUARD_MS) ||
		    probe.passed < 0)
			return fail("no descriptor was passed");
		sscanf(answer, "%u %u", &probe.their_client, &probe.their_subdevice);
	}
	printf("{\"ok\": true}\n");
}

static void do_uid(char *rest)
{
	unsigned id = (unsigned)atoi(rest);

	if (setgroups(0, NULL) || setgid(id) || setuid(id))
		return fail("cannot give up root");
	printf("{\"ok\": true}\n");
}

static void do_list(char *rest)
{
	const struct table *t = probe.table;
	const char *comma = "";

	(void)rest;
	if (!t)
		return fail("attach first");
	printf("{\"pid\": %u, \"incomplete\": %u, \"calls\": %u, \"app_disables\": %u, \"app_schedules\": "
	       "%u, ",
	       t->pid, t->incomplete, t->calls, t->app_disables, t->app_schedules);
	printf("\"app_preempts\": %u, \"channels\": [", t->app_preempts);
	for (uint32_t i = 0; i < t->channels; i++) {
		const struct table_channel *c = &t->channel[i];
		if (c->live != LIVE)
			continue;
		printf("%s{\"client\": %u, \"channel\": %u, \"tsg\": %u, \"engine\": %u, \"class\": %u, ",
		       comma, c->client, c->channel, c->tsg, c->engine, c->cls);
		printf("\"cid\": %u, \"compute\": %u, \"copy\": %u, \"uvm\": %u}", c->cid, c->compute,
		       c->copy, c->is_uvm);
		comma = ", ";
	}
	printf("]}\n");
}

static void do_switch(char *rest, bool off)
{
	char word[16] = "gr";
	unsigned ms = 1000;

	sscanf(rest, "%15s %u", word, &ms);
	if (off && !guard_ask("hold", ms))
		return fail("the guard did not acknowledge");
	struct rm_result r = switch_channels(select_of(word), off);
	if (!off) {
		guard_ask("release", 0);
		probe.left_off = false;
	}
	answer(r);
}

static void do_off(char *rest)
{
	do_switch(rest, true);
}

static void do_on(char *rest)
{
	do_switch(rest, false);
}

static void do_raw(char *rest)
{
	char word[8] = "", pairs[LINE] = "-";
	unsigned flags = 0, ms = 1000;
	rm_list list = {0};

	sscanf(rest, "%7s %u %8190s %u", word, &flags, pairs, &ms);
	if (probe.path == 'c')
		return fail("lists need path a or b");
	bool off = !strcmp(word, "off");
	list.bOnlyDisableScheduling = flags & 1;
	for (char *save = NULL, *pair = strtok_r(pairs, ",", &save); pair;
	     pair = strtok_r(NULL, ",", &save)) {
		uint32_t *n = &list.numChannels;
		if (*n < NV2080_DISABLE_CHANNELS_MAX &&
		    sscanf(pair, "%u:%u", &list.hClientList[*n], &list.hChannelList[*n]) == 2)
			(*n)++;
	}
	if (off && !guard_ask("hold", ms))
		return fail("the guard did not acknowledge");
	if (off)
		probe.left_off = true;
	struct rm_result r = switch_list(&list, off);
	answer(r);
}

static void do_control(char *rest)
{
	char whose[8] = "", object[16] = "", hex[LINE] = "";
	uint8_t params[LINE / 2] = {0};
	uint32_t cmd = 0, bytes = 0;

	sscanf(rest, "%7s %15s %x %8190s", whose, object, &cmd, hex);
	if (cmd == NV2080_CTRL_CMD_FIFO_DISABLE_CHANNELS)
		return fail("the disable call goes through off and raw");
	bool theirs = !strcmp(whose, "theirs");
	if (theirs && probe.passed < 0)
		return fail("path b first");
	bytes = from_hex(hex, params, sizeof(params));
	uint32_t sub = theirs ? probe.their_subdevice : probe.own.subdevice;
	uint32_t client = theirs ? probe.their_client : probe.own.client;
	uint32_t handle = strcmp(object, "sub") ? (uint32_t)strtoul(object, NULL, 0) : sub;
	struct rm_result r = rm_control(theirs ? probe.passed : probe.own.ctl, client, handle, cmd,
	                                bytes ? params : NULL, bytes);
	if (r.ns > SLOW_NS)
		probe.is_slow = true;
	printf("{");
	print_result("", r);
	printf(", \"slow\": %s, \"params\": \"", probe.is_slow ? "true" : "false");
	for (uint32_t i = 0; i < bytes; i++)
		printf("%02x", params[i]);
	printf("\"}\n");
}

/* The same ioctl that the workload could make, from outside it: the remap that needs no thread of libcuda's. */
static void do_sparse(char *rest)
{
	struct uvm_map_external_sparse params = {.rmStatus = ~0u};
	unsigned long long base = 0, bytes = 0;
	char uuid[33] = "", answer[LINE];
	int uvm = -1;

	sscanf(rest, "%llu %llu %32s", &base, &bytes, uuid);
	if (probe.work < 0 || sock_ask(probe.work, "uvm", answer, &uvm, GUARD_MS) || uvm < 0)
		return fail("no uvm descriptor was passed");
	from_hex(uuid, params.gpuUuid, sizeof(params.gpuUuid));
	params.base = base;
	params.length = bytes;
	uint64_t start = now_ns();
	struct rm_result r = {.err = ioctl(uvm, UVM_MAP_EXTERNAL_SPARSE, &params) ? errno : 0};
	r.ns = now_ns() - start;
	r.status = params.rmStatus;
	close(uvm);
	printf("{");
	print_result("", r);
	printf("}\n");
}

static void do_watch(char *rest)
{
	uint64_t end = now_ns() + (uint64_t)atoi(rest) * 1000000u, last, t, before = now_ns(), gap = 0;
	unsigned changes = 0;

	if (!probe.beat)
		return fail("no beat file");
	last = probe.beat->mark;
	for (; (t = now_ns()) < end && !stop_now; look_again()) {
		uint64_t mark = probe.beat->mark;
		if (t - before > gap)
			gap = t - before;
		if (mark == last)
			continue;
		changes++;
		last = mark;
		before = t;
	}
	printf("{\"changes\": %u, \"longest_gap_us\": %.1f, \"done\": %u, \"launches\": %llu}\n", changes,
	       (double)gap / 1e3, probe.beat->done, (unsigned long long)probe.beat->launches);
}

static void do_cycles(char *rest)
{
	if (!probe.table)
		return fail("attach first");
	cycles(rest);
}

static const struct command {
	const char *name;
	void (*run)(char *rest);
} commands[] = {
        {"open", do_open},       {"attach", do_attach}, {"path", do_path},     {"uid", do_uid},
        {"list", do_list},       {"off", do_off},       {"on", do_on},         {"raw", do_raw},
        {"control", do_control}, {"watch", do_watch},   {"cycles", do_cycles}, {"sparse", do_sparse},
};

static void obey(char *line)
{
	size_t word = strcspn(line, " \n");
	char *rest = line + word + (line[word] == ' ');

	line[strcspn(line, "\n")] = 0;
	for (size_t i = 0; i < sizeof(commands) / sizeof(commands[0]); i++) {
		if (strlen(commands[i].name) == word && !strncmp(commands[i].name, line, word)) {
			commands[i].run(rest);
			fflush(stdout);
			return;
		}
	}
	fail("unknown command");
	fflush(stdout);
}

int main(int argc, char **argv)
{
	struct sigaction action = {.sa_handler = on_signal}; /* no SA_RESTART: a signal ends the reading */
	static char line[2 * LINE];

	sigaction(SIGTERM, &action, NULL); /* a cycle in progress is finished, which leaves the channels on */
	sigaction(SIGINT, &action, NULL);
	signal(SIGPIPE, SIG_IGN);
	probe.is_patient = argc > 2;
	if (argc > 1 && (probe.guard = sock_connect(argv[1], 5000)) < 0)
		return 1;
	while (!stop_now && fgets(line, sizeof(line), stdin))
		obey(line);
	if (probe.left_off) {
		switch_channels(SELECT_ALL, false);
		guard_ask("release", 0);
	}
	rm_close(&probe.own);
	return 0;
}
