/*
 * fuzz_link.c - the session of an offline process, and any order of what can happen to its link: answers right and wrong, orders,
 * leases that end, valveds that die, come, refuse, and go on without us. Each byte is an event, after which the session has
 * one turn. The valved is in this process, behind real sockets and pages.
 *
 * After each turn: launches that waited, and channels that were off, are so still, unless somebody let them who may; and a stop that
 * the driver refused is made as soon as it refuses no more. After all: nothing is left off, or waits.
 *
 * With clang: -fsanitize=fuzzer,address,undefined. Elsewhere main() runs N inputs of its own making: -r N SEED, or the one
 * that stands in hex on the command line.
 */
#include "link/session.c"

#include "nvrm.h"

#define SETTLED 8 /* turns: a link that breaks, a new one, a question, its answer */

struct valve_shim valve_shim;
struct valve_settings valve_settings = {.wanted_role = VALVE_ROLE_OFFLINE, .orphan_ns = UINT64_MAX};
_Thread_local struct valve_tls valve_tls;

/* ---- valved: the page of the present link, and that of the one before ---- */
static struct {
	struct kernel_file *backlog, *link;      /* who has not said HELLO, and who has */
	struct kernel_file *memory, *old_memory; /* of the present page, and of the one before */
	struct valve_control *page, *old;
	bool is_there, keeps_stops;
	uint32_t refusal;   /* of the next HELLO; 0: welcome */
	uint32_t online;    /* on the next page */
	uint32_t asked;     /* number of the last question about the whole process */
	bool let_go;        /* and it may */
	bool owed;          /* launches waited as the link was lost, and nobody let them go since */
	bool whole, is_off; /* KV memory; the channels */
	bool refuses;       /* the driver, whatever is asked */
	uint32_t failures;  /* passes in a row that it refused */
	bool owes_enable;   /* the last of them was to enable */
} valved;

static void let_go(struct kernel_file **file)
{
	if (*file)
		kernel_let_go(*file);
	*file = NULL;
}

static void forget_old(void)
{
	let_go(&valved.old_memory);
	valved.old = NULL;
}

static void hang_up(void)
{
	if (valved.link)
		kernel_hang_up(valved.link, false);
	valved.link = NULL;
	valved.asked = 0;
	valved.let_go = false;
	if (valved.page) {
		forget_old();
		valved.old = valved.page;
		valved.old_memory = valved.memory;
	}
	valved.page = NULL;
	valved.memory = NULL;
}

static void say(void *message, uint16_t type, uint32_t bytes, uint32_t seq, struct kernel_file **files,
                uint32_t count)
{
	*(struct valve_link_header *)message = (struct valve_link_header){
	        .magic = VALVE_LINK_MAGIC, .abi = VALVE_LINK_ABI, .type = type, .length = bytes, .seq = seq};
	kernel_tell(valved.link, message, bytes, files, count);
}

static void welcome(uint32_t seq)
{
	struct valve_link_welcome message = {.abi = VALVE_LINK_ABI,
	                                     .role = VALVE_ROLE_OFFLINE,
	                                     .features = valved.keeps_stops ? VALVE_FEATURE_KEEP_STOP : 0,
	                                     .control_bytes = VALVE_CONTROL_BYTES,
	                                     .region_bytes = VALVE_REGION_BYTES};
	struct kernel_file *files[] = {kernel_memory(VALVE_CONTROL_BYTES, F_SEAL_SHRINK | F_SEAL_GROW),
	                               kernel_memory(VALVE_REGION_BYTES, F_SEAL_SHRINK | F_SEAL_GROW),
	                               kernel_bell(), kernel_bell()};

	valved.memory = files[0];
	valved.page = kernel_bytes(valved.memory);
	*valved.page = (struct valve_control){.magic = VALVE_CONTROL_MAGIC,
	                                      .abi = VALVE_REGION_ABI,
	                                      .bytes = VALVE_CONTROL_BYTES,
	                                      .role = VALVE_ROLE_OFFLINE,
	                                      .lease_ns = 3600000000000ull,
	                                      .online_registered = valved.online,
	                                      .heartbeat_ns = now_ns()};
	say(&message, VALVE_LINK_WELCOME, sizeof(message), seq, files, 4);
	for (size_t i = 1; i < 4; i++)
		kernel_let_go(files[i]);
}

int valved_accepts(struct kernel_file *link)
{
	if (valved.backlog)
		kernel_hang_up(valved.backlog, false);
	valved.backlog = link;
	return 0;
}

