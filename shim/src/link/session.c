/*
 * session.c - registration and what follows from it: one thread per registered process that reads the link, obeys
 * orders (offline), watches valved's lease (offline) and finds a new valved after the old one went away.
 *
 * When valved is gone: an online process forgets the gate word at once (its launches must not wait for anything). An
 * offline process stops itself if an online one shares its GPU, because no valved would stop it otherwise; if none
 * does, it makes sure that its channels run, because no valved would wake it. Launches that wait by order of a valved
 * that is gone wait on under the next one until that lets them go (pages.c).
 *
 * When a valved is there and refuses us, it is asked again: its mode, its claims and its quotas change. An offline
 * process that was valved's, or will be when there is room or an answer, stops until one takes it: else nobody would stop it.
 */
#include "ownfd.h"
#include "settings.h"
#include "shim.h"

#include <errno.h>
#include <linux/membarrier.h>
#include <poll.h>
#include <string.h>

#define ONLINE_WAIT_MS  50 /* an online start is delayed by no more */
#define OFFLINE_WAIT_MS 2000
#define RECONNECT_MS    500
#define RETRY_FAST_NS   200000000u /* while a restart is likely: take-over is promised within 2 s */
#define RETRY_SLOW_NS   5000000000u
#define RETRY_FAST_FOR  10000000000u
#define REFUSED_MIN_NS  5000000000u /* then twice as long each time */
#define REFUSED_MAX_NS  30000000000u
#define LEASE_NS        1000000000u /* when the daemon names none */
#define LOOK_MS         2000        /* an online process looks whether its descriptors are still there */
#define REST_MIN_MS     50
#define REST_MAX_MS     1000
#define TICK_NS         1000000u
#define BLIND_NS        5000000u
#define TELL_AFTER      3  /* refusals in a row of what should run: an operator should know */
#define EXIT_NO_DAEMON  69 /* EX_UNAVAILABLE */

static struct {
	uint32_t order_seq; /* last order carried out */
	uint32_t refusals;  /* in a row */
	bool refused;       /* offline, and no valved's any more: stopped until one takes us */
	bool stopped;       /* we stopped our channels: the lease ran out, or we were refused */
	bool released;      /* we enabled our channels: no service needs them off, and none came since */
	bool may_run;       /* valved let us end our stop, and does not know yet that we did */
	uint32_t ask_seq;   /* of the request to end our stop, 0: none is under way */
	uint64_t linked_ns; /* when the link was made */
	uint64_t lost_ns;   /* when the link broke, or was first missed */
} session;

/* ---- orders ---- */

static uint32_t carry_out(uint32_t order)
{
	if (order == VALVE_ORDER_STOP) {
		store_relaxed(&valve_shim.self_stopped, 1);
		return valve_self_gate(true, VALVE_GATE_ALL);
	}
	if ((!session.stopped || valve_until_stands() ||
	     !(valve_shim.daemon_features & VALVE_FEATURE_KEEP_STOP)) &&
	    exchange_full(&valve_shim.self_stopped, 0))
		return valve_self_gate(false, VALVE_GATE_HELD);
	return 0; /* running; HOLD is read by the launches themselves; valved's answer ends a stop of our own */
}

static void obey(void)
{
	uint64_t rung;
	uint32_t seq;

	if (syscall(SYS_read, valve_own(VALVE_OWN_ORDER), &rung, sizeof(rung)) < 0 && errno != EAGAIN)
		return;
	while ((seq = load_relaxed(&VALVE_CONTROL->order_seq)) != session.order_seq) {
		struct valve_region *region = VALVE_REGION;

		full_fence(); /* valved writes order, then order_seq */
		store_relaxed(&region->order_status, carry_out(load_relaxed(&VALVE_CONTROL->order)));
		store_relaxed(&region->order_ns, now_ns());
		store_release(&region->order_done, seq);
		session.order_seq = seq;
	}
}

/* ---- the lease ---- */

