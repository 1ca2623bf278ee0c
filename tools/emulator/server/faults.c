/*
 * faults.c - scripted failures. One rule a line:
 *     on EVENT [N | every N | always] [gpu G]: ACTION
 * EVENT   disable enable schedule alloc free control map unmap sparse
 * ACTION  hang TIME    sleep before doing it, locks held (TIME: 300us, 20ms, 1s, real time)
 *         hold         stop there, locks held, until the client's release()
 *         late TIME    disable only: answer at once, the channels stop so much later
 *         status S     answer this RM status, do nothing
 *         silent       answer OK, do nothing
 *         xid N        write a kernel log line, then do it
 *         lost         the card falls off the bus
 *         kill         SIGKILL the caller before anything is done
 * N counts the events that the rule matches, from when it was added. README.md has examples.
 */
#include "server.h"
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { RULES = 64 };
enum action { HANG, LATE, STATUS, XID, HOLD, SILENT, LOST, KILL, ACTIONS };
static const char *const actions[ACTIONS] = {"hang", "late",   "status", "xid",
                                             "hold", "silent", "lost",   "kill"};
static const char *const events[] = {"disable", "enable", "schedule", "alloc", "free",
                                     "control", "map",    "unmap",    "sparse"};

struct rule {
	char event[16];
	uint64_t at, every, seen; /* at 0 and every 0: always */
	int gpu;                  /* -1: any */
	enum action action;
	uint64_t number; /* ns, status or Xid */
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct rule rules[RULES];
static int rule_count;
static pthread_cond_t released = PTHREAD_COND_INITIALIZER;
static uint64_t releases;
static uint32_t held;

static bool matches(struct rule *r, const char *event, const struct gpu *g)
{
	if (strcmp(r->event, event) != 0 || (r->gpu >= 0 && (!g || g->index != (uint32_t)r->gpu)))
		return false;
	r->seen++;
	if (r->at)
		return r->seen == r->at;
	return !r->every || r->seen % r->every == 0;
}

/* Reality is not scaled when it breaks: a hang is given in real time. */
static void hang(uint64_t ns)
{
	struct timespec t = {(time_t)(ns / 1000000000u), (long)(ns % 1000000000u)};

	clock_nanosleep(CLOCK_MONOTONIC, 0, &t, NULL);
}

/* Lets a test stand at a point of a call for as long as it wants: kill a process there, or show what waits. */
static void hold(void)
{
	uint64_t round;

	LOCKED(&lock);
	round = releases;
	held++;
	while (round == releases)
		pthread_cond_wait(&released, &lock);
}

void faults_release(void)
{
	LOCKED(&lock);
	releases++;
	held = 0; /* at once: the next count must not see those that are leaving */
	pthread_cond_broadcast(&released);
}

uint32_t faults_held(void)
{
	LOCKED(&lock);
	return held;
}

static void carry_out(const struct rule *r, struct fault_hit *hit, const struct call *c, struct gpu *g)
{
	switch (r->action) {
	case HANG:
		hang(r->number);
		break;
	case HOLD:
		hold();
		break;
	case LATE:
		hit->late_ns = r->number;
		break;
	case STATUS:
		hit->has_status = true;
		hit->status = (uint32_t)r->number;
		break;
	case SILENT:
		hit->silent = true;
		break;
	case XID:
		xid(g ? g : &S.gpu[0], (uint32_t)r->number, c->pid, "scripted");
		break;
	case LOST:
		state_lock();
		gpu_lose(g ? g : &S.gpu[0]);
		state_unlock();
		hit->has_status = true;
		hit->status = NV_ERR_GPU_IS_LOST;
		break;
	case KILL:
		kill(c->pid, SIGKILL);
		hit->has_status = true;
		hit->status = NV_ERR_INVALID_STATE;
		break;
	default:
		break;
	}
}

struct fault_hit fault_at(const char *event, const struct call *c, struct gpu *g)
{
	struct fault_hit hit = {0};
	struct rule due[RULES];
	int n = 0;