/* There is no second thread: HELLO is answered before its sender waits for the answer. */
int valved_hears(struct kernel_file *link, const void *packet, uint32_t bytes)
{
	const struct valve_link_header *header = packet;

	CHECK(bytes >= sizeof(*header) && bytes == header->length);
	if (header->type == VALVE_LINK_SCHEDULE_WAIT) {
		valved.asked = header->seq;
		valved.let_go = false;
	}
	if (header->type != VALVE_LINK_HELLO)
		return 0;
	hang_up();
	CHECK(link == valved.backlog);
	valved.link = link;
	valved.backlog = NULL;
	if (valved.refusal) {
		struct valve_link_refused no = {.code = valved.refusal};

		say(&no, VALVE_LINK_REFUSED, sizeof(no), header->seq, NULL, 0);
	} else {
		welcome(header->seq);
	}
	return 0;
}

void kernel_waits(void)
{
}

void kernel_exit(int status)
{
	CHECK(!status);
	abort();
}

int valve_settings_socket(struct sockaddr_un *address)
{
	address->sun_family = AF_UNIX;
	return valved.is_there ? 0 : -ENOENT;
}

/* ---- the rest of the shim ---- */
uint32_t valve_self_gate(bool disable, enum valve_gate_set set)
{
	(void)set;
	/* what was refused once is not tried again on a guess */
	CHECK(disable || !valved.owes_enable || valve_shim.state != VALVE_STATE_LINKED || valved.let_go ||
	      session.released || VALVE_CONTROL->draining);
	valved.owes_enable = !disable && valved.refuses;
	if (valved.refuses) {
		valved.failures++;
		return NV_ERR_TIMEOUT;
	}
	valved.is_off = disable;
	valved.failures = 0;
	return 0;
}

void valve_self_gate_hand_over(void)
{
	CHECK(false); /* no granted time here */
}

uint32_t valve_self_gate_owes(void)
{
	return valved.failures;
}

uint64_t valve_self_gate_due_ns(void)
{
	return valved.failures ? 0 : UINT64_MAX;
}

int valve_capture_tell_ran(void)
{
	return 0;
}

void valve_capture_report(bool wait)
{
	(void)wait;
	valve_shim.untold = 0;
}

