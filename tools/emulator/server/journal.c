/*
 * journal.c - what happened, for tests and for people: calls that the emulator does not implement (by number),
 * the last disables and enables with their times, and a kernel log with Xid lines in
 * VALVE_EMU_DIR/dmesg.
 */
#include "server.h"
#include <stdarg.h>
#include <stdio.h>

enum { NUMBERS = 64, GATES = 4096 };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* a leaf: nothing else is taken under it */
static struct {
	uint32_t number;
	uint64_t count;
} unknown[TALLY_KINDS][NUMBERS];
static struct gate_entry gates[GATES];
static uint64_t gate_count, disables, enables;

void tally_unknown(enum tally kind, uint32_t number)
{
	LOCKED(&lock);
	for (int i = 0; i < NUMBERS; i++) {
		if (unknown[kind][i].count && unknown[kind][i].number != number)
			continue;
		unknown[kind][i].number = number;
		unknown[kind][i].count++;
		break;
	}
}

void journal_gate(const struct gate_entry *e)
{
	LOCKED(&lock);
	gates[gate_count++ % GATES] = *e;
	*(e->on ? &enables : &disables) += 1;
}

static void write_unknown(FILE *out)
{
	static const char *const names[TALLY_KINDS] = {"controls", "classes", "escapes", "uvm"};

	for (int kind = 0; kind < TALLY_KINDS; kind++) {
		fprintf(out, "%s\"%s\":{", kind ? "," : "", names[kind]);
		for (int i = 0; i < NUMBERS && unknown[kind][i].count; i++)
			fprintf(out, "%s\"0x%x\":%llu", i ? "," : "", unknown[kind][i].number,
			        (unsigned long long)unknown[kind][i].count);
		fputc('}', out);
	}
}

void journal_write(FILE *out)
{
	uint64_t first;

	LOCKED(&lock);
	fputs("\"unknown\":{", out);
	write_unknown(out);
	fprintf(out, "},\"disables\":%llu,\"enables\":%llu,\"gates\":[", (unsigned long long)disables,
	        (unsigned long long)enables);
	first = gate_count > GATES ? gate_count - GATES : 0;
	for (uint64_t i = first; i < gate_count; i++) {
		const struct gate_entry *e = &gates[i % GATES];

		fprintf(out,
		        "%s{\"gpu\":%u,\"on\":%s,\"channels\":%u,\"status\":%u,\"client\":%u,"
		        "\"pid\":%d,"
		        "\"entry_ns\":%llu,\"locked_ns\":%llu,\"stopped_ns\":%llu,\"done_ns\":%llu}",
		        i > first ? "," : "", e->gpu, e->on ? "true" : "false", e->channels, e->status,
		        e->client, e->pid, (unsigned long long)e->entry_ns, (unsigned long long)e->locked_ns,
		        (unsigned long long)e->stopped_ns, (unsigned long long)e->done_ns);
	}
	fputc(']', out);
}

void kernel_log(const char *format, ...)
{
	char path[sizeof S.dir + 8];
	uint64_t now = now_ns();
	va_list list;
	FILE *f;

	snprintf(path, sizeof path, "%s/dmesg", S.dir);
	LOCKED(&lock);
	f = fopen(path, "ae");
	if (f) {
		fprintf(f, "[%5llu.%06llu] NVRM: ", (unsigned long long)(now / 1000000000u),
		        (unsigned long long)(now / 1000u % 1000000u));
		va_start(list, format);
		vfprintf(f, format, list);
		va_end(list);
		fputc('\n', f);
		fclose(f);
	}
}

void xid(const struct gpu *g, uint32_t number, pid_t pid, const char *text)
{
	kernel_log("Xid (PCI:%04x:%02x:%02x): %u, pid=%d, %s", g->board->gpu_id >> 16,
	           g->board->gpu_id >> 8 & 0xFF, g->board->gpu_id & 0xFF, number, pid, text);
}
