/*
 * process.c - the page that this process publishes (emu.h): its settings and the time it spends in the driver. The page is
 * libfakenv's; where that is missing, settings stay private and nothing is counted.
 */
#include "core.h"

#include <stdlib.h>

#pragma weak emu_process_page
#pragma weak emu_meter_begin
#pragma weak emu_meter_add
#pragma weak emu_meter_end
#pragma weak emu_sparse_refresh

_Static_assert(SETTINGS <= EMU_SETTINGS, "settings");

static uint64_t asked_for(const char *name, uint64_t preset)
{
	const char *text = getenv("VALVE_EMU_CUDA");
	size_t length = strlen(name);
	uint64_t value = preset;

	for (const char *at = text ? strstr(text, name) : NULL; at; at = strstr(at + 1, name))
		if ((at == text || at[-1] == ',') && at[length] == '=')
			value = strtoull(at + length + 1, NULL, 0);
	return value;
}

void settings_read(void)
{
	static const struct emu_setting presets[SETTINGS] = {
#define X(name, value) {#name, value},
	        SETTINGS_OF(X)
#undef X
	};
	static struct emu_setting own[SETTINGS];
	struct emu_process *page = emu_process_page ? emu_process_page() : NULL;

	emu.settings = page ? page->setting : own;
	for (int i = 0; i < SETTINGS; i++) {
		emu.settings[i] = presets[i];
		emu.settings[i].value = asked_for(presets[i].name, presets[i].value);
	}
}

uint64_t setting(enum setting which)
{
	return __atomic_load_n(&emu.settings[which].value, __ATOMIC_RELAXED);
}

static pthread_mutex_t api = PTHREAD_MUTEX_INITIALIZER;

bool api_lock(void)
{
	bool wanted = setting(SETTING_launch_locks) != 0;

	if (wanted)
		pthread_mutex_lock(&api);
	return wanted;
}

void api_unlock(const bool *was_taken)
{
	if (*was_taken)
		pthread_mutex_unlock(&api);
}

enum emu_cost meter_begin(enum emu_cost cost)
{
	if (emu_meter_begin)
		emu_meter_begin(cost);
	return cost;
}

void meter_end(const enum emu_cost *cost)
{
	(void)cost;
	if (emu_meter_end)
		emu_meter_end();
}

void meter_model(uint64_t real)
{
	if (emu_meter_add)
		emu_meter_add(real);
}

void sparse_refresh(void)
{
	if (emu_sparse_refresh)
		emu_sparse_refresh();
}