/* While stopped, another thread or valved may have switched our channels already: to say it once more costs a call.
 * Launches wait beside a stop that the driver refuses. */
static void stop_again(void)
{
	session.released = false;
	store_relaxed(&valve_shim.self_stopped, 1);
	if (valve_self_gate(true, VALVE_GATE_ALL))
		valve_launches_hold();
}

static void stop_own_channels(const char *why)
{
	bool is_news = !session.stopped;

	session.stopped = true;
	VALVE_REGION->self_stops += is_news;
	stop_again();
	if (is_news)
		valve_say(why);
}

static void release_own_channels(void)
{
	session.stopped = false;
	session.released = true;
	valve_until_forget(); /* for a service that comes the end of a grant that stands is one to stop for */
	store_relaxed(&valve_shim.self_stopped, 0);
	valve_self_gate(false, VALVE_GATE_ALL);
}

static bool is_lease_over(void)
{
	uint64_t beat_ns = load_relaxed(&VALVE_CONTROL->heartbeat_ns), now = now_ns();
	uint64_t lease_ns =
	        load_relaxed(&VALVE_CONTROL->lease_ns) ? load_relaxed(&VALVE_CONTROL->lease_ns) : LEASE_NS;

	if (!beat_ns)
		beat_ns = session.linked_ns; /* died before its first beat */
	return beat_ns && now > beat_ns && now - beat_ns > lease_ns;
}

static void lose_link(void)
{
	session.ask_seq = 0; /* an answer that lies in the socket is that of a valved that is gone */
	session.may_run = false;
	valve_link_drop();
	store_release(&valve_shim.state, VALVE_STATE_UNLINKED);
	valve_orders_wake(); /* it waits for a step no more: the orders of the valved that is gone leave the queue */
	session.lost_ns = now_ns();
	if (!valve_is_offline())
		valve_map_private(0, VALVE_ORDER_RUN);
	else if (valve_launches_wait())
		valve_launches_hold();
	session.stopped |= load_relaxed(&valve_shim.self_stopped) !=
	                   0; /* by order: the valved that would end it is gone */
	if (session.stopped)
		stop_again();
}

/* ---- the end of our own stop and of a hold that was there before, under a new valved ---- */

static bool stands(void)
{
	return session.stopped || valve_launches_kept();
}

/* Not for the end of a stop that valved is to end by its own. */
static bool waits_for_leave(void)
{
	return stands() && !valve_until_stands();
}

/* ---- what the driver refused of a stop or of its end is tried again ---- */

static bool may_try_again(void)
{
	return valve_is_offline() && valve_self_gate_owes() &&
	       (load_relaxed(&valve_shim.self_stopped) || session.released);
}

/* Channels are off that should run, and only valved knows whether its gate is open now. Without a link this is not
 * known, until the lease is over or a valved is back. */
static bool must_ask_again(void)
{
	return valve_is_offline() && valve_self_gate_owes() && !may_try_again() && valve_is_linked();
}

static uint64_t until_again_ns(uint64_t most_ns)
{
	uint64_t now = now_ns(), due_ns = valve_self_gate_due_ns(), rest_ns;

	if (!may_try_again() && (!must_ask_again() || session.ask_seq))
		return most_ns;
	rest_ns = (due_ns > now ? due_ns - now : 0) + TICK_NS;
	return rest_ns < most_ns ? rest_ns : most_ns;
}

static void try_again(void)
{
	bool disable = load_relaxed(&valve_shim.self_stopped);

	if (may_try_again() && now_ns() >= valve_self_gate_due_ns())
		valve_self_gate(disable, disable ? VALVE_GATE_ALL : VALVE_GATE_HELD);
	if (!disable && valve_is_offline() && valve_self_gate_owes() >= TELL_AFTER)
		valve_note(VALVE_NOTE_NOT_ENABLED, 0, 0,
		           "the driver refused to enable channels; the shim tries again");
}

