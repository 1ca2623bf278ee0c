/*
 * orphan.c - ends or frees an offline process that waits for a valved, when none comes and no service needs its GPU.
 *
 * A hold stands before a mapping that was under way, so the shim cannot tell what it was for; but once every order has
 * been carried out and every slot of KV memory has its own handle, nothing is missing and launches go on. A hole can be
 * filled by a valved alone: computing over it would be wrong, and waiting for good is no better. After VALVE_ORPHAN_S
 * it ends by name.
 */
#include "settings.h"
#include "shim.h"

#define EXIT_ORPHAN 69 /* EX_UNAVAILABLE */

/* Precondition: there is no link, and our own stop, if there was one, has ended. The session's thread. */
void valve_orphan_check(uint64_t lost_ns)
{
	bool waits = valve_launches_wait();

	if (!waits && !valve_announce_is_waiting())
		return;
	if (!valve_orders_left_no_hole()) {
		if (now_ns() - lost_ns < valve_settings.orphan_ns)
			return;
		valve_say("no valved came to fill the holes in this offline process's KV memory: the process "
		          "ends");
		_exit(EXIT_ORPHAN);
	}
	if (waits)
		valve_map_private(0, VALVE_ORDER_RUN);
}
