/*
 * note.c - things an operator should know, or valved acts on: most of them once to each valved. Some are found before the link exists (the CUDA runtime asks
 * for its functions before the driver opens a device), so they wait in a short list.
 */
#include "shim.h"

#include <string.h>

#define NOTES 32
#define NAMES \
	24 /* of them at most are names that a driver newer than we are has: the rest is for what valved acts on */
#define AGAIN_NS 1000000000u

struct note {
	uint32_t code, h_client, h_channel;
	uint32_t told; /* generation of the link by which it went; 0: not yet */
	uint64_t said_ns;
	char text[96];
};

static struct {
	uint32_t count;
	struct note note[NOTES];
} notes;

static bool is_same(const struct note *one, const struct note *other)
{
	return one->code == other->code && one->h_client == other->h_client &&
	       one->h_channel == other->h_channel && !strcmp(one->text, other->text);
}

/* What a want of memory means depends on the processes that are there: valved hears of later ones, too. */
static void say_again(struct note *note)
{
	if (note->told != load_relaxed(&valve_shim.link_generation) ||
	    (note->code == VALVE_NOTE_NO_MEMORY && now_ns() - note->said_ns > AGAIN_NS))
		note->told = 0;
}

/* What this process is, each valved hears: it acts on it (MPS). What happened once was its predecessor's to hear. */
static bool is_due(const struct note *note, uint32_t generation)
{
	bool has_passed = note->code == VALVE_NOTE_NO_MEMORY || note->code == VALVE_NOTE_NOT_ENABLED;

	return !note->told || (!has_passed && note->told != generation);
}

/* A list that is full drops: the first notes of a kind say what the later ones would. */
void valve_note(uint32_t code, uint32_t h_client, uint32_t h_channel, const char *text)
{
	struct note fresh = {.code = code, .h_client = h_client, .h_channel = h_channel};
	uint32_t i = 0, room = code == VALVE_NOTE_UNKNOWN_SUBMIT ? NAMES : NOTES;

	strncpy(fresh.text, text, sizeof(fresh.text) - 1);
	valve_lock(&valve_shim.note_lock);
	while (i < notes.count && !is_same(&notes.note[i], &fresh))
		i++;
	if (i == notes.count && i < room)
		notes.note[notes.count++] = fresh;
	else if (i < notes.count)
		say_again(&notes.note[i]);
	valve_unlock(&valve_shim.note_lock);
	valve_note_flush();
}

void valve_note_flush(void)
{
	uint32_t generation = load_relaxed(&valve_shim.link_generation);

	if (!valve_is_linked())
		return;
	valve_lock(&valve_shim.note_lock);
	for (uint32_t i = 0; i < notes.count; i++) {
		struct note *note = &notes.note[i];
		struct valve_link_note message = {
		        .code = note->code, .h_client = note->h_client, .h_channel = note->h_channel};

		if (!is_due(note, generation))
			continue;
		memcpy(message.text, note->text, sizeof(message.text));
		note->said_ns = now_ns();
		if (!valve_link_send_fds(&message, sizeof(message), VALVE_LINK_NOTE, NULL, 0, generation))
			note->told = generation;
	}
	valve_unlock(&valve_shim.note_lock);
}

/* A forked child is no client yet, and what its parent did is not its own doing. */
void valve_note_reset(void)
{
	if (notes.count)
		notes.count = 0;
}
