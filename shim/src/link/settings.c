/*
 * settings.c - what the environment says, read once: when the process opens nvidiactl, on the thread that does. The
 * session's thread must not call getenv(): a setenv() of the application frees what it reads (glibc before 2.41).
 */
#include "settings.h"

#include "shim.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

#define ORPHAN_S      600u
#define ORPHAN_MOST_S 1000000000u

struct valve_settings valve_settings;

static const char *setting(const char *name)
{
	return valve_is_secure() ? NULL : getenv(name);
}

static uint32_t role_wish(void)
{
	const char *role = setting("VALVE_ROLE");

	if (!role)
		return VALVE_ROLE_NONE;
	if (!strcmp(role, "online"))
		return VALVE_ROLE_ONLINE;
	return strcmp(role, "offline") ? VALVE_ROLE_NONE : VALVE_ROLE_OFFLINE;
}

/* Seconds that make no sense are the usual ten minutes: a restart or an upgrade of valved takes less. */
static uint64_t orphan_ns(void)
{
	const char *text = setting("VALVE_ORPHAN_S");
	char *end = NULL;
	unsigned long seconds = text ? strtoul(text, &end, 10) : 0;

	if (!text || *text < '0' || *text > '9' || *end || seconds > ORPHAN_MOST_S)
		seconds = ORPHAN_S;
	return seconds * 1000000000ull;
}

/* `folder` NULL: this place is not asked. A path that does not fit stays empty, and connecting says so. */
static void add_place(const char *folder, const char *tail)
{
	struct valve_place_of_socket *place = &valve_settings.place[valve_settings.places];
	size_t length = folder ? strlen(folder) : 0;

	if (!folder)
		return;
	valve_settings.places++;
	place->address.sun_family = AF_UNIX;
	if (length + strlen(tail) >= sizeof(place->address.sun_path))
		return;
	memcpy(place->address.sun_path, folder, length);
	memcpy(place->address.sun_path + length, tail, strlen(tail) + 1);
}

/* The order of valved/paths.py: VALVE_RUN_DIR, /run/valve, the user's run folder, and nothing else. */
void valve_settings_read(void)
{
	const char *require = setting("VALVE_REQUIRE");

	memset(&valve_settings, 0, sizeof(valve_settings));
	valve_settings.wanted_role = role_wish();
	valve_settings.is_required = require && !strcmp(require, "1");
	valve_settings.orphan_ns = orphan_ns();
	valve_settings.names_mps = setting("CUDA_MPS_PIPE_DIRECTORY") != NULL;
	add_place(setting("VALVE_RUN_DIR"), "/link.sock");
	valve_settings.place[0].is_named = valve_settings.places == 1;
	add_place("/run/valve", "/link.sock");
	add_place(setting("XDG_RUNTIME_DIR"), "/valve/link.sock");
}

/* The named place, else the first that exists. 0 or -errno. */
int valve_settings_socket(struct sockaddr_un *address)
{
	for (uint32_t i = 0; i < valve_settings.places; i++) {
		const struct valve_place_of_socket *place = &valve_settings.place[i];

		if (!place->address.sun_path[0])
			return -ENAMETOOLONG;
		if (!place->is_named && syscall(SYS_access, place->address.sun_path, F_OK))
			continue;
		*address = place->address;
		return 0;
	}
	return -ENOENT;
}
