/*
 * link_events.h - for fuzz_link.c: valved, the process and the application, and all that can happen to a link. Included behind
 * session.c, whose state a stop and an end are checked against.
 */
#ifndef VALVE_FUZZ_LINK_EVENTS_H
#define VALVE_FUZZ_LINK_EVENTS_H

#include "nvrm.h"

#include <setjmp.h>

#define ORPHAN_NS 600000000000u
#define SEALS     (F_SEAL_SHRINK | F_SEAL_GROW)

/* ---- valved: the page of the present link, and that of the one before ---- */
static struct {
	struct kernel_file *backlog, *link;      /* who has not said HELLO, and who has */
	struct kernel_file *memory, *old_memory; /* of the present page, and of the one before */
	struct kernel_file *bell;
	struct valve_control *page, *old;
	bool is_there, keeps_stops, beats;
	uint64_t lease_ns;
	uint32_t refusal;                      /* of the next HELLO; 0: welcome */
	uint32_t flaw;                         /* of the next WELCOME */
	enum { AT_ONCE, LATE, NEVER } answers; /* HELLO */
	enum { READS, FULL, LEAVES } mail;     /* what comes later */
	uint32_t crowd; /* so many tries find the queue full; an odd one is ended by a signal */
	uint32_t unread, asked_unread, hello; /* in its socket; HELLO's number that waits for an answer */
	uint32_t online;                      /* on the next page */
	uint32_t asked;                       /* number of the last question about the whole process */
	uint32_t answered; /* the last of them that has its answer: another means nothing */
	bool let_go;       /* and it may */
	bool handed;       /* it will run the channels itself: they are not the shim's to enable */
	bool last_word;    /* it said so before it hung up, and nobody has read that */
	bool stops;        /* it has said STOP and let nobody go since */
	bool refused;      /* it was the last to answer HELLO, and refused, and we could hear it */
} valved;

#include "link_shown.h"

/* ---- the process ---- */
static struct {
	uint32_t role;
	bool owed;          /* launches waited as the link was lost, and nobody let them go since */
	bool whole, is_off; /* KV memory; the channels */
	bool held;          /* by ourselves */
	bool outside;       /* by valved's own hand, which has them in its plan */
	bool refuses;       /* the driver, whatever is asked */
	uint32_t failures;  /* passes in a row that it refused */
	uint64_t due_ns;    /* of the next */
	bool owes_enable;   /* the last of them was to enable */
	bool blind;         /* memory ran out: no page of our own could hold launches */
	bool may;           /* somebody let launches go in this turn */
	bool may_enable;    /* valved ordered what needs channels on */
	uint64_t let_ns;    /* when somebody let us run last */
	jmp_buf ended;
} process;

static void forget_old(void)
{
	if (valved.old)
		kernel_let_go(valved.old_memory);
	valved.old = NULL;
}

static void hang_up(void)
{
	if (valved.link)
		kernel_hang_up(valved.link, valved.unread);
	valved.link = NULL;
	shown.is_told = shown.is_said = false;
	shown.seq = 0;
	valved.asked = valved.asked_unread = valved.unread = valved.hello = 0;
	valved.last_word |= valved.let_go;
	valved.let_go = valved.stops = valved.handed = false;
	if (valved.bell)
		kernel_let_go(valved.bell);
	valved.bell = NULL;
	if (valved.page) {
		forget_old();
		valved.old = valved.page;
		valved.old_memory = valved.memory;
	}
	valved.page = NULL;
	valved.memory = NULL;
}

static void die(void)
{
	hang_up();
	if (valved.backlog)
		kernel_hang_up(valved.backlog, false);
	valved.backlog = NULL;
}

/* False: nobody reads it. */
static bool say(void *message, uint16_t type, uint32_t bytes, uint32_t seq, struct kernel_file **files,
                uint32_t count)
{
	*(struct valve_link_header *)message = (struct valve_link_header){
	        .magic = VALVE_LINK_MAGIC, .abi = VALVE_LINK_ABI, .type = type, .length = bytes, .seq = seq};
	return valved.link && kernel_tell(valved.link, message, bytes, files, count);
}

enum flaw { NO_FLAW, ABI, FEW, UNSEALED, SHORT, MAGIC, ROLE, BYTES };