bool valve_orders_left_no_hole(void)
{
	return valved.whole;
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

int valve_spawn(void *(*run)(void *))
{
	(void)run;
	return 0;
}

bool valve_announce_is_waiting(void)
{
	return false;
}

bool valve_announce_is_behind(void)
{
	return false;
}

bool valve_is_secure(void)
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

/* ---- events ---- */
static void answer(uint32_t seq, uint32_t status)
{
	struct valve_link_ack ack = {.status = status};

	if (!valved.link)
		return;
	say(&ack, VALVE_LINK_ACK, sizeof(ack), seq, NULL, 0);
	valved.let_go |= valved.asked && seq == valved.asked && status != EAGAIN;
}

static void junk(uint32_t length)
{
	unsigned char packet[128];

	memset(packet, (int)length, sizeof(packet));
	if (valved.link)
		kernel_tell(valved.link, packet, length % sizeof(packet) + 1, NULL, 0);
}

static void order(struct valve_control *page, uint32_t what)
{
	if (!page)
		return;
	page->order = what;
	page->gate_epoch += (what != VALVE_ORDER_RUN) != page->gate_epoch % 2;
	page->order_seq++;
}

static void happen(unsigned char event)
{
	uint32_t detail = event >> 4;

	switch (event & 15) {
	case 0:
		answer(valved.asked, 0);
		break;
	case 1:
		answer(valved.asked, EAGAIN);
		break;
	case 2:
		answer(detail, detail);
		break; /* number 0, and others that nobody has given */
	case 3:
		junk(detail * 9);
		break;
	case 4:
		order(valved.page, detail % 3);
		break;
	case 5: /* who has lost us says what it likes */
		order(valved.old, detail % 3);
		CHECK(!valved.owed || valve_launches_wait());
		break;
	case 6:
		hang_up();
		break;
	case 7:
		hang_up(), valved.is_there = false;
		break;
	case 8:
		valved.is_there = true, valved.refusal = 0, valved.keeps_stops = detail % 4;
		break;
	case 9:
		valved.refusal = detail % 8;
		break;
	case 10:
		if (valved.page)
			valved.page->heartbeat_ns = detail % 2 ? now_ns() : 1;
		break;
	case 11:
		valved.online = detail % 2;
		if (valved.page)
			valved.page->online_registered = valved.online;
		break;
	case 12:
		valve_own_close((enum valve_own)(detail % VALVE_OWNS));
		break;
	case 13:
		valved.whole = detail % 2;
		break;
	case 14:
		if (valved.page)
			valved.page->draining = detail == 0;
		break;
	case 15:
		if (detail < 8)
			valve_shim.untold = detail % 2;
		else
			valved.refuses = detail % 2;
		break;
	}
}

/* What keep() does once, without its rests. */
static void turn(void)
{
	if (valve_shim.state == VALVE_STATE_LINKED) {
		int bell = valve_own(VALVE_OWN_ORDER);

		if (bell >= 0)
			kernel_ring_number(bell); /* poll returns at once */
		serve();
	} else {
		check_lease();
		reconnect();
	}
	if (valve_shim.state != VALVE_STATE_OFF) {
		check_lease();
		try_again();
	}
}

static void step(unsigned char event)
{
	uint32_t generation, may;
	bool waited, was_off, was_linked;

	happen(event);
	generation = valve_shim.link_generation;
	was_linked = valve_shim.state == VALVE_STATE_LINKED;
	waited = valve_launches_wait();
	was_off = valved.is_off;
	may = valved.let_go || !VALVE_CONTROL->online_registered || VALVE_CONTROL->draining;
	turn();
	/* by its answer, by a new valved that is not asked, or where nobody is there and nobody needs the GPU */
	may |= generation != valve_shim.link_generation && valved.page && !valved.keeps_stops;
	CHECK(!waited || valve_launches_wait() || may);
	valved.owed = valve_launches_wait() &&
	              (valved.owed || (was_linked && generation != valve_shim.link_generation));
	valved.owed &= valve_shim.state == VALVE_STATE_UNLINKED || valve_launches_kept();
	CHECK(!was_off || valved.is_off || may || (was_linked && VALVE_CONTROL->order != VALVE_ORDER_STOP));
	CHECK(valve_shim.state == VALVE_STATE_LINKED || valve_shim.state == VALVE_STATE_UNLINKED);
	CHECK(!valve_shim.self_stopped || valved.is_off || valved.refuses);
}

/* Whatever has happened: once the driver does what it is asked, and a valved is there that gates nothing, everything runs. */
static void settle(void)
{
	valved.refuses = false;
	valved.is_there = valved.keeps_stops = valved.whole = true;
	valved.refusal = valved.online = valve_shim.untold = 0;
	for (int turns = 0; turns < SETTLED; turns++) {
		if (valved.page) {
			valved.page->heartbeat_ns = now_ns();
			valved.page->draining = 0;
			if (valved.page->order != VALVE_ORDER_RUN)
				order(valved.page, VALVE_ORDER_RUN);
		}
		turn();
		if (valved.asked) /* number 0 would end the link */
			answer(valved.asked, 0);
	}
	CHECK(!valved.is_off && !valved.failures && !valve_launches_wait());
}

static void begin(void)
{
	kernel_begin();
	memset(&valve_shim, 0, sizeof(valve_shim));
	valve_map_fresh();
	valved.is_there = valved.keeps_stops = valved.whole = true;
	valved.refusal = valved.online = 0;
	valved.is_off = valved.owed = valved.refuses = valved.owes_enable = false;
	valved.failures = 0;
	valve_register();
	CHECK(valve_shim.state == VALVE_STATE_LINKED);
}

static void end(void)
{
	valve_link_drop();
	for (int i = 0; i < VALVE_OWNS; i++)
		valve_own_close((enum valve_own)i);
	hang_up();
	forget_old();
	if (valved.backlog)
		kernel_hang_up(valved.backlog, false);
	valved.backlog = NULL;
	kernel_end();
}

int LLVMFuzzerTestOneInput(const unsigned char *data, size_t size);

int LLVMFuzzerTestOneInput(const unsigned char *data, size_t size)
{
	begin();
	for (size_t i = 0; i < size; i++)
		step(data[i]);
	settle();
	end();
	return 0;
}

#ifndef FUZZER
int main(int argc, char **argv)
{
	long count = argc == 4 ? strtol(argv[2], NULL, 10) : 0;
	uint64_t random = argc == 4 ? strtoull(argv[3], NULL, 10) | 1 : 1;
	unsigned char events[64];
	size_t told = 0;

	for (const char *hex = argc == 2 ? argv[1] : ""; hex[2 * told] && told < sizeof(events); told++)
		CHECK(sscanf(hex + 2 * told, "%2hhx", &events[told]) == 1);
	if (told)
		LLVMFuzzerTestOneInput(events, told), count = 0;
	for (long i = 0; i < count; i++) {
		for (size_t k = 0; k < sizeof(events); k++) {
			random ^= random << 13;
			random ^= random >> 7;
			random ^= random << 17;
			events[k] = (unsigned char)(random >> 24);
		}
		LLVMFuzzerTestOneInput(events, random % sizeof(events));
	}
	printf("%ld inputs\n", told ? 1 : count);
	return 0;
}
#endif
