/* knobs.c - the table of settings; values are atomics because handlers read them while an admin
 * changes them. */
#include "knobs.h"
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

struct row {
	const char *name, *kind, *preset, *text;
};
static const struct row rows[K_COUNT] = {
#define X(name, kind, preset, text) [K_##name] = {#name, kind, preset, text},
        KNOBS(X)
#undef X
};
static int64_t values[K_COUNT];

int64_t knob(enum knob_id id)
{
	return __atomic_load_n(&values[id], __ATOMIC_RELAXED);
}

static int64_t unit_of(const char *kind)
{
	if (strcmp(kind, "us") == 0)
		return 1000;
	if (strcmp(kind, "ms") == 0)
		return 1000000;
	return strcmp(kind, "ratio") == 0 ? 1000 : 1;
}

static bool is_choice(const char *kind)
{
	return strchr(kind, ',') != NULL;
}

/* Position of value in "a,b,c", or -1. */
static int64_t choice(const char *kind, const char *value)
{
	size_t length = strlen(value);
	int64_t at = 0;

	for (const char *p = kind; p; p = strchr(p, ','), p += p != NULL, at++)
		if (strncmp(p, value, length) == 0 && (p[length] == ',' || p[length] == 0))
			return at;
	return -1;
}

static const char *choice_name(const char *kind, int64_t at, int *length)
{
	while (at-- > 0)
		kind = strchr(kind, ',') + 1;
	*length = (int)strcspn(kind, ",");
	return kind;
}

static bool parse(const struct row *r, const char *value, int64_t *out)
{
	char *end;
	double number;

	if (is_choice(r->kind)) {
		*out = choice(r->kind, value);
		return *out >= 0;
	}
	if (strcmp(r->kind, "int") == 0) {
		*out = strtoll(value, &end, 0);
		return end != value && *end == 0 && *out >= 0;
	}
	number = strtod(value, &end);
	*out = (int64_t)(number * (double)unit_of(r->kind) + 0.5);
	return end != value && *end == 0 && number >= 0 && number < 1e9 &&
	       (strcmp(r->kind, "ratio") != 0 || *out > 0);
}

const char *knob_set(const char *name, const char *value)
{
	int64_t parsed;

	for (int i = 0; i < K_COUNT; i++) {
		if (strcmp(rows[i].name, name) != 0)
			continue;
		if (!parse(&rows[i], value, &parsed))
			return rows[i].kind;
		__atomic_store_n(&values[i], parsed, __ATOMIC_RELAXED);
		return NULL;
	}
	return "unknown knob";
}

/*
 * What virtual memory costs on one kind of card. a100, l40s and gb10 are what was published of them, as far as that
 * goes: the rest of a row is a100's. h100 is an assumption, since no figures were published: the fixed part is a100's,
 * and it grows with the size by less than what l40s shows (which zeroes at a third of the bandwidth).
 */
enum { COSTS = 12 };
static const enum knob_id cost_of[COSTS] = {
        K_alloc_us, K_alloc_mib_us, K_free_us,    K_map_us,  K_map_mib_us, K_map_locked_us,
        K_unmap_us, K_unmap_mib_us, K_reserve_us, K_book_us, K_fill_gbps,  K_copy_gbps,
};
static const struct {
	const char *name, *value[COSTS];
} cards[] = {
        {"h100", {"190", "1.5", "23", "35", "0.5", "25", "25.2", "0.2", "2", "1.45", "2500", "1500"}},
        {"a100", {"193", "0", "23", "36", "0", "25", "25.6", "0", "2", "1.45", "1600", "1000"}},
        {"l40s", {"94", "2.6", "23", "36", "0.5", "25", "25.6", "0.2", "2", "1.45", "700", "350"}},
        {"gb10", {"193", "1.5", "23", "23.6", "4.7", "15", "25.6", "0", "2", "1.45", "200", "100"}},
};

const char *knob_costs(const char *preset)
{
	for (size_t card = 0; card < sizeof cards / sizeof cards[0]; card++) {
		if (strcmp(cards[card].name, preset) != 0)
			continue;
		for (int i = 0; i < COSTS; i++)
			knob_set(rows[cost_of[i]].name, cards[card].value[i]);
		return NULL;
	}
	return "h100, a100, l40s or gb10";
}

void knobs_preset(void)
{
	for (int i = 0; i < K_COUNT; i++)
		knob_set(rows[i].name, rows[i].preset);
}

void knobs_write(FILE *out)
{
	fputc('{', out);
	for (int i = 0; i < K_COUNT; i++) {
		const struct row *r = &rows[i];
		const char *name;
		int length;

		fprintf(out, "%s\"%s\":", i ? "," : "", r->name);
		if (is_choice(r->kind)) {
			name = choice_name(r->kind, knob((enum knob_id)i), &length);
			fprintf(out, "\"%.*s\"", length, name);
		} else
			fprintf(out, "%.10g", (double)knob((enum knob_id)i) / (double)unit_of(r->kind));
	}
	fputc('}', out);
}