static void welcome(uint32_t seq)
{
	enum flaw flaw = valved.flaw;
	struct valve_link_welcome message = {
	        .abi = (uint16_t)(VALVE_LINK_ABI + (flaw == ABI)),
	        .role = (uint16_t)(flaw == ROLE ? VALVE_ROLE_HOOK : process.role),
	        .features = valved.keeps_stops ? VALVE_FEATURE_KEEP_STOP | VALVE_FEATURE_FETCH : 0,
	        .control_bytes = VALVE_CONTROL_BYTES,
	        .region_bytes = VALVE_REGION_BYTES - (flaw == BYTES)};
	struct kernel_file *files[] = {kernel_memory(VALVE_CONTROL_BYTES, flaw == UNSEALED ? 0 : SEALS),
	                               kernel_memory(VALVE_REGION_BYTES - (flaw == SHORT), SEALS),
	                               kernel_bell(), kernel_bell()};

	valved.memory = files[0];
	valved.page = kernel_bytes(valved.memory);
	valved.bell = files[3];
	*valved.page = (struct valve_control){.magic = VALVE_CONTROL_MAGIC - (flaw == MAGIC),
	                                      .abi = VALVE_REGION_ABI,
	                                      .bytes = VALVE_CONTROL_BYTES,
	                                      .role = process.role,
	                                      .lease_ns = valved.lease_ns,
	                                      .online_registered = valved.online,
	                                      .heartbeat_ns = kernel_now()};
	say(&message, VALVE_LINK_WELCOME, sizeof(message), seq, files, flaw == FEW ? 3 : 4);
	kernel_let_go(files[1]);
	kernel_let_go(files[2]);
	process.may |= !valved.keeps_stops;      /* an old one: it is not asked */
	if (process.outside && !valved.online) { /* what the one before had disabled, and not what we have */
		process.is_off = process.held;
		process.outside = false;
		process.may = true;
	}
}

static void answer_hello(void)
{
	struct valve_link_refused no = {.code = valved.refusal};
	uint32_t seq = valved.hello;

	valved.hello = 0;
	valved.refused = valved.refusal && say(&no, VALVE_LINK_REFUSED, sizeof(no), seq, NULL, 0) &&
	                 valved.refusal != VALVE_REFUSED_DRAINING;
	if (!valved.refusal)
		welcome(seq);
}

int valved_accepts(struct kernel_file *link)
{
	if (!valved.is_there)
		return -ECONNREFUSED;
	if (valved.crowd)
		return valved.crowd-- % 2 ? -EINTR : -EAGAIN;
	if (valved.backlog)
		kernel_hang_up(valved.backlog, false);
	valved.backlog = link;
	return 0;
}

static void write_order(struct valve_control *page, uint32_t what)
{
	page->order = what;
	page->gate_epoch += (what != VALVE_ORDER_RUN) != page->gate_epoch % 2;
	page->order_seq++;
}

static void hear_question(uint32_t seq)
{
	valved.asked = seq;
	valved.let_go = valved.handed = false;
}

static void wake(uint32_t detail);

static bool shown_is_heard(void)
{
	return valved.link && valved.mail == READS;
}

/* There is no second thread: HELLO is answered before its sender waits for the answer, or while it does. */
int valved_hears(struct kernel_file *link, const void *packet, uint32_t bytes)
{
	const struct valve_link_header *header = packet;
	bool asks = header->type == VALVE_LINK_SCHEDULE_WAIT, ran = header->type == VALVE_LINK_SCHEDULE_DONE;

	CHECK(bytes >= sizeof(*header) && bytes == header->length);
	if (header->type == VALVE_LINK_HELLO) {
		hang_up();
		valved.last_word = false; /* the link before was read to its end */
		CHECK(link == valved.backlog);
		valved.link = link;
		valved.backlog = NULL;
		valved.hello = header->seq;
		if (valved.answers == AT_ONCE)
			answer_hello();
		return 0;
	}
	if (valved.mail == FULL)
		return -EAGAIN;
	if (valved.mail == READS && (header->type & VALVE_LINK_LENT))
		hear_lent(header, bytes);
	if (valved.mail == READS && asks)
		hear_question(header->seq);
	if (valved.mail == READS && ran && valved.handed && valved.let_go && !valved.stops)
		wake(0);
	if (valved.mail == READS && ran && valved.stops) { /* what its stop met was enabled since */
		write_order(valved.page, VALVE_ORDER_STOP);
		kernel_ring(valved.bell);
	}
	if (valved.mail == LEAVES) {
		valved.unread++;
		valved.stops &= !ran;
		valved.asked_unread = asks ? header->seq : valved.asked_unread;
	}
	return 0;
}