	pthread_mutex_lock(&lock);
	for (int i = 0; i < rule_count; i++)
		if (matches(&rules[i], event, g))
			due[n++] = rules[i];
	pthread_mutex_unlock(&lock);
	for (int i = 0; i < n; i++)
		carry_out(&due[i], &hit, c, g);
	return hit;
}

void faults_clear(void)
{
	LOCKED(&lock);
	rule_count = 0;
}

static const char *parse_time(const char *text, uint64_t *ns)
{
	char *end;
	double value = strtod(text, &end);

	if (end == text || value < 0)
		return "a TIME is a number and us, ms or s";
	if (strcmp(end, "us") == 0)
		*ns = (uint64_t)(value * 1e3);
	else if (strcmp(end, "ms") == 0)
		*ns = (uint64_t)(value * 1e6);
	else if (strcmp(end, "s") == 0)
		*ns = (uint64_t)(value * 1e9);
	else
		return "a TIME is a number and us, ms or s";
	return NULL;
}

static const char *parse_action(const char *text, struct rule *r)
{
	char name[16] = "", argument[32] = "", rest[2];
	int n = sscanf(text, " %15s %31s %1s", name, argument, rest), i;
	char *end;

	for (i = 0; i < ACTIONS && strcmp(actions[i], name) != 0; i++)
		;
	if (i == ACTIONS)
		return "unknown action (hang, late, status, xid, hold, silent, lost, kill)";
	r->action = (enum action)i;
	if (n != (i <= XID ? 2 : 1))
		return "wrong number of words after the action";
	if (i == HANG || i == LATE)
		return parse_time(argument, &r->number);
	if (n == 2) {
		r->number = strtoull(argument, &end, 0);
		if (*end)
			return "a status or Xid is a number";
	}
	return NULL;
}

/* "EVENT [N | every N | always] [gpu G]", cut into words by the caller's copy. */
static const char *parse_when(char *text, struct rule *r)
{
	char *save, *word = strtok_r(text, " ", &save);
	bool known = false;

	if (!word || strcmp(word, "on") != 0)
		return "a rule starts with: on EVENT";
	word = strtok_r(NULL, " ", &save);
	for (size_t i = 0; word && i < sizeof events / sizeof events[0]; i++)
		known = known || strcmp(events[i], word) == 0;
	if (!known)
		return "unknown event (disable enable schedule alloc free control map unmap sparse)";
	strcpy(r->event, word);
	while ((word = strtok_r(NULL, " ", &save)) != NULL) {
		const char *value = strcmp(word, "every") == 0 || strcmp(word, "gpu") == 0
		                            ? strtok_r(NULL, " ", &save)
		                            : word;
		char *end;
		long number = value ? strtol(value, &end, 10) : -1;

		if (strcmp(word, "always") == 0)
			continue;
		if (!value || *end || number < 0)
			return "expected N, every N, always or gpu G";
		if (strcmp(word, "every") == 0)
			r->every = (uint64_t)number;
		else if (strcmp(word, "gpu") == 0)
			r->gpu = (int)number;
		else
			r->at = (uint64_t)number;
	}
	return NULL;
}

const char *fault_add(const char *line)
{
	struct rule r = {.gpu = -1};
	char copy[256];
	char *colon;
	const char *wrong;

	if (strlen(line) >= sizeof copy)
		return "line too long";
	strcpy(copy, line);
	colon = strchr(copy, ':');
	if (!colon)
		return "expected: on EVENT [WHEN]: ACTION";
	*colon = 0;
	wrong = parse_when(copy, &r);
	if (!wrong)
		wrong = parse_action(colon + 1, &r);
	if (wrong)
		return wrong;
	LOCKED(&lock);
	if (rule_count < RULES)
		rules[rule_count++] = r;
	else
		wrong = "too many rules";
	return wrong;
}