static int send_schedule(uint16_t type, uint32_t *seq)
{
	struct valve_link_schedule message = {.h_client = 0};
	int err = valve_link_send(&message, sizeof(message), type, -1);

	if (!err && seq)
		*seq = message.header.seq;
	return err;
}

/* That we ran, or switch nothing any more. A valved that knows no word about the whole process hears it of each RM client. */
static int tell_ran(void)
{
	return valve_shim.daemon_features & VALVE_FEATURE_KEEP_STOP
	               ? send_schedule(VALVE_LINK_SCHEDULE_DONE, NULL)
	               : valve_capture_tell_ran();
}

/* Once valved has been told of all our channels, and of the memory that held launches would compute with. Our own
 * stop does not wait for that: the thread that tells it may be in a call that waits for our channels. A full socket:
 * the next turn tries again. */
static void ask_to_run(void)
{
	bool again = must_ask_again() && now_ns() >= valve_self_gate_due_ns();

	if ((waits_for_leave() || again) && !session.ask_seq && valve_capture_is_told() &&
	    (session.stopped || again || !valve_announce_is_behind()))
		send_schedule(VALVE_LINK_SCHEDULE_WAIT, &session.ask_seq);
	if (session.may_run && !tell_ran())
		session.may_run = false; /* it stops again what a gate met meanwhile */
}

/* `handed`: valved runs what it has taken. An enable of our own may come after a stop, if this thread stood still (link.h). */
static void end_stop(bool handed)
{
	session.stopped = false;
	if (handed)
		valve_self_gate_hand_over();
	store_relaxed(&valve_shim.self_stopped, 0);
	valve_self_gate(false, VALVE_GATE_HELD);
	if (!valve_announce_is_behind())
		valve_launches_follow();
}

/* Precondition: link.c found it sane. EAGAIN: the gate is closed still. */
static int take_ack(const struct valve_link_header *packet, int length, struct valve_fds *fds)
{
	uint32_t status = ((const struct valve_link_ack *)(const void *)packet)->status;

	if (session.ask_seq && packet->seq == session.ask_seq) {
		session.ask_seq = 0;
		if (status != EAGAIN && (waits_for_leave() || must_ask_again())) {
			end_stop(status == VALVE_LINK_HANDED);
			session.may_run = true;
		}
		ask_to_run();
	}
	return valve_capture_ack(packet, length, fds);
}

static void check_lease(void)
{
	if (!valve_is_offline() || session.refused)
		return;
	if (load_relaxed(&VALVE_CONTROL->draining)) {
		if (!session.released)
			release_own_channels();
		if (!valve_is_linked())
			valve_orphan_check(session.lost_ns);
		return;
	}
	if (valve_is_linked() || load_relaxed(&VALVE_CONTROL->online_registered))
		session.released = false; /* a drain was called off, or a service came after a hang */
	valve_until_check(session.released, &session.stopped);
	if (!is_lease_over())
		return;
	if (valve_is_linked()) {
		session.ask_seq = 0;
		valve_link_receive(); /* what it took from us from outside is heard before the socket goes */
		lose_link(); /* valved hangs; when it is back, a new conversation sorts out which channels are on */
	}
	if (load_relaxed(&VALVE_CONTROL->online_registered) && !session.stopped)
		stop_own_channels("valved is gone and online work shares this GPU: this process is stopped "
		                  "until valved is back");
	else if (!load_relaxed(&VALVE_CONTROL->online_registered) && !session.released)
		release_own_channels();
	if (session.released)
		valve_orphan_check(session.lost_ns);
}

/* ---- the thread ---- */

/* No longer than granted time goes on. */
static uint64_t bounded_ns(uint64_t most_ns)
{
	if (!valve_is_offline() || session.refused || session.released)
		return most_ns;
	return valve_until_rest_ns(most_ns);
}

