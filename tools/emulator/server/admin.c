/*
 * admin.c - the control connection of tests, benches and people: one command per packet.
 *   get | state | set NAME VALUE | fault LINE | faults-clear | release | lose GPU | quit
 * Answers: "+bytes" packets and a last ".bytes"; errors as JSON {"error": text}.
 */
#include "server.h"
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

enum { CHUNK = 60000 };

static void reply(int sock, const char *text, size_t size)
{
	char packet[CHUNK + 1];
	size_t part;

	do {
		part = size > CHUNK ? CHUNK : size;
		packet[0] = part == size ? '.' : '+';
		memcpy(packet + 1, text, part);
		if (send(sock, packet, part + 1, MSG_NOSIGNAL) < 0)
			return;
		text += part;
		size -= part;
	} while (packet[0] == '+');
}

static void reply_from(int sock, void (*write)(FILE *))
{
	char *text = NULL;
	size_t size = 0;
	FILE *out = open_memstream(&text, &size);

	if (!out)
		return;
	write(out);
	fclose(out);
	reply(sock, text, size);
	free(text);
}

static void reply_result(int sock, const char *wrong)
{
	char text[256];

	if (wrong)
		snprintf(text, sizeof text, "{\"error\": \"%s\"}", wrong);
	else
		strcpy(text, "{}");
	reply(sock, text, strlen(text));
}

void driver_text(char out[64])
{
	LOCKED(&S.state);
	memcpy(out, S.driver, sizeof S.driver);
}

/* "580.159.04": what the card says of itself, and the branch that decides sizes and commands. */
static const char *set_driver(const char *version)
{
	uint32_t part[3] = {0};

	if (strlen(version) >= sizeof S.driver ||
	    sscanf(version, "%u.%u.%u", &part[0], &part[1], &part[2]) < 1)
		return "a driver version is like 580.159.04";
	state_lock();
	memset(S.driver, 0, sizeof S.driver);
	memcpy(S.driver, version, strlen(version));
	for (int i = 0; i < 3; i++)
		store(&S.board->driver[i], part[i]);
	state_unlock();
	return proc_files_write() ? "cannot write the proc files" : NULL;
}

/* What libcuda and NVML read without asking. */
void board_follow_knobs(void)
{
	store(&S.board->gpfifo_depth, (uint32_t)knob(K_gpfifo_depth));
	store(&S.board->gsp, (uint32_t)knob(K_gsp));
	store(&S.board->mig, (uint32_t)knob(K_mig));
	store(&S.board->compute_mode, (uint32_t)knob(K_compute_mode));
	store(&S.board->reserve_ns, (uint64_t)knob(K_reserve_us));
	store(&S.board->book_ns, (uint64_t)knob(K_book_us));
	store(&S.board->fill_gbps, (uint64_t)knob(K_fill_gbps));
	store(&S.board->copy_gbps, (uint64_t)knob(K_copy_gbps));
	store(&S.board->silent_fills, (uint64_t)knob(K_fills));
}

const char *setting(const char *name, const char *value)
{
	const char *wrong;

	if (strcmp(name, "driver") == 0)
		return set_driver(value);
	wrong = strcmp(name, "costs") == 0 ? knob_costs(value) : knob_set(name, value);
	board_follow_knobs();
	return wrong;
}

static const char *lose(const char *text)
{
	char *end;
	unsigned long i = strtoul(text, &end, 10);

	if (end == text || *end || i >= S.gpus)
		return "no such GPU";
	LOCKED(&S.state);
	gpu_lose(&S.gpu[i]);
	return NULL;
}

static void carry_out(int sock, char *line)
{
	char *rest = strchr(line, ' ');
	char *value;

	if (rest)
		*rest++ = 0;
	else
		rest = line + strlen(line);
	if (strcmp(line, "state") == 0)
		reply_from(sock, snapshot_json);
	else if (strcmp(line, "get") == 0)
		reply_from(sock, knobs_write);
	else if (strcmp(line, "set") == 0) {
		value = strchr(rest, ' ');
		if (value)
			*value++ = 0;
		reply_result(sock, value ? setting(rest, value) : "set NAME VALUE");
	} else if (strcmp(line, "fault") == 0)
		reply_result(sock, fault_add(rest));
	else if (strcmp(line, "faults-clear") == 0) {
		faults_clear();
		reply_result(sock, NULL);
	} else if (strcmp(line, "release") == 0) {
		faults_release();
		reply_result(sock, NULL);
	} else if (strcmp(line, "lose") == 0)
		reply_result(sock, lose(rest));
	else if (strcmp(line, "quit") == 0) {
		reply_result(sock, NULL);
		kill(getpid(), SIGTERM);
	} else
		reply_result(sock, "unknown command");
}

void admin_serve(int sock)
{
	char line[1024];
	ssize_t n;

	while ((n = recv(sock, line, sizeof line - 1, 0)) > 0) {
		line[n] = 0;
		carry_out(sock, line);
	}
}
