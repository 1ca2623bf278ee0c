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

/* A path that does not fit stays empty. */
static bool join(struct sockaddr_un *address, const char *here, const char *folder, const char *tail)
{
	const char *const parts[] = {here, *here ? "/" : "", folder, tail};
	size_t length = 0;

	for (size_t i = 0; i < sizeof(parts) / sizeof(parts[0]); i++) {
		size_t more = strlen(parts[i]);

		if (length + more >= sizeof(address->sun_path)) {
			address->sun_path[0] = 0;
			return false;
		}
		memcpy(address->sun_path + length, parts[i], more + 1);
		length += more;
	}
	return true;
}

/* `folder` NULL: this place is not asked. A program may go elsewhere before it looks for a valved again, so a folder is named
 * from the root, where that fits. */
static void add_place(const char *folder, const char *tail)
{
	struct sockaddr_un *address = &valve_settings.place[valve_settings.places].address;
	char here[sizeof(address->sun_path)];

	if (!folder)
		return;
	valve_settings.places++;
	address->sun_family = AF_UNIX;
	if (*folder != '/' && syscall(SYS_getcwd, here, sizeof(here)) > 0 && *here == '/' &&
	    join(address, here, folder, tail))
		return;
	join(address, "", folder, tail);
}

/* The order of valved/paths.py: VALVE_RUN_DIR, /run/valve, the user's run folder, and nothing else. */
void valve_settings_read(void)
{
	const char *require = setting("VALVE_REQUIRE");

	memset(&valve_settings, 0, sizeof(valve_settings));
	valve_settings.wanted_role = role_wish();
	valve_settings.is_required =
	        require && !strcmp(require, "1") && valve_settings.wanted_role == VALVE_ROLE_OFFLINE;
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