/* A quarter of the lease, so that its end is seen soon; at most a second, because a new valved may shorten it. */
static int rest_ms(void)
{
	uint64_t lease_ns =
	        load_relaxed(&VALVE_CONTROL->lease_ns) ? load_relaxed(&VALVE_CONTROL->lease_ns) : LEASE_NS;
	uint64_t quarter_ms = lease_ns / 4000000u;

	if (!valve_is_offline())
		return LOOK_MS;
	return quarter_ms < REST_MIN_MS   ? REST_MIN_MS
	       : quarter_ms > REST_MAX_MS ? REST_MAX_MS
	                                  : (int)quarter_ms;
}

static void serve(void)
{
	bool untold = load_relaxed(&valve_shim.untold);
	struct pollfd ready[] = {
	        {.fd = valve_own(VALVE_OWN_LINK), .events = untold ? POLLIN | POLLOUT : POLLIN},
	        {.fd = valve_own(VALVE_OWN_ORDER), .events = POLLIN}};
	long count;

	if (ready[0].fd < 0 || ready[1].fd < 0 || valve_own(VALVE_OWN_DOORBELL) < 0) {
		lose_link(); /* the application closed one: a new link brings new ones */
		return;
	}
	count = syscall(SYS_poll, ready, 2,
	                (int)(until_again_ns(bounded_ns((uint64_t)rest_ms() * 1000000u)) / 1000000u));
	if (is_refused(count)) { /* the program may have fewer descriptors than two, or no such call */
		sleep_ns(BLIND_NS);
		ready[0].revents = ready[0].events;
		ready[1].revents = POLLIN;
		count = 2;
	}
	if (count > 0 && ready[1].revents)
		obey();
	if (count > 0 && (ready[0].revents & ~POLLOUT) && valve_link_receive())
		lose_link();
	else if (count > 0 && (ready[0].revents & POLLOUT))
		valve_capture_report(false);
	if (valve_is_linked())
		ask_to_run();
	valve_watcher_start(); /* again, where there was no thread to be had */
}

/* At its start: nothing was launched yet. */
static void exit_if_required(void)
{
	if (!valve_settings.is_required)
		return;
	valve_say(
	        "VALVE_REQUIRE is set, but no valved takes this offline process; start one with `valve up`");
	_exit(EXIT_NO_DAEMON);
}

static int connect_to_valved(int timeout_ms)
{
	int err = valve_link_connect(valve_settings.wanted_role, timeout_ms);
	bool refused = err > 0;

	session.refusals = refused ? session.refusals + 1 : 0;
	if (!err)
		valve_speak_for_the_past();
	if (err == VALVE_LINK_NEVER)
		valve_say("valved speaks another version of the link than this shim");
	if (err && !session.linked_ns)
		exit_if_required();
	if (valve_link_would_take(err) && valve_settings.wanted_role == VALVE_ROLE_OFFLINE &&
	    !valve_is_offline()) {
		store_release(&valve_shim.role, VALVE_ROLE_OFFLINE); /* it would run ungated until then */
		refused = true;
	}
	if (refused && valve_is_offline()) {
		session.refused = true;
		stop_own_channels("valved does not take this offline process: it is stopped until one does");
	} else if (err == VALVE_LINK_NEVER) { /* what was never its own, or is online, passes through */
		valve_map_private(0, VALVE_ORDER_RUN);
		store_release(&valve_shim.state, VALVE_STATE_OFF);
	}
	return err;
}

static uint64_t retry_ns(void)
{
	uint64_t wait_ns = REFUSED_MIN_NS << (session.refusals < 4 ? session.refusals : 4) >> 1;

	if (session.refusals)
		return wait_ns < REFUSED_MAX_NS ? wait_ns : REFUSED_MAX_NS;
	return now_ns() - session.lost_ns < RETRY_FAST_FOR ? RETRY_FAST_NS : RETRY_SLOW_NS;
}

