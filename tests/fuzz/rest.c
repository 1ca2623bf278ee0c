/* rest.c - for the link's fuzzer: what the link calls in rooms of the shim that the fuzzer leaves out, to no effect. */
#include "settings.h"

#include "shim.h"

struct valve_shim valve_shim;
struct valve_settings valve_settings;
_Thread_local struct valve_tls valve_tls;

int valve_capture_tell_ran(void)
{
	return 0;
}

bool valve_capture_is_told(void)
{
	return !valve_shim.untold;
}

void valve_capture_report(bool wait)
{
	(void)wait;
	valve_shim.untold = 0;
}

int valve_capture_ack(const struct valve_link_header *packet, int length, struct valve_fds *fds)
{
	(void)packet, (void)length, (void)fds;
	return 0;
}

int valve_orders_take(const struct valve_link_header *packet, int length, struct valve_fds *fds)
{
	return valve_packet_is_order((const void *)packet, length, fds) ? 0 : -EPROTO;
}

int valve_orders_take_runs(const struct valve_link_header *packet, int length, struct valve_fds *fds)
{
	return valve_packet_is_runs((const void *)packet, length, fds) ? 0 : -EPROTO;
}

void valve_ending_watch(void)
{
}

void valve_ending_answer(uint32_t seq)
{
	(void)seq;
}

int valve_alone_spawn(void)
{
	return 0;
}

bool valve_session_leaves(void)
{
	return false;
}

void valve_alone_begin(void)
{
}

void valve_alone_give_up(void)
{
}

bool valve_announce_is_waiting(void)
{
	return false;
}

bool valve_announce_is_behind(void)
{
	return false;
}

void valve_settings_read(void)
{
}

void valve_capture_forget_reports(void)
{
}

void valve_note(uint32_t code, uint32_t a, uint32_t b, const char *text)
{
	(void)code, (void)a, (void)b, (void)text;
}

void valve_note_flush(void)
{
}

void valve_orders_wake(void)
{
}

void valve_say(const char *text)
{
	(void)text;
}

void valve_speak_for_the_past(void)
{
}

void valve_watcher_start(void)
{
}

const char *__asan_default_options(void);

/* What was freed is few and small: more of it only costs cache misses. */
const char *__asan_default_options(void)
{
	return "quarantine_size_mb=4:malloc_context_size=3";
}