void kernel_waits(void)
{
	if (valved.page && valved.beats)
		valved.page->heartbeat_ns = kernel_now();
	if (valved.hello && valved.answers == LATE)
		answer_hello();
	if (!shown.waits || shown.reads)
		return;
	shown.reads = true; /* the session's thread, beside the one that waits */
	if (shown.how == IS_SLOW)
		fetch_shown();
	if (valve_is_linked() && valve_link_receive())
		lose_link();
	shown.is_told |= shown.is_said;
	shown.reads = false;
}

int valve_settings_socket(struct sockaddr_un *address)
{
	address->sun_family = AF_UNIX;
	return valved.is_there ? 0 : -ENOENT;
}

/* ---- the process's channels, memory and end ---- */
uint32_t valve_self_gate(bool disable, enum valve_gate_set set)
{
	bool switches = disable || set == VALVE_GATE_ALL || process.held;

	CHECK(process.role == VALVE_ROLE_OFFLINE);
	CHECK(disable || !switches || !valved.handed || session.released);
	/* what was refused once is not tried again on a guess */
	CHECK(disable || !process.owes_enable || valve_shim.state != VALVE_STATE_LINKED || valved.let_go ||
	      valved.last_word || session.released || VALVE_CONTROL->draining);
	process.owes_enable = !disable && process.refuses;
	if (process.refuses) {
		process.due_ns = kernel_now() + (2000000ull << (process.failures < 7 ? process.failures : 7));
		process.failures++;
		return NV_ERR_TIMEOUT;
	}
	process.failures = 0;
	if (!switches)
		return 0; /* what is off is so by valved's hand */
	process.is_off = process.held = disable;
	process.outside = false;
	return 0;
}

void valve_self_gate_hand_over(void)
{
	valve_shim.self_stopped = 0;
	process.outside |= process.held;
	process.held = process.owes_enable = false;
	process.failures = 0;
}

uint32_t valve_self_gate_owes(void)
{
	return process.failures;
}

uint64_t valve_self_gate_due_ns(void)
{
	return process.failures ? process.due_ns : UINT64_MAX;
}

bool valved_has_room(void)
{
	return valved.mail != FULL;
}

bool valve_orders_left_no_hole(void)
{
	return process.whole;
}

void kernel_exit(int status)
{
	CHECK(status == EXIT_NO_DAEMON && valve_shim.state == VALVE_STATE_UNLINKED && !process.whole);
	CHECK(valve_launches_wait() && kernel_now() - session.lost_ns >= ORPHAN_NS);
	longjmp(process.ended, 1);
}

/* ---- events ---- */
static void answer(uint32_t seq, uint32_t status)
{
	struct valve_link_ack ack = {.status = status};

	bool is_question = valved.link && seq && (seq == valved.asked || seq == valved.asked_unread);

	say(&ack, VALVE_LINK_ACK, sizeof(ack), seq, NULL, 0);
	if (is_question && seq != valved.answered) {
		valved.answered = seq;
		valved.handed = status == VALVE_LINK_HANDED;
	}
	if (!is_question || status == EAGAIN)
		return;
	valved.let_go = true;
	process.let_ns = kernel_now();
	valved.stops = false;
}

static void let_run(uint32_t detail)
{
	answer(valved.asked, detail & 1 ? VALVE_LINK_HANDED : 0);
}

static void let_wait(uint32_t detail)
{
	(void)detail;
	answer(valved.asked, EAGAIN);
}

static void answer_any(uint32_t detail) /* number 0, old ones, and others that nobody has given */
{
	answer(detail < valve_shim.next_seq ? detail : 1000000 + detail, detail);
}