/* A new valved. Our own stop ends when it says so: it knows of the channels by then, and gates them where it must. One of
 * an older version is not asked: the stop ends before the channels are announced. So does that of one which wished to be offline
 * and is taken as online. */
static void reconnect(void)
{
	int err = connect_to_valved((int)(bounded_ns(RECONNECT_MS * 1000000ull) / 1000000u) + 1);

	if (err)
		return;
	if (stands() && (!valve_is_offline() || !(valve_shim.daemon_features & VALVE_FEATURE_KEEP_STOP)))
		end_stop(false);
	session.released = session.refused = false;
	valve_until_forget(); /* a grant that no valved ended: its end is a stop like any other now */
	session.order_seq = 0;
	session.linked_ns = now_ns();
	valve_capture_forget_reports();
	store_release(&valve_shim.state, VALVE_STATE_LINKED);
	valve_note_flush(); /* first: no channel of an MPS client is ever gated */
	valve_capture_report(false);
	valve_watcher_start();
	valve_orders_wake(); /* it tells of KV memory that is mapped here */
	obey();
	ask_to_run();
}

/* Until a valved is looked for again. */
static void rest(uint64_t ns)
{
	uint64_t end_ns = now_ns() + ns, left = ns; /* more than `ns` after the end */

	for (; left && left <= ns && !load_relaxed(&valve_shim.leaving); left = end_ns - now_ns()) {
		valve_ending_watch();
		futex_wait(&valve_shim.leaving, 0, until_again_ns(left < LEASE_NS ? left : LEASE_NS));
		try_again();
	}
}

void *valve_keep(void *unused)
{
	uint32_t state;

	(void)unused;
	valve_alone_begin();
	while ((state = load_acquire(&valve_shim.state)) != VALVE_STATE_OFF && !valve_session_leaves()) {
		if (state == VALVE_STATE_LINKED) {
			serve();
		} else {
			rest(bounded_ns(retry_ns()));
			check_lease(); /* a valved that is slow to answer delays no stop */
			reconnect();
		}
		if (load_acquire(&valve_shim.state) != VALVE_STATE_OFF) {
			check_lease();
			try_again();
			valve_ending_watch();
		}
	}
	return NULL;
}

/* ---- registration ---- */

/* Precondition: this process has just opened nvidiactl, on the calling thread, and nothing was launched yet. */
void valve_register(void)
{
	uint32_t expected = VALVE_STATE_NEW;
	int err;

	if (!swap_if(&valve_shim.state, &expected, VALVE_STATE_UNLINKED))
		return;
	memset(&session, 0, sizeof(session));
	valve_until_forget();
	valve_shim.can_membarrier = !syscall(SYS_membarrier, MEMBARRIER_CMD_REGISTER_GLOBAL_EXPEDITED, 0, 0);
	valve_settings_read();
	valve_link_handle(VALVE_LINK_ACK, take_ack);
	valve_link_handle(VALVE_LINK_KV_ORDER, valve_orders_take);
	valve_link_handle(VALVE_LINK_KV_RUNS, valve_orders_take_runs);
	session.lost_ns = now_ns();
	err = connect_to_valved(valve_settings.wanted_role == VALVE_ROLE_OFFLINE ? OFFLINE_WAIT_MS
	                                                                         : ONLINE_WAIT_MS);
	session.linked_ns = err ? 0 : now_ns();
	if (!err || err == VALVE_LINK_NEVER)
		store_release(&valve_shim.state, err ? VALVE_STATE_OFF : VALVE_STATE_LINKED);
	if (valve_settings.names_mps)
		valve_note(VALVE_NOTE_MPS, 0, 0, "CUDA_MPS_PIPE_DIRECTORY is set");
	if (valve_shim.state == VALVE_STATE_OFF)
		return;
	if (valve_alone_spawn()) {
		exit_if_required();
		valve_alone_give_up();
		return;
	}
	valve_note_flush();
	valve_capture_report(false); /* what was made since then */
	valve_watcher_start();
}