static void junk(uint32_t detail)
{
	unsigned char packet[VALVE_LINK_MAX + 1];

	memset(packet, (int)detail, sizeof(packet));
	if (valved.link)
		kernel_tell(valved.link, packet, detail == 7 ? sizeof(packet) : 1 + detail * 16, NULL, 0);
}

static void answer_in_part(uint32_t detail)
{
	struct valve_link_ack ack = {.header = {.magic = VALVE_LINK_MAGIC - (detail == 1),
	                                        .abi = VALVE_LINK_ABI,
	                                        .type = VALVE_LINK_ACK,
	                                        .length = sizeof(ack) - detail / 2,
	                                        .seq = valved.asked}};

	if (valved.link && detail)
		kernel_tell(valved.link, &ack, sizeof(ack) - 1 - detail / 4, NULL, 0);
}

static void kv_order(uint32_t detail)
{
	struct kernel_file *files[] = {kernel_bell(), kernel_bell()};
	struct valve_link_kv_entries order = {
	        .op = detail & 1 ? VALVE_KV_BACK : VALVE_KV_QUARANTINE, .how = 0, .count = 1};

	say(&order, VALVE_LINK_KV_ORDER, sizeof(order), 1, files, detail / 2 % 3);
	kernel_let_go(files[0]);
	kernel_let_go(files[1]);
}

static uint64_t *grant_of(struct valve_control *page, uint32_t gpu)
{
	return &((struct valve_grant *)(void *)((unsigned char *)page + VALVE_GRANT_OFFSET))
	                ->run_until_ns[gpu];
}

static void clear_grant(uint32_t gpu) /* after a stop of valved's own */
{
	if (!*grant_of(valved.page, gpu))
		return;
	process.is_off = true;
	process.outside = true;
	*grant_of(valved.page, gpu) = 0;
	kernel_ring(valved.bell);
}

static void order(uint32_t detail)
{
	if (!valved.page || process.role != VALVE_ROLE_OFFLINE)
		return;
	for (uint32_t gpu = 0; gpu < 2 && detail % 3 != VALVE_ORDER_STOP; gpu++)
		if (*grant_of(valved.page, gpu) <= kernel_now())
			clear_grant(gpu);
	write_order(valved.page, detail % 3);
	valved.stops = detail % 3 == VALVE_ORDER_STOP && !valved.page->draining;
	valved.let_go &= detail % 3 == VALVE_ORDER_RUN || session.ask_seq; /* its answer is under way still */
	if (detail % 3 != VALVE_ORDER_STOP) {
		process.let_ns = kernel_now();
		valved.handed = false;
	}
	process.may |= detail % 3 == VALVE_ORDER_RUN;
	process.may_enable |= detail % 3 != VALVE_ORDER_STOP;
	kernel_ring(valved.bell);
}

static void order_of_old(uint32_t detail) /* who has lost us says what it likes */
{
	if (valved.old && valved.old->role == VALVE_ROLE_OFFLINE)
		write_order(valved.old, detail % 3);
	CHECK(!process.owed || process.blind || valve_launches_wait());
}

static void lose(uint32_t detail)
{
	if (detail & 1)
		valved.is_there = false;
	if (detail & 2)
		die(); /* whoever has not been heard, too */
	hang_up();
}

static void read_mail(void)
{
	valved.mail = READS;
	if (valved.asked_unread)
		hear_question(valved.asked_unread);
	valved.unread = valved.asked_unread = 0;
}

static void come(uint32_t detail)
{
	const uint64_t leases[] = {3600000000000ull, 1000000000ull, 0, 200000000ull};

	valved.is_there = valved.beats = true;
	valved.refusal = valved.flaw = valved.crowd = 0;
	valved.answers = AT_ONCE;
	read_mail();
	valved.keeps_stops = detail & 1;
	valved.lease_ns = leases[detail / 2];
}

static void refuse(uint32_t detail)
{
	valved.refusal = detail;
}

static void flaw(uint32_t detail)
{
	valved.flaw = detail;
}

static void beat(uint32_t detail)
{
	valved.beats = detail & 1;
	if (valved.page && detail < 4)
		valved.page->heartbeat_ns = detail & 1 ? kernel_now() : detail / 2;
}

static void pace(uint32_t detail)
{
	if (detail < 3) {
		valved.answers = detail;
		return;
	}
	if (detail > 5) {
		valved.crowd = detail == 6 ? 7 : 1000000;
		return;
	}
	valved.mail = detail % 3;
	if (valved.mail == READS)
		read_mail();
}

static void online(uint32_t detail)
{
	valved.online = detail & 1;
	if (valved.page)
		valved.page->online_registered = valved.online;
	process.may |= valved.page && !valved.online;
}

static void drain(uint32_t detail)
{
	if (!valved.page)
		return;
	valved.page->draining = detail & 1;
	process.may |= detail & 1;
	process.let_ns = kernel_now();
	valved.stops = false; /* it says so again */
}

static void wake(uint32_t detail) /* what is off by valved's hand alone */
{
	(void)detail;
	if (!valved.page || !process.outside || valve_shim.self_stopped)
		return;
	process.is_off = process.outside = false;
	process.let_ns = kernel_now();
}

static void grant(uint32_t detail)
{
	const uint64_t spans[] = {0, 1, 2000000, 2000000000};

	if (!valved.page || process.role != VALVE_ROLE_OFFLINE)
		return;
	if (detail < 2) {
		clear_grant(detail);
		return;
	}
	clear_grant(detail & 1);
	*grant_of(valved.page, detail & 1) = kernel_now() + spans[detail / 2];
	kernel_ring(valved.bell);
}

static void pass(uint32_t detail)
{
	const uint64_t spans[] = {1000000, 50000000, 1000000000, 10000000000, ORPHAN_NS};

	kernel_pass(spans[detail % 5]);
}

static void app_closes(uint32_t detail) /* by a call that the shim sees, or by one that it does not */
{
	enum valve_own which = detail % VALVE_OWNS;

	if (detail < 3)
		valve_own_close(which);
	else if (detail < 6)
		kernel_steal((int)valve_shim.own[which].number - 1, true);
	else
		for (int i = 0; i < VALVE_OWNS; i++)
			kernel_steal((int)valve_shim.own[i].number - 1, detail & 1);
}

static void app_wants_number(uint32_t detail)
{
	int number = (int)valve_shim.own[detail % VALVE_OWNS].number - 1;

	if (number < 0 || !valve_own_has(number))
		return;
	valve_own_make_way(number);
	kernel_steal(number, true);
}

static void scarce(uint32_t detail)
{
	const int limits[] = {1024, 902, 900, 8};

	kernel_limit(limits[detail % 4], detail >= 4);
	process.blind |= detail >= 4;
}

static void other(uint32_t detail)
{
	if (detail < 2)
		process.whole = detail & 1;
	else if (detail < 4)
		valve_shim.untold = detail & 1;
	else
		process.refuses = detail & 1;
}

static void start(uint32_t role)
{
	valve_settings = (struct valve_settings){.wanted_role = role, .orphan_ns = ORPHAN_NS};
	process.role = role;
	process.is_off = process.held = process.outside = process.owes_enable = process.owed = false;
	process.refuses = process.blind = false;
	process.failures = 0;
	kernel_limit(1024, false);
	valve_shim.pid = 1;
	valve_register();
}

static void fork_child(uint32_t detail) /* it is what is looked at from here on: hooks/interpose.c */
{
	valve_map_fresh();
	for (int which = 0; which < VALVE_OWNS; which++)
		valve_own_close((enum valve_own)which);
	hang_up();
	memset(&valve_shim, 0, sizeof(valve_shim));
	valved.refused = false;
	start(detail & 1 ? VALVE_ROLE_ONLINE : VALVE_ROLE_OFFLINE);
}

#define LATER 24 /* to 27: so many calls of the kernel into the turn the next event happens */

static void (*const events[32])(uint32_t detail) = {
        let_run, let_wait,         answer_any, junk,     order,          order_of_old, lose, come, refuse,
        beat,    online,           app_closes, other,    drain,          grant,        wake, pass, flaw,
        pace,    app_wants_number, scarce,     kv_order, answer_in_part, fork_child,   NULL, NULL, NULL,
        NULL,    app_shows,        lose,       come,     order};

#endif
